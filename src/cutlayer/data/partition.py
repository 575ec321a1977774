"""Partitions: which samples belong to which client. All randomness is a function of the key."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cutlayer import registry
from cutlayer.core.checks import check_positive
from cutlayer.core.keys import generator
from cutlayer.data.arrays import Arrays
from cutlayer.errors import PartitionError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Labels = Tensor | NDArray[Any] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Partition:
    """The sorted sample indices of each client."""

    clients: tuple[Ints, ...]
    names: tuple[str, ...] = ()  # one a client; "0", "1", ... by default

    def __post_init__(self) -> None:
        arrays = tuple(np.asarray(c, dtype=None if len(c) else np.int64) for c in self.clients)  # also of plain lists
        object.__setattr__(self, "clients", arrays)
        if not self.names:
            object.__setattr__(self, "names", tuple(str(j) for j in range(len(self.clients))))
        if len(self.names) != len(self.clients):
            raise PartitionError(f"{len(self.clients)} clients have {len(self.names)} names; give one each, or none")

    def __repr__(self) -> str:
        return f"Partition({len(self)} clients, {int(self.sizes.sum())} samples)"

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> Ints:
        """The number of samples of each client."""
        return np.array([len(c) for c in self.clients], dtype=np.int64)

    def histograms(self, labels: Labels, num_classes: int) -> Ints:
        """Return the number of samples of each client (row) in each class (column)."""
        known = _classes(labels)
        if len(known) and not 0 <= known.min() <= known.max() < num_classes:
            raise PartitionError(
                f"labels go from {known.min()} to {known.max()}, but {num_classes} classes have "
                f"the labels 0 to {num_classes - 1}; give the number of classes of the whole data set"
            )
        rows = [np.bincount(known[c], minlength=num_classes) for c in self.clients]
        return np.array(rows, dtype=np.int64).reshape(len(self), num_classes)

    def js_divergence(self, labels: Labels, num_classes: int) -> Floats:
        """Return each client's Jensen-Shannon divergence, in bits, from balanced labels; NaN for an empty client."""
        counts = self.histograms(labels, num_classes)
        with np.errstate(invalid="ignore"):
            own = counts / counts.sum(axis=1, keepdims=True)
        balanced = np.full(num_classes, 1 / num_classes)
        divergence: Floats = _entropy((own + balanced) / 2) - (_entropy(own) + _entropy(balanced)) / 2
        return np.maximum(divergence, 0.0)  # rounding may leave -1e-16


def _entropy(p: Floats) -> Floats:
    terms: Floats = -p * np.log2(np.where(p > 0, p, 1.0))
    return np.asarray(terms.sum(axis=-1))


def iid(num_samples: int, num_clients: int, *, key: int) -> Partition:
    """Assign samples to clients at random; sizes differ by at most one."""
    _check_counts(num_samples, num_clients)
    owner = generator(key, "partition", "iid").permutation(np.arange(num_samples) % num_clients)
    return _by_owner(owner, num_clients)


def dirichlet(
    labels: Labels,
    num_clients: int,
    *,
    alpha: float,
    key: int,
    min_size: int = 1,
    balance_cap: bool = False,
    max_tries: int = 1000,
) -> Partition:
    """Divide each class among the clients by a draw of Dir(alpha, ..., alpha); redraw until no client is too small.

    balance_cap, as in NIID-Bench: a client that already holds its even share of all samples gets none of later classes.
    """
    known = _classes(labels)
    _check_counts(len(known), num_clients)
    _check_dirichlet(len(known), num_clients, alpha, min_size, max_tries)
    classes, of_class, class_sizes = np.unique(known, return_inverse=True, return_counts=True)
    random = generator(key, "partition", "dirichlet")
    cap = len(known) / num_clients if balance_cap else math.inf
    best = -1
    for _ in range(max_tries):
        counts = _dirichlet_counts(class_sizes, num_clients, alpha, cap, random)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_size:
            break
        best = max(best, smallest)
    else:
        raise PartitionError(
            f"no Dirichlet partition (alpha {alpha}) of {len(known)} samples gave each of {num_clients} clients "
            f"at least {min_size} in {max_tries} draws; at best the smallest client had {best}. "
            "Use fewer clients, a larger alpha or a smaller min_size."
        )
    owner = np.empty(len(known), dtype=np.int64)
    for k in range(len(classes)):
        owner[of_class == k] = random.permutation(np.repeat(np.arange(num_clients), counts[k]))
    return _by_owner(owner, num_clients)


def _dirichlet_counts(
    class_sizes: Ints, num_clients: int, alpha: float, cap: float, random: np.random.Generator
) -> Ints:
    """Return the number of samples of each class (row) for each client (column); every sample is counted once."""
    counts = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for k, size in enumerate(class_sizes):
        shares = random.dirichlet(np.full(num_clients, alpha))
        if cap < math.inf:
            open_ = held < cap  # some client is below the cap until all samples are assigned
            shares = np.where(open_, shares, 0.0)
            shares = shares / shares.sum() if shares.any() else open_ / open_.sum()
        # Round the edges, not the shares, so that every sample is assigned.
        edges = np.rint(np.cumsum(shares) * size).astype(np.int64).clip(0, size)
        edges[-1] = size
        counts[k] = np.diff(edges, prepend=0)
        held += counts[k]
    return counts


def shards(labels: Labels, num_clients: int, *, shards_per_client: int = 2, key: int) -> Partition:
    """Sort samples by label, cut them into equal shards, and give each client `shards_per_client` of them at random."""
    known = _classes(labels)
    _check_counts(len(known), num_clients)
    num_shards = shards_per_client * num_clients
    if shards_per_client < 1 or num_shards > len(known):
        raise PartitionError(
            f"cannot cut {len(known)} samples into {shards_per_client} shards for each of {num_clients} clients; "
            f"give 1 to {len(known) // num_clients} shards per client"
        )
    dealt = generator(key, "partition", "shards").permutation(np.arange(num_shards) % num_clients)
    by_label = np.argsort(known, kind="stable")
    owner = np.empty(len(known), dtype=np.int64)
    owner[by_label] = dealt[np.arange(len(known)) * num_shards // len(known)]
    return _by_owner(owner, num_clients)


def natural(keys_per_sample: Sequence[Any] | NDArray[Any]) -> Partition:
    """Make a client of each distinct key (a writer, a speaker, a hospital), in the order of the sorted keys."""
    if not len(keys_per_sample):
        raise PartitionError("a natural partition needs samples; got none")
    distinct, owner = np.unique(np.asarray(keys_per_sample), return_inverse=True)
    return Partition(_by_owner(owner, len(distinct)).clients, tuple(str(name) for name in distinct))


def _by_owner(owner: Ints, num_clients: int) -> Partition:
    order = np.argsort(owner, kind="stable").astype(np.int64)  # stable: each client's indices come out sorted
    edges = np.cumsum(np.bincount(owner, minlength=num_clients))[:-1]
    return Partition(tuple(np.split(order, edges)))


def _classes(labels: Labels) -> Ints:
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise PartitionError(
            f"labels of type {array.dtype} and shape {array.shape} are no classes; "
            "give one integer a sample, or use the iid or a natural partition"
        )
    return array.astype(np.int64)


def _check_counts(num_samples: int, num_clients: int) -> None:
    if num_clients < 1:
        raise PartitionError(f"cannot deal samples to {num_clients} clients; give at least 1")
    if num_clients > num_samples:
        raise PartitionError(
            f"cannot deal {num_samples} samples to {num_clients} clients; use at most {num_samples} clients"
        )


def _check_dirichlet(num_samples: int, num_clients: int, alpha: float, min_size: int, max_tries: int) -> None:
    if not 0 < alpha < math.inf:
        raise PartitionError(f"the Dirichlet alpha is {alpha}; give a positive number (small: uneven, large: even)")
    if max_tries < 1:
        raise PartitionError(f"cannot draw a partition in {max_tries} tries; give at least 1")
    if num_clients * min_size > num_samples:
        raise PartitionError(
            f"{num_clients} clients with at least {min_size} samples each need {num_clients * min_size} samples, "
            f"there are {num_samples}; use fewer clients or a smaller min_size"
        )


class Scheme(Protocol):
    """A way to partition, with its settings."""

    def draw(self, data: Arrays, num_clients: int, key: int) -> Partition: ...


@dataclass(frozen=True, kw_only=True)
class IID:
    """Samples at random, equal sizes."""

    def draw(self, data: Arrays, num_clients: int, key: int) -> Partition:
        return iid(len(data), num_clients, key=key)


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Uneven labels and sizes, by a Dirichlet draw per class."""

    alpha: float = 0.3  # small: uneven, large: even
    min_size: int = 2  # redraw until every client has at least this many samples
    balance_cap: bool = False  # a client that holds its even share gets no more samples

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def draw(self, data: Arrays, num_clients: int, key: int) -> Partition:
        return dirichlet(
            data.y, num_clients, alpha=self.alpha, key=key, min_size=self.min_size, balance_cap=self.balance_cap
        )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A few labels per client, equal sizes."""

    per_client: int = 2  # shards of sorted labels for each client

    def draw(self, data: Arrays, num_clients: int, key: int) -> Partition:
        return shards(data.y, num_clients, shards_per_client=self.per_client, key=key)


@dataclass(frozen=True, kw_only=True)
class Natural:
    """One client for each of the data's own groups, or for some of them at random: speakers, roles in plays."""

    min_size: int = 2  # groups with fewer samples are left out

    def draw(self, data: Arrays, num_clients: int, key: int) -> Partition:
        if data.groups is None:
            raise PartitionError(
                "the data have no groups (speakers, writers, roles) to make clients of; "
                "use another partition, or data that have groups"
            )
        _check_counts(len(data), num_clients)
        groups = data.groups.cpu().numpy()
        everyone = natural(groups)
        large = np.flatnonzero(everyone.sizes >= self.min_size)
        if num_clients > len(large):
            raise PartitionError(
                f"cannot make {num_clients} clients of {len(everyone)} groups, "
                f"{len(large)} of them with at least {self.min_size} samples; "
                f"use at most {len(large)} clients, or a smaller min_size"
            )
        chosen = np.sort(generator(key, "partition", "natural").choice(large, num_clients, replace=False))
        names = [data.group_names[group] for group in np.unique(groups)]
        return Partition(tuple(everyone.clients[j] for j in chosen), tuple(names[j] for j in chosen))


PARTITIONS: registry.Table[Callable[..., Scheme]] = registry.table(
    "PARTITIONS", {"iid": IID, "dirichlet": Dirichlet, "shards": Shards, "natural": Natural}
)
