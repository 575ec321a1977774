"""`cutlayer join --dry-run`: what servers may ask of a device, and what would leave it."""

from collections.abc import Container, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from cutlayer.core.text import human_bytes
from cutlayer.errors import ConfigError
from cutlayer.remote.device.conversation import BY_SAMPLE

if TYPE_CHECKING:
    from cutlayer.remote.device.conversation import Conversation
    from cutlayer.remote.joining.join import DeviceSettings


def show_terms(settings: "DeviceSettings") -> None:
    """Print the conversation of the run that the device agrees to."""
    if settings.config is None:
        raise ConfigError("--dry-run shows what a run may ask, so it needs --config FILE")
    device = settings.rehearsed()
    terms, console = device.terms, Console(soft_wrap=True)
    assert terms is not None
    console.print(f"{len(device.data)} samples to train on, in {terms.attempts.rounds} rounds", highlight=False)
    for title, one in (("training", terms.conversation.any_round), ("testing", terms.tests)):
        if one is not None:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            console.print("\n".join(_words(one)), highlight=False, markup=False)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _shapes(kind: str, forms: Iterable[Hashable], free: Container[str]) -> str:
    """Return the types and shapes of the tensors of a kind, in words."""
    if kind in free:
        return "as the cut of the round has them"
    rows = "n" if kind in BY_SAMPLE else ""
    return " or ".join(sorted({", ".join(_tensors(form, rows)) or "numbers" for form in forms}))


def _tensors(form: Hashable, rows: str) -> Iterator[str]:
    match form:
        case (torch.dtype() as dtype, torch.Size() as shape):
            sizes = ", ".join([*([rows] if rows else []), *map(str, shape)])
            yield f"{str(dtype).removeprefix('torch.')} ({sizes})"
        case tuple():
            for item in form:
                yield from _tensors(item, rows)


def _words(one: "Conversation") -> list[str]:
    least, most = one.batch_sizes
    batches = f"{most}" if least == most else f"{least} to {most}"
    times = "once" if one.num_loads == 1 else f"at most {one.num_loads} times"
    sent = f"{'about' if one.free else 'at most'} {human_bytes(one.sent)}"
    lines = [
        f"leaves, {sent} a round: {', '.join(one.kinds) or 'nothing'}",
        *(f"     {name.replace(' ', ', ')}: at most {_times(num)}" for name, num in one.num_sent.items()),
        f"at most {one.num_steps} mini-batches of {batches} samples a round, each {times}",
        *([f"plain numbers that come: {', then '.join(map(str, one.settings))}"] if one.settings else []),
        f"messages to the device of at most {human_bytes(one.most_bytes)}",
        "",
        "Types and shapes; n is the number of samples in a mini-batch:",
        *(f"     {kind}: {_shapes(kind, forms, one.free)}" for kind, forms in {**one.forms, **one.leaves}.items()),
        "",
        "A server may ask for these lines, in this order:",
    ]
    for number, passage in enumerate(one.passages):
        after = ", ".join(str(k + 1) for k in sorted(one.follows[number])) or "the end"
        begins = "a round begins here; " if number in one.begins else ""
        lines += [f"{number + 1}  ({begins}then {after})", *(f"     {line}" for line in passage)]
    return lines
