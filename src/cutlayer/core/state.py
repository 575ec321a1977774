"""The values that methods pass around: a model, a part in training, its gradients, and the state between rounds."""

from typing import Any, Generic, NamedTuple

from torch import Tensor

from cutlayer.core.tree import T, storable

Tensors = dict[str, Tensor]


@storable
class Model(NamedTuple):
    """The values of some units, by their names in the unsplit module: what travels and what is averaged."""

    params: Tensors
    frozen: Tensors  # parameters that do not train
    buffers: Tensors  # running statistics: averaged, never in momenta

    @property
    def model(self) -> "Model":
        """Itself: a model and a part answer alike."""
        return self

    def joined(self, other: "Model") -> "Model":
        """The model that holds the units of both."""
        return Model(*({**a, **b} for a, b in zip(self, other, strict=True)))


@storable
class Progress(NamedTuple):
    """What a part has been through since its round began."""

    loss: Tensor  # sum of its batch losses
    steps: Tensor  # how many were finite
    ok: Tensor  # false once a gradient was not finite: from then on the part stands still


@storable
class Part(NamedTuple):
    """One trainable part of the model with its optimiser's memory."""

    params: Tensors
    frozen: Tensors
    buffers: Tensors
    moments: dict[str, Tensors]
    count: int  # type: ignore[assignment]  # steps of the optimiser, for bias correction
    lr: float
    progress: Progress
    start: Tensors  # the values when the round began, where a rule asks for them; else empty

    @property
    def model(self) -> Model:
        return Model(self.params, self.frozen, self.buffers)


@storable
class Grads(NamedTuple):
    """Gradients of a batch's mean loss. A name that is missing had no gradient: its value does not move."""

    params: Tensors
    buffers: Tensors  # the new running statistics that the forward pass left
    loss: Tensor | None = None
    cut: Tensor | None = None  # gradient with respect to the input of the part
    norm2: Tensor | None = None  # joint squared norm over all parts, where the method shared it


@storable
class State(NamedTuple, Generic[T]):
    """What a method keeps between rounds."""

    round: int  # rounds done
    client: Any  # the client-side model, at the fed server
    server: Any  # the server-side model or part, at the training server
    memory: T  # what else the method remembers, each at its own place
    report: Any = None  # of the last round: sum of batch losses, batches, clients that stopped
