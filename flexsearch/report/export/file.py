"""A Python file in the making: its imports, functions and the lines that apply a plan to a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pprint import pformat

from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.native import NativePlan

WIDTH = 110
"""Characters of a line of literals."""


@dataclass
class File:
    """``imports``: names by module; "" are whole modules. ``layers``: lines of the function that makes ``model``
    parallel. ``note``: in what it differs from the plan."""

    graph: OperatorGraph
    strategy: Strategy
    plan: NativePlan
    imports: dict[str, set[str]] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    note: str = ""

    def needs(self, module: str, *names: str) -> None:
        """Import names of a module."""
        self.imports.setdefault(module, set()).update(names)

    @property
    def options(self) -> Options:
        return self.strategy.options

    @property
    def device(self) -> str:
        """Kind of the devices, as PyTorch names it."""
        return self.strategy.cluster.devices[0].kind

    @property
    def precise(self) -> bool:
        """Whether the plan computes in the precision of the model."""
        return self.options.precision == "as-is"

    @property
    def own_loss(self) -> bool:
        """Whether the model computes its loss itself, from a batch that has the targets too."""
        return all(op.module != "loss" for op in self.graph.operators)

    @property
    def wrapped(self) -> bool:
        """Whether data parallelism is ``DistributedDataParallel``, which goes with neither tensor parallelism nor
        another precision."""
        plan = self.plan
        alone = plan.tensor == plan.pipeline == 1 and self.precise and plan.data > 1
        return alone and plan.states in (States.WHOLE, States.OPTIMIZER)

    @property
    def replicated(self) -> bool:
        """Whether ``fully_shard`` keeps whole weights: over a mesh of replicas, each of one shard."""
        return self.plan.states == States.WHOLE and not self.wrapped and (self.plan.data > 1 or not self.precise)

    @property
    def data(self) -> tuple[tuple[str, int], ...]:
        """The dimensions of the mesh over which samples are shared out, with their sizes: ``fully_shard`` takes two
        where replicas have weights of their own, whole ones or those that some of them divide."""
        plan = self.plan
        if self.replicated:
            return ("replicate", plan.data), ("shard", 1)
        if plan.shards < plan.data:
            return ("replicate", plan.data // plan.shards), ("shard", plan.shards)
        return (("data", plan.data),)

    def each(self, names: Sequence[str], line: str) -> list[str]:
        """A loop over modules; over those that a part of the model has, where it is taken apart."""
        text = names_text(names)
        return [f"for name in {f'here(model, {text})' if self.plan.pipeline > 1 else text}:", f"    {line}"]

    def text(self, head: str, last: str) -> str:
        """The whole file: ``head`` is its docstring, ``last`` comes after the functions."""
        whole = [f"import {name}" for name in sorted(self.imports.get("", ()))]
        named = [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(self.imports.items()) if module
        ]  # fmt: skip
        library = [line for line in named if not line.startswith("from torch")]
        imports = "\n\n".join("\n".join(lines) for lines in (library, whole + [n for n in named if n not in library]))
        constants = ["\n".join(self.constants)] if self.constants else []
        return f'"""{head}"""\n\n' + "\n\n\n".join(
            chain([imports.strip()], constants, self.functions, [last])
        ) + "\n"


def names_text(names: Sequence[str]) -> str:
    """A list of modules as Python; numbered ones are counted: ``[f"layers.{i}" for i in range(32)]``."""
    runs: list[tuple[str, str, list[int]]] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        head, tail = (match[1], match[3]) if match else (name, "")
        if match and runs and runs[-1][:2] == (head, tail) and runs[-1][2] and runs[-1][2][-1] + 1 == int(match[2]):
            runs[-1][2].append(int(match[2]))
        else:
            runs.append((head, tail, [int(match[2])] if match else []))
    parts = []
    for head, tail, numbers in runs:
        if len(numbers) > 2:
            first = f"{numbers[0]}, " if numbers[0] else ""
            parts.append(f'*(f"{head}{{i}}{tail}" for i in range({first}{numbers[-1] + 1}))')
        else:
            parts += [f'"{head}{number}{tail}"' for number in numbers] or [f'"{head}"']
    if len(parts) == 1 and parts[0].startswith("*("):
        return f"[{parts[0][2:-1]}]"
    return "[" + ", ".join(parts) + "]"


def literal(value: object) -> str:
    """A literal with double quotes, over several lines if it is long."""
    return pformat(value, width=WIDTH, compact=True).replace("'", '"')
