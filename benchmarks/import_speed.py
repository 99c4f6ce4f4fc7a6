"""How long importing full-size models takes, how much memory, and how large their graph files are.

    python -m benchmarks.import_speed [--quick] [--json] [MODEL...]

Every model is imported on the meta device in a process of its own. Memory is the peak resident set over that just
before the import, with torch, transformers and the model in memory. On a busy machine, CPU time is the fairer measure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: Mapping[str, dict[str, int]] = {
    "llama-2-7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
    "llama-3-70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "llama-3-405b": {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256},
}
TOKENS = 4096
ZOO: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{name: ("llama7b", {**sizes, "seq": TOKENS}) for name, sizes in LLAMA.items()},
    "gpt2": ("gpt2", {"batch": 8, "seq": 1024}),
    "bert_large": ("bert_large", {"batch": 8, "seq": 128}),
    "resnet101": ("resnet101", {"batch": 64}),
}
"""Name -> builder of ``flexsearch.zoo`` and its arguments."""
MODELS = (*ZOO, *(f"{name} (transformers)" for name in LLAMA))
QUICK = ("llama-2-7b", "gpt2", "bert_large", "resnet101", "llama-2-7b (transformers)")


def build(name: str) -> tuple[Any, Any, Any, Any]:
    """(model, inputs, targets, loss) on the meta device."""
    import torch

    if name in ZOO:
        from flexsearch import zoo

        builder, arguments = ZOO[name]
        built: tuple[Any, Any, Any, Any] = getattr(zoo, builder)(device="meta", **arguments)
        return built
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LLAMA[name.removesuffix(" (transformers)")]
    config = LlamaConfig(
        num_hidden_layers=sizes["layers"], hidden_size=sizes["hidden"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], intermediate_size=sizes["ffn"], vocab_size=sizes["vocab"],
        max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens.clone()}, None, None


def measure(name: str) -> dict[str, Any]:
    """One row, in this process, which must be a fresh one."""
    from flexsearch.graph import OperatorGraph
    from flexsearch.graph.importer import import_model

    model, inputs, targets, loss = build(name)
    before = _status_bytes("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    graph = import_model(model, inputs, loss, targets=targets)
    import_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    peak = _status_bytes("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        graph.save(path)
        file_bytes, load_s = path.stat().st_size, []
        for _ in range(3):
            start = time.perf_counter()
            OperatorGraph.load(path)
            load_s.append(time.perf_counter() - start)
    return {
        "model": name, "operators": len(graph.operators), "import_s": round(import_s, 2),
        "import_cpu_s": round(cpu_s, 2),
        "extra_bytes": max(0, peak - before), "file_bytes": file_bytes, "load_s": round(min(load_s), 4),
    }  # fmt: skip


def _status_bytes(field: str) -> int:
    """A field of this process's status in bytes: VmRSS, resident now, or VmHWM, the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | operators | import | CPU time | memory | file | load |", f"|---{'|---:' * 6}|"]
    lines += [
        f"| {r['model']} | {r['operators']} | {r['import_s']:.1f} s | {r['import_cpu_s']:.1f} s "
        f"| {r['extra_bytes'] / 1e6:.0f} MB | {r['file_bytes'] / 1e3:.1f} KB | {r['load_s'] * 1e3:.0f} ms |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure the models named, those of ``--quick``, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]} instead of a table')
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    names = options.models or (QUICK if options.quick else MODELS)
    if options.here:
        print(json.dumps(measure(names[0])))
        return
    rows = []
    for name in names:
        print(f"importing {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.import_speed", "--here", name]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    print(json.dumps({"rows": rows}) if options.json else table(rows))


if __name__ == "__main__":
    main()
