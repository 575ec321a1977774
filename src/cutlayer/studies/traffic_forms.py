"""The traffic of a run of a given number of samples as a formula, before anything is trained."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from cutlayer import registry
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check

FLOAT, DOUBLE, INTEGER = 4, 8, 8  # bytes: losses and weights, slopes, labels and seeds


@dataclass(frozen=True, kw_only=True)
class TrafficSetting:
    """What the traffic of a run depends on; all clients hold the same number of samples."""

    samples: int  # the run ends with the round in which they are processed
    clients: int
    per_round: int
    client_samples: int  # of each client
    activation: int  # elements of one sample at the cut
    client_params: int  # trained ones
    auxiliary_params: int = 0  # FSL-SAGE
    perturbations: int = 5  # HO-SFL
    missed: float | None = None  # rounds that a client of HO-SFL replays; by default the mean that it misses
    upload_every: int = 5  # FSL-SAGE: batches
    align_every: int = 1  # FSL-SAGE: rounds
    activation_bytes: int = FLOAT  # of one element
    batching: Batching = Batching(drop_last=False)
    # With one step a round a client draws a full batch in every round. With goes_on it continues its last pass, whose
    # last batch may be smaller.
    goes_on: bool = False
    exceed: bool = False  # end only once more than the samples are processed

    def __post_init__(self) -> None:
        for name in ("samples", "clients", "per_round", "client_samples", "activation", "client_params"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "a whole number above 0")
        check(self.per_round <= self.clients, "per_round", self.per_round, f"at most the {self.clients} clients")

    @property
    def rounds_missed(self) -> float:
        """The rounds between two rounds of one client, by default for clients that are drawn anew in each round."""
        return self.clients / self.per_round - 1 if self.missed is None else self.missed

    def cut(self, samples: float) -> float:
        """Return the bytes of the activations of these samples, or of their gradients."""
        return self.activation_bytes * self.activation * samples


class Expected(NamedTuple):
    """The traffic of a whole run in bytes by direction and kind, as in the ledger, without settings."""

    rounds: int
    samples: float
    crossed: dict[str, float]


def expected(method: str, setting: TrafficSetting) -> Expected:
    """Return the traffic of a run of sfl_v1, splitlora, hosfl, zo_sfl, mu_splitfed or fsl_sage."""
    visit, one_step = registry.find("method with a closed form", VISITS, method)
    processed = _one_step(setting) if one_step else _passes(setting)
    enough = operator.gt if setting.exceed else operator.ge
    fewest = setting.samples // (setting.per_round * _most(setting, one_step))
    rounds = next(r for r in count(fewest) if enough(processed(r), setting.samples))
    visits, samples = rounds * setting.per_round, processed(rounds)
    sizes = [samples / visits] if one_step else _sizes(setting)
    return Expected(rounds, samples, {kind: visits * size for kind, size in visit(setting, sizes).items() if size})


def _sizes(setting: TrafficSetting) -> list[float]:
    """Return the sizes of a client's batches in a round."""
    held, size = setting.client_samples, setting.batching.size
    whole = setting.batching.per_epoch(held, size)
    return [min(size, held - (step % whole) * size) for step in range(setting.batching.per_round(held, size))]


def _most(setting: TrafficSetting, one_step: bool) -> int:
    return min(setting.batching.size, setting.client_samples) if one_step else int(sum(_sizes(setting)))


def _passes(setting: TrafficSetting) -> Callable[[int], float]:
    return lambda rounds: rounds * setting.per_round * sum(_sizes(setting))


def _one_step(setting: TrafficSetting) -> Callable[[int], float]:
    """Return a function from rounds to processed samples; with goes_on their mean over the draws of clients."""
    size = _most(setting, True)
    if not setting.goes_on:
        return lambda rounds: float(rounds * setting.per_round * size)
    whole = setting.batching.per_epoch(setting.client_samples, size)
    of_pass = sum(min(size, setting.client_samples - step * size) for step in range(whole))
    drawn = setting.per_round / setting.clients

    def processed(rounds: int) -> float:
        chances = ((steps, _binomial(rounds, steps, drawn)) for steps in range(rounds + 1))
        return setting.clients * sum(p * (n // whole * of_pass + n % whole * size) for n, p in chances)

    return processed


def _binomial(tries: int, hits: int, chance: float) -> float:
    if chance == 1:
        return float(hits == tries)
    ways = math.lgamma(tries + 1) - math.lgamma(hits + 1) - math.lgamma(tries - hits + 1)
    return math.exp(ways + hits * math.log(chance) + (tries - hits) * math.log1p(-chance))


Bytes = dict[str, float]


def _cut(setting: TrafficSetting, samples: float, passes: int = 1) -> Bytes:
    """The activations of so many forward passes, and the labels."""
    return {"up_activations": passes * setting.cut(samples), "up_labels": INTEGER * samples}


def _models(setting: TrafficSetting) -> Bytes:
    return {"up_model": FLOAT * setting.client_params, "down_model": FLOAT * setting.client_params}


def _sfl(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    n = sum(sizes)
    return _cut(setting, n) | _models(setting) | {"down_gradients": setting.cut(n)}


def _ho_sfl(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    """Seeds and mean slopes go down, of this round and of those missed."""
    n, slopes, seeds = sum(sizes), DOUBLE * setting.perturbations, INTEGER * setting.perturbations
    down = {"down_gradients": setting.cut(n), "down_slopes": (seeds + slopes) * (1 + setting.rounds_missed)}
    return _cut(setting, n) | {"up_slopes": slopes} | down


def _zeroth_order(passes: int, setting: TrafficSetting, sizes: list[float]) -> Bytes:
    """One number goes down for each step."""
    return _cut(setting, sum(sizes), passes) | _models(setting) | {"down_scalars": FLOAT * len(sizes)}


def _fsl_sage(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    auxiliary = {"down_auxiliary": FLOAT * setting.auxiliary_params / setting.align_every}
    return _cut(setting, sum(sizes[:: setting.upload_every])) | _models(setting) | auxiliary


class RoundTraffic(NamedTuple):
    """What one client sends and receives in a round, from the sizes of its batches."""

    crossing: Callable[[TrafficSetting, list[float]], Bytes]
    one_step: bool = False  # a round is one step


VISITS = {
    "sfl_v1": RoundTraffic(_sfl),
    "splitlora": RoundTraffic(_sfl),
    "hosfl": RoundTraffic(_ho_sfl, one_step=True),
    "zo_sfl": RoundTraffic(partial(_zeroth_order, 2)),  # with the weights moved there and back
    "mu_splitfed": RoundTraffic(partial(_zeroth_order, 3), one_step=True),  # and with the weights as they are
    "fsl_sage": RoundTraffic(_fsl_sage),
}
