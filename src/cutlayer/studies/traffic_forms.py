"""What a method sends in a run of so many samples, before anything is trained: the closed form of the ledger."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from cutlayer import registry
from cutlayer.core.batches import Batching
from cutlayer.core.checks import check

FLOAT, DOUBLE, INTEGER = 4, 8, 8  # bytes: losses and weights, slopes, labels and seeds
MU_PASSES = 3  # whose activations MU-SplitFed sends: of the weights as they are, and moved there and back


@dataclass(frozen=True, kw_only=True)
class TrafficSetting:
    """A run whose clients hold equally many samples, as far as its traffic goes."""

    samples: int  # after which it ends, with its round
    clients: int
    per_round: int
    client_samples: int  # of each
    activation: int  # elements of one sample at the cut
    client_params: int  # that are trained
    auxiliary_params: int = 0  # FSL-SAGE
    perturbations: int = 5  # HO-SFL
    missed: float | None = None  # rounds that a client of HO-SFL replays; as many as it misses on average by default
    upload_every: int = 5  # FSL-SAGE: batches
    align_every: int = 1  # FSL-SAGE: rounds
    activation_bytes: int = FLOAT  # of one element
    batching: Batching = Batching(drop_last=False)
    # A method of one step a round draws a full batch every time; or it goes on where it was, so that after the last,
    # smaller batch of its samples it begins again.
    goes_on: bool = False
    exceed: bool = False  # end once more than the samples are processed, not as many

    def __post_init__(self) -> None:
        for name in ("samples", "clients", "per_round", "client_samples", "activation", "client_params"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "a whole number above 0")
        check(self.per_round <= self.clients, "per_round", self.per_round, f"at most the {self.clients} clients")

    @property
    def rounds_missed(self) -> float:
        """Between two rounds of one client, if each round draws its clients anew."""
        return self.clients / self.per_round - 1 if self.missed is None else self.missed

    def cut(self, samples: float) -> float:
        """Bytes of the activations of so many samples, or of their gradients."""
        return self.activation_bytes * self.activation * samples


class Expected(NamedTuple):
    """A whole run; bytes by direction and kind, as in the ledger, without settings."""

    rounds: int
    samples: float
    crossed: dict[str, float]


def expected(method: str, setting: TrafficSetting) -> Expected:
    """What crosses in a run of this method: sfl_v1 (SplitLoRA too), hosfl, zo_sfl, mu_splitfed or fsl_sage."""
    visit, one_step = registry.find("method with a closed form", VISITS, method)
    processed = _one_step(setting) if one_step else _passes(setting)
    enough = operator.gt if setting.exceed else operator.ge
    fewest = setting.samples // (setting.per_round * _most(setting, one_step))
    rounds = next(r for r in count(fewest) if enough(processed(r), setting.samples))
    visits, samples = rounds * setting.per_round, processed(rounds)
    sizes = [samples / visits] if one_step else _sizes(setting)
    return Expected(rounds, samples, {kind: visits * size for kind, size in visit(setting, sizes).items() if size})


def _sizes(setting: TrafficSetting) -> list[float]:
    """The batches of a client in a round."""
    held, size = setting.client_samples, setting.batching.size
    whole = setting.batching.per_epoch(held, size)
    return [min(size, held - (step % whole) * size) for step in range(setting.batching.per_round(held, size))]


def _most(setting: TrafficSetting, one_step: bool) -> int:
    return min(setting.batching.size, setting.client_samples) if one_step else int(sum(_sizes(setting)))


def _passes(setting: TrafficSetting) -> Callable[[int], float]:
    return lambda rounds: rounds * setting.per_round * sum(_sizes(setting))


def _one_step(setting: TrafficSetting) -> Callable[[int], float]:
    """Samples that are processed in so many rounds; where clients go on, their mean over who is drawn when."""
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


Bytes = Mapping[str, float]


def _sfl(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    n, model = sum(sizes), FLOAT * setting.client_params
    there = {"up_activations": setting.cut(n), "up_labels": INTEGER * n, "up_model": model}
    return {**there, "down_gradients": setting.cut(n), "down_model": model}


def _ho_sfl(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    """Down come the seeds and the mean slopes, of this round and of those missed."""
    n, slopes = sum(sizes), DOUBLE * setting.perturbations
    there = {"up_activations": setting.cut(n), "up_labels": INTEGER * n, "up_slopes": slopes}
    seeds = INTEGER * setting.perturbations
    return {**there, "down_gradients": setting.cut(n), "down_slopes": (seeds + slopes) * (1 + setting.rounds_missed)}


def _zo_sfl(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    """Activations of weights moved there and back; down comes one number a step."""
    n, model = sum(sizes), FLOAT * setting.client_params
    there = {"up_activations": 2 * setting.cut(n), "up_labels": INTEGER * n, "up_model": model}
    return {**there, "down_scalars": FLOAT * len(sizes), "down_model": model}


def _mu_splitfed(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    n, model = sum(sizes), FLOAT * setting.client_params
    there = {"up_activations": MU_PASSES * setting.cut(n), "up_labels": INTEGER * n, "up_model": model}
    return {**there, "down_scalars": FLOAT * len(sizes), "down_model": model}


def _fsl_sage(setting: TrafficSetting, sizes: list[float]) -> Bytes:
    n, model = sum(sizes[:: setting.upload_every]), FLOAT * setting.client_params
    there = {"up_activations": setting.cut(n), "up_labels": INTEGER * n, "up_model": model}
    return {**there, "down_model": model, "down_auxiliary": FLOAT * setting.auxiliary_params / setting.align_every}


class RoundTraffic(NamedTuple):
    """What crosses for one client in one round, from its batches."""

    crossing: Callable[[TrafficSetting, list[float]], Bytes]
    one_step: bool = False  # a round is one step


VISITS = {
    "sfl_v1": RoundTraffic(_sfl),
    "splitlora": RoundTraffic(_sfl),
    "hosfl": RoundTraffic(_ho_sfl, one_step=True),
    "zo_sfl": RoundTraffic(_zo_sfl),
    "mu_splitfed": RoundTraffic(_mu_splitfed, one_step=True),
    "fsl_sage": RoundTraffic(_fsl_sage),
}
