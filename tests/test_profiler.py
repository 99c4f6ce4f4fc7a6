"""The profiler: which pieces it measures, that they run, and that nothing is measured twice. Nothing about time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsearch import zoo
from flexsearch.clocks import Clock
from flexsearch.cost import Costs, Profile
from flexsearch.cost.costed import Costed
from flexsearch.cost.profile import LONG_VECTOR, SHORT_VECTOR, Entry, WorkRate
from flexsearch.errors import ProfileError
from flexsearch.graph import Operator, OperatorGraph, chunk
from flexsearch.graph.images import images
from flexsearch.graph.importer import import_model
from flexsearch.graph.ops.base import KernelContext, build_kernel
from flexsearch.graph.ops.batch_norm import normalising
from flexsearch.graph.precision import with_precision
from flexsearch.measure import cases, profiler, recipe_work, reference, updates
from flexsearch.measure.cases import Case, count, plan
from flexsearch.measure.neighbours import SWEEPS, Neighbours, neighbours
from flexsearch.measure.profiler import profile_graph
from flexsearch.measure.recipe_work import KINDS, RECIPE, measure_recipe_work
from flexsearch.measure.reference import Sizes
from flexsearch.measure.runs import Run, Samples, backward_tasks, forward_tasks, grouped
from flexsearch.measure.sweeps import Bench
from flexsearch.measure.updates import OPTIMIZERS, UPDATE, measure_updates
from flexsearch.sync import kinds
from flexsearch.topology import Topology
from tests.test_cost import axes, machines, small_net, tensor


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "UPDATE_BYTES", 1 << 16)
    monkeypatch.setattr(recipe_work, "ELEMENTS", (1 << 10, 1 << 12))
    monkeypatch.setitem(reference.SIZES, "cpu", Sizes((4, 16, 32), (1, 2), (1 << 8, 1 << 10), (8, 16)))


def test_every_piece_that_a_few_parts_can_make_is_planned_once() -> None:
    graph = small_net()
    rounds = plan(graph, 3)
    keys = {case.key for row in rounds for case in row}
    assert len(keys) == count(rounds)  # none in two rounds
    for row in rounds:
        kinds = [case.costed.op.kind for case in row]
        assert kinds == sorted(kinds, key=["conv2d", "view", "linear", "sum"].index)  # the order of the graph
    sums = [k for k in keys if k.startswith("sum")]
    # 4 rows: whole, halves, thirds of 1 and 2; 128 columns: whole, halves, thirds of 42 and 43.
    assert {k.split(" | ")[-1] for k in sums} == {
        "b=4 p=128", "b=2 p=128", "b=1 p=128", "b=4 p=64", "b=4 p=42", "b=4 p=43",
    }  # fmt: skip


def test_a_machine_that_is_slow_for_a_while_does_not_make_pieces_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_net()
    turns, planned = list[set[str]](), {case.key for row in plan(graph, 2) for case in row}
    before = Bench.measure

    def measure(bench: Bench, row: Sequence[Case], repeats: int, deadline: float | None = None) -> dict[str, Entry]:
        measured = before(bench, row, repeats, deadline)
        if not measured.keys() <= planned:
            return measured  # operators for the device's figures
        if not turns or turns[-1] & measured.keys():
            turns.append(set())  # the next turn begins
        turns[-1] |= measured.keys()
        seconds = [2.0, 1.0, 1.5][len(turns) - 1]
        return {
            key: entry.model_copy(update={"forward_s": seconds, "backward_s": 2 * seconds})
            for key, entry in measured.items()
        }

    monkeypatch.setattr(Bench, "measure", measure)
    entries = profile_graph(graph, max_parts=2, repeats=3).entries
    assert turns == [entries.keys()] * 3  # all other pieces stand between two turns of one
    assert {(entry.forward_s, entry.backward_s) for entry in entries.values()} == {(1.5, 3.0)}
    assert all(entry.repeats >= 3 for entry in entries.values())


def test_the_first_round_is_the_whole_graph() -> None:
    graph = small_net()
    whole = {case.key for case in plan(graph, 4)[0]}
    assert whole == {case.key for row in plan(graph, 1) for case in row}
    assert len(whole) == 4  # the two linear layers are of one form


def test_where_time_may_end_splits_of_the_batch_come_first_and_each_piece_has_one_sweep_before_any_has_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = zoo.llama7b(batch=4, seq=8, layers=1, hidden=16, heads=4, ffn=32, vocab=50, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="llama")
    op = next(op for op in graph.operators if op.kind == "linear")
    (samples,) = op.axes_of("sample")
    extents = [case.extents for row in plan(graph, 4) for case in row if case.costed.op == op]
    assert [e[samples] for e in extents[:4]] == [4, 1, 2, 4]  # whole, quarters, halves, then other axes
    graph = small_net()
    taken, before = list[int](), Bench.measure

    def measure(bench: Bench, row: Sequence[Case], repeats: int, deadline: float | None = None) -> dict[str, Entry]:
        taken.append(repeats)
        return before(bench, row, repeats, deadline)

    monkeypatch.setattr(Bench, "measure", measure)
    profile_graph(graph, max_parts=2, repeats=6, budget_s=600.0)
    rounds = len(plan(graph, 2))
    assert taken[: 3 * rounds] == [1] * rounds + [2] * 2 * rounds


def test_operators_of_one_form_are_measured_at_all_their_places_as_far_as_caches_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = small_net()
    assert [case.costed.op.name for case in plan(graph, 1)[0]] == [op.name for op in graph.operators]
    monkeypatch.setattr(cases, "CACHE_BYTES", 0)
    assert count(plan(graph, 1)) == len(plan(graph, 1)[0]) == 4


def test_only_what_follows_from_images_lies_in_memory_as_they_do() -> None:
    made = zoo.alexnet(2, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="alexnet")
    there = images(graph)
    assert all((len(t.shape) == 4) == (t.name in there) for t in graph.tensors)
    made = zoo.llama7b(batch=2, seq=8, layers=1, hidden=16, heads=2, ffn=32, vocab=50, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="llama")
    (attention,) = [op for op in graph.operators if op.kind == "attention"]
    assert not images(graph) & set(attention.inputs)


def test_half_of_a_tensor_is_cut_from_the_whole() -> None:
    made = zoo.llama7b(batch=4, seq=8, layers=1, hidden=16, heads=2, ffn=32, vocab=50, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="llama")
    halves = [case for row in plan(graph, 2) for case in row if case.costed.op.kind == "slice"]
    assert {case.piece.inputs[0] for case in halves} >= {((0, 4), (0, 2), (0, 8), (4, 8))}
    for case in halves:
        (read,), (held,) = case.piece.inputs, case.held
        assert read is not None and held is not None
        assert held == (*read[:3], (0, 8))


def test_backward_tasks_of_operators_that_need_a_gradient_have_times() -> None:
    made = zoo.llama7b(batch=2, seq=8, layers=1, hidden=16, heads=2, ffn=32, vocab=50, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="llama")
    profile = profile_graph(graph, max_parts=1, repeats=2)
    for index, op in enumerate(graph.operators):
        costed = Costed.of(graph, index)
        entry = profile.entries[costed.signature(op.sizes)]
        assert entry.forward_s > 0
        assert (entry.backward_s > 0) == any(costed.needs)
        assert entry.repeats >= 2
        assert entry.halves_s is not None  # of what has no weights all is the first half
        assert (entry.halves_s[1] > 0) == costed.trained
        if costed.trained:  # an embedding makes gradients of weights alone
            assert (entry.halves_s[0] > 0) == (costed.gradients is not None)


def test_all_splits_are_measured_and_then_found() -> None:
    graph = small_net()
    profile = profile_graph(graph, max_parts=2, repeats=1)
    assert len(profile.entries) == count(plan(graph, 2))
    assert set(profile.updates) == {"sgd", "momentum", "adam"}
    assert profile.torch == torch.__version__
    assert profile.device.threads == 1
    costs = Costs(graph, machines(profile.device.model), profile)
    for index, op in enumerate(graph.operators):
        assert costs.is_measured(index, op.sizes, 0)
        for axis in op.splittable:
            for part in range(2):
                low, high = chunk(op.sizes[axis], 2, part)
                assert costs.is_measured(index, {**op.sizes, axis: high - low}, 0)


def test_known_entries_are_not_measured_again() -> None:
    graph, seen = small_net(), []
    first = profile_graph(graph, max_parts=1, repeats=1)
    again = profile_graph(graph, max_parts=1, repeats=1, known=first, progress=lambda done, total: seen.append(total))
    assert again == first
    assert seen == []
    more = profile_graph(graph, max_parts=2, repeats=1, known=first)
    assert first.entries.items() <= more.entries.items()
    assert len(more.entries) > len(first.entries)


def test_known_entries_of_another_device_are_refused() -> None:
    graph = small_net()
    first = profile_graph(graph, max_parts=1, repeats=1)
    with pytest.raises(ProfileError, match="cannot be extended"):
        profile_graph(graph, max_parts=1, repeats=1, threads=2, known=first)


def test_a_spent_budget_measures_nothing_more() -> None:
    assert profile_graph(small_net(), repeats=1, budget_s=0.0).entries == {}


def test_progress_ends_at_the_total() -> None:
    calls: list[tuple[int, int]] = []
    profile_graph(small_net(), max_parts=2, repeats=1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_a_graph_with_integers_and_windows_outside_is_measured() -> None:
    graph = OperatorGraph(
        name="ids",
        tensors=(
            tensor("ids", 4, 3, kind="input", dtype="int64"),
            tensor("table", 11, 6, kind="parameter"),
            tensor("e", 4, 3, 6),
            tensor("pair", 4, 6, 6),
            tensor("loss"),
        ),
        operators=(
            Operator(name="look", kind="embedding", pattern="n s, v d -> n s d", axes=axes(n=4, s=3, d=6, v=11),
                     inputs=("ids", "table"), outputs=("e",), attributes={"padding_idx": None}),
            Operator(name="join", kind="cat", pattern="n (h) d, n (h-3) d -> n h d", axes=axes(n=4, h=6, d=6),
                     inputs=("e", "e"), outputs=("pair",), attributes={"dim": 1}),
            Operator(name="sum", kind="sum", pattern="n h d -> ", axes=axes(n=4, h=6, d=6), inputs=("pair",),
                     outputs=("loss",), attributes={"dims": [0, 1, 2], "keepdim": False}),
        ),
        loss="loss",
    )  # fmt: skip
    assert len(profile_graph(graph, max_parts=3, repeats=1).entries) == count(plan(graph, 3))


def test_busy_neighbours_do_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks update, or select, at the same time, and share the memory."""
    told: list[str] = []
    switch = Neighbours.switch

    def watched(self: Neighbours, work: str) -> None:
        switch(self, work)  # waits until they do it
        told.append(work)

    monkeypatch.setattr(Neighbours, "switch", watched)
    profile = profile_graph(small_net(), max_parts=1, repeats=1, busy_neighbours=2)
    assert profile.busy_neighbours == 2
    assert len(profile.entries) == 4
    assert told[1:] == [*(f"{UPDATE}{name}" for name in OPTIMIZERS), *(f"{RECIPE}{kind}" for kind in KINDS), SWEEPS]


def test_a_neighbour_that_has_ended_is_told() -> None:
    with neighbours(small_net(), "as-is", "cpu", 1, 1, 1) as others, pytest.raises(ProfileError, match="neighbour"):
        for process in others._processes:
            process.kill()
            process.wait()
        others.switch(SWEEPS)


def test_threads_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    profile_graph(small_net(), repeats=1, budget_s=0.0, threads=1 if before > 1 else 2)
    assert torch.get_num_threads() == before


def test_updates_of_every_optimizer() -> None:
    entries = measure_updates(small_net(), Bench("cpu"), repeats=1)
    assert set(entries) == {"sgd", "momentum", "adam"}
    assert all(e.s_per_byte >= 0 and e.s_per_tensor >= 0 for e in entries.values())


def test_an_update_is_measured_of_as_many_tensors_as_a_graph_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host takes its time for each; only the largest are cut where all are too much."""
    graph = small_net()
    sizes = [prod(weight.shape) for weight in graph.of_kind("parameter")]
    monkeypatch.setattr(updates, "UPDATE_BYTES", 4 * sum(sizes))
    assert updates._weight_sizes(graph) == sizes
    monkeypatch.setattr(updates, "UPDATE_BYTES", 4 * (sum(sizes) - max(sizes) // 2))
    cut = updates._weight_sizes(graph)
    assert len(cut) == len(sizes) and 4 * sum(cut) <= updates.UPDATE_BYTES < 4 * (sum(cut) + len(cut))
    assert all(small == size or small == max(cut) for small, size in zip(cut, sizes, strict=True))


@pytest.mark.parametrize("option", ["threads", "max_parts", "repeats"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(ProfileError, match=rf"{option} is 0\. Give at least 1\."):
        profile_graph(small_net(), **{option: 0})


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"cannot profile device 'meta'\. Give 'cpu'"):
        profile_graph(small_net(), device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="no CUDA device"):
            profile_graph(small_net(), device="cuda")


def test_profile_of_the_profiler_is_a_file(tmp_path: Path) -> None:
    profile = profile_graph(small_net(), max_parts=1, repeats=1)
    path = tmp_path / "p.json"
    profile.save(path)
    assert Profile.load(path) == profile


# ---- work of recipes


def test_all_kinds_of_work_of_recipes_are_measured_and_kept(tmp_path: Path) -> None:
    rates = measure_recipe_work(Bench("cpu"))
    assert rates.keys() == set(kinds.KINDS)
    assert all(rate.s_per_byte >= 0.0 and rate.n == 2 for rate in rates.values())
    assert all(rates[kind].s_per_byte > 0.0 for kind in ("add", "select", "pack"))
    profile = Profile(device=profiler._device("cpu", 1), torch=torch.__version__, recipe_work=rates)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").recipe_work == rates


def test_a_rate_is_that_of_large_vectors_and_the_start_what_a_small_one_takes_beside_it() -> None:
    rate = recipe_work._rate([(100, 5e-6 + 1e-7), (10**6, 1e-3), (10**7, 3e-2)])
    assert rate.s_per_byte == pytest.approx(1e-9) and rate.start_s == pytest.approx(5e-6)
    assert rate.seconds(0) == 0.0 and rate.seconds(1000) == pytest.approx(6e-6)
    # Of 1000 bytes, in work on vectors of other lengths.
    assert rate.long_s_per_byte == pytest.approx(3e-9)
    middle = (SHORT_VECTOR + LONG_VECTOR) // 2
    times = [rate.seconds(1000, vector) for vector in (1, SHORT_VECTOR, middle, LONG_VECTOR, 10 * LONG_VECTOR)]
    assert times == pytest.approx([6e-6, 6e-6, 7e-6, 8e-6, 8e-6])


def test_files_in_the_first_format_count_attention_without_a_causal_mask_once(tmp_path: Path) -> None:
    device, work = {"kind": "cpu", "model": "old"}, {"flops": 100.0, "nbytes": 10.0}
    entry = {"dtype": "float32", "forward_s": 1e-3, "backward_s": 2e-3, "repeats": 3, "forward": work, "backward": work}
    key = 'attention b h q E, b h K E, b h K v -> b h q v | {"causal":CAUSAL} | f32 f32 f32 f32 | b=1'
    entries = {
        key.replace("CAUSAL", "true"): {"kind": "attention", **entry},
        key.replace("CAUSAL", "false"): {"kind": "attention", **entry},
        "linear b i, o i -> b o | f32 f32 f32 | b=1": {"kind": "linear", **entry},
    }
    old = {"format": "flexsearch.profile/1", "device": device, "torch": "2", "entries": entries}
    (tmp_path / "old.json").write_text(json.dumps(old))
    read = Profile.load(tmp_path / "old.json")
    assert read.format == "flexsearch.profile/2"
    flops = [(e.forward.flops, e.backward.flops) for e in read.entries.values()]
    assert flops == [(100.0, 100.0), (200.0, 200.0), (100.0, 100.0)]
    read.save(tmp_path / "new.json")
    assert Profile.load(tmp_path / "new.json") == read


def test_files_without_rates_of_recipes_are_read_and_extended(tmp_path: Path) -> None:
    device = {"kind": "cpu", "model": "old"}
    (tmp_path / "old.json").write_text(json.dumps({"format": "flexsearch.profile/1", "device": device, "torch": "2"}))
    old = Profile.load(tmp_path / "old.json")
    assert old.recipe_work == {}
    rates = {"copy": WorkRate(n=2, median=0.0, p90=0.0, s_per_byte=1e-9, start_s=0.0)}
    new = old.model_copy(update={"recipe_work": rates})
    assert old.extended(new).recipe_work == new.extended(old).recipe_work == rates


def test_pieces_of_mixed_precision_are_measured_as_plans_have_them() -> None:
    """A loss stays float32 and reads scores of half precision, which its kernel casts."""
    made = zoo.gpt2(2, seq=4, layers=1, hidden=8, heads=2, vocab=11, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets)
    profile = profile_graph(graph, max_parts=1, repeats=1, precision="bf16")
    half, one = with_precision(graph, "bf16"), Topology.load("ethernet-1g:1")
    costs, plain = Costs(half, one, profile), Costs(graph, one, profile)
    whole = [op.sizes for op in graph.operators]
    assert all(costs.is_measured(i, sizes, 0) for i, sizes in enumerate(whole))
    linear = next(i for i, op in enumerate(graph.operators) if op.kind == "linear")
    assert not plain.is_measured(linear, whole[linear], 0)


def test_batch_norm_by_all_samples_is_measured_as_one() -> None:
    """A rank then takes the statistics, and updates running ones, with the normalisation; else it does so after the
    statistics. The sizes of the update do not tell, so that it counts as nothing of its own."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3))
    graph = import_model(model, (torch.zeros(4, 2, 5, 5),), torch.sum)
    ran: dict[tuple[str, bool], int] = {}
    for case in [case for row in plan(graph, 2) for case in row]:
        op, costed = case.costed.op, case.costed
        if not op.kind.startswith("batch_"):
            continue
        split = any(case.extents[axis] < op.sizes[axis] for axis in ("n", "s0", "s1") if axis in op.sizes)
        operands = [
            torch.rand([b - a for a, b in box]) if k == 0 or tensor.kind != "activation" else torch.zeros(2, 3)
            for k, (tensor, box) in enumerate(zip(costed.inputs, case.piece.inputs, strict=True))
            if box is not None
        ]
        kernel = build_kernel(op, case.piece, case.shapes, KernelContext())
        with Operations() as operations:
            normalising(op, case.extents, kernel)(*operands)
        ran[op.kind, split] = operations.count("lerp")
    assert ran == {
        ("batch_statistics", False): 0,
        ("batch_statistics", True): 2,
        ("batch_norm", False): 2,
        ("batch_norm", True): 0,
        ("batch_norm_running", False): 0,
    }


class Operations(TorchDispatchMode):
    """Counts the calls of PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """How many calls of an operator there were."""
        return self.names.count(name)


class Counted(Clock):
    """Counts its marks."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks


def runs_of(graph: OperatorGraph, bench: Bench) -> list[Run]:
    """The whole operators of a graph."""
    return [Run(case, bench.numbers, Samples(case)) for case in plan(graph, 1)[0]]


def test_a_group_runs_without_anything_between_and_goes_back_one_after_the_other() -> None:
    """All forward tasks share their marks; autograd finishes with each piece before it takes the one before."""
    made = zoo.llama7b(batch=2, seq=8, layers=1, hidden=16, heads=2, ffn=32, vocab=50, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name="llama")
    runs, clock = runs_of(graph, Bench("cpu")), Counted()
    forward_tasks(runs, clock, halved=False)
    assert [run.ended for run in runs[:-1]] == [run.began for run in runs[1:]]
    assert clock.marks == len(runs) + 1
    backward_tasks(runs[::-1], half=False)
    back = [(run.entered, run.left) for run in runs[::-1] if run.entered is not None]
    assert len(back) > 10
    marks = [mark for pair in back for mark in pair]
    assert marks == sorted(marks)


def test_groups_hold_what_a_cache_holds_and_at_least_one_piece() -> None:
    runs = runs_of(small_net(), Bench("cpu"))
    case_of = attrgetter("case")
    sizes = [run.case.costed.forward(run.case.extents).nbytes for run in runs]
    assert [list(group) for group in grouped(runs, sum(sizes), case_of)] == [runs]
    assert [len(group) for group in grouped(runs, 0.0, case_of)] == [1] * len(runs)
    limit = max(a + b for a, b in pairwise(sizes))
    for group in grouped(runs, limit, case_of):
        assert len(group) == 1 or sum(run.case.costed.forward(run.case.extents).nbytes for run in group) <= limit


def test_hosts_of_devices_with_a_queue_have_times_of_their_own() -> None:
    """As on a GPU, but that this device computes at once."""
    bench, cases = Bench("cpu"), plan(small_net(), 1)[0]
    bench.queued = True
    entries = bench.measure(cases, 2)
    assert entries.keys() == {case.key for case in cases}
    assert all(entry.host_s is not None and entry.host_s[0] > 0.0 for entry in entries.values())
    bench.queued = False
    assert all(entry.host_s is None for entry in bench.measure(cases, 2).values())
