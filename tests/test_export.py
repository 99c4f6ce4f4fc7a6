"""Exported plans: files of ordinary PyTorch train as one device does, flags say the layout, other plans are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.report.export import megatron_flags, torch_file, torchtitan_flags
from flexsearch.search.hybrid import search_hybrid
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.native import native_plan
from flexsearch.topology import Topology
from tests import families
from tests.conftest import Cli
from tests.exported import (
    Trained,
    alone,
    build,
    family,
    family_alone,
    family_gradients,
    in_parts,
    layout,
    train,
    train_family,
)
from tests.ranks import pool

LLAMA = ("layers.1.input_norm", "layers.2.input_norm", "layers.3.input_norm")
FULL, ADAM = Options(recompute="full"), Options(optimizer="adam")
CLUSTER = Topology.load("ethernet-1g-4")


@cache
def graph(name: str) -> OperatorGraph:
    model, inputs, targets, loss = build(name)
    return import_model(model, inputs, loss, targets=targets, name=name)


def test_a_file_says_that_pytorch_sums_gradients_by_all_reduces(cli: Cli) -> None:
    of, topology = OperatorGraph.load("alexnet"), Topology.load("p100")
    for way, notable in (("reduce-scatter", True), ("all-reduce", False)):
        plan = baseline("data-parallel", of, topology, Options(synchronise_by=way))  # type: ignore[arg-type]
        plan.save("plan.json")
        said = cli("export", "plan.json", "-o", "apply.py")
        assert said.code == 0 and ("by all-reduces, whatever the plan says" in said.out) == notable
        assert ("instead of 42.2 ms" in said.out.replace("\n", " ")) == notable
        assert ("PyTorch sums the gradients" in Path("apply.py").read_text()) == notable
    sharded = layout(graph("mlp"), 4, states=States.WEIGHTS, options=Options(synchronise_by="bandwidth"))
    assert "whatever" not in torch_file(sharded, graph("mlp"))  # fully_shard has reduce-scatters


def plans() -> dict[str, tuple[str, Strategy, tuple[str, ...]]]:
    """By what they are: the model, the plan, and what its file must contain."""
    sharded = {"states": States.WEIGHTS, "options": FULL.model_copy(update={"reshard_after_forward": True})}
    llama, net = graph("llama"), graph("mlp")
    return {
        "data": ("lenet", layout(graph("lenet"), 4), ("DistributedDataParallel",)),
        "data, microbatches": ("mlp", layout(net, 4, microbatches=2), ("no_sync", "forward_backward")),
        "ZeRO-1": ("mlp", layout(net, 4, states=States.OPTIMIZER), ("ZeroRedundancyOptimizer",)),
        "ZeRO-3, microbatches": (
            "lenet", layout(graph("lenet"), 4, states=States.WEIGHTS, microbatches=2),
            ("fully_shard", "reshard_after_forward=False"),
        ),
        "hybrid sharding, recomputed": (
            "llama", layout(llama, 4, **sharded, over=2), ('["replicate", "shard"]', "2 shards on each 2 ranks"),
        ),
        "hybrid sharding, microbatches": (
            "mlp", layout(net, 4, states=States.WEIGHTS, microbatches=2, over=2), ("set_requires_all_reduce(k == 1)",),
        ),
        "tensor": ("mlp", layout(net, 1, 4), ("RowwiseParallel()", "ColwiseParallel()")),
        "data x tensor, tied weights": (
            "gpt2", layout(graph("gpt2"), 2, 2, microbatches=2),
            ("lm_head.weight = model.wte.weight", "divide_heads", '"shard"', "set_requires_gradient_sync"),
        ),
        "data x tensor, sharded, recomputed": (
            "llama", layout(llama, 2, 2, **sharded), ("checkpoint_wrapper", "reshard_after_forward=True"),
        ),
        "pipeline x data, 1F1B": (
            "llama", layout(llama, 2, 1, LLAMA[1:2], ranks=2, microbatches=4, **sharded), ("Schedule1F1B(",),
        ),
        "pipeline x tensor, interleaved": (
            "llama",
            layout(llama, 1, 2, LLAMA, ranks=2, schedule="interleaved-1f1b", microbatches=4, options=FULL),
            ("ScheduleInterleaved1F1B(", "HELD = ((0, 2), (1, 3))"),
        ),
        "pipeline, zero bubble": (
            "llama", layout(llama, 1, 1, LLAMA, ranks=4, schedule="zero-bubble", microbatches=4),
            ("ScheduleInterleavedZeroBubble(",),
        ),
        "pipeline x data, tied weights": (
            "gpt2", layout(graph("gpt2"), 2, 1, ["blocks.1.ln1"], ranks=2, microbatches=2, states=States.WEIGHTS),
            ("add_tied(parts)",),
        ),
        "pipeline x data, a border inside a block": (
            "gpt2", layout(graph("gpt2"), 2, 1, ["blocks.1.ln2"], ranks=2, microbatches=2),
            ('["blocks.0", "blocks.1.attn"]',),
        ),
        "pipeline x data, modules called by name": (
            "by name", layout(graph("by name"), 2, 1, ["blocks.2.layer"], ranks=2, microbatches=2), ("Schedule1F1B(",),
        ),
        "pipeline x data, modules that return tuples": (
            "tuples", layout(graph("tuples"), 2, 1, ["blocks.1.layer"], ranks=2, microbatches=2), ("HANDED",),
        ),
        "pipeline x data, written over between layers": (
            "written between", layout(graph("written between"), 2, 1, ["blocks.2.layer"], ranks=2, microbatches=2),
            ('WRITABLE = [f"blocks.{i}"',),
        ),
        "pipeline x data, a weight that a module gets": (
            "table", layout(graph("table"), 2, 1, ["blocks.2.layer"], ranks=2, microbatches=2, states=States.WEIGHTS),
            ('OUTSIDE = {"positions.weight": 0}',),
        ),
        "data, a layer that is not called": ("uncalled", layout(graph("uncalled"), 4), ("find_unused_parameters",)),
        "pipeline x data, an activation of several layers": (
            "one activation", layout(graph("one activation"), 2, 1, ["layers.2"], ranks=2, microbatches=2),
            ('SHARED = ["activation"]',),
        ),
        "pipeline x data, a module without operators": (
            "pooled", layout(graph("pooled"), 2, 1, ["1"], ranks=2, microbatches=2), ("Schedule1F1B(",),
        ),
    }  # fmt: skip


def test_exported_files_give_the_losses_and_weights_of_one_device() -> None:
    for what, (name, strategy, needed) in plans().items():
        text = torch_file(strategy, graph(name))
        assert all(part in text for part in needed), (what, text)
        losses, weights = alone(name)
        plan = native_plan(strategy, graph(name))
        answers = pool(4).run(train, name, text)
        told = {d: answers[d][0] for stage in plan.mesh for row in stage for d in row[:1] if answers[d][0]}
        assert len(told) == plan.data, what  # each replica has its own samples
        means = [sum(column) / plan.data for column in zip(*told.values(), strict=True)]
        assert means == pytest.approx(losses, rel=1e-9), what
        _check_weights(answers, weights, what)


@pytest.mark.parametrize("gradients", ["as-is", "float32"])
def test_an_exported_file_in_bf16_trains_near_the_model(gradients: Any) -> None:
    options = Options(precision="bf16", gradients=gradients)
    strategy = layout(graph("llama"), 4, states=States.WEIGHTS, options=options)
    answers = pool(4).run(train, "llama", torch_file(strategy, graph("llama")), torch.float32)
    losses, _ = alone("llama")
    assert sum(answer[0][0] for answer in answers) / 4 == pytest.approx(losses[0], rel=2e-2)
    assert max(error for _, errors in answers for error in errors.values()) < 5e-2


def test_layers_that_keep_keys_for_later_tokens_are_computed_again_once() -> None:
    """Transformers' decoders fill a cache (use_cache) as they run, also when a layer runs a second time."""
    model, batch = families.build("mistral", draws=False, dtype=torch.float64)
    graph = import_model(model, batch, name="mistral")
    file: dict[str, Any] = {}
    exec(torch_file(layout(graph, topology="ethernet-1g:1", options=FULL), graph), file)
    parallel = file["apply_plan"](families.build("mistral", draws=False, dtype=torch.float64)[0])
    for net in (model, parallel):
        net(**batch)["loss"].backward()
    for (name, expected), found in zip(model.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


@cache
def graph_of_family(name: str) -> OperatorGraph:
    return import_model(*family(name), name=name)


def stages_of(name: str, *first: int | str) -> list[str]:
    """The first operators of layers of a Hugging Face model, by number or module."""
    operators = graph_of_family(name).operators
    layers = [rf"(.*\.)?(layers?|h|blocks?)\.{k}" if isinstance(k, int) else re.escape(k) for k in first]
    return [next(op.name for op in operators if re.fullmatch(rf"{layer}(\..*)?", op.module)) for layer in layers]


DATA: dict[str, Any] = {"data": 2, "first": (2,), "ranks": 2, "microbatches": 2}
RANKS: dict[str, Any] = {"data": 1, "first": (1, 2, 3), "ranks": 4, "microbatches": 4}
ROUNDS: dict[str, Any] = {"first": (1, 2, 3), "ranks": 2, "schedule": "interleaved-1f1b", "microbatches": 2}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", {**DATA, "options": FULL, "states": States.WEIGHTS}),
        ("llama", {**RANKS, "schedule": "zero-bubble"}),
        ("llama", {**ROUNDS, "data": 1, "tensor": 2, "microbatches": 4}),
        ("mistral", DATA),  # masks of a window
        ("qwen2", {**RANKS, "schedule": "gpipe", "options": FULL}),
        ("qwen3", {**ROUNDS, "data": 2, "options": FULL}),
        ("gemma3", DATA),  # two masks, two rotary tables, tied weights
        ("gpt2", {**DATA, "states": States.WEIGHTS}),  # tied weights in the first and the last stage, in shards
        ("gpt2", {**RANKS, "schedule": "zero-bubble", "options": FULL}),
        ("opt", {**ROUNDS, "data": 2}),  # positions from the mask
        ("opt", {**DATA, "data": 1, "tensor": 2}),
        ("bert", RANKS),
        ("bert_classifier", {**ROUNDS, "data": 2}),
        ("bert_classifier", {**RANKS, "schedule": "gpipe"}),
        ("vit", {**DATA, "options": FULL}),
        ("vit", {**RANKS, "schedule": "zero-bubble"}),
        ("falcon", {**ROUNDS, "data": 2}),
        ("bloom", RANKS),  # layers return tuples, with the attention's probabilities, which no other reads
        ("bloom", {**DATA, "options": FULL, "states": States.WEIGHTS}),
    ],
)
def test_pipelines_of_hugging_face_models_train_as_the_model_does(name: str, plan: dict[str, Any]) -> None:
    _trains_as_the_model_does(name, plan)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("t5", {**RANKS, "first": ("encoder.block.1", "decoder.block.1", "decoder.block.3")}),  # tables of positions
        ("t5", {**DATA, "first": ("decoder.block.0",)}),  # a list of layers is in one stage, what holds it in both
        ("bart", {**RANKS, "first": ("model.encoder.layers.2", "model.decoder.layers.0", "model.decoder.layers.1")}),
        ("bart", {**DATA, "data": 1, "tensor": 2, "first": ("model.decoder.layers.0",)}),  # three layers have a weight
        ("gpt2", {**ROUNDS, "data": 2, "schedule": "zero-bubble-v"}),  # tied weights in two stages of one rank
        # The same, where nothing but that makes them two.
        ("gpt2", {**ROUNDS, "data": 1, "schedule": "zero-bubble-v", "topology": "ethernet-1g-2"}),
        ("wav2vec2", DATA),  # writes zeros into the output of a layer of an earlier stage
        ("llama", {**DATA, "schedule": "zero-bubble"}),  # gradients of weights are made apart, and replicas add them up
    ],
)
def test_pipelines_of_models_that_need_more_train_as_these_do(name: str, plan: dict[str, Any]) -> None:
    """What only few models or schedules need: no sample leaves these out."""
    _trains_as_the_model_does(name, plan)


def _trains_as_the_model_does(name: str, plan: dict[str, Any]) -> None:
    more = {key: value for key, value in plan.items() if key not in ("data", "tensor", "first")}
    borders = stages_of(name, *plan["first"])
    strategy = layout(graph_of_family(name), plan["data"], plan.get("tensor", 1), borders, **more)
    losses, weights = family_alone(name, [])
    answers = pool(2 if "topology" in plan else 4).run(train_family, name, torch_file(strategy, graph_of_family(name)))
    told = [found for found, _ in answers if found]
    assert len(told) == plan["data"] * plan.get("tensor", 1)  # where the last stage is
    assert [sum(column) / len(told) for column in zip(*told, strict=True)] == pytest.approx(losses, rel=1e-9)
    _check_weights(answers, weights, name)


def _check_weights(answers: list[Trained], weights: Mapping[str, torch.Tensor], what: str) -> None:
    """The ranks have all weights, which may have several names, and have trained them as one device does."""
    assert {id(weights[key]) for _, errors in answers for key in errors} == set(map(id, weights.values())), what
    assert max(error for _, errors in answers for error in errors.values()) < 1e-9, what


ATTENTION = {r".*\.[qkv]_proj": "o", r".*\.(o|out)_proj": "i"}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("opt", {r".*embed_positions": "v"}),  # is called with the mask, and computes positions from it
        ("opt", {r".*embed_positions": "d"}),
        ("bart", {r".*embed_positions": "d", **ATTENTION}),
        ("gemma3", ATTENTION),  # norms between these layers multiply by 1 + weight
        ("wav2vec2", {"projector": "o"}),  # writes zeros into its output
    ],
)
def test_layers_of_transformers_train_in_parts(name: str, split: dict[str, str]) -> None:
    model, batch = families.build(name, draws=False, dtype=torch.float64)
    graph = import_model(model, batch, name=name)
    _same_gradients(name, in_parts(graph, split), graph)


def test_a_model_that_computes_its_loss_runs_in_microbatches() -> None:
    model, batch = families.build("vit", draws=False, dtype=torch.float64)
    graph = import_model(model, batch, name="vit")
    _same_gradients("vit", layout(graph, 2, topology="ethernet-1g:2", microbatches=2), graph)


def _same_gradients(name: str, strategy: Strategy, graph: OperatorGraph) -> None:
    expected = family_gradients(name, "")
    for found in pool(2).run(family_gradients, name, torch_file(strategy, graph)):
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, msg=key)


def test_activations_that_write_over_the_output_of_a_layer_in_parts_make_a_tensor_of_their_own() -> None:
    text = torch_file(layout(graph("overwriting"), 2, 2, states=States.WEIGHTS), graph("overwriting"))
    losses, _ = alone("overwriting")
    answers = pool(4).run(train, "overwriting", text)
    assert [sum(column) / 4 for column in zip(*(a[0] for a in answers), strict=True)] == pytest.approx(losses, rel=1e-9)
    assert max(error for _, errors in answers for error in errors.values()) < 1e-9


def test_a_rank_of_a_pipeline_says_that_a_module_returns_tensors_that_cannot_be_told_apart() -> None:
    plan = layout(graph("alike"), 1, 1, ["blocks.2.layer"], ranks=2, microbatches=2, topology="ethernet-1g-2")
    with pytest.raises(AssertionError, match=r"blocks\.1 returns a tuple with tensors of .*; in a pipeline make it"):
        pool(2).run(train, "alike", torch_file(plan, graph("alike")))


# ---- what cannot be exported


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (lambda: baseline("placement", graph("mlp"), CLUSTER), "'layers.fc1' runs on 1 of the 4 devices"),
        (lambda: baseline("megatron", graph("lenet"), CLUSTER), "is a conv2d split over 'o'"),
        (lambda: baseline("one-weird-trick", graph("lenet"), CLUSTER), "has 1 shares of the samples, 'conv1' has 4"),
        (lambda: layout(graph("llama"), 4, options=Options(recompute="attention")), "recompute: attention"),
        (lambda: layout(graph("llama"), 2, 2, states=States.OPTIMIZER), "states: optimizer"),
        (lambda: layout(graph("llama"), 2, 1, LLAMA, ranks=2, schedule="gpipe"), "the plan has 2"),
        (lambda: _gathered_again(), "schedule: zero-bubble: weights are gathered again for the backward pass"),
        (lambda: layout(graph("mlp"), 4, options=Options(recipes=({"recipe": "gossip"},))), "agree by gossip"),
        (lambda: layout(graph("scaled"), 4, states=States.WEIGHTS), "parameter 'scale' is a scalar"),
        (lambda: layout(graph("mlp"), 4, states=States.OPTIMIZER, over=2), "sharded over 2 of 4 replicas"),
        (lambda: layout(graph("mlp"), 4, states=States.WEIGHTS, over=3), "sharded_over: 3 consecutive devices"),
        (lambda: _mixed(), "'layers.fc2': its weights are kept whole, those of 'layers.fc1' weights"),
    ],
)  # fmt: skip
def test_what_pytorch_cannot_express_is_refused_by_operator_or_option(plan: Callable[[], Strategy], says: str) -> None:
    strategy = plan()
    of = next(graph(name) for name in ("mlp", "lenet", "llama", "gpt2", "scaled") if strategy.graph.name == name)
    with pytest.raises(StrategyError) as error:
        torch_file(strategy, of)
    assert says in error.value.message
    assert error.value.remedy


def _gathered_again() -> Strategy:
    more: dict[str, Any] = {"states": States.WEIGHTS, "options": Options(reshard_after_forward=True)}
    return layout(graph("llama"), 2, 1, LLAMA[1:2], ranks=2, microbatches=2, schedule="zero-bubble", **more)


def _mixed() -> Strategy:
    strategy = layout(graph("mlp"), 4, states=States.WEIGHTS)
    strategy.configs["layers.fc2"] = replace(strategy.configs["layers.fc2"], states=States.WHOLE)
    return strategy


def test_a_module_that_is_no_linear_layer_is_not_split() -> None:
    """The router of a mixture of experts has the weight of a linear layer, and picks experts too."""
    model, batch = families.build("mixtral", draws=False, experts_implementation="eager")
    graph = import_model(model, batch, name="mixtral")
    with pytest.raises(StrategyError, match=r"is a part of 'model.layers.0.mlp.gate', which is no nn.Linear: it comp"):
        torch_file(in_parts(graph, {r".*\.mlp\.gate": "o"}), graph)


class Chosen(nn.Module):
    """As many rows as there are positive numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[(x[:, 0] > 0).nonzero().squeeze(1)]


def test_a_module_whose_shapes_depend_on_values_says_so_in_a_pipeline() -> None:
    file: dict[str, Any] = {}
    plan = layout(graph("by name"), 2, 1, ["blocks.2.layer"], ranks=2, microbatches=2)
    exec(torch_file(plan, graph("by name")), file)
    with pytest.raises(TypeError, match=r"of what layers\.0 computes depend on values; .*set_experts_implementation"):
        file["Returned"]("layers.0", Chosen()).of((torch.randn(4, 2),), {})


def test_a_pipeline_of_layers_that_are_one_module_is_refused() -> None:
    operators = [op for op in graph_of_family("albert").operators if op.module.startswith("albert.encoder.")]
    plan = layout(graph_of_family("albert"), 2, 1, [operators[len(operators) // 2].name], ranks=2, microbatches=2)
    with pytest.raises(StrategyError, match="which is in several stages; each rank of PyTorch's pipeline would train"):
        torch_file(plan, graph_of_family("albert"))


def test_weights_that_a_stage_computes_with_from_the_batch_alone_need_whole_backward_passes() -> None:
    borders = stages_of("bart", "model.encoder.layers.2", "model.encoder.layers.3", "model.decoder.layers.0")
    plan = layout(graph_of_family("bart"), 1, 1, borders, ranks=4, schedule="zero-bubble", microbatches=4)
    with pytest.raises(StrategyError, match=r"zero-bubble: operator .model.decoder.layernorm_embedding. is computed f"):
        torch_file(plan, graph_of_family("bart"))


class Borrowing(nn.Module):
    """Multiplies by the weight of a layer that it does not call, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight)


def test_a_layer_whose_weight_another_module_uses_is_not_split() -> None:
    batch, target = (torch.randn(8, 6),), torch.randint(4, (8,))
    model = nn.Sequential(Borrowing())
    graph = import_model(model, batch, nn.functional.cross_entropy, targets=target, name="borrowing")
    with pytest.raises(StrategyError, match=r"reads '0.inner.weight'"):
        torch_file(in_parts(graph, {"0": "o"}), graph)


def test_a_weight_that_two_modules_read_is_split_in_one_way() -> None:
    strategy = layout(graph("gpt2"), 2, 2)
    strategy.configs["wte"] = make_config(graph("gpt2").operators[graph("gpt2").index["wte"]], {}, range(2))
    with pytest.raises(StrategyError, match=r"'wte' and 'lm_head' read 'wte.weight' split in different ways"):
        native_plan(strategy, graph("gpt2"))


# ---- flags


def test_flags_of_torchtitan_and_megatron_say_the_layout() -> None:
    options = Options(
        optimizer="adam", recompute="full", precision="bf16", gradients="float32", reshard_after_forward=True
    )
    apart, inside = (
        layout(
            graph("llama"), 2, 2, LLAMA, ranks=2, topology="dgx-a100:1", states=States.WEIGHTS, microbatches=2,
            schedule="interleaved-1f1b", options=options, inside=inside,
        )
        for inside in (False, True)
    )  # fmt: skip
    titan, megatron = dict(torchtitan_flags(inside, graph("llama"))), dict(megatron_flags(apart, graph("llama")))
    assert megatron_flags(inside, graph("llama")) == [
        flag for flag in megatron.items() if flag[0] != "--use-tp-pp-dp-mapping"
    ]  # fmt: skip
    with pytest.raises(StrategyError, match="torchtitan numbers ranks by stage, replica and tensor part"):
        torchtitan_flags(apart, graph("llama"))
    assert titan["--parallelism.data_parallel_shard_degree"] == titan["--parallelism.tensor_parallel_degree"] == "2"
    assert titan["--parallelism.data_parallel_replicate_degree"] == "1"
    assert titan["--parallelism.fsdp_reshard_after_forward"] == "always"
    assert titan["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert titan["--parallelism.pipeline_parallel_layers_per_stage"] == "1"
    assert titan["--parallelism.pipeline_parallel_microbatch_size"] == "2"  # 8 samples, 2 replicas, 2 microbatches
    assert (titan["--training.local_batch_size"], titan["--training.seq_len"]) == ("4", "6")
    assert titan["--activation_checkpoint.mode"] == "full"
    assert megatron["--tensor-model-parallel-size"] == megatron["--pipeline-model-parallel-size"] == "2"
    assert megatron["--num-layers-per-virtual-pipeline-stage"] == "1"
    assert (megatron["--micro-batch-size"], megatron["--global-batch-size"]) == ("2", "8")
    assert megatron["--recompute-granularity"] == "full" and "--bf16" in megatron
    assert megatron["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert "--use-tp-pp-dp-mapping" in megatron  # the ranks of a pipeline are next to each other
    assert titan["--training.mixed_precision_reduce"] == "float32"


@pytest.mark.parametrize("states", [States.OPTIMIZER, States.WEIGHTS])
def test_flags_say_that_some_replicas_divide_states(states: States) -> None:
    """Four replicas of two devices, of which those on four devices next to each other divide states: two by two."""
    options = ADAM.model_copy(update={"reshard_after_forward": True})
    plan = layout(graph("llama"), 4, 2, topology="dgx-a100:1", states=states, over=4, options=options)
    megatron = dict(megatron_flags(plan, graph("llama")))
    assert megatron["--num-distributed-optimizer-instances"] == "2"
    assert megatron.get("--outer-dp-sharding-strategy") == ("no_shard" if states == States.WEIGHTS else None)
    if states == States.WEIGHTS:
        titan = dict(torchtitan_flags(plan, graph("llama")))
        assert titan["--parallelism.data_parallel_replicate_degree"] == "2"
        assert titan["--parallelism.data_parallel_shard_degree"] == "2"
        text = torch_file(plan, graph("llama"))
        assert 'mesh_dim_names=("replicate", "shard", "tensor")' in text and "(2, 2, 2)" in text
    whole = dict(megatron_flags(layout(graph("llama"), 4, states=states, options=options), graph("llama")))
    assert "--num-distributed-optimizer-instances" not in whole


@pytest.mark.parametrize(("precision", "gradients", "flag"), [
    ("bf16", "float32", "accumulate-allreduce-grads-in-fp32"), ("bf16", "as-is", "grad-reduce-in-bf16"),
    ("fp16", "float32", "accumulate-allreduce-grads-in-fp32"), ("fp16", "as-is", None), ("as-is", "as-is", None),
])  # fmt: skip
def test_the_type_of_gradients_is_that_of_the_plan(precision: Any, gradients: Any, flag: str | None) -> None:
    options = Options(optimizer="adam", precision=precision, gradients=gradients)
    plan = layout(graph("llama"), 4, states=States.OPTIMIZER, options=options)
    megatron = {name.removeprefix("--") for name, _ in megatron_flags(plan, graph("llama"))}
    assert megatron & {"accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"} == ({flag} if flag else set())
    if precision != "as-is":
        text = torch_file(layout(graph("llama"), 4, states=States.WEIGHTS, options=options), graph("llama"))
        own = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
        reduced = "torch.float32" if gradients == "float32" else own
        assert f"MixedPrecisionPolicy(param_dtype={own}, reduce_dtype={reduced})" in text


def test_gradients_in_bfloat16_are_refused_where_torchtitan_has_none() -> None:
    plan = layout(graph("llama"), 4, states=States.WEIGHTS, options=ADAM.model_copy(update={"precision": "bf16"}))
    with pytest.raises(StrategyError, match="gradients: torchtitan adds up") as error:
        torchtitan_flags(plan, graph("llama"))
    assert "gradients float32" in error.value.remedy


def test_schedules_that_megatron_has_not_are_refused() -> None:
    plan = layout(graph("llama"), 1, 1, LLAMA, ranks=4, schedule="zero-bubble", microbatches=4, options=ADAM)
    with pytest.raises(StrategyError, match="schedule: zero-bubble"):
        megatron_flags(plan, graph("llama"))
    assert dict(torchtitan_flags(plan, graph("llama")))["--parallelism.pipeline_parallel_schedule"] == (
        "InterleavedZeroBubble"
    )


def test_replicas_of_what_is_split_are_refused_where_torchtitan_has_none() -> None:
    """Its DDP raises an error beside tensor parallelism or a pipeline."""
    pipeline = layout(graph("llama"), 2, 1, LLAMA[1:2], ranks=2, microbatches=2, options=ADAM, inside=True)
    for plan in (layout(graph("llama"), 2, 2, options=ADAM), pipeline):
        with pytest.raises(StrategyError, match=r"replicates weights \(DDP\) beside no other.* Use states weights"):
            torchtitan_flags(plan, graph("llama"))
    alone = dict(torchtitan_flags(layout(graph("llama"), 2, 1, options=ADAM, topology="ethernet-1g-2"), graph("llama")))
    assert alone["--parallelism.data_parallel_replicate_degree"] == "2"


def test_stages_without_layers_and_several_rows_of_layers_are_refused() -> None:
    """Megatron-LM wants more than no layer in each stage, and has one stack of them."""
    plan = layout(graph("llama"), 1, 1, ("norm",), ranks=2, topology="ethernet-1g-2", microbatches=2, options=ADAM)
    rows = graph_of_family("t5")
    two = layout(rows, 1, 1, ("decoder.embed_tokens",), ranks=2, topology="ethernet-1g-2", microbatches=2, options=ADAM)
    for flags in (torchtitan_flags, megatron_flags):
        with pytest.raises(StrategyError, match=r"stages: they have \[4, 0\] layers, and each needs one"):
            flags(plan, graph("llama"))
        with pytest.raises(StrategyError, match=r"several stacks of layers \(decoder.block, encoder.block\)"):
            flags(two, rows)


# ---- native searches


def test_a_native_search_over_layouts_answers_with_a_plan_that_is_exported() -> None:
    result = search_hybrid(graph("llama"), CLUSTER, ADAM, budget_s=1.0, native=True)
    text = torch_file(result.strategy, graph("llama"))
    assert "def apply_plan(" in text
    for candidate, _ in result.baselines.values():
        configs = dict(zip(graph("llama").index, candidate.configs, strict=True))
        assert configs["loss.cross_entropy"].parts <= 1 or candidate.layout.tensor == 1  # each rank has whole logits


def test_on_devices_that_are_linked_directly_pipelines_of_hugging_face_models_are_found(cli: Cli) -> None:
    """There replicas are planned in one stage alone, so pipelines are all that layouts have to offer."""
    graph_of_family("llama").save("llama.json")
    ran = cli("optimize", "llama.json", "-t", "p100:1", "--space", "native-layouts", "-b", "4s")
    assert ran.code == 0, ran.err
    assert cli("export", "strategy.json", "--graph", "llama.json", "-o", "apply_plan.py").code == 0
    assert "PipelineStage" in Path("apply_plan.py").read_text()


def test_where_no_native_layout_can_be_planned_the_answer_says_why_and_names_the_search_that_finds_a_plan(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*plan: object) -> None:
        raise StrategyError("stages: module 'model.layers.0' hands on two tensors")

    monkeypatch.setattr("flexsearch.search.hybrid.trials.as_native", refuse)
    graph_of_family("llama").save("llama.json")
    ran = cli("optimize", "llama.json", "-t", "p100:1", "--space", "native-layouts", "-b", "1s")
    said = " ".join(ran.err.split())
    assert ran.code == 2 and "Search with --space native," in said
    assert "; a pipeline: stages: module 'model.layers.0' hands on two tensors" in said, said
    assert "; replicas: " in said, said
    assert cli("optimize", "llama.json", "-t", "p100:1", "--space", "native", "-b", "40").code == 0
    assert cli("export", "strategy.json", "--graph", "llama.json", "-o", "apply_plan.py").code == 0


def test_a_native_search_finds_a_plan_that_is_exported(cli: Cli) -> None:
    answer = cli("optimize", "mlp", "-t", "ethernet-1g-4", "--space", "native", "-b", 60, "--json").json
    assert answer["free_s"] <= answer["iteration_s"]
    assert answer["iteration_s"] <= min(p["iteration_s"] for p in answer["plans"] if p["name"] in ("fsdp", "megatron"))
    ran = cli("export", "strategy.json", "-o", "apply_plan.py")
    assert ran.code == 0 and "Wrote apply_plan.py." in ran.out
    text = Path("apply_plan.py").read_text()
    compile(text, "apply_plan.py", "exec")
    assert torch_file(Strategy.load("strategy.json"), OperatorGraph.load("mlp")) == text
    said = cli("optimize", "mlp", "-t", "ethernet-1g-4", "--space", "native", "-b", 60).out
    assert "Native " in said and ", free " in said and "flexsearch export strategy.json" in said


def test_export_says_what_a_plan_needs_and_writes_nothing(cli: Cli) -> None:
    baseline("one-weird-trick", OperatorGraph.load("alexnet"), CLUSTER).save("plan.json")
    ran = cli("export", "plan.json", "-o", "apply_plan.py")
    assert ran.code == 2 and not Path("apply_plan.py").exists()
    assert "'classifier.fc6'" in ran.err and "--space native" in " ".join(ran.err.split())
