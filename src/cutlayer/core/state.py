"""The values that methods pass around: a model, a part in training, its gradients, and the state between rounds."""

from typing import Any, Generic, NamedTuple

from torch import Tensor

from cutlayer.core.tree import T, storable

Tensors = dict[str, Tensor]


@storable
class Model(NamedTuple):
    """The values of some units, by their names in the unsplit module. Models are sent and averaged."""

    params: Tensors
    frozen: Tensors  # parameters that are not trained
    buffers: Tensors  # running statistics: averaged, but not part of momenta

    @property
    def model(self) -> "Model":
        """The model itself, so that models and parts have the same attribute."""
        return self

    def joined(self, other: "Model") -> "Model":
        """Return the model with the units of both."""
        return Model(*({**a, **b} for a, b in zip(self, other, strict=True)))


@storable
class Progress(NamedTuple):
    """The progress of a part since its round began."""

    loss: Tensor  # sum of its batch losses that were finite
    steps: Tensor  # number of those batches
    ok: Tensor  # false after the first gradient that was not finite; the part does not move any more


@storable
class Part(NamedTuple):
    """A trainable part of the model with the state of its optimiser."""

    params: Tensors
    frozen: Tensors
    buffers: Tensors
    moments: dict[str, Tensors]
    count: int  # type: ignore[assignment]  # steps taken, for bias correction
    lr: float
    progress: Progress
    start: Tensors  # the values when the round began, if a rule needs them; else empty

    @property
    def model(self) -> Model:
        return Model(self.params, self.frozen, self.buffers)


@storable
class Grads(NamedTuple):
    """Gradients of a batch's mean loss. A parameter without an entry had no gradient and does not move."""

    params: Tensors
    buffers: Tensors  # the running statistics after the forward pass
    loss: Tensor | None = None
    cut: Tensor | None = None  # gradient with respect to the part's input
    norm2: Tensor | None = None  # joint squared norm over all parts, if the method computed it


@storable
class State(NamedTuple, Generic[T]):
    """What a method keeps between rounds."""

    round: int  # rounds done
    client: Any  # the client-side model, at the fed server
    server: Any  # the server-side model or part, at the training server
    memory: T  # what else the method keeps, each value at its place
    report: Any = None  # of the last round: sum of batch losses, number of batches, clients that stopped

    def __repr__(self) -> str:
        return f"State(round={self.round}, ...)"
