"""`cutlayer join --dry-run`: what servers may ask of a device, and what would leave it."""

from typing import TYPE_CHECKING

from rich.console import Console

from cutlayer.core.text import human_bytes
from cutlayer.errors import ConfigError

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
    for title, one in (("training", terms.conversation(0)), ("testing", terms.tests)):
        if one is not None:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            console.print("\n".join(_words(one)), highlight=False, markup=False)


def _words(one: "Conversation") -> list[str]:
    least, most = one.batch_sizes
    batches = f"{most}" if least == most else f"{least} to {most}"
    lines = [
        f"leaves, at most {human_bytes(one.sent)} a round: {', '.join(one.kinds) or 'nothing'}",
        f"at most {one.num_steps} mini-batches of {batches} samples a round, each once",
        f"messages to the device of at most {human_bytes(one.most_bytes)}",
        "",
        "A server may ask for these lines, in this order:",
    ]
    for number, passage in enumerate(one.passages):
        after = ", ".join(str(k + 1) for k in sorted(one.follows[number])) or "the end"
        begins = "a round begins here; " if number in one.begins else ""
        lines += [f"{number + 1}  ({begins}then {after})", *(f"     {line}" for line in passage)]
    return lines
