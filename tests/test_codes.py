"""Which code figures describe: what another one makes of them, and products in TF32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexsearch.cost import Costs
from flexsearch.cost.updates import CAST_STREAMS
from flexsearch.errors import TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.precision import with_precision
from flexsearch.runtime.modes import tell_rounding
from flexsearch.setting import Setting
from flexsearch.strategy import Options
from flexsearch.topology import Topology, presets
from flexsearch.topology.changes import with_code, with_tf32
from flexsearch.topology.codes import code_change
from tests.conftest import Cli


def one(name: str = "dgx-a100:1") -> Topology:
    return Topology.load(name).subset([0])


def step_s(topology: Topology, graph: str = "gpt2", options: Options | None = None) -> float:
    setting = Setting.of(OperatorGraph.load(graph), topology)
    return setting.row("", setting.baseline("single", options)).simulation.makespan_s


def test_every_preset_says_which_code_it_describes() -> None:
    for name in presets():
        topology = Topology.load(name)
        assert topology.code is not None and len(topology.code.describes) > 20
        gpu = topology.devices[0].kind == "cuda"
        assert (topology.code.standard_error > 0.0) == gpu and (topology.code.kind == "fused") == gpu
    assert "llm-foundry" in Topology.load("dgx-a100").code.describes  # type: ignore[union-attr]


def test_what_is_said_of_code_is_no_part_of_a_cluster() -> None:
    """Nor is a rate that nothing uses: plans of earlier versions stay those of the same cluster."""
    topology = Topology.load("dgx-a100:1")
    flops = {name: rate for name, rate in topology.devices[0].flops.items() if name != "tf32"}
    devices = tuple(device.model_copy(update={"flops": flops}) for device in topology.devices)
    bare = topology.model_copy(update={"code": None, "devices": devices})
    assert bare.content_hash() == topology.content_hash() == "0278b7edd13d3843"
    changed = [with_code(topology, "eager"), with_code(topology, "captured"), with_tf32(topology)]
    assert len({other.content_hash() for other in (topology, *changed)}) == 4
    saved = with_tf32(with_code(topology, "eager"))
    saved.save(path := Path("eager.json").resolve())
    try:
        assert Topology.load(path).model_dump() == saved.model_dump()
    finally:
        path.unlink()


def test_chains_of_kernels_move_more_and_start_more_often() -> None:
    graph, change = OperatorGraph.load("gpt2"), code_change("eager")
    fused, eager = one(), with_code(one(), "eager")
    costs = [Costs(graph, topology) for topology in (fused, eager)]
    for name, kind in (("blocks.0.norm1", "layer_norm"), ("blocks.0.attention.qkv", "linear")):
        op = graph.index.get(name) or next(i for i, op in enumerate(graph.operators) if op.kind == kind)
        extents = graph.operators[op].sizes
        nbytes = costs[0]._costed[op].forward(extents).nbytes
        before, after = (c._models[0].seconds(c._costed[op], extents)[0] for c in costs)
        kernels, passes = change.kernels.get(kind, 1), change.passes_full.get(kind, 1.0)
        reached = fused.devices[0].efficiency_for("float32")
        more = (passes - 1.0) * nbytes / (fused.devices[0].memory_bandwidth * reached.memory)
        assert after - before == pytest.approx(more + (kernels - 1) * reached.overhead_s, rel=1e-3, abs=1e-11)
    assert costs[1].update_rates(0, "adam")[0] == pytest.approx(
        change.passes_full["adam"] * costs[0].update_rates(0, "adam")[0]
    )
    half = Options(precision="bf16")
    assert step_s(eager, options=half) > 1.1 * step_s(fused, options=half)


def test_another_code_needs_figures_of_fused_kernels() -> None:
    eager = with_code(one(), "eager")
    assert (
        with_code(eager, "eager") is eager
        and eager.code is not None
        and eager.code.standard_error == code_change("eager").error
    )
    for topology, kind, said in (
        (eager, "fused", "has the figures of eager code"),
        (one().model_copy(update={"code": None}), "eager", "does not say"),
        (Topology.load("ethernet-1g:2"), "fused", "has the figures of eager code"),
        (Topology.load("ethernet-1g:2"), "captured", "captured steps change nothing"),
    ):  # fmt: skip
        with pytest.raises(TopologyError, match=said):
            with_code(topology, kind)  # type: ignore[arg-type]


def test_compiled_code_pads_products_and_captured_code_launches_nothing() -> None:
    half, fused = Options(precision="bf16", optimizer="adam"), one("hgx-h100:1")
    eager, compiled, captured = (with_code(fused, kind) for kind in ("eager", "compiled", "captured"))  # type: ignore[arg-type]
    assert captured.devices[0].overhead_s == 0.0 < compiled.devices[0].overhead_s < eager.devices[0].overhead_s
    assert captured.code is not None and captured.code.kind == "captured"
    for topology in (compiled, captured):
        assert topology.devices[0].efficiency_for("bfloat16").unaligned == (1.0, 1.0, 1.0)
    steps = [step_s(topology, options=half) for topology in (eager, compiled, captured)]
    assert steps[0] > steps[1] >= steps[2]
    graph = OperatorGraph.load("gpt2")
    places = [k for k, op in enumerate(graph.operators) if op.kind == "linear"]
    costs = [Costs(with_precision(graph, "bf16"), topology) for topology in (eager, compiled)]
    block, vocabulary = (
        [c._models[0].seconds(c._costed[k], graph.operators[k].sizes)[0] for c in costs]
        for k in (places[0], places[-1])
    )
    assert block[0] == block[1] and vocabulary[0] > 2.0 * vocabulary[1]


def test_weights_that_are_cast_are_launched_and_moved_apart() -> None:
    graph, fused = OperatorGraph.load("gpt2"), one()
    plain, casting = Costs(graph, fused), Costs(graph, with_code(fused, "eager"))
    assert plain.update_launches("sgd", "bf16") == plain.update_launches("sgd", "as-is") == 1.0
    assert (casting.update_launches("sgd", "as-is"), casting.update_launches("sgd", "bf16")) == (1.0, 3.0)
    device = fused.devices[0]
    moved = CAST_STREAMS / (device.memory_bandwidth * device.efficiency_for("float32").memory)
    full, half = casting.update_rates(0, "sgd", "as-is")[0], casting.update_rates(0, "sgd", "bf16")[0]
    assert half == pytest.approx(2 * (full + moved))


def test_products_in_tf32_take_less_and_nothing_else_does() -> None:
    full, rounded = one(), with_tf32(one())
    device, graph = rounded.devices[0], OperatorGraph.load("gpt2")
    assert device.flops_for("float32") == 19.5e12 and device.product_flops_for("float32") == 156e12
    costs = [Costs(graph, topology) for topology in (full, rounded)]
    kinds = {}
    for i, op in enumerate(graph.operators):
        before, after = (c._models[0].seconds(c._costed[i], op.sizes)[0] for c in costs)
        kinds.setdefault(op.kind, []).append(after / before)
    *blocks, vocabulary = kinds.pop("linear")
    assert max(blocks) < 0.25 and vocabulary < 0.6  # 50,257 columns are odd
    assert all(ratio == 1.0 for ratios in kinds.values() for ratio in ratios)
    half = Options(precision="bf16")
    assert step_s(rounded) < 0.5 * step_s(full) and step_s(rounded, options=half) == step_s(full, options=half)
    assert step_s(with_tf32(one()), "alexnet") > 0.5 * step_s(full, "alexnet")  # convolutions are in TF32 anyway
    with pytest.raises(TopologyError, match="no TF32 rate"):
        with_tf32(Topology.load("p100"))


def test_a_rank_whose_products_are_not_rounded_as_planned_says_so() -> None:
    planned, gpu = with_tf32(one()).devices[0], torch.device("cuda")
    with pytest.warns(UserWarning, match="allow_tf32 = True"):
        tell_rounding(planned, gpu)
    tell_rounding(planned, torch.device("cpu"))
    tell_rounding(one().devices[0], gpu)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        tell_rounding(planned, gpu)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_commands_take_the_code_and_tf32(cli: Cli) -> None:
    plans = {}
    for name, arguments in (("as-is", ()), ("eager", ("--code", "eager")), ("tf32", ("--precision", "tf32"))):
        file = f"{name}.json"
        ran = cli("compare", "mlp", "-t", "dgx-a100:1", "--save", "single", "-o", file, "--json", *arguments)
        assert ran.code == 0, ran.err
        plans[name] = cli("explain", file, "--tries", "0", "--json").json
    assert plans["eager"]["iteration_s"] > plans["as-is"]["iteration_s"] >= plans["tf32"]["iteration_s"]
    told = cli("clusters", "dgx-a100").out
    assert (
        "Code: fused: llm-foundry of 2023" in told
        and cli("clusters", "dgx-a100", "--json").json["code"]["error"] == 0.053
    )
    codes = [row for row in plans["eager"]["rests_on"] if "code" in row["source"]]
    assert [row["source"] for row in codes] == ["eager code of others"]
    for arguments, said in (
        (("compare", "mlp", "-t", "p100", "--precision", "tf32"), "no TF32 rate"),
        (("compare", "mlp", "-t", "dgx-a100:1", "--precision", "tf32", "-p", "none.json"), "no times in TF32"),
        (("simulate", "-s", "eager.json", "--code", "fused"), "brings the cluster"),
        (("compare", "-s", "eager.json", "--precision", "tf32"), "brings the cluster"),
        (("what-if", "eager.json", "--code", "eager"), "are of eager code already"),
        (("what-if", "eager.json", "--code", "fused"), "has the figures of eager code"),
        (("optimize", "mlp", "-t", "ethernet-1g:2", "--code", "fused"), "has the figures of eager code"),
    ):
        ran = cli(*arguments)
        assert ran.code == 2 and said in " ".join(ran.err.split()), (arguments, ran.err)
