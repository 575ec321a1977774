"""The benchmark of a SMoFi step: every engine, the same step by hand and in JAX, and the limit of the device.

Imports: core, data, engines, errors, methods, models, optim, registry, runs, split.
"""

from cutlayer.benching.cases import BASELINES, Case, usual
from cutlayer.benching.measure import measure
from cutlayer.benching.table import text

__all__ = ["BASELINES", "Case", "measure", "text", "usual"]
