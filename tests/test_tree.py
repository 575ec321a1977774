"""Who may import whom: one table for all rooms, and what keeps the tree readable.

A room is a package or module at the root, or a package of `remote`. Imports inside of functions and those for types
alone count as well.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cutlayer

ROOT = Path(cutlayer.__file__).parent
MOST_ROOT_MODULES = 8
MODULE_HOMES = ("_modules", "_parameters", "_buffers", "_flat_weights")  # of a torch module, which are private

# Each room with the rooms that it may import, the lowest floor first.
MAY_IMPORT = {
    "errors": "",
    "version": "",
    "registry": "errors",
    "core": "errors",
    "codecs": "core errors registry",
    "optim": "core errors registry",
    "data": "core errors registry",
    "split": "core data errors",
    "planning": "core errors registry split",
    "pieces": "core errors optim planning registry split",
    "methods": "core errors optim pieces planning registry split",
    "models": "core data errors registry",
    "meters": "core planning registry",
    "engines": "core data errors optim registry split",
    "authoring": "core optim pieces split",
    "plugins": "core errors registry",
    "runs": "codecs core data engines errors meters methods models optim pieces planning registry split version",
    "remote": "",
    "remote/protocol": "errors",
    "remote/tensors": "core errors registry remote/protocol",
    "remote/identity": "core errors",
    "remote/monitor": "core errors runs",
    "remote/device": "core data engines errors registry remote/identity remote/protocol remote/tensors runs version",
    "remote/joining": "core data errors meters registry remote/device remote/protocol remote/server runs",
    "remote/server": "core data engines errors meters pieces remote/device remote/identity remote/monitor "
    "registry remote/protocol remote/tensors runs version",
    "remote/ray": "core data engines errors plugins remote/device remote/monitor remote/protocol remote/server "
    "remote/tensors runs",
    "recipes": "core data errors planning registry runs split",
    "results": "errors planning recipes runs",
    "studies": "core errors meters methods optim pieces planning registry results runs split",
    "benching": "core data engines errors methods models optim registry runs split",
    "cli": "benching codecs core data errors methods models optim planning plugins recipes registry remote/device "
    "remote/identity remote/joining remote/monitor remote/server results runs split studies version",
    "__init__": "codecs core data errors methods models optim pieces planning runs split studies version",
    "__main__": "cli",
}

FILES = {
    ".".join(("cutlayer", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imported(module: str) -> frozenset[str]:
    """All modules that a module imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports by a relative name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found)


def room(module: str) -> str:
    _, *names = module.split(".")
    return "/".join(names[: 2 if names[:1] == ["remote"] else 1]) or "__init__"


def doors() -> dict[tuple[str, str], set[str]]:
    """Map each package to the packages that it imports, with the importing modules."""
    found: dict[tuple[str, str], set[str]] = {}
    for module in FILES:
        for other in imported(module) & FILES.keys():
            if room(other) != room(module):
                found.setdefault((room(module), room(other)), set()).add(module)
    return found


def allowed(name: str) -> set[str]:
    return set(MAY_IMPORT[name].split())


def test_every_room_is_in_the_table() -> None:
    assert {room(module) for module in FILES} == MAY_IMPORT.keys()


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_imports_what_the_table_lets_it(name: str) -> None:
    others = {other: by for (who, other), by in doors().items() if who == name}
    assert {other: by for other, by in others.items() if other not in allowed(name)} == {}


def test_no_two_rooms_import_each_other_by_any_way_round() -> None:
    floors = list(TopologicalSorter({name: allowed(name) for name in MAY_IMPORT}).static_order())  # or a CycleError
    assert set(floors) == MAY_IMPORT.keys()


def reached(start: str) -> Iterator[str]:
    """All modules that an import of this one loads."""
    seen, waiting = {start}, [start]
    while waiting:
        module = waiting.pop()
        yield module
        new = imported(module) - seen if module in FILES else frozenset()
        seen |= new
        waiting += new


@pytest.mark.parametrize("module", [module for module in FILES if room(module) == "remote/protocol"])
def test_the_protocol_needs_no_torch(module: str) -> None:
    assert not [name for name in reached(module) if name.split(".")[0] == "torch"]


def test_few_modules_lie_at_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= MOST_ROOT_MODULES


def test_a_class_name_is_defined_once() -> None:
    names = Counter(node.name for module in FILES for node in parsed(module).body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_package_says_what_it_imports(name: str) -> None:
    file = ROOT / name / "__init__.py"
    if not file.exists():
        pytest.skip("a module at the root")
    said = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split())
    imports = ", ".join(sorted(allowed(name))) or "nothing; its packages say what they import"
    assert said.endswith(f"Imports: {imports}.")


def private_names(module: str) -> set[str]:
    """The names of torch in a module that begin with an underscore."""
    found: set[str] = {name for name in imported(module) if name.split(".")[0] == "torch"}
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] == "torch":
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr in MODULE_HOMES and ast.unparse(node.value) != "self":
            found.add(f"torch.nn.Module.{node.attr}")
    return {name for name in found if any(p.startswith("_") and not p.startswith("__") for p in name.split("."))}


def test_private_names_of_torch_live_in_one_module() -> None:
    assert [module for module in FILES if private_names(module)] == ["cutlayer.core.torch_private"]


def test_the_walk_sees_imports_for_types_and_inside_of_functions() -> None:
    assert "cutlayer.core.values" in imported("cutlayer.core.kinds")
    assert "cutlayer.planning.planner" in imported("cutlayer.results.figures.plan")
    assert "cutlayer.engines.graph.kernels.picking" in imported("cutlayer.engines.graph.compiling")
