"""The house stands: no module imports from a floor above it, and torch stays where DESIGN puts it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import networkx as nx
import pytest

import flexsearch

ROOT = Path(flexsearch.__file__).resolve().parent

FLOOR = {
    "errors": -3, "children": -3, "ranks": -3, "allocator": -3,
    "packed": -5, "translating": -4, "linking": -3, "untried": -3,
    "clocks": -2, "saved": -2, "compiled": -2, "direct": -2, "quantities": -2, "output": -2,
    "backward": -2, "directions": -2, "experts": -2,
    "files": -1, "zoo": -1, "sync": -1, "graph": 0, "topology": 0,
    "strategy": 1, "cost": 1,
    "lower": 2,
    "simulate": 3, "proof": 3,
    "search": 4, "runtime": 4, "report": 4, "measure": 4,
    "calibrating": 5, "converging": 5, "explaining": 5, "changing": 5, "fitting": 5, "grids": 5, "planning": 5,
    "scaling": 5, "spaces": 5, "tracing": 5, "api": 5, "setting": 5, "cli": 5, "__main__": 5, "": 5,
}  # fmt: skip
"""Floor of each package and top-level module. The zoo is plain torch that anything may build on; "" is
``flexsearch/__init__.py``, which hands on what lies below."""

WITH_TORCH = (
    "backward", "clocks", "directions", "experts", "saved", "graph.assemble", "graph.assigned", "graph.blocks",
    "graph.checks", "graph.decompose", "graph.experts", "graph.export", "graph.fingerprint", "graph.flex",
    "graph.fold", "graph.holders", "graph.huggingface", "graph.imported", "graph.importer", "graph.loading",
    "graph.losses", "graph.operands", "graph.prepare", "graph.private", "graph.records", "graph.refusals",
    "graph.regions", "graph.repeats", "graph.sizes", "graph.stand_ins", "graph.walk", "graph.ops.attention_blocks",
    "graph.ops.attention_narrow", "graph.ops.halves", "graph.ops.loss_functions", "graph.ops.norm_functions",
    "measure", "runtime", "zoo",
)  # fmt: skip
"""Modules that may import torch when they are imported (and those whose names begin so)."""
WHEN_CALLED = "graph.ops"
"""What may import torch in the functions that trace and run operators."""


def modules() -> Iterator[tuple[str, Path]]:
    """Name below ``flexsearch`` ("graph.model"; a package's ``__init__`` is the package) and file of every module."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(tree: ast.AST, module: str, package: bool) -> Iterator[tuple[str, str]]:
    """(Absolute name, when it is imported: "now", "called" or "typing") of every import, those in functions too.

    ``from package import name`` counts as ``package.name``, because name may be a module."""

    def walk(node: ast.AST, now: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from ((name, "typing") for name, _ in walk(child, now))
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, now) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    own = ["flexsearch", *module.split(".")]
                    up = child.level - (1 if package else 0)
                    base = ".".join([*own[: len(own) - up], *filter(None, [child.module])])
                yield from ((f"{base}.{alias.name}", now) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, "called" if inside else now)

    yield from walk(tree, "now")


def part_of(name: str) -> str:
    """Package or top-level module below flexsearch that an absolute name lies in."""
    below = name.removeprefix("flexsearch").removeprefix(".").split(".")[0]
    return below if below in FLOOR else ""


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m or "flexsearch") for m, p in modules()])
def test_a_module_imports_only_from_floors_below_it(module: str, path: Path) -> None:
    own = part_of(f"flexsearch.{module}")
    assert own or not module, f"flexsearch.{module} is on no floor: add it to DESIGN's table and to FLOOR"
    for name, _ in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
        if name.split(".")[0] != "flexsearch":
            continue
        target = part_of(name)
        if target != own and FLOOR[own] < 5:
            assert FLOOR[target] < FLOOR[own], f"flexsearch.{module} (floor {FLOOR[own]}) imports {name}"


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m or "flexsearch") for m, p in modules()])
def test_torch_is_imported_only_where_models_are_read_measured_and_run(module: str, path: Path) -> None:
    if module.startswith(WITH_TORCH):
        return
    for name, when in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
        allowed = ("typing", "called") if module.startswith(WHEN_CALLED) else ("typing",)
        assert name.split(".")[0] != "torch" or when in allowed, f"flexsearch.{module} imports {name}"
        if when == "now":
            below = name.removeprefix("flexsearch.")
            assert not (name.startswith("flexsearch.") and below.startswith(WITH_TORCH)), (
                f"flexsearch.{module} imports {name}, and so torch, whenever it is imported"
            )


def test_no_two_modules_import_each_other() -> None:
    """Directly or by way of others, also where only types are imported. Inside ``graph``, operators and what a graph
    may contain are checked by each other."""
    names = {module for module, _ in modules()}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, path in modules():
        for name, _ in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
            below = name.removeprefix("flexsearch").removeprefix(".")
            target = below if below in names else below.rpartition(".")[0]
            if name.startswith("flexsearch") and target in names - {module}:
                graph.add_edge(module, target)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert not [circle for circle in circles if not all(part_of(f"flexsearch.{m}") == "graph" for m in circle)]


def test_the_zoo_is_plain_torch_and_the_operators_of_experts() -> None:
    own = ("flexsearch.zoo", "flexsearch.experts")
    for module, path in modules():
        if module.startswith("zoo"):
            for name, _ in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
                assert name.startswith(own) or not name.startswith("flexsearch"), f"{module}: {name}"


def test_importing_flexsearch_imports_no_torch_and_no_numba() -> None:
    code = "import sys, flexsearch, flexsearch.cli; print(sorted({'torch', 'numba', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_list_of_commands_needs_no_numbers() -> None:
    """Help, versions and mistakes in options are told at once: each command imports what it needs when it is called."""
    code = "import sys, flexsearch.cli.app; print(sorted({'numpy', 'networkx', 'numba', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_choices_that_the_command_line_writes_out_are_those_there_are() -> None:
    """So that help needs to import nothing."""
    from flexsearch.cli.common import CodeOption
    from flexsearch.cli.models import FormatOption
    from flexsearch.graph.profiled import FORMATS
    from flexsearch.topology.codes import CodeKind

    assert set(get_args(get_args(get_args(CodeOption)[0])[0])) == set(get_args(CodeKind))
    assert get_args(FormatOption)[1].metavar == "|".join(FORMATS)


def test_optimizing_a_saved_graph_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from flexsearch.cli import main\n"
        "sys.argv = ['flexsearch', 'optimize', 'alexnet', '--topology', 'ethernet-1g-4', '--budget', '50', '--json',\n"
        f"            '-o', {str(tmp_path / 'strategy.json')!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"
    assert (tmp_path / "strategy.json").exists()


EMPTY = {"found", "known", "made", "given"}
"""Words that say nothing in names."""
SPARED = {
    ("measure.profiler", "known"),  # a parameter that users may give by its name
    ("lower.moves", "GIVEN"), ("search.starts", "GIVEN"), ("search.climbs", "found_in"), ("search.run", "found_in"),
}  # fmt: skip


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module binds: of variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def words(name: str) -> set[str]:
    """Those of a name: of "made_first", "GivenLayer" or "cli.given"."""
    return {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_names_say_what_they_mean() -> None:
    assert words("_made_first") | words("GivenLayer") | words("FOUND") == {"made", "first", "given", "layer", "found"}
    bound = {(module, name) for module, path in modules() for name in bound_names(ast.parse(path.read_text()))}
    assert {(module, name) for module, name in bound if EMPTY & words(name)} == SPARED
    assert not [module for module, _ in modules() if EMPTY & words(module)]
