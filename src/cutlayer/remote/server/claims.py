"""What a client says of its samples when it is ready, and what a server believes of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from cutlayer.core.batches import Batching
from cutlayer.core.method import Method, needs_of
from cutlayer.errors import LinkError
from cutlayer.remote.identity.register import Register
from cutlayer.remote.protocol.messages import Ready, TensorForm
from cutlayer.runs.config import Run
from cutlayer.runs.examination import BATCHES

MOST_SAMPLES = 100_000_000  # that a client may claim: the number sets its weight


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The checks of one run."""

    forms: tuple[TensorForm, ...]  # of a sample
    batching: Batching | None  # with the smallest batch; None if the method counts the steps itself
    most_steps: int
    list: Path | None = None  # of the clients that may join, which may declare their samples

    @classmethod
    def of(
        cls, run: Run, method: Method, forms: tuple[TensorForm, ...], most_steps: int, list: Path | None
    ) -> "Claims":
        needs, size = needs_of(method), run.batching.size
        sizes = needs.batch_sizes(range(run.clients), size).values()
        smallest = replace(run.batching, size=min([size, *sizes]))
        return cls(forms=forms, batching=None if needs.counts_steps else smallest, most_steps=most_steps, list=list)

    def check(self, name: str, ready: Ready) -> None:
        """Raise LinkError if a client's samples do not fit the run, or if it claims too many."""
        if ready.sample != self.forms:
            raise LinkError(f"its samples are {_words(ready.sample)}, but those of this run are {_words(self.forms)}")
        if ready.samples < 2:
            raise LinkError(f"it holds {ready.samples} samples; at least 2 are needed to train")
        claimed = max(ready.samples, ready.tests)
        if claimed > MOST_SAMPLES:
            raise LinkError(f"it says that it holds {claimed} samples; no more than {MOST_SAMPLES} are believed")
        self._check_declared(name, ready.samples)
        if self.batching is not None:
            self._check_steps("a round", ready.samples, self.batching.per_round(ready.samples, self.batching.size))
        self._check_steps("a test of the model", ready.tests, BATCHES.per_round(ready.tests, BATCHES.size))

    def _check_declared(self, name: str, samples: int) -> None:
        declared = None if self.list is None else Register.read(self.list).samples.get(name)
        if declared is not None and samples > declared:
            raise LinkError(
                f"it says that it holds {samples} samples, but [samples] in the server's clients.toml allows it "
                f"{declared}; if it holds more, correct the list"
            )

    def _check_steps(self, what: str, samples: int, steps: int) -> None:
        if steps > self.most_steps:
            raise LinkError(
                f"it says that it holds {samples} samples, with which {what} has {steps} steps; this server allows "
                f"{self.most_steps}. Raise --most-steps there, or use larger batches"
            )


def _words(forms: tuple[TensorForm, ...]) -> str:
    return ", ".join(f"{form.dtype} {tuple(form.shape)}" for form in forms)
