"""Models of Hugging Face's transformers, tiny and in training mode, with the batch that a collator gives.

``pytest tests/test_huggingface.py --all-models`` proves every family of tests/families.py; without the option, a sample
that together uses every kind of layer.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from flexsearch.cost import Costs
from flexsearch.errors import ImportModelError
from flexsearch.graph.importer import import_model, import_with_constants
from flexsearch.graph.regions import CHECKPOINTS
from flexsearch.runtime.parallel import parallelize
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology

pytest.importorskip("transformers")

from tests.families import FAMILIES, build, translation
from tests.ranks import pool
from tests.test_loop import read
from tests.training import Training, imported, product_flops, prove, prove_draws, torch_flops

pytestmark = pytest.mark.filterwarnings("ignore:use_cache")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every family with --all-models, else those that are cheap."""
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-models")
        names = [name for name, family in FAMILIES.items() if every or family.cheap]
        few = metafunc.function is test_random_draws_do_not_depend_on_the_plan and not every
        metafunc.parametrize("family", names[::3] if few else names)


def tiny(name: str, draws: bool) -> Training:
    """A family in float64."""
    return Training(*build(name, draws=draws, dtype=torch.float64))


def _expert_by_expert(name: str, draws: bool) -> Training:
    """The same function; the grouped products of experts have no float64 in plain PyTorch."""
    return Training(*build(name, draws=draws, dtype=torch.float64, experts_implementation="eager"))


def test_every_plan_computes_what_plain_pytorch_computes(family: str) -> None:
    prove(tiny, family, _expert_by_expert)


def test_random_draws_do_not_depend_on_the_plan(family: str) -> None:
    prove_draws(tiny, family)


def test_the_batch_is_what_a_plan_is_fed(family: str) -> None:
    traced = imported(tiny, family, True)
    assert {tensor.name for tensor in traced.graph.of_kind("input")} == set(traced.input_names)


def test_the_products_of_a_step_are_those_that_torch_counts(family: str) -> None:
    """Attention and experts are counted in their plain forms, the fused ones being unknown to FlopCounterMode."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    expected = torch_flops(Training(*build(family, **plain)))
    assert product_flops(imported(tiny, family, True).graph) == pytest.approx(expected, rel=0.05)


def test_a_boolean_mask_takes_no_time_worth_speaking_of() -> None:
    model, batch = build("bert_classifier", max_position_embeddings=512, hidden_size=64)
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
    model, batch = build("gpt2")
    assert model.config.use_cache is True
    with pytest.warns(UserWarning, match="use_cache is turned off"):
        import_model(model, batch)
    assert model.config.use_cache is True
    model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_model(model, batch)


def test_a_batch_without_labels_is_told_what_it_lacks() -> None:
    model, batch = build("bert_classifier")
    del batch["labels"]
    with pytest.raises(ImportModelError, match=r"returns logits and no loss\. Put the labels into the batch"):
        import_model(model, batch)


STATIC_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("wav2vec2", {"apply_spec_augment": True, "layerdrop": 0.1}, "layerdrop=0.0 and apply_spec_augment=False"),
    ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.0"),
    ("opt", {"layerdrop": 0.1}, "layerdrop=0.0"),
]


@pytest.mark.parametrize(("name", "options", "remedy"), STATIC_OPTIONS)
def test_a_model_that_decides_by_values_is_told_which_option_to_set(
    name: str, options: dict[str, Any], remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ImportModelError) as error:
        import_model(*build(name, **options))
    assert "decides by the values of tensors in layer '" in error.value.message
    assert "/modeling_" in error.value.message
    expected = f"The line is transformers's: set {remedy} in the model's configuration, or import the model"
    assert error.value.remedy.startswith(expected)
    assert "def forward" not in capfd.readouterr().err


def test_experts_without_another_implementation_are_not_told_to_take_one() -> None:
    """Switch Transformers loop over the experts that tokens choose, and nothing else can be set."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 50}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_experts": 2}
    import transformers

    config = transformers.SwitchTransformersConfig(**sizes, **layers, decoder_start_token_id=0)
    with pytest.raises(ImportModelError, match="decides by the values of tensors in layer 'encoder") as error:
        import_model(transformers.SwitchTransformersForConditionalGeneration(config), translation())
    assert "experts_implementation" not in error.value.remedy


def test_draws_that_pytorch_does_not_make_are_refused() -> None:
    """SpecAugment draws by numpy: the graph would hold the masks of one step."""
    with pytest.raises(ImportModelError, match="draws random numbers by numpy") as error:
        import_model(*build("whisper", apply_spec_augment=True))
    assert error.value.remedy == "Set apply_spec_augment=False in the model's configuration."


def test_a_batch_that_does_not_fit_is_told_the_layer_and_the_line() -> None:
    model, batch = build("bert_classifier")
    with pytest.raises(ImportModelError) as error:
        import_model(model, {**batch, "position_ids": torch.zeros(4, 3, dtype=torch.long)})
    assert "cannot be traced in layer 'bert.embeddings" in error.value.message
    assert "The line is transformers's: check that the batch" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "reentrant"), [("gpt2", True), ("llama", False), ("t5", True), ("vit", False), ("bert", True)]
)
def test_gradient_checkpointing_imports_to_the_same_graph_with_a_note(name: str, reentrant: bool) -> None:
    model, batch = build(name)
    plain_graph = import_with_constants(model, batch).graph
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    traced = import_with_constants(model, batch)
    assert CHECKPOINTS in traced.notes
    assert traced.graph.content_hash() == plain_graph.content_hash()


def test_a_classifier_that_selects_its_labels_imports_as_shipped() -> None:
    """DeBERTa finds the labels that count by their values unless its configuration says what they are."""
    model, batch = build("deberta_v2", problem_type=None)
    graph = import_model(model, batch)
    assert model.config.problem_type is None
    assert graph.content_hash() == import_model(*build("deberta_v2")).content_hash()


def _llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model, batch = build("llama", draws=False)
    return model, {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def _from_meta(file: str) -> tuple[list[float], torch.Tensor]:
    """The losses of two steps of a model that was made on the meta device, and what it then predicts."""
    model, batch = _llama()
    with torch.device("meta"):
        empty: Any = type(model)(model.config).train()
    assert any(buffer.is_meta for buffer in empty.buffers())  # rotary frequencies, which no state_dict has
    step = parallelize(empty, read(file), inputs=batch, seed=5, initialise=empty._init_weights)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        losses.append(step(batch).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with step.evaluating():
        return losses, step.forward(batch, everything=True)["logits"]


def test_a_model_made_on_the_meta_device_trains_under_the_plan_of_the_real_one() -> None:
    model, batch = _llama()
    plan = baseline("megatron", import_model(model, batch), Topology.load("ethernet-1g:2"))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for module in model.modules():
            model._init_weights(module)  # type: ignore[operator]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(2):
        value = model(**batch).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    logits = model.eval()(**batch).logits.detach()
    for steps, predicted in pool(2).run(_from_meta, plan.to_file().model_dump_json()):
        assert steps == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(predicted, logits, rtol=1e-4, atol=1e-5)
