"""A block that repeats is traced twice and walked again, and nobody can tell: the graph is that of the whole trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.graph import OperatorGraph, export
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.repeats import REPEAT
from tests import small_models

SIZE = 4


def both(model: nn.Module, inputs: Any, loss: Any = None, targets: Any = None) -> tuple[OperatorGraph, int]:
    """The graph, which is that of a whole trace with equal constants, and how many calls were repeated in it."""
    programs = []

    def kept(step: Any, program: Any) -> Any:
        programs.append(functional(step, program))
        return programs[-1]

    functional = export._functional
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(export, "_functional", kept)
        imported = import_with_constants(model, inputs, loss, targets=targets)
        patch.setattr(export, "_with_blocks", lambda *_: None)
        whole = import_with_constants(model, inputs, loss, targets=targets)
    assert imported.graph == whole.graph
    assert imported.constants.keys() == whole.constants.keys()
    for name, value in imported.constants.items():
        assert value.is_meta == whole.constants[name].is_meta
        assert value.is_meta or torch.equal(value, whole.constants[name])
    assert "forward" not in {name for module in model.modules() for name in vars(module)}
    return imported.graph, sum(node.target is REPEAT for node in programs[-2].graph.nodes) if len(programs) > 1 else 0


class Block(nn.Module):
    """Two layers and an activation; ``body`` adds what the case is about."""

    def __init__(self, index: int = 0, body: Callable[..., Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Dropout(0.5)
        self.index, self.body = index, body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.dropout(self.outer(F.gelu(self.inner(x))))
        return y if self.body is None else self.body(self, y, x)


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], order: list[int] | None = None) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(blocks), order or list(range(len(blocks)))
        self.first = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k in self.order:
            x = self.layers[k](x)
        return x.square().mean()


def chain(body: Callable[..., Tensor] | None = None, count: int = 5) -> Chain:
    return Chain([Block(k, body) for k in range(count)])


X = torch.ones(6, SIZE)


def test_equal_blocks_are_traced_twice() -> None:
    graph, repeated = both(chain(), X)
    assert repeated == 3
    names = [f"layers.{k}.{part}" for k in range(5) for part in ("inner", "gelu", "outer", "dropout", "add")]
    assert [op.name for op in graph.operators][1:-2] == names
    salts = [op.attributes["salt"] for op in graph.operators if op.kind == "dropout"]
    assert len(set(salts)) == 5


def _doubled_if_even(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return y * 2 if self.even else y


def test_blocks_that_differ_in_what_they_read_are_traced_each() -> None:
    assert both(chain(lambda self, y, x: y * (self.index + 1)), X)[1] == 0
    assert both(chain(lambda self, y, x: y * (self.index % 2), count=6), X)[1] == 0
    alternate = Chain([Block(k, _doubled_if_even, even=k % 2 == 0) for k in range(8)])
    assert both(alternate, X)[1] == 4
    one = chain()
    one.layers[2].dropout.p = 0.25
    assert both(one, X)[1] == 2
    one = chain()
    one.layers[3].dropout.eval()
    assert both(one, X)[1] == 2
    one = chain()
    one.layers[3].inner.weight.requires_grad_(False)
    assert both(one, X)[1] == 2
    wider = chain()
    wider.layers[4].inner, wider.layers[4].outer = nn.Linear(SIZE, 7), nn.Linear(7, SIZE)
    assert both(wider, X)[1] == 2


def test_a_block_called_again_repeats_itself() -> None:
    assert both(Chain([Block()], [0] * 5), X)[1] == 3
    assert both(Chain([Block(), Block()], [0, 1, 0, 1, 1]), X)[1] == 3


def test_weights_of_other_blocks_are_not_mistaken_for_own_ones() -> None:
    shared = chain()
    for block in shared.layers[1:]:
        block.inner.weight = shared.layers[0].inner.weight
    assert both(shared, X)[1] == 0

    def before(self: Any, y: Tensor, x: Tensor) -> Tensor:
        return y @ self.others[0].weight

    first = nn.Linear(SIZE, SIZE, bias=False)
    assert both(Chain([first, *(Block(k, before, others=[first]) for k in range(4))]), X)[1] == 2
    layers = [Block(k, before) for k in range(4)]
    for block in layers:
        block.others = [layers[0].inner]
    assert both(Chain([*layers]), X)[1] <= 1


class Normalised(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.linear, self.norm, self.relu = nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.relu(self.norm(self.linear(x)))


def test_buffers_that_a_step_changes_are_each_blocks_own() -> None:
    graph, repeated = both(Chain([Normalised() for _ in range(4)]), X)
    assert repeated == 2
    assert list(graph.buffer_updates) == [f"layers.{k}.norm.running_{x}" for k in range(4) for x in ("mean", "var")]
    counters = [f"layers.{k}.{x}" for k in range(4) for x in ("calls", "norm.num_batches_tracked")]
    assert sorted(graph.counters) == sorted(counters)
    assert both(Chain([Normalised() for _ in range(5)], [0, 1, 2, 3, 4, 2]), X)[1] == 0


class Context:
    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.values: list[Tensor] = []
        self.count = 0


COUNT = [0]


def _stored(self: Any, y: Tensor, x: Tensor) -> Tensor:
    self.last = y
    return y


def _appended(self: Any, y: Tensor, x: Tensor) -> Tensor:
    self.context.values.append(y)
    return y


def _counted(self: Any, y: Tensor, x: Tensor) -> Tensor:
    self.context.count += 1
    return y * self.context.count


def _counted_elsewhere(self: Any, y: Tensor, x: Tensor) -> Tensor:
    COUNT[0] += 1
    return y * COUNT[0]


def _captured(self: Any, y: Tensor, x: Tensor) -> Tensor:
    if self.context.first is None:
        self.context.first = x
    return y + self.context.first


def _through_vars(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return y * (vars(self)["index"] + 1)


def _scaled_in_place(self: Any, y: Tensor, x: Tensor) -> Tensor:
    x.mul_(0.5)
    return y + x


@pytest.mark.parametrize(
    "body", [_stored, _appended, _counted, _counted_elsewhere, _captured, _through_vars, _scaled_in_place]
)
def test_what_goes_past_inputs_and_outputs_is_traced_as_it_is(body: Callable[..., Tensor]) -> None:
    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            COUNT[0], context.count, context.first = 0, 0, None
            context.values.clear()
            x = super().forward(x * 1.0)
            if body is _stored:
                x = x + sum(block.last.mean() for block in self.layers)
            return x + sum(value.mean() for value in context.values)

    context = Context()
    assert both(Model([Block(k, body, context=context) for k in range(5)]), X)[1] == 0


def test_outputs_that_are_inputs_or_views_of_them_stay_so() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, bias: Tensor, flag: bool = False, *, other: Tensor | None = None) -> Any:
            y = self.block(x + bias)
            return (y, bias, {"view": x.view(-1)}, other)

    class Model(nn.Module):
        def __init__(self, change: bool) -> None:
            super().__init__()
            self.layers, self.change = nn.ModuleList(Pair() for _ in range(5)), change
            self.first = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            bias, total = x.mean(0), x.sum()
            for layer in self.layers:
                y, same, more, none = layer(x, bias, flag=True)
                assert same is bias and none is None
                if self.change:
                    more["view"].add_(1)
                total = total + more["view"].sum() + x.sum()
                x = y
            return total + x.sum()

    assert both(Model(False), X)[1] == 3
    both(Model(True), X)


def test_hooks_inside_a_block_are_heard_and_those_of_the_block_too() -> None:
    model, heard = chain(), []
    model.layers[3].inner.register_forward_hook(lambda *_: heard.append("inner"))
    model.layers[4].register_forward_hook(lambda module, args, output: output * 2)
    assert both(model, X)[1] == 2  # the third and the last; the fourth is traced
    assert heard and set(heard) == {"inner"}


def test_constants_made_in_blocks_and_regions_without_gradient() -> None:
    def constants(self: Any, y: Tensor, x: Tensor) -> Tensor:
        return y * torch.arange(SIZE)

    assert both(chain(constants), X)[1] == 3

    def literals(self: Any, y: Tensor, x: Tensor) -> Tensor:
        return y * torch.tensor([0.5, 1.0, 2.0, 4.0])

    both(chain(literals), X)

    def detached(self: Any, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = y.mean()
        return y + scale

    both(chain(detached), X)

    class Frozen(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.layers[0](x)
            return super().forward(y)

    both(Frozen([Block() for _ in range(5)]), X)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) + x


def test_blocks_in_blocks() -> None:
    graph, repeated = both(Chain([Stack([Normalised() for _ in range(4)]) for _ in range(4)]), X)
    assert repeated >= 2 and len(graph.buffer_updates) == 32


def test_an_error_is_that_of_the_whole_trace() -> None:
    def fails(self: Any, y: Tensor, x: Tensor) -> Tensor:
        return y @ torch.ones(3, 3) if self.index == 3 else y

    with pytest.raises(export.ImportModelError, match=r"cannot be traced in layer 'layers\.3'"):
        import_with_constants(chain(fails), X)


kinds = st.tuples(
    st.sampled_from(["plain", "scaled", "batch norm", "stack", "wide"]),
    st.integers(0, 1),
)


@settings(max_examples=6, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_any_chain_is_as_if_traced_whole(parts: list[tuple[str, int]], times: int, data: st.DataObject) -> None:
    def block(kind: str, number: int) -> nn.Module:
        if kind == "scaled":
            return Block(number, lambda self, y, x: y * (self.index + 1))
        if kind == "batch norm":
            return Normalised()
        if kind == "stack":
            return Stack([Block(number), Normalised()])
        return Block(number, None, wide=number) if kind == "plain" else Stack([Block(k) for k in range(3)])

    blocks = [block(*part) for _ in range(times) for part in parts]
    order = data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=6))
    both(Chain(blocks, data.draw(st.sampled_from([None, order]))), X)


ZOO: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "seq": 8, "hidden": 16, "heads": 2, "vocab": 50, "dropout": 0.1},
    "bert": {"layers": 4, "seq": 8, "hidden": 16, "heads": 2, "vocab": 50, "dropout": 0.1},
    "llama7b": {"layers": 4, "seq": 8, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 50},
    "resnet50": {"batch": 2},
    "inception_v3": {"batch": 2},
    "rnnlm": {},
}


def small_of_the_zoo(name: str) -> zoo.ZooModel:
    """A model of the zoo; of Inception-v3 five of its eleven blocks, two of which are alike, behind one convolution."""
    made = getattr(zoo, name)(device="meta", **ZOO[name])
    if name == "inception_v3":
        made.model.stem, made.model.blocks = nn.Conv2d(3, 768, 7, 8, device="meta"), made.model.blocks[5:10]
    return made


@pytest.mark.parametrize("name", ZOO)
def test_graphs_of_the_zoo(name: str) -> None:
    model, inputs, targets, loss = small_of_the_zoo(name)
    repeated = both(model, inputs, loss, targets)[1]
    assert repeated >= {"gpt2": 2, "bert": 2, "llama7b": 2, "resnet50": 4}.get(name, 0)


@pytest.mark.parametrize("name", small_models.NAMES)
def test_graphs_of_small_models(name: str) -> None:
    case = small_models.case(name)
    both(case.model, case.inputs, case.loss, case.targets)
