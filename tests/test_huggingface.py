"""Models of Hugging Face's transformers, tiny and in training mode, with the batch that a collator gives.

``pytest tests/test_huggingface.py --all-models`` proves every family of tests/families.py; without the option, a sample
that together uses every kind of layer.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from flexsearch.cost import Costs
from flexsearch.errors import ImportModelError
from flexsearch.graph.aten import HANDLERS
from flexsearch.graph.importer import import_model
from flexsearch.topology import Topology
from tests.families import FAMILIES, build, configuration, images, transformers
from tests.training import Training, imported, product_flops, prove, prove_draws, torch_flops

pytestmark = pytest.mark.filterwarnings("ignore:use_cache")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every family with --all-models, else those that are cheap."""
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-models")
        metafunc.parametrize("family", [name for name, family in FAMILIES.items() if every or family.cheap])


def tiny(name: str, draws: bool) -> Training:
    """A family in float64."""
    return Training(*build(name, draws=draws, dtype=torch.float64))


def test_every_plan_computes_what_plain_pytorch_computes(family: str) -> None:
    prove(tiny, family)


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


def test_errors_inside_a_library_say_what_its_user_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random operator without a handler, in DINOv2's drop path; and a batch of the wrong kind."""
    monkeypatch.delitem(HANDLERS, "aten.rand")
    config = configuration("dinov2", drop_path_rate=0.5)
    model = transformers.Dinov2ForImageClassification(config).train()
    with pytest.raises(ImportModelError) as drawn:
        import_model(model, images()())
    assert "draws random numbers" in str(drawn.value) and "drop_path" in str(drawn.value)
    assert "The layer is transformers's: set the rate" in drawn.value.remedy
    assert "model.eval()" in drawn.value.remedy
    model, batch = build("bert_classifier")
    with pytest.raises(ImportModelError) as failed:
        import_model(model, {**batch, "position_ids": torch.zeros(4, 3, dtype=torch.long)})
    assert "cannot be traced in layer 'bert.embeddings" in failed.value.message
    assert "The line is transformers's: check that the batch" in failed.value.remedy
