"""What does the search over data x tensor x pipeline layouts find for large language models, and how good is it?

    python -m benchmarks.llm_plans [--quick] [--json] [--only gpt|llama] [--seconds 60]

Nothing is trained: all times but ``paper_tflops`` are simulated, with data-sheet figures of the hardware. Two tables:

**gpt**: the models of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), table 1: fp16, full recomputation, servers of 8 A100. The layout of the paper, simulated, beside
what it measured; then the plan that the search finds, which may also choose not to compute again.

- ``paper_layout``, ``paper_step_s``: the paper's layout (tensor, pipeline, data, samples of a microbatch, stages of a
  rank where there are several) and its simulated step;
- ``paper_layout_tflops``, ``paper_tflops``: TFLOP/s of each GPU with it, simulated and as published, by the paper's
  formula 96 B s l h^2 (1 + s / 6h + V / 16lh), which counts the recomputed forward pass;
- ``paper_fits``: whether it fits into 80 GB, by the simulator's account;
- ``plan``, ``step_s``: what the search finds, and its simulated step;
- ``ratio_vs_paper_layout``: paper_step_s over step_s; below 1, the search missed a plan that people wrote by hand;
- ``plans``, ``search_s``: plans simulated by the search, and its time.

Above 512 GPUs only the paper's layout is simulated.

**llama**: Llama 2 and 3 on servers of A100 and H100, bf16 with Adam; ``tokens`` of a step.

- ``step_s``, ``mfu``: simulated step, and model FLOPs utilisation;
- ``gain_vs_baseline``: step of the best layout of the families that people write by hand, over ours; 1 where the
  plan is one of them;
- ``baseline``: that family; none if the search met no plan of one that fits;
- ``expert_step_s``, ``expert_fits``, ``ratio_vs_expert``: a layout that an expert would take (7B, 8B: sharded
  weights; 70B: tensor 4 x pipeline 8, 1F1B; 405B: tensor 8 x pipeline 16, 1F1B; microbatches of one sample), its step
  over ours; below 1, the search missed it;
- ``fits``: whether the plan fits into memory; ``considered``: plans estimated; ``plans``, ``search_s``: as above;
  ``stopped``: why the search ended.

The search draws nothing at random: where the budget does not end it, it finds the same each time.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from benchmarks.decoders import Model, graph_of
from benchmarks.harness import Row, parser, report, say
from flexsearch.graph import OperatorGraph
from flexsearch.graph.deepen import deepened
from flexsearch.graph.importer import import_model
from flexsearch.graph.shipped import FEW
from flexsearch.report.layouts import StagedRow, layout_words
from flexsearch.search.hybrid import HybridResult, Layout, search_hybrid, simulate_layout
from flexsearch.simulate.staged import Step
from flexsearch.strategy import Options, States
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from flexsearch.zoo.large import llama7b

SEQ, VOCAB = 2048, 51200
MOST_GPUS: Final = 512
SECONDS, QUICK_SECONDS = 120.0, 30.0


class Published(NamedTuple):
    """A row of the paper's table 1. ``parameters``: billions, as printed; ``tflops``: measured, of each GPU.
    ``microbatch`` (samples) and ``chunks`` (stages of a rank) are those of ``examples/sc21/run_table_1.sh`` in
    NVIDIA/Megatron-LM."""

    parameters: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: int
    microbatch: int
    chunks: int = 1


TABLE_1: Final = (
    Published(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16),
    Published(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    Published(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    Published(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    Published(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    Published(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    Published(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    Published(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    Published(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    Published(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)
FSDP, PIPELINE, DEEP = (1, 1, True), (4, 8, False), (8, 16, False)
"""Layouts of an expert: tensor, pipeline, whether weights are sharded; microbatches of one sample, nothing computed
again."""
EXPERT: Final = {
    "llama_7b": FSDP, "llama_70b": PIPELINE, "llama3_8b": FSDP, "llama3_70b": PIPELINE, "llama_405b": DEEP
}  # fmt: skip
LLAMA3: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "llama3_8b": (32, {"hidden": 4096, "heads": 32, "ffn": 14336}),
    "llama3_70b": (80, {"hidden": 8192, "heads": 64, "ffn": 28672}),
}
"""Layers and sizes of models that are not shipped (Grattafiori et al., 2024, table 3)."""
LLAMA: Final = (
    ("llama_7b", "dgx-a100:2", "1M"), ("llama_7b", "hgx-h100:1", "1M"), ("llama_70b", "dgx-a100:8", "1M"),
    ("llama3_8b", "hgx-h100:1", "1M"), ("llama3_8b", "hgx-h100:8", "1M"), ("llama3_70b", "hgx-h100:8", "1M"),
    ("llama3_70b", "hgx-h100:32", "4M"), ("llama_405b", "hgx-h100:64", "4M"),
)  # fmt: skip
QUICK_LLAMA: Final = (("llama_7b", "dgx-a100:2", "1M"), ("llama3_70b", "hgx-h100:8", "1M"))


def gpt(row: Published) -> OperatorGraph:
    """The training step of a model of the table, float32 until a plan says otherwise, with attention as Megatron-LM had
    it then: scores, softmax, dropout and the product are kernels of their own."""
    model = Model(row.hidden, row.heads, row.layers, VOCAB, SEQ, fused=False, bias=True)
    return graph_of(model).resized(row.batch)


def layout_of(row: Published) -> Layout:
    """The paper's layout."""
    data = row.gpus // (row.tensor * row.pipeline)
    schedule: ScheduleKind = "interleaved-1f1b" if row.chunks > 1 else "1f1b"
    return Layout(data, row.tensor, row.pipeline, row.batch // data // row.microbatch, schedule, row.chunks)


def tflops(row: Published, step_s: float) -> float:
    """TFLOP/s of each GPU by the paper's formula (section 5.1)."""
    h, layers = row.hidden, row.layers
    flops = 96 * row.batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
    return flops / step_s / row.gpus / 1e12


def words(result: HybridResult) -> str:
    """The layout of the best plan."""
    best = result.best
    row = StagedRow("", best.pipeline, best.options, result.step, best.layout.sharding)
    return layout_words(row).replace(" with float32 masters", "")


def measure_gpt(row: Published, seconds: float) -> Row:
    """One row of the first table."""
    graph, topology = gpt(row), Topology.load(f"dgx-a100:{row.gpus // 8}")
    options = Options(optimizer="adam", precision="fp16")
    _, paper = simulate_layout(graph, topology, layout_of(row), options.model_copy(update={"recompute": "full"}))
    layout = f"t{row.tensor} p{row.pipeline} d{row.gpus // row.tensor // row.pipeline} b{row.microbatch}"
    found: Row = {}
    if row.gpus <= MOST_GPUS:
        result = search_hybrid(graph, topology, options, budget_s=seconds)
        found = {
            "plan": words(result), "fits": result.best.feasible, "step_s": result.step.makespan_s,
            "ratio_vs_paper_layout": paper.makespan_s / result.step.makespan_s, "plans": result.plans,
            "search_s": result.elapsed_s,
        }  # fmt: skip
    return {
        "parameters_b": row.parameters, "gpus": row.gpus, "batch": row.batch,
        "paper_layout": layout + (f" v{row.chunks}" if row.chunks > 1 else ""), "paper_step_s": paper.makespan_s,
        "paper_layout_tflops": tflops(row, paper.makespan_s), "paper_tflops": row.tflops,
        "paper_fits": not paper.missing, **found,
    }  # fmt: skip


def expert(name: str, graph: OperatorGraph, topology: Topology, options: Options) -> Step:
    """The layout that an expert would take, simulated."""
    tensor, pipeline, sharded = EXPERT[name]
    data = len(topology.devices) // (tensor * pipeline)
    states = States.WEIGHTS if sharded else States.WHOLE
    return simulate_layout(
        graph, topology, Layout(data, tensor, pipeline, graph.batch // data, states=states), options
    )[1]  # fmt: skip


def llama(name: str) -> OperatorGraph:
    """A shipped graph, or one of ``LLAMA3``."""
    if name not in LLAMA3:
        return OperatorGraph.load(name)
    layers, sizes = LLAMA3[name]
    built = llama7b(4, 8192, FEW, kv_heads=8, vocab=128256, theta=500000.0, **sizes)
    graph = import_model(built.model, built.inputs, built.loss, targets=built.targets, name=name)
    return deepened(graph, layers)


def measure_llama(name: str, cluster: str, tokens: str, seconds: float) -> Row:
    """One row of the second table."""
    graph, topology = llama(name).resized(f"{tokens}-tokens"), Topology.load(cluster)
    options = Options(optimizer="adam", precision="bf16")
    hand = expert(name, graph, topology, options)
    start = time.perf_counter()
    result = search_hybrid(graph, topology, options, budget_s=seconds)
    taken = time.perf_counter() - start
    fitting = {name: step.makespan_s for name, (_, step) in result.baselines.items() if not step.missing}
    best = min(fitting, key=fitting.__getitem__, default=None)
    return {
        "graph": name, "cluster": cluster, "tokens": tokens, "plan": words(result), "fits": result.best.feasible,
        "step_s": result.step.makespan_s, "mfu": result.step.utilisation, "baseline": best,
        "gain_vs_baseline": fitting[best] / result.step.makespan_s if best else None, "expert_step_s": hand.makespan_s,
        "expert_fits": not hand.missing, "ratio_vs_expert": hand.makespan_s / result.step.makespan_s,
        "considered": result.considered, "plans": result.plans, "search_s": taken, "stopped": result.stopped,
    }  # fmt: skip


def warm_up() -> None:
    """Have everything compiled before a search is timed."""
    search_hybrid(OperatorGraph.load("gpt2"), Topology.load("dgx-a100:1"), Options(precision="bf16"), budget_s=1.0)


def main() -> None:
    """Print the tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=("gpt", "llama"), help="one of the tables")
    arguments.add_argument("--seconds", type=float, help="of each search")
    options = arguments.parse_args()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    say("compiling")
    warm_up()
    tables: dict[str, list[dict[str, Any]]] = {"gpt": [], "llama": []}
    if options.only != "llama":
        for row in TABLE_1[:3] if options.quick else TABLE_1:
            say(f"GPT with {row.parameters:g} B parameters on {row.gpus} GPUs")
            tables["gpt"].append({"table": "gpt", **measure_gpt(row, seconds)})
    if options.only != "gpt":
        for name, cluster, tokens in QUICK_LLAMA if options.quick else LLAMA:
            say(f"{name} on {cluster}")
            tables["llama"].append({"table": "llama", **measure_llama(name, cluster, tokens, seconds)})
    if options.json:
        report([row for rows in tables.values() for row in rows], "", True)
        return
    titles = {
        "gpt": "Megatron-LM's table 1 (SC 2021): the paper's layouts and the search's, simulated",
        "llama": "Llama 2 and 3, bf16, Adam",
    }
    for name, rows in tables.items():
        if rows:
            report([{key: value for key, value in row.items() if key != "table"} for row in rows], titles[name], False)


if __name__ == "__main__":
    main()
