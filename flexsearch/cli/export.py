"""``export``: a plan for PyTorch, torchtitan or Megatron-LM. It does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexsearch.cli.common import (
    BatchOption,
    JsonOption,
    SequenceOption,
    Size,
    check_outputs,
    setting_of,
    show,
    stdout,
)

if TYPE_CHECKING:
    from flexsearch.graph import OperatorGraph
    from flexsearch.strategy import Strategy

Target = Literal["torch", "torchtitan", "megatron"]


def export(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="Strategy file.")],
    to: Annotated[
        Target, typer.Option("--to", help="torch: a Python file that applies the plan. torchtitan, megatron: flags.")
    ] = "torch",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write. Default: print the text.")
    ] = None,
    graph: Annotated[
        str | None, typer.Option("--graph", "-g", metavar="GRAPH", help="The graph, where it is not a shipped one.")
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as ordinary PyTorch, or print it as flags of torchtitan or Megatron-LM.

    A plan that they cannot express is refused; the message names the first operator or option that is in the way.
    `flexsearch optimize --space native` searches only for plans that can be exported.
    """
    from flexsearch.output import write
    from flexsearch.report.export import summing_note
    from flexsearch.strategy import Strategy

    check_outputs({"--output": output}, strategy, graph)
    plan = Strategy.load(strategy)
    setting = setting_of(strategy, plan, graph, None, None, Size(batch, seq), "--graph GRAPH")
    note = summing_note(plan, setting.graph) if to == "torch" else ""
    text = _text(plan, setting.graph, to, note)
    if output is not None:
        write(output, text)
    path = str(output) if output is not None else None
    data = {"strategy": str(strategy), "to": to, "path": path, "note": note or None, "text": text}

    def human() -> None:
        if output is None:
            stdout.print(text, end="", soft_wrap=True)
        else:
            stdout.print(f"Wrote {output}. {note}".rstrip(), soft_wrap=True)

    show(as_json, data, human)


def _text(plan: Strategy, graph: OperatorGraph, to: Target, note: str) -> str:
    from flexsearch.report.export import megatron_flags, torch_file, torchtitan_flags

    if to == "torch":
        return torch_file(plan, graph, note)
    flags = (torchtitan_flags if to == "torchtitan" else megatron_flags)(plan, graph)
    return " \\\n".join(f"{flag} {value}".rstrip() for flag, value in flags) + "\n"
