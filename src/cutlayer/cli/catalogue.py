"""All names that a configuration may use, with their options and a line of description."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cutlayer import registry
from cutlayer.recipes import RECIPES
from cutlayer.runs.config import GIVEN

ENGINES = {
    "auto": "graph on a GPU; elsewhere loop or vmap, by a rule over model, batch and clients; says which and why",
    "loop": "one client after another, plain Python: the reference, and for big models on a CPU",
    "vmap": "clients of equal shapes stacked: for many small clients",
    "graph": "each client's step recorded as a CUDA graph and replayed, many clients side by side: on a GPU",
    "ray": "clients in the processes of a Ray cluster, on this machine or on many: for more cores than one",
}
DATA = {
    "digits": "8x8 grey images of 10 digits, built in: 1437 to train, 360 to test",
    "mnist": "28x28 grey images of 10 digits, from files in the data folder",
    "fashion_mnist": "28x28 grey images of 10 kinds of clothes, from files in the data folder",
    "cifar10": "32x32 colour images of 10 classes, from files in the data folder",
    "cifar100": "32x32 colour images of 100 classes, from files in the data folder",
    "tiny_imagenet": "64x64 colour images of 200 classes, from files in the data folder",
    "ham10000": "64x64 colour images of 7 kinds of skin lesions, from files in the data folder",
    "shakespeare": "80 characters of a role in a play and the next one of 80, by role, from files in the data folder",
    "speech_commands": "32x32 log-mel images of 35 spoken words, by speaker, from files in the data folder",
    "sst2": "sentences of film reviews, bad or good, for language models, from files in the data folder",
    "rte": "whether one sentence follows from others, for language models, from files in the data folder",
    "wsc": "whom a pronoun refers to, for language models, from files in the data folder",
    "text": "a plain text, every next token, for language models, from a .txt file in the data folder",
}
WITH_OPTIONS = ("METHODS", "MODELS", "PARTITIONS", "OPTIMISERS", "SCHEDULES", "DEVICES", "SAMPLERS", "CODECS")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name; `needs` lists its options without a default."""

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    source: str = ""  # the paper that a recipe reproduces, or the plug-in that defines the name


def of_kind(kind: str | None) -> dict[str, list[Entry]]:
    """Return the names of one kind, or of all kinds."""
    descriptions: dict[str, Mapping[Any, str]] = {"DATA": DATA, "ENGINES": ENGINES}
    recipes = [Entry(name=name, about=_about(fn), source=fn().source) for name, fn in RECIPES.items()]
    everything = {"recipes": recipes} | {
        word.lower(): [_entry(word, name, descriptions.get(word, {}).get(name)) for name in table]
        for word, table in registry.TABLES.items()
    }
    return everything if kind is None else {kind: registry.find("kind", everything, kind)}


def _entry(word: str, name: str, about: str | None) -> Entry:
    table = registry.TABLES[word]
    known = registry.options_of(table[name], GIVEN) if word in WITH_OPTIONS else {}
    return Entry(
        name=name,
        about=about or _about(table[name]),
        options={k: p.default for k, p in known.items() if p.default is not p.empty},
        needs=tuple(k for k, p in known.items() if p.default is p.empty),
        source=table.origins.get(name, ""),
    )


def _about(thing: Callable[..., Any]) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
