"""The look of lines: every method has its colour and marker in every figure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from cutlayer.results.names import printed

# Okabe and Ito's palette, which colour-blind readers can tell apart, without yellow, which is hard to see on white, and
# colours from Paul Tol's muted palette that lie between these.
BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
BLACK, WINE, OLIVE, GREY, TEAL, INDIGO, PURPLE = (
    "#000000", "#882255", "#999933", "#888888", "#44AA99", "#332288", "#AA4499",
)  # fmt: skip
COLOURS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, BLACK, WINE, OLIVE, GREY, TEAL, INDIGO, PURPLE)
MARKERS = "os^Dv<>PXphd*"
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
DASHED = 1  # the place in STYLES
MANY = 6  # lines from which on they are thin
WIDTHS = (2.2, 1.8, 1.5)  # the first lines are wider, so that they show under others with the same numbers
THIN = (1.6, 1.3, 1.0)  # for many lines


class MethodLook(NamedTuple):
    """What a method is recognised by; in grey, by the marker, whether it is hollow, and the dashes."""

    colour: str
    marker: str
    hollow: bool = False  # methods that train the whole model at the client; their lines are dashed


LOOKS = {
    "fedavg": MethodLook(BLACK, "o", hollow=True),
    "fedprox": MethodLook(GREY, "s", hollow=True),
    "fednar": MethodLook(OLIVE, "^", hollow=True),
    "fedavgm": MethodLook(TEAL, "D", hollow=True),
    "slowmo": MethodLook(WINE, "v", hollow=True),
    "fednag": MethodLook(INDIGO, "P", hollow=True),
    "sl": MethodLook(SKY, "<"),
    "sfl_v1": MethodLook(BLUE, "s"),
    "sfl_v2": MethodLook(GREEN, "^"),
    "mergesfl": MethodLook(ORANGE, "D"),
    "smofi": MethodLook(VERMILION, "o"),
    "hasfl": MethodLook(PURPLE, "v"),
    "hosfl": MethodLook(PINK, "P"),
    "zo_sfl": MethodLook(INDIGO, "X"),
    "mu_splitfed": MethodLook(TEAL, ">"),
    "fsl_sage": MethodLook(OLIVE, "h"),
    "splitlora": MethodLook(WINE, "d"),
}


def looks(methods: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return how the line of each label looks; `methods` has the method of each label, or "" if it has none.

    Runs of one method have its colour and marker, and differ in their dashes. If all labels are of one method, the
    first has its look, and colours tell the others apart.
    """
    several = len(set(methods.values())) > 1
    named = _by_method(methods.values()) if several else _in_order(methods)
    widths = THIN if len(methods) >= MANY else WIDTHS
    seen: dict[str, int] = {}
    found = {}
    for number, (label, method) in enumerate(methods.items()):
        key = method if several else label
        look = named[key]
        dashes = seen.get(key, DASHED if look.hollow else 0)
        seen[key] = dashes + 1
        found[label] = {
            "color": look.colour,
            "marker": look.marker,
            "markerfacecolor": "white" if look.hollow else look.colour,
            "linestyle": STYLES[dashes % len(STYLES)],
            "linewidth": widths[min(number, len(widths) - 1)],
            "label": printed(label),
        }
    return found


def _by_method(names: Iterable[str]) -> dict[str, MethodLook]:
    """Return the look of each method; that of a plug-in follows from its name, unless another in the figure has it."""
    wanted = set(names)
    found = {name: look for name, look in LOOKS.items() if name in wanted}
    for name in sorted(wanted - set(found)):
        start = crc32(name.encode())
        colour = _free(COLOURS, start, [look.colour for look in found.values()])
        found[name] = MethodLook(colour, _free(MARKERS, start, [look.marker for look in found.values()]))
    return found


def _in_order(methods: Mapping[str, str]) -> dict[str, MethodLook]:
    """Return a look for each label of one method, or of none."""
    first, *others = methods
    found = {first: LOOKS.get(methods[first], MethodLook(COLOURS[0], MARKERS[0]))}
    for number, label in enumerate(others):
        colour = _free(COLOURS, number, [look.colour for look in found.values()])
        found[label] = MethodLook(colour, _free(MARKERS, number, [look.marker for look in found.values()]))
    return found


def _free(choices: Sequence[str], start: int, taken: Sequence[str]) -> str:
    """Return the first choice from a place on that is not taken; if all are, that of the place."""
    there = start % len(choices)
    return next((c for c in (*choices[there:], *choices[:there]) if c not in taken), choices[there])
