"""Data: samples in memory, the data sets and files they come from, and their partition among clients.

Imports: core, errors, registry.
"""

from cutlayer.data.arrays import Arrays, from_arrays, split_off
from cutlayer.data.augment import Augment, SampleTransform
from cutlayer.data.datasets import from_dataset
from cutlayer.data.own import OwnData, load
from cutlayer.data.partition import Partition, dirichlet, iid, natural, shards
from cutlayer.data.sources import Dataset, names

__all__ = [
    "Arrays",
    "Augment",
    "Dataset",
    "OwnData",
    "Partition",
    "SampleTransform",
    "dirichlet",
    "from_arrays",
    "from_dataset",
    "iid",
    "load",
    "names",
    "natural",
    "shards",
    "split_off",
]
