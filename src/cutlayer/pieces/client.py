"""The functions of a client that holds the lower layers, and what they give."""

from dataclasses import dataclass

from torch import Tensor

from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, MODEL, SCALARS
from cutlayer.core.masks import Key
from cutlayer.core.program import at_client
from cutlayer.core.state import Grads, Model, Part, Tensors
from cutlayer.errors import LawError
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split


@dataclass(frozen=True, kw_only=True)
class SplitClient:
    """The client's half of every method that back-propagates through the cut."""

    model: Split
    opt: Transform

    @property
    def labels_leave(self) -> bool:
        """Whether labels go up with the activations: unless the split is U-shaped."""
        return not self.model.u_shaped

    @at_client(gives={"model": MODEL})
    def begin(self, model: Model, round: int) -> Part:
        return self.opt.begin(model, round)

    @at_client(gives=ACTIVATIONS)
    def forward(self, part: Part, x: Tensor, key: Key, cut: int | None = None) -> tuple[Tensor, Tensors]:
        """Run the layers up to the model's cut, or to this client's own cut."""
        if cut is not None and cut < min(1, self.model.cut):
            raise LawError(f"a cut of {cut} would leave no layer at the client, so its raw inputs would go up")
        return (self.model if cut is None else self.model.at(cut)).lower(part, x, key)

    @at_client(gives={"model": MODEL})
    def update(self, part: Part, grads: Grads) -> Part:
        return self.opt.step(part, grads)

    @at_client(gives={"cut": GRADIENTS, "loss": SCALARS})
    def head_loss(self, part: Part, h: Tensor, y: Tensor, key: Key) -> tuple[Tensor, Tensors]:
        """U-shape: return the loss behind the client's head; only its value and its gradient at the head leave."""
        out, buffers = self.model.top(part, h, key)
        return self.model.loss(out, y), buffers

    @at_client()
    def both_ends(self, body: Grads, head: Grads) -> Grads:
        """U-shape: merge the gradients of the client's layers below and above the server."""
        return Grads({**body.params, **head.params}, {**body.buffers, **head.buffers})

    @at_client(gives=SCALARS)
    def squared_norm(self, part: Part, grads: Grads) -> Tensor:
        return self.opt.norm2(part, grads)

    @at_client()
    def with_norm(self, grads: Grads, norm2: Tensor) -> Grads:
        return grads._replace(norm2=norm2)
