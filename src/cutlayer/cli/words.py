"""What words of the command line mean: values as in TOML, and codecs such as topk:0.1+int8."""

import tomllib
from typing import Any

from cutlayer import registry
from cutlayer.codecs import CODECS
from cutlayer.errors import ConfigError

SHARE = 0.1  # of the elements, for codecs that keep a share of them and are given none


def value(text: str) -> Any:
    """Read a TOML literal; anything else is a string, which needs no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def codec(text: str, where: str) -> Any:
    """Return a codec such as topk:0.1 or topk:0.1+int8 as in a run file: a table, or a list of them for a chain."""
    stages = [_stage(stage.strip(), where) for stage in text.split("+")]
    return stages[0] if len(stages) == 1 else stages


def _stage(text: str, where: str) -> dict[str, Any]:
    """Return the table of a codec and its options, such as topk:0.1 or randtopk:0.1:alpha=0.2."""
    name, *given = text.split(":")
    if not name:
        raise ConfigError(f"{where}: a name is missing; give names and options, such as none,int8,topk:0.1+int8")
    known = registry.options_of(registry.find("codec", CODECS, name, where))
    options: dict[str, Any] = {}
    for place, word in enumerate(given):
        key, sign, content = word.partition("=")
        if not sign:  # without its name, it is the option at this place
            if place >= len(known):
                raise ConfigError(f"{where} {text!r}: {name} has {_counted(len(known))}; leave {word!r} out")
            key, content = list(known)[place], word
        options[key.strip()] = value(content)
    return {"name": name, **({"share": SHARE} if "share" in known else {}), **options}


def _counted(number: int) -> str:
    return "no options" if not number else f"{number} option{'' if number == 1 else 's'}"
