"""Find the results of a chain that can overwrite the old values in their rows directly, without a copy."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.tree import Tree
from cutlayer.engines.graph.execute import Inputs, Ran, running
from cutlayer.engines.graph.forms import is_there, pairs
from cutlayer.engines.graph.in_place import form_in_place
from cutlayer.engines.graph.queue import Operation


def overwritable(chain: Sequence[Operation], inputs: Inputs, homes: Mapping[int, Tree]) -> dict[int, Tree]:
    """Return those of the results with homes, by number, that their operations can write there themselves.

    The function must have an in-place form, and nothing may read the old value after the operation. The chain runs once
    to see which operation reads which memory.
    """
    ran = list(running(chain, inputs, frozenset(), {}))
    reads = _reads(ran)
    made = [value for own in ran for value in own.made]
    found = {}
    for place, own in enumerate(ran):
        if own.first in homes and form_in_place(own.operation) is not None:
            home = homes[own.first]
            leaving = [a for number in homes if number != own.first for a in tree.tensors(made[number])]
            passed_on = [
                a for there, a in pairs(home, made[own.first]) if isinstance(a, Tensor) and not is_there(there, a)
            ]
            later = [a for tensors in reads[place + 1 :] for a in tensors]
            spans = _spans(home)
            if not any(_is_within(a, spans) for a in (*leaving, *passed_on, *later)):
                found[own.first] = home
    return found


def _reads(ran: Sequence[Ran]) -> list[list[Tensor]]:
    """Return the tensors that each operation reads; a pullback still reads the arguments of its forward pass."""
    reads: list[list[Tensor]] = []
    saved: dict[int, list[Tensor]] = {}
    for own in ran:
        read = [a for arg in own.args for a in (saved.get(id(arg), []) if callable(arg) else tree.tensors(arg))]
        saved |= {id(made): read for made in own.made if callable(made)}
        reads.append(read)
    return reads


def _spans(home: Tree) -> list[tuple[int, int]]:
    """Return the first and last address of a value in each row that it lies in."""
    spans: dict[int, tuple[int, int]] = {}
    for a in tree.tensors(home):
        start, end = _span(a)
        row = a.untyped_storage().data_ptr()
        low, high = spans.get(row, (start, end))
        spans[row] = min(low, start), max(high, end)
    return list(spans.values())


def _span(a: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(a.shape, a.stride(), strict=True)) if a.numel() else -1
    return a.data_ptr(), a.data_ptr() + (last + 1) * a.element_size()


def _is_within(a: Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    start, end = _span(a)
    return any(start < high and low < end for low, high in spans)
