"""What a call of a model leaves in its modules, and records among what it returns: taken over, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError, StrategyError
from flexsearch.graph import Tracing
from flexsearch.graph.importer import import_forward, import_model
from flexsearch.lower.layout import Entry
from flexsearch.lower.pieces import kept
from flexsearch.runtime.parallel import trace
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.test_importer import Fn


class Averaging(nn.Module):
    """A layer, and a buffer of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Recalling(nn.Module):
    """Keeps something of each call: ``state(x, y)`` as the attribute ``kept``, which it reads first where ``reads``."""

    def __init__(self, state: Callable[[Tensor, Tensor], Any], reads: bool, first: Any = None) -> None:
        super().__init__()
        self.linear, self.state, self.reads, self.kept = nn.Linear(8, 8), state, reads, first

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept if self.kept is not None else self.state(x, torch.zeros_like(x))
        y = self.linear(x) + (sum(pytree.tree_leaves(kept)) if self.reads else 0)
        if self.kept is None or self.reads:
            self.kept = self.state(x, y.detach())
        return y.sum()


@pytest.mark.parametrize("state", [lambda x, y: y, lambda x, y: (y, y)])
@pytest.mark.parametrize("first", [None, torch.zeros(4, 8)])
def test_a_state_that_is_an_attribute_is_refused_where_the_next_call_reads_it(state: Any, first: Any) -> None:
    model = Recalling(state, True, first)
    with pytest.raises(ImportModelError, match=r"'kept', which each call makes anew,.*register_buffer\('kept'"):
        import_model(model, torch.ones(4, 8))
    assert model.kept is first


class Writing(nn.Module):
    """Keeps something of each call in a list or dict that stays the same: ``write(kept, x)``, and reads it."""

    def __init__(self, kept: Any, write: Callable[[Any, Tensor], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self._kept, self.write, self.read = nn.Linear(8, 8), kept, write, read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.read(self._kept)
        self.write(self._kept, y.detach())
        return y.sum()


@pytest.mark.parametrize(
    ("kept", "write", "read"),
    [
        ([torch.zeros(4, 8)], lambda kept, y: kept.__setitem__(0, y), lambda kept: kept[0]),
        ([], lambda kept, y: kept.append(y), lambda kept: sum(kept)),
        ({"a": {}}, lambda kept, y: kept["a"].update(b=y), lambda kept: kept["a"].get("b", 0)),
        ([0], lambda kept, y: kept.__setitem__(0, kept[0] + 1), lambda kept: kept[0]),
    ],
)
def test_a_state_in_a_list_or_dict_is_refused_and_taken_out_again(kept: Any, write: Any, read: Any) -> None:
    model, before = Writing(kept, write, read), repr(kept)
    with pytest.raises(ImportModelError, match=r"'_kept', which each call makes anew, or writes into.*register_buffer"):
        import_model(model, torch.ones(4, 8))
    assert repr(kept) == before
    import_model(Writing(kept, write, lambda kept: 0), torch.ones(4, 8))  # nothing reads it
    assert repr(kept) == before


class Statistics:
    """No module: a mean of activations, how many there were, and their list."""

    def __init__(self) -> None:
        self.mean, self.count, self.all = torch.zeros(8), 0, [torch.zeros(8)]
        self.own = self  # as objects that know each other do

    def note(self, y: Tensor) -> None:
        mean = y.detach().mean(0)
        self.mean, self.count = 0.9 * self.mean + 0.1 * mean, self.count + 1
        self.all[0] = self.all[0] + mean


class Observed(nn.Module):
    """Notes its activations in an object of a list, or its loss does; computes with what ``read`` reads there."""

    def __init__(self, read: Callable[[Statistics], Any], in_loss: bool) -> None:
        super().__init__()
        self.linear, self.read, self.in_loss, self.observers = nn.Linear(8, 8), read, in_loss, [Statistics()]
        self.elsewhere = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.in_loss else self.told(y, self.observers[0])

    def told(self, y: Tensor, statistics: Statistics) -> Tensor:
        statistics.note(y)
        return y.square().sum() * (1 + self.read(statistics))


@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize(
    ("read", "name"),
    [(lambda s: s.mean.sum(), "mean"), (lambda s: s.count, "count"), (lambda s: s.all[0].sum(), "all")],
)
def test_a_state_in_an_object_of_python_is_refused_and_taken_out_again(
    read: Callable[[Statistics], Any], name: str, in_loss: bool
) -> None:
    model = Observed(read, in_loss)
    statistics = model.elsewhere if in_loss else model.observers[0]

    class Loss:
        """Keeps states, too."""

        statistics = None

        def __init__(self) -> None:
            self.statistics = statistics

        def __call__(self, y: Tensor) -> Tensor:
            return model.told(y, statistics) if in_loss else y

    before = dict(vars(statistics))
    where = "elsewhere" if in_loss else "observers[0]"
    with pytest.raises(ImportModelError, match=re.escape(f"'{where}.{name}', ") + ".*a buffer of a module"):
        import_model(model, torch.ones(4, 8), Loss())
    assert vars(statistics) == before and not statistics.all[0].any()
    model.read = lambda s: 0  # it is written, and nothing reads it
    import_model(model, torch.ones(4, 8), Loss())
    assert vars(statistics) == before


def test_a_call_that_fails_leaves_nothing_either() -> None:
    statistics = Statistics()

    def failing(y: Tensor) -> Tensor:
        statistics.note(y)
        raise ZeroDivisionError

    class Loss:
        def __init__(self) -> None:
            self.statistics = statistics

        def __call__(self, y: Tensor) -> Tensor:
            return failing(y)

    before = dict(vars(statistics))
    with pytest.raises(ImportModelError, match="ZeroDivisionError"):
        import_model(Averaging(), torch.ones(4, 8), Loss())
    assert vars(statistics) == before and type(statistics.all[0]) is Tensor


@pytest.mark.parametrize("reads", [False, True])
def test_a_state_in_an_object_that_the_first_call_makes_is_refused_where_the_next_one_reads_it(reads: bool) -> None:
    class Making(Averaging):
        statistics: Statistics | None = None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if self.statistics is None or not reads:
                self.statistics = Statistics()
            self.statistics.mean = self.statistics.mean + y.detach().mean(0)
            return (y - self.statistics.mean if reads else y).sum()

    model = Making()
    with pytest.raises(ImportModelError, match="'statistics', which each call makes") if reads else nullcontext():
        import_model(model, torch.ones(4, 8))
    assert model.statistics is None


def test_a_count_that_is_nowhere_in_the_model_is_noticed_before_the_first_step() -> None:
    count = iter(range(1, 10))

    class Counting(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() / next(count)

    model = Counting()
    graph = import_model(model, torch.ones(4, 8))
    strategy = baseline("data-parallel", graph, Topology.load("ethernet-1g:2"))
    with pytest.raises(StrategyError, match=r"gives another one.*another in each call.*make it a buffer"):
        trace(model, strategy, None, None, None)


def test_what_a_call_keeps_may_depend_on_shapes_alone_or_be_read_by_none() -> None:
    for model in (Recalling(lambda x, y: torch.ones_like(x).tril(), True), Recalling(lambda x, y: y, False)):
        import_model(model, torch.ones(4, 8))
        assert model.kept is None


def test_a_buffer_that_is_assigned_is_updated_and_one_that_a_call_registers_goes_again() -> None:
    def assigned(m: nn.Module, value: Tensor) -> Tensor:
        m.mean = value
        m.register_buffer("made", torch.ones(3))
        return m.linear(value + m.mean).sum()

    model = Averaging()
    graph = import_model(model, torch.ones(4, 8), lambda y: assigned(model, y.mean(0)))
    assert list(graph.buffer_updates) == ["mean"]
    assert list(dict(model.named_buffers())) == ["mean"] and type(model.mean) is Tensor
    with pytest.raises(ImportModelError, match=r"shape \(1, 8\) to its buffer 'mean'.*shape \(8,\)"):
        import_model(model, torch.ones(4, 8), lambda y: assigned(model, y.mean(0, keepdim=True)))


def test_a_layer_and_the_loss_of_one_name_are_told_apart() -> None:
    class Keeping(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if hasattr(self, "seen"):
                return y + self.seen
            self.register_buffer("seen", y.detach())
            return y

    class Sum(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.sum()

    model = nn.Sequential()
    model.add_module("loss", Keeping())
    with pytest.raises(ImportModelError, match=r"'loss\.seen', which each call makes anew"):
        import_model(model, torch.ones(4, 8), Sum())


def test_gradients_may_be_switched_off_for_a_part_of_a_call_only() -> None:
    weight = nn.Linear(8, 3)

    def frozen(m: nn.Module) -> Tensor:
        return m.weight.requires_grad_(False).sum()

    def trained(m: nn.Module) -> Tensor:
        return m.weight.requires_grad_().sum()

    def half_trained(y: Tensor) -> Tensor:
        weight.requires_grad_(False)
        first = weight(y[:, :1].expand(4, 8)).sum()
        weight.requires_grad_()
        return first + y.sum()

    graph = import_model(weight, torch.ones(4, 8), half_trained)
    flows = [op.inputs for op in graph.operators if op.kind == "detach" and op.inputs[0] in ("weight", "bias")]
    assert sorted(flows) == [("bias",), ("weight",)]
    with pytest.raises(ImportModelError, match="leaves it off"):
        import_model(weight, torch.ones(4, 8), lambda y: y.sum() + frozen(weight))
    weight.weight.requires_grad_(False)
    with pytest.raises(ImportModelError, match=r"requires_grad=True before"):
        import_model(weight, torch.ones(4, 8), lambda y: y.sum() + trained(weight))


def test_a_buffer_that_is_changed_in_place_without_gradients_hands_none_on() -> None:
    model = Averaging()

    def averaged(y: Tensor) -> Tensor:
        with torch.no_grad():
            model.mean.lerp_(model.linear.weight.sum(0), 0.1)
            model.mean[:2] += y[0, :2]
        return (y * model.mean).sum()

    graph = import_model(model, torch.ones(4, 8), averaged)
    weighed = next(op for op in graph.operators if op.attributes.get("target") == "aten.mul.Tensor")
    assert weighed.inputs[1] not in graph.differentiable
    with pytest.raises(ImportModelError, match=r"in place \(clamp_\) under no_grad.*\(f\(x\) - x\).detach\(\)"):
        import_model(model, torch.ones(4, 8), lambda y: torch.no_grad()(y.clamp_)(0.0).sum())


class Averaged(nn.Module):
    """A layer, and a copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        slow = [*self.slow.parameters(), *self.slow.buffers()]
        with torch.no_grad():
            for average, weight in zip(slow, self.online.parameters(), strict=True):
                average.lerp_(weight, 0.1)
        return (self.online(x) - self.slow(x)).square().sum()


def test_weights_that_a_call_changes_are_to_be_buffers() -> None:
    model, x = Averaged(), torch.ones(4, 8)
    with pytest.raises(ImportModelError, match=r"'slow\.weight'.*a buffer if it is not trained"):
        import_model(model, x)
    for name, weight in list(model.slow.named_parameters()):
        delattr(model.slow, name)
        model.slow.register_buffer(name, weight.detach())
    assert list(import_model(model, x).buffer_updates) == ["slow.weight", "slow.bias"]


def test_a_table_whose_rows_a_call_scales_is_refused_in_words() -> None:
    table = nn.Embedding(9, 4, max_norm=1.0)
    with pytest.raises(ImportModelError, match=r"\(max_norm\)\. Leave out max_norm"):
        import_model(table, torch.zeros(4, 3, dtype=torch.int64), lambda y: y.sum())


@dataclass
class Record:
    x: Tensor


def test_a_batch_that_is_a_dataclass_is_to_be_registered() -> None:
    model = Fn(lambda record, w: (record.x * w).sum(), (8,))
    with pytest.raises(ImportModelError, match=r"register_dataclass\(Record\)"):
        import_model(model, (Record(torch.ones(4, 8)),))
    torch.export.register_dataclass(Record)
    assert import_model(model, (Record(torch.ones(4, 8)),)).batch == 4


@dataclass(frozen=True)
class Answer:
    loss: Tensor
    parts: Any = None


class Named(NamedTuple):
    loss: Tensor
    parts: Any = None


@pytest.mark.parametrize("form", [Answer, Named])
def test_a_record_with_a_loss_is_trained_on_and_comes_back_as_one(form: Any) -> None:
    model = Fn(lambda x, w: form((x * w).sum(), [form(x + w)]), (8,))
    assert "sum" in [op.kind for op in import_model(model, torch.ones(4, 8)).operators]
    outputs = import_forward(model, torch.ones(4, 8), Tracing())[1]
    answer = outputs.nested([torch.ones(()), torch.zeros(4, 8)])
    assert isinstance(answer, form) and isinstance(answer.parts[0], form)
    assert answer.loss == 1 and answer.parts[0].loss.shape == (4, 8) and answer.parts[0].parts is None
    with pytest.raises(ImportModelError, match="loss=lambda output: output\\[1\\]"):
        import_model(Fn(lambda x, w: (x * w, (x * w).sum()), (8,)), torch.ones(4, 8))


def test_a_gradient_inside_of_a_step_is_refused_in_words() -> None:
    with pytest.raises(ImportModelError, match=r"a gradient inside of it"):
        import_model(Fn(lambda x, w: torch.func.grad(lambda z: (z * w).sum())(x).sum(), (8,)), torch.ones(4, 8))


def test_a_buffer_is_kept_on_each_device_in_one_region_whatever_its_readers_want() -> None:
    upper, lower, whole = ((0, 1), (0, 5)), ((1, 2), (0, 5)), ((0, 2), (0, 5))
    reads = [(Entry(0, upper, 0), Entry(1, lower, 0)), (Entry(0, lower, 0), Entry(0, whole, 0))]
    assert kept(reads) == (Entry(0, whole, 0), Entry(1, lower, 0))
