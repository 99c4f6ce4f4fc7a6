"""Which models import as they come, into how many operators, how fast, and what a search makes of them.

    python -m benchmarks.models [--quick] [--json] [--only tiny] [--models gpt2,llama-2-7b] [--write docs/models.md]

Two tables of models of Hugging Face's transformers, in training mode with the batch of their collator, as shipped
(attention, dropout, KV cache):

- ``tiny``: every family of tests/families.py, in a tiny configuration, on two hosts with 1 Gbit/s.
- ``full``: configurations that people train, on the meta device, on one server of 8 GPUs (dgx-a100).

Columns: ``operators``; ``opaque``: of these, those that cannot be split; ``import_s``: seconds to import, in a process
that has imported a small model before; ``memory_mb``: by how much importing raised the process's peak memory;
``baseline``: the best hand-written plan, ``baseline_s`` its predicted iteration time; ``found_s``: that of the plan
that a search finds; ``gain``: how many times as fast that is. Each model has a process of its own, which is ended after
``--limit`` seconds; ``problem`` says what a model that does not import lacks.

``--write FILE`` writes both tables as a page of documentation; the whole of it takes about an hour on two cores.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Row, parser, report_tables, say
from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.huggingface import load_huggingface
from flexsearch.graph.importer import import_with_constants
from flexsearch.search import search
from flexsearch.topology import Topology

LIMIT_S = 900.0
"""For one model."""
CLUSTERS = {"tiny": "ethernet-1g:2", "full": "dgx-a100"}
PROPOSALS = {"tiny": 500, "full": 2000}
TITLES = {
    "tiny": "Families, in a tiny configuration, on two hosts with 1 Gbit/s",
    "full": "Configurations that people train, on 8 A100 of one server",
}


@dataclass(frozen=True)
class Size:
    """A configuration that people train: a name for ``hf:``, a batch, and options of the configuration."""

    name: str
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)


_BERT_LARGE: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip

SIZES: Mapping[str, Size] = {
    "gpt2": Size("hf:gpt2", 32, {"seq": 1024}),
    "gpt2-xl": Size("hf:gpt2", 16, {"seq": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base": Size("hf:bert", 64),
    "bert-large": Size("hf:bert", 32, _BERT_LARGE),
    "roberta-base": Size("hf:roberta", 64, {"seq": 512, "max_position_embeddings": 514}),
    "t5-base": Size("hf:t5", 32, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "llama-2-7b": Size("hf:llama", 8, {"seq": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096}),
    "llama-3-8b": Size(
        "hf:llama", 8,
        {"seq": 8192, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192},
    ),
    "mistral-7b": Size("hf:mistral", 8, {"seq": 4096}),
    "mixtral-8x7b": Size("hf:mixtral", 8, {"seq": 4096}),
    "vit-base": Size("hf:vit", 256),
    "vit-large": Size(
        "hf:vit", 128,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "clip-vit-b32": Size("hf:clip", 256),
    "convnext-tiny": Size("hf:convnext", 256),
    "resnet-50": Size("hf:resnet", 256),
    "whisper-large": Size(
        "hf:whisper", 16,
        {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
         "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
    ),
    "mamba2-2.7b": Size(
        "hf:mamba2", 16,
        {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "n_groups": 1, "vocab_size": 50288},
    ),
}  # fmt: skip

QUICK = {"tiny": ("gpt2", "vit"), "full": ("bert-base",)}


def _names(table: str) -> Sequence[str]:
    if table == "full":
        return list(SIZES)
    from tests.families import FAMILIES

    return list(FAMILIES)


def _build(table: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    if table == "full":
        size = SIZES[name]
        return load_huggingface(size.name, batch=size.batch, device="meta", **size.options)
    from tests.families import build

    return build(name)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _row(table: str, name: str, proposals: int) -> dict[str, Any]:
    """One model, in this process."""
    warnings.simplefilter("ignore")
    small = nn.Linear(2, 2)
    import_with_constants(small, (torch.ones(2, 2),), torch.sum)
    row: dict[str, Any] = {"model": name}
    try:
        model, batch = _build(table, name)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        start, before = time.perf_counter(), _peak_mb()
        graph = import_with_constants(model, batch).graph
    except FlexsearchError as error:
        return {**row, "imports": "no", "problem": error.message}
    imported = {
        "imports": "yes", "operators": len(graph.operators),
        "opaque": sum(op.kind == "opaque" for op in graph.operators),
        "import_s": time.perf_counter() - start, "memory_mb": _peak_mb() - before,
    }  # fmt: skip
    return {**row, **imported, **_searched(graph, Topology.load(CLUSTERS[table]), proposals)}


def _searched(graph: OperatorGraph, topology: Topology, proposals: int) -> dict[str, Any]:
    result = search(graph, topology, Costs(graph, topology), proposals=proposals, seed=0)
    fitting = {name: plan.time_s for name, plan in result.baselines.items() if plan.feasible}
    if not fitting:
        return {"problem": "no baseline fits into memory", "found_s": result.prediction.iteration_s}
    best = min(fitting, key=lambda name: fitting[name])
    found = result.simulation.makespan_s
    return {"baseline": best, "baseline_s": fitting[best], "found_s": found, "gain": fitting[best] / found}


def _child(pipe: Connection, table: str, name: str, proposals: int) -> None:
    pipe.send(_row(table, name, proposals))


def _apart(table: str, name: str, proposals: int, limit_s: float) -> dict[str, Any]:
    """One model, in a process of its own that is ended after ``limit_s``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, table, name, proposals))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return {"model": name, "problem": f"not done after {limit_s:g} s"}
        row: dict[str, Any] = ours.recv()
        return row
    except EOFError:
        process.join()
        return {"model": name, "problem": f"the process ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


PAGE = """# Models as they come

Import a model of Hugging Face's transformers by its name, without weights and without network:

    flexsearch import hf:llama --batch 8 --set seq=4096 --set num_hidden_layers=16 -o graph.json

The tables below list the families that import unchanged: in training mode, with the batch of their data collator,
attention kernels, dropout and drop path, masks. Importing turns the KV cache off. wav2vec2 must be without layer drop
and SpecAugment, and DeBERTa needs to know that each text has one class. As shipped these depend on values, and the
error says what to set.

Plans of these families compute the loss and the gradients of plain PyTorch. `pytest tests/test_huggingface.py
--all-models` checks this on two ranks for data parallelism, Megatron, FSDP, random plans and the plan of the search.

- *import*: seconds, in a process that has imported a small model before.
- *memory*: by how much importing raised the peak memory of the process.
- *opaque*: operators that cannot be split.
- *baseline*: the best hand-written plan. *found*: the plan of a search with {tiny} proposals, {full} for
  configurations that people train. Both times are predictions; *gain* is their ratio.

Made by `python -m benchmarks.models{only} --write docs/models.md`, with torch {torch} and transformers {transformers}.
"""


def _page(rows: Sequence[Row]) -> str:
    import transformers

    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    tables = {row["table"] for row in rows}
    only = f" --only {next(iter(tables))}" if len(tables) == 1 else ""
    parts = [PAGE.format(only=only, **versions, **PROPOSALS)]
    for table, title in TITLES.items():
        of_table = [row for row in rows if row["table"] == table]
        if of_table:
            head = "| model | parameters | imports | operators | opaque | import | memory | baseline | found | gain |"
            lines = [head, "|---|--:|---|--:|--:|--:|--:|---|--:|--:|", *map(_line, of_table)]
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    if "operators" not in row:
        return f"| {row['model']} | {_count(row.get('parameters'))} | no: {row['problem']} | | | | | | | |"
    plans = ("no plan fits", "", "")
    if "baseline" in row:
        baseline = f"{row['baseline']}, {_seconds(row['baseline_s'])}"
        plans = (baseline, _seconds(row["found_s"]), f"{row['gain']:.2f}x")
    cells = [
        row["model"], _count(row["parameters"]), "yes", row["operators"], row["opaque"], f"{row['import_s']:.1f} s",
        f"{row['memory_mb']:.0f} MB", *plans,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _count(parameters: int | None) -> str:
    if parameters is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"


def run(options: Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the tables that ``options`` ask for; ``table`` says of which."""
    for table in TITLES:
        if options.only not in (None, table):
            continue
        names = QUICK[table] if options.quick else _names(table)
        for name in names:
            if options.models is None or name in options.models.split(","):
                say(f"{table}: {name}")
                proposals = 50 if options.quick else PROPOSALS[table]
                yield {"table": table, **_apart(table, name, proposals, options.limit)}


def main() -> None:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--only", choices=tuple(TITLES), help="only this table")
    made.add_argument("--models", help="only these, comma-separated")
    made.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for a model; default: {LIMIT_S:g}")
    made.add_argument("--write", type=Path, help="a page of documentation to write")
    options = made.parse_args()
    rows: list[dict[str, Any]] = []
    for row in run(options):
        rows.append(row)
        if options.write is not None:  # after each, as the whole takes long
            options.write.write_text(_page(rows))
    if not rows:
        sys.exit("There is no such model.")
    report_tables(rows, TITLES, options.json)


if __name__ == "__main__":
    main()
