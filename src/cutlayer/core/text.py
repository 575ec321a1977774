"""Numbers formatted for people, and texts of others made safe to print."""

MOST_CHARACTERS = 200  # of a text that somebody else gave


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Escape line ends, terminal escapes and other characters that do not print, and cut a text that is too long."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"


def short(number: float) -> str:
    """Return a number with few digits if they give it again, or else with all."""
    text = f"{number:g}"
    return text if float(text) == number else repr(float(number))


def human_bytes(count: float) -> str:
    """1.5 KiB, 12.0 MiB, ..."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def human_seconds(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float | None) -> str:
    """Format a share of 1 in per cent; None as a dash."""
    return "–" if share is None else f"{100 * share:.1f} %"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a unit that suits this time, and the unit's seconds."""
    return ("h", 3600.0) if seconds >= 3600 else ("min", 60.0) if seconds >= 60 else ("s", 1.0)
