"""The zoo's models are the well-known ones, train, are the same on every rank, and can be exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flexsearch import zoo

PARAMETERS = {  # published sizes
    "lenet": (zoo.lenet, 61_706),
    "mlp": (zoo.mlp, 2 * (4096 * 4096 + 4096) + 4096 * 10 + 10),
    "alexnet": (zoo.alexnet, 61_100_840),
    "vgg16": (zoo.vgg16, 138_357_544),
    "resnet50": (zoo.resnet50, 25_557_032),
    "resnet101": (zoo.resnet101, 44_549_160),
    "inception_v3": (zoo.inception_v3, 23_834_568),
    "gpt2": (zoo.gpt2, 124_439_808),
    "bert": (zoo.bert, 109_514_298),
    "bert_large": (zoo.bert_large, 335_174_458),
    "llama7b": (zoo.llama7b, 6_738_415_616),
    "llama70b": (zoo.llama70b, 68_976_648_192),
    "llama405b": (zoo.llama405b, 405_853_388_800),
    "gpt3": (zoo.gpt3, 174_604_259_328),
    "mixtral": (zoo.mixtral, 46_702_792_704),
    # No published sizes: embeddings, LSTM layers of 4 gates with two weights and two biases, attention, softmax.
    "rnntc": (zoo.rnntc, 20_000 * 1024 + 4 * 4 * (2 * 1024**2 + 2 * 1024) + 2 * 1024 + 2),
    "rnnlm": (zoo.rnnlm, 10_000 * 2048 + 2 * 4 * (2 * 2048**2 + 2 * 2048) + 10_000 * 2049),
    "nmt": (zoo.nmt, 2 * 32_000 * 1024 + 4 * 4 * (2 * 1024**2 + 2 * 1024) + 3 * 1024**2 + 32_000 * 1025),
}

STEPS: dict[str, Any] = {"batch": 3, "steps": 3, "hidden": 16, "vocab": 11}
TEXT: dict[str, Any] = {"batch": 2, "seq": 16, "layers": 2, "hidden": 32, "heads": 4, "vocab": 50}
SMALL: dict[str, tuple[Callable[..., zoo.ZooModel], tuple[int, ...]]] = {
    "lenet": (partial(zoo.lenet, batch=3), (3, 10)),
    "mlp": (partial(zoo.mlp, batch=3, features=20, width=16, layers=3, classes=7), (3, 7)),
    "alexnet": (partial(zoo.alexnet, batch=2, size=64, classes=7, hidden=32), (2, 7)),
    "vgg16": (partial(zoo.vgg16, batch=2, size=32, classes=7, hidden=32), (2, 7)),
    "resnet50": (partial(zoo.resnet50, batch=2, size=64, classes=7, width=8, blocks=(1, 2, 1, 1)), (2, 7)),
    "inception_v3": (partial(zoo.inception_v3, batch=2, size=75, classes=7, width=2), (2, 7)),
    "rnntc": (partial(zoo.rnntc, **STEPS, layers=3, classes=5), (3, 5)),
    "rnnlm": (partial(zoo.rnnlm, **STEPS), (3, 11)),  # of each step
    "nmt": (partial(zoo.nmt, **STEPS), (3, 11)),
    "gpt2": (partial(zoo.gpt2, **TEXT), (2, 16, 50)),
    "bert": (partial(zoo.bert, **TEXT), (2, 16, 50)),
    "llama": (partial(zoo.llama7b, **TEXT, ffn=48, device="cpu"), (2, 16, 50)),
    "llama, grouped": (partial(zoo.llama7b, **TEXT, ffn=48, kv_heads=2, device="cpu"), (2, 16, 50)),
    "mixtral": (partial(zoo.mixtral, **TEXT, ffn=48, kv_heads=2, experts=4, device="cpu"), (2, 16, 50)),
}


def _outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """Of all steps, where a model has several."""
    return output if isinstance(output, tuple) else (output,)


small = pytest.mark.parametrize(("builder", "shape"), SMALL.values(), ids=SMALL.keys())


@pytest.mark.parametrize(("builder", "parameters"), PARAMETERS.values(), ids=PARAMETERS.keys())
def test_full_size_models_have_the_published_number_of_parameters(
    builder: Callable[..., zoo.ZooModel], parameters: int
) -> None:
    model, inputs, targets, _ = builder(device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {x.device.type for x in (*model.parameters(), *model.buffers(), *inputs, targets)} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@small
def test_a_step_gives_a_loss_of_log_classes_and_every_parameter_a_gradient(
    builder: Callable[..., zoo.ZooModel], shape: tuple[int, ...]
) -> None:
    model, inputs, targets, loss = builder()
    output = model(*inputs)
    assert {y.shape for y in _outputs(output)} == {shape}
    value = loss(output, targets)
    torch.autograd.backward(value)
    assert value.shape == () and 0.3 < value.item() / math.log(shape[-1]) < 3
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@small
def test_building_twice_gives_the_same_numbers_and_leaves_the_random_state_alone(
    builder: Callable[..., zoo.ZooModel], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = builder()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    two = builder()
    assert all(
        torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))
    assert torch.equal(one.targets, two.targets)


@small
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_export_in_training_mode(
    builder: Callable[..., zoo.ZooModel], shape: tuple[int, ...], device: str
) -> None:
    model, inputs, _, _ = builder(device=device)
    program = torch.export.export(model, inputs)
    output = next(reversed(program.graph.nodes)).args[0][0]
    assert output.meta["val"].shape == shape


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, grouped"])
def test_decoders_do_not_look_ahead(name: str) -> None:
    model, (tokens,), _, _ = SMALL[name][0]()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])


def test_rotary_positions_depend_on_the_distance_only() -> None:
    from flexsearch.zoo.transformer import _rotate

    model = zoo.Llama(layers=0, hidden=32, heads=2, ffn=1, vocab=2, positions=12)
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 12, 16)
    scores = (_rotate(q, model.cos, model.sin) @ _rotate(k, model.cos, model.sin).mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_dropout_is_off_unless_asked_for(name: str) -> None:
    builder = SMALL[name][0]
    model, inputs, _, _ = builder()
    if name not in ("resnet50", "inception_v3"):  # batch statistics are the same twice, but running ones move
        assert all(map(torch.equal, _outputs(model(*inputs)), _outputs(model(*inputs))))
    noisy, inputs, _, _ = builder(dropout=0.5)
    assert not all(map(torch.equal, _outputs(noisy(*inputs)), _outputs(noisy(*inputs))))
