"""Specifies that docs/codecs.md is right: its codec of one's own, its bytes, its formulas, its tables of kinds."""

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import blocks
from torch.distributions import Normal

from cutlayer import cli, codecs, plugins
from cutlayer.core.codec import CODED, Coder
from cutlayer.core.coders import NOT_CODED
from cutlayer.core.kinds import ACTIVATIONS, KINDS, MODEL

PAGE = Path(__file__).parents[1] / "docs" / "codecs.md"
TEXT = PAGE.read_text(encoding="utf-8")
SIGN = next(block for block in blocks(PAGE) if "CODECS = " in block)
COMMAND = re.search(r"^\$ cutlayer (run digits .*sign\.py.*)$", TEXT, re.MULTILINE)
TINY = ["--rounds", "2", "--set", "per_round=2", "--quiet"]
FLOAT = 4  # bytes


def rows(of: str) -> list[list[str]]:
    """The rows of the table whose head begins with these cells."""
    body = TEXT.partition(f"| {of} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in body]


@contextmanager
def unchanged() -> Iterator[None]:
    """Forget the codecs of plug-ins afterwards."""
    before = dict(codecs.CODECS.data), dict(codecs.CODECS.origins)
    yield
    codecs.CODECS.data, codecs.CODECS.origins = before
    plugins.LOADED.clear()


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sign") / "sign.py"
    file.write_text(SIGN, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def ends(sign: Path) -> dict[str, dict[str, Any]]:
    """The last records of the page's command, on two engines."""
    assert COMMAND is not None
    found = {}
    for engine in ("loop", "vmap"):
        with chdir(sign.parent), unchanged(), pytest.raises(SystemExit) as left:
            cli.main([*COMMAND[1].split(), *TINY, "--engine", engine, "--out", engine])
        assert not left.value.code
        lines = (sign.parent / engine / "digits" / "sfl_v2" / "seed-0" / "metrics.jsonl").read_text().splitlines()
        found[engine] = json.loads(lines[-1])
    return found


def test_a_codec_of_ones_own_sends_what_the_page_says(ends: dict[str, dict[str, Any]]) -> None:
    said = re.search(r"have (\d+) values a sample: (\d+) bytes cross instead of ([\d,]+)\.", TEXT)
    assert said is not None
    values, after, before = (int(word.replace(",", "")) for word in said.groups())
    assert (after, before) == (math.ceil(values / 8) + FLOAT, FLOAT * values)
    end = ends["loop"]
    for kind in ("up_activations", "down_gradients"):
        assert end["bytes"][kind] == after * end["samples"]
        assert end["bytes_before_codecs"][kind] == before * end["samples"]


def test_a_codec_of_ones_own_is_the_same_on_every_engine(ends: dict[str, dict[str, Any]]) -> None:
    loop, vmap = ends["loop"], ends["vmap"]
    assert loop["bytes"] == vmap["bytes"]
    assert loop["loss"] == pytest.approx(vmap["loss"], rel=1e-5)


def test_a_codec_of_ones_own_keeps_signs_and_sizes(sign: Path) -> None:
    spec = importlib.util.spec_from_file_location("sign", sign)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sign"] = module
    spec.loader.exec_module(module)
    a = torch.tensor([[3.0, -1.0, 2.0], [-1.0, -1.0, 4.0]])
    own = module.Sign()
    code = own.encode(a, torch.tensor(0))
    assert code["signs"].tolist() == [[0b101], [0b100]]
    assert own.decode(code, (2, 3), torch.float32).tolist() == [[2, -2, 2], [-2, -2, 2]]
    del sys.modules["sign"]


# -- bytes -------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"share": 0.1},
    "randtopk": {"share": 0.1},
    "lowrank": {"rank": 2},
    "clip": {"norm": 1.0},
    "gaussian": {"std": 0.1},
    "laplace": {"scale": 0.1},
}


BYTES = {row[0]: row[1].replace("as `topk", "") for row in rows("codec | bytes")}


def said(name: str, **sizes: int) -> int:
    """The bytes that the page says: a formula of these sizes, rounded up, and what places take."""
    cell = BYTES[name] or BYTES["topk"]
    formula = re.sub(
        r"(\d?)\*([a-z])\*", lambda found: "*".join(filter(None, found.groups())), re.split(" for |[,;]", cell)[0]
    )
    found = math.ceil(eval(re.sub(r"([a-z])\(", r"\1*(", formula), {}, sizes))
    more = re.search(r"with more than (\d+) values (\d+) more for each (\d+), whichever is less", cell)
    if more is None:
        return found
    blocks = int(more[2]) * math.ceil(sizes["d"] / int(more[3])) if sizes["d"] > int(more[1]) else 0
    return found + min(math.ceil(sizes["d"] / 8), sizes["k"] + blocks)


def test_every_codec_is_on_the_page() -> None:
    assert list(BYTES) == list(codecs.CODECS)


@pytest.mark.parametrize("d", [7, 256, 1001])
@pytest.mark.parametrize("name", [name for name in BYTES if name != "lowrank"])
def test_codecs_take_the_bytes_that_the_page_says(name: str, d: int) -> None:
    made = codecs.build({"name": name, **OPTIONS.get(name, {})})
    assert not isinstance(made, codecs.error_feedback)
    assert Coder(ACTIVATIONS, made).size((5, d), torch.float32) == 5 * said(name, d=d, k=math.ceil(d / 10))


def test_a_low_rank_takes_the_bytes_that_the_page_says() -> None:
    made = Coder(MODEL, codecs.lowrank(rank=2))
    assert made.size((30, 5, 4), torch.float32) == said("lowrank", r=2, m=30, n=20)
    assert BYTES["lowrank"].endswith("; 4*d* where that is no less")
    assert made.size((4, 4), torch.float32) == made.size((16,), torch.float32) == said("none", d=16)


# -- kinds and formulas ------------------------------------------------------------------------------------------------


def test_the_page_says_of_every_kind_whether_it_has_codecs() -> None:
    found = {name: why for names, why in rows("kind | why not") for name in names.split("`, `")}
    assert found == NOT_CODED
    assert {*found, *(kind.name for kind in CODED)} == {kind.name for kind in KINDS}


def delta(epsilon: float, moved: float) -> float:
    """The delta of normal noise of standard deviation 1 at an epsilon, for values that are moved this far."""
    cdf = Normal(torch.tensor(0.0, dtype=torch.float64), 1.0).cdf
    near, far = (float(cdf(torch.tensor(s * moved / 2 - epsilon / moved, dtype=torch.float64))) for s in (1, -1))
    return near - math.exp(epsilon) * far


@pytest.mark.parametrize(("size", "other", "removal"), rows("`std` / `clip` | ε, another sample"))
def test_the_privacy_of_one_release_is_what_the_page_says(size: str, other: str, removal: str) -> None:
    for told, moved in ((float(other), 2 / float(size)), (float(removal), 1 / float(size))):
        assert delta(told + 0.005, moved) < 1e-5 < delta(told - 0.005, moved)  # two decimals
