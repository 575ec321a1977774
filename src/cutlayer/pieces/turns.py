"""One server-side part that takes the clients' batches one after another."""

from collections.abc import Callable, Iterable

from torch import Tensor

from cutlayer.core.places import Step
from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Part, Progress
from cutlayer.core.values import Held, PerClient
from cutlayer.pieces.exchange import Ascent, through_server
from cutlayer.split import Split

Turn = Callable[[Part, Progress, Grads], Part]


def in_turns(
    turn: Turn,
    order: Iterable[int],
    crossing: Ascent,
    model: Split,
    step: Step,
    server: Server,
    s: Held[Part],
    progress: dict[int, Held[Progress]],
) -> tuple[Held[Part], PerClient[Tensor]]:
    """The part after everyone's turn, and each client's gradient at the cut; `progress` is each client's own.

    A turn is under its client's own progress, so that a client that stops does not stop the others.
    """
    crossing.z = server.together(crossing.z)  # the order is drawn among all that answer
    cuts = {}
    for j in order:
        one = step.active.only((j,))
        gs = through_server(crossing, model, step, server, server.copies(s, one))
        if j not in gs.ids:  # lost in the middle of its turn
            continue
        s = server.do(turn, s, progress[j], server.pick(gs, j))
        progress[j] = s.progress
        cuts[j] = server.pick(gs.cut, j)
    return s, server.rows(cuts)
