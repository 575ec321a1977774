"""Where a cut or a head is, by number or name, and what is said where it cannot be."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from cutlayer.errors import CutError
from cutlayer.split.graphs import Unit
from cutlayer.split.segment import Segment

MOST_LISTED = 16  # cuts in an error message


def place_of(cut: int | str, model: nn.Module, units: Sequence[Unit]) -> str | None:
    """Return the module after which a unit must end for this cut, if none ends there yet and one could."""
    if not isinstance(cut, str) or _cuts(cut, units) or callable(getattr(model, "units", None)):
        return None
    return cut if cut in dict(model.named_modules(remove_duplicate=False)) else None


def cut_number(cut: int | str, units: Sequence[Unit], kind: str) -> int:
    """Return the number of units below a cut."""
    cuts = _listed([f"{i} {unit.name!r}" for i, unit in enumerate(units, start=1)])
    if isinstance(cut, str):
        if found := _cuts(cut, units):
            return found
        near = _near(cut, [unit.name for unit in units], [path for unit in units for path in unit.ends])
        raise CutError(f"{kind} has no unit {cut!r} to cut after{near} It has {cuts}.")
    _refuse_other_than_int("cut", cut)
    if not 0 <= cut <= len(units):
        raise CutError(
            f"cut {cut} is out of range: {kind} has {len(units)} units, so cuts go from 0 to {len(units)}: {cuts}."
        )
    return cut


def head_number(head: int | str, cut: int, units: Sequence[Unit], kind: str) -> int:
    """Return the number of the unit with which a head begins."""
    starts = _listed([f"{i} {unit.name!r}" for i, unit in enumerate(units) if i >= cut])
    if isinstance(head, str):
        names = [unit.name for unit in units]
        found = [i for i, unit in enumerate(units) if head in unit.begins]
        if head not in names and not found:
            near = _near(head, names)
            raise CutError(f"{kind} has no unit {head!r} to start the head{near} It may be {starts}.")
        head = names.index(head) if head in names else found[0]
    _refuse_other_than_int("head", head)
    if not cut <= head <= len(units):
        raise CutError(
            f"head {head} is out of range: above cut {cut} of {kind}, heads start from {cut} to {len(units)}: {starts}."
        )
    return head


def refuse_shared(segments: Iterable[Segment], model: nn.Module) -> None:
    """Refuse trained values and running statistics on both sides: they would drift apart. Frozen values may be."""
    seen: set[str] = set()
    for segment in segments:
        own = segment.params + segment.statistics
        for name in own:
            if name in seen:
                raise shared(name, model)
        seen.update(own)


def shared(name: str, model: nn.Module) -> CutError:
    """Return the error for a value on both sides of a cut: a tied one, or one that several layers share."""
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    tensor = dict(every)[name]
    others = [other for other, value in every if value is tensor and other != name]
    kind = type(model).__name__
    if others:
        return CutError(
            f"{kind} cannot be cut here: {name!r} is used on both sides of a cut, above it as {others[-1]!r}. "
            "Cut elsewhere, freeze it, or train separate copies with Split(..., untie=True)."
        )
    return CutError(
        f"{kind} cannot be cut here: {name!r} is used on both sides of a cut, since several layers share it. "
        "Cut elsewhere or freeze it."
    )


def _cuts(name: str, units: Sequence[Unit]) -> int | None:
    """Return the number of units below a cut of this name: a unit's own name, or a module that ends with it."""
    named = [i for i, unit in enumerate(units, start=1) if unit.name == name]
    ended = [i for i, unit in enumerate(units, start=1) if name in unit.ends]
    return named[0] if named else ended[-1] if ended else None


def _listed(entries: list[str]) -> str:
    if len(entries) > MOST_LISTED:
        half = MOST_LISTED // 2
        entries = [*entries[:half], f"... ({len(entries) - MOST_LISTED} more)", *entries[-half:]]
    return ", ".join(entries)


def _refuse_other_than_int(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CutError(f"{what} {value!r} is neither a number of units nor the name of one; give an int or a str")


def _near(name: str, *known: Sequence[str]) -> str:
    """Suggest the nearest name of the first list that has one near it."""
    near = next(filter(None, (get_close_matches(name, names, n=1, cutoff=0.5) for names in known)), None)
    return f"; did you mean {near[0]!r}?" if near else "."
