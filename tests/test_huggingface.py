"""Models of Hugging Face's transformers, tiny and in training mode, with the batch that a collator gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.errors import ImportModelError
from flexsearch.graph.importer import Imported, import_model, import_with_constants
from flexsearch.graph.ops.base import TRACES
from flexsearch.runtime.parallel import distribute
from flexsearch.search import search
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.model import StrategyFile
from flexsearch.topology import Topology
from tests.ranks import pool

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:use_cache")

Batch = dict[str, Tensor]
BATCH, LENGTH, VOCABULARY = 4, 8, 50
WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _masked(**more: Tensor) -> Batch:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": _tokens(), "attention_mask": mask, **more}


def _causal() -> Batch:
    batch = _masked()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _classes() -> Batch:
    return _masked(labels=torch.randint(2, (BATCH,)))


def _translated() -> Batch:
    return _masked(labels=_tokens(6))


def _images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(3, (BATCH,))}


Family = tuple[str, str, dict[str, Any], Callable[[], Batch]]
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER: dict[str, Any] = {**TEXT, **WIDTH, "max_position_embeddings": 32}
_GROUPED: dict[str, Any] = {**_DECODER, "num_attention_heads": 4, "num_key_value_heads": 2}
_PATCHES: dict[str, Any] = {**WIDTH, **_NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3}

FAMILIES: dict[str, Family] = {
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {**TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0}, _causal,
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED, _causal),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}, _causal),
    "bert": (
        "BertConfig", "BertForSequenceClassification", {**_DECODER, **_NO_DROPOUT}, _classes,
    ),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {**TEXT, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
         "dropout_rate": 0.0}, _translated,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", _PATCHES, _images),
}  # fmt: skip
"""Architecture: names of its configuration and model, the configuration, the batch. Dropout is off where plans are
compared with plain PyTorch, which draws other masks."""

EXACT = ("bert", "t5", "vit")
"""The others compute their rotary tables, norms or losses in float32, whatever the type of their weights."""


def _made(name: str, **more: Any) -> tuple[nn.Module, Batch]:
    """A model in float64, always the same, and its batch."""
    configuration, model, options, batch = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**{**options, **more})
    given = batch()
    return getattr(transformers, model)(config).double().train(), {
        key: x.double() if x.is_floating_point() else x for key, x in given.items()
    }


@cache
def _imported(name: str) -> Imported:
    return import_with_constants(*_made(name))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _stepped(name: str, file: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps on this rank under a strategy, and the state after them."""
    model, batch = _made(name)
    parallel = distribute(model, _imported(name), Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    low, high = parallel.sample_range
    losses = [float(parallel.step({key: batch[key][low:high] for key in reversed(batch)})) for _ in range(2)]
    return losses, parallel.state_dict()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_as_it_comes_is_imported_searched_and_run(name: str) -> None:
    imported, topology, digits = _imported(name), Topology.load("ethernet-1g:2"), 1e-9 if name in EXACT else 1e-4
    graph = imported.graph
    assert not [op.name for op in graph.operators if op.kind == "opaque"]
    assert {tensor.name for tensor in graph.of_kind("input")} == set(imported.input_names)
    model, batch = _made(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer, losses = _sgd(list(model.parameters())), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    result = search(graph, topology, Costs(graph, topology), proposals=200, seed=0, processes=1)
    plans = {name: baseline(name, graph, topology) for name in ("data-parallel", "megatron", "fsdp")}
    best = min(o.time_s for o in result.baselines.values() if o.feasible)
    assert result.simulation.makespan_s <= best
    for plan, strategy in {**plans, "found": result.strategy}.items():
        for found, held in pool(2).run(_stepped, name, strategy.to_file().model_dump_json(), timeout_s=120):
            assert found == pytest.approx(losses, rel=digits), plan
            assert list(held) == list(state)
            for key in state:
                change, other = state[key] - before[key], held[key] - before[key]
                slack = digits * max(change.abs().max().item(), 1e-3)
                assert (change - other).abs().max().item() <= slack, f"{plan}: {key}"


def test_the_products_of_a_step_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from flexsearch.graph.ops import KINDS, forward_flops

    model, batch = _made("bert", attn_implementation="eager")
    graph = import_model(model, batch)
    products = sum(
        forward_flops(op, op.sizes) for op in graph.operators if KINDS[op.kind].contraction or op.kind == "attention"
    )
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    assert products == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_a_boolean_mask_takes_no_time_worth_speaking_of() -> None:
    model, batch = _made("bert", max_position_embeddings=512, hidden_size=64)
    batch = {key: x.repeat(1, 32) if x.dim() == 2 else x for key, x in batch.items()}
    graph, topology = import_model(model, batch), Topology.load("ethernet-1g:2")
    costs = Costs(graph, topology)
    seconds = {op.name: 0.0 for op in graph.operators}
    for i, op in enumerate(graph.operators):
        forward, backward = costs.compute_many(i, {a: torch.tensor([n]).numpy() for a, n in op.sizes.items()}, 0)
        seconds[op.name] = float(forward[0] + backward[0])
    masks = [op.name for op in graph.operators if graph.tensor[op.outputs[0]].dtype == "bool"]
    assert masks and max(seconds[name] for name in masks) < 0.02 * sum(seconds.values())


def test_the_cache_is_turned_off_with_a_warning_and_back_on() -> None:
    model, batch = _made("gpt2")
    assert model.config.use_cache is True
    with pytest.warns(UserWarning, match="use_cache is turned off"):
        import_model(model, batch)
    assert model.config.use_cache is True
    model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_model(model, batch)


def test_a_batch_without_labels_is_told_what_it_lacks() -> None:
    model, batch = _made("bert")
    del batch["labels"]
    with pytest.raises(ImportModelError, match=r"returns logits and no loss\. Put the labels into the batch"):
        import_model(model, batch)


def test_errors_inside_a_library_say_what_its_user_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random operator without a handler, in DINOv2's drop path; and a batch of the wrong kind."""
    monkeypatch.delitem(TRACES, "aten.rand")
    config = transformers.Dinov2Config(**_PATCHES, drop_path_rate=0.5)
    model = transformers.Dinov2ForImageClassification(config).train()
    with pytest.raises(ImportModelError) as drawn:
        import_model(model, _images())
    assert "draws random numbers" in str(drawn.value) and "drop_path" in str(drawn.value)
    assert "The layer is transformers's: set the rate" in drawn.value.remedy
    assert "model.eval()" in drawn.value.remedy
    model, batch = _made("bert")
    with pytest.raises(ImportModelError) as failed:
        import_model(model, {**batch, "position_ids": torch.zeros(4, 3, dtype=torch.long)})
    assert "cannot be traced in layer 'bert.embeddings" in failed.value.message
    assert "The line is transformers's: check that the batch" in failed.value.remedy
