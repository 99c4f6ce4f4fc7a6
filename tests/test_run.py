"""Runs: local ranks start and end together, training runs report, timelines name what took how long."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from flexsearch.children import module
from flexsearch.cost import Learned, Profile, ProfileDevice
from flexsearch.errors import FileFormatError, RuntimeFailure
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.runtime.faults import Failures, lost
from flexsearch.runtime.instructions import Backward
from flexsearch.runtime.launch import call, free_port, launch
from flexsearch.runtime.parallel import parallelize
from flexsearch.runtime.timeline import clock_offset, compare
from flexsearch.runtime.train import WARM_UP, _filled, train
from flexsearch.simulate import simulate
from flexsearch.simulate.staged import step_of_strategy
from flexsearch.strategy import Measurement, Options, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from tests.conftest import Cli
from tests.ranks import context, pool

SPEC = "flexsearch.zoo:mlp"
SIZES = {"batch": 6, "features": 12, "width": 16, "classes": 4}


def _strategy(name: str = "data-parallel", ranks: int = 2, optimizer: Any = "momentum") -> Strategy:
    model, inputs, targets, loss = load_callable(SPEC, **SIZES)
    graph = import_model(model, inputs, loss, targets=targets)
    return baseline(name, graph, Topology.load(f"ethernet-1g:{ranks}"), Options(optimizer=optimizer))


def _file(strategy: Strategy) -> str:
    return strategy.to_file().model_dump_json()


def _train(file: str, **arguments: Any) -> tuple[dict[str, Any], list[int], list[int]]:
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    done = train(strategy, SPEC, arguments=SIZES, **arguments)
    return done.summary(), sorted(done.timeline.spans if done.timeline else ()), list(done.lowered.tasks.kind)


# ---- training runs


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_reports_losses_of_one_device_and_times(optimizer: str) -> None:
    strategy = _strategy(optimizer=optimizer)
    reports = [summary for summary, _, _ in pool(2).run(partial(_train, steps=4, rate=0.1), _file(strategy))]
    assert reports[0] == reports[1], "all ranks tell the same"
    model, inputs, targets, _ = load_callable(SPEC, **SIZES)
    plain = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam)(model.parameters(), lr=0.1)  # type: ignore[operator]
    for step in reports[0]["steps"]:
        plain.zero_grad()
        loss = F.cross_entropy(model(*inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        plain.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert step["iteration_s"] > 0
    times = sorted(step["iteration_s"] for step in reports[0]["steps"][WARM_UP:])
    assert times[0] <= reports[0]["median_iteration_s"] <= times[-1]
    assert reports[0]["predicted_iteration_s"] > 0


def _recipe(text: str) -> str:
    """Data parallelism in which all weights follow a recipe."""
    file = _strategy().to_file().model_dump(mode="json")
    file["synchronisation"]["recipes"] = [{"weights": ["*"], "recipe": text}]
    return json.dumps(file)


def test_plans_with_recipes_are_run_predicted_and_traced() -> None:
    reports = pool(2).run(partial(_train, steps=4, trace=True), _recipe("local-sgd:period=2+top-k:density=0.5"))
    for summary, spans, _ in reports:
        assert summary["predicted_iteration_s"] > 0 and summary["traced_iteration_s"] > 0 and spans
        assert summary["errors"] and summary["memory"]


def test_workers_that_go_by_themselves_are_run_without_waiting_and_not_traced() -> None:
    for summary, _, _ in pool(2).run(partial(_train, steps=4), _recipe("async+server")):
        assert len(summary["steps"]) == 4 and summary["predicted_iteration_s"] > 0
    for refusal in pool(2).run(_untraced, _recipe("async+server")):
        assert "workers do not wait for each other" in refusal


def _untraced(file: str) -> str:
    with pytest.raises(RuntimeFailure) as refusal:
        _train(file, trace=True)
    return str(refusal.value)


@pytest.mark.parametrize("name", ["data-parallel", "fsdp", "megatron"])
def test_a_trace_has_a_span_for_every_task(name: str) -> None:
    summary, spans, kinds = pool(2).run(partial(_train, steps=1, trace=True), _file(_strategy(name)))[0]
    missing = set(range(len(kinds))) - set(spans)
    assert not missing, f"{len(missing)} of {len(kinds)} tasks have no measured time"
    rows = summary["errors"]
    assert sum(row["tasks"] for row in rows) == len(kinds)
    sizes = [abs(row["difference_s"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert {"forward", "backward", "update"} <= {row["kind"] for row in rows}


class Keywords(torch.nn.Module):
    """Wants its inputs by name and returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 1)

    def forward(self, *, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.fc(x) * scale, x[:, :1])


def _keywords() -> Loaded:
    torch.manual_seed(0)
    return Loaded(Keywords(), {"x": torch.randn(6, 3), "scale": torch.randn(6, 1)}, None, None)


def _train_keywords(file: str) -> list[float]:
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    return [step.loss for step in train(strategy, _keywords(), steps=2, rate=0.1).steps]


def test_inputs_by_name_reach_the_model_as_they_did_at_import() -> None:
    model, inputs, _, _ = _keywords()
    strategy = baseline("data-parallel", import_model(model, inputs), Topology.load("ethernet-1g:2"))
    first, second = pool(2).run(_train_keywords, _file(strategy))
    assert first == second and first[0] == pytest.approx(model(**inputs).item(), rel=1e-5)


class Chosen(torch.nn.Module):
    """Batch normalisation, and an operator outside the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.norm(self.linear(x)), 1).square().mean()


def _chosen() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 6)


def _train_chosen(file: str) -> float:
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    return parallelize(Chosen(), strategy, optimizer=partial(torch.optim.SGD, lr=0.1)).step(_chosen()).item()


def test_what_was_chosen_at_import_is_in_the_strategy_and_chosen_again() -> None:
    graph = import_model(Chosen(), _chosen(), opaque=True, batch_norm_groups=2)
    strategy = baseline("data-parallel", graph, Topology.load("ethernet-1g:2"))
    assert strategy.to_file().graph.tracing == graph.tracing
    parts = torch.stack([Chosen()(part) for part in _chosen().chunk(2)]).mean().item()
    assert pool(2).run(_train_chosen, _file(strategy)) == pytest.approx([parts] * 2, rel=1e-5)
    assert Chosen()(_chosen()).item() != pytest.approx(parts, rel=1e-3)


def test_a_batch_without_data_is_filled_alike_everywhere() -> None:
    shapes = {"x": torch.empty(2, 3, device="meta"), "y": [torch.empty(4, dtype=torch.int64, device="meta"), 5]}
    one, two = (_filled(shapes, torch.Generator().manual_seed(1)) for _ in range(2))
    assert one["x"].shape == (2, 3) and torch.equal(one["x"], two["x"])
    assert torch.equal(one["y"][0], two["y"][0]) and one["y"][0].dtype == torch.int64 and one["y"][1] == 5


def _timeline(file: str) -> tuple[list[str], float]:
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    done = train(strategy, SPEC, arguments=SIZES, steps=1, trace=True)
    assert done.timeline is not None
    tasks, spans, wrong = done.lowered.tasks, done.timeline.spans, []
    for task, (start, end) in spans.items():
        if not 0 <= start <= end <= 10:
            wrong.append(f"task {task}: {start} to {end}")
        # Between tasks of one device order holds exactly: it is one thread with one clock.
        for before in tasks.dependencies[task]:
            if tasks.device[before] == tasks.device[task] >= 0 and spans[before][1] > end:
                wrong.append(f"task {task} ends before {before}, which it follows")
    simulation = simulate(done.lowered)
    exact = done.timeline.__class__({t: (float(simulation.start[t]), float(simulation.end[t])) for t in spans},
                                    frozenset(), simulation.makespan_s)  # fmt: skip
    return wrong, sum(abs(row.difference_s) for row in compare(done.lowered, simulation, exact))


def test_spans_lie_in_the_step_and_a_perfect_prediction_has_no_error() -> None:
    for wrong, error in pool(2).run(_timeline, _file(_strategy())):
        assert wrong == [] and error == 0.0


def test_clocks_of_one_machine_agree() -> None:
    for asked, known in pool(2).run(_clocks):
        assert known == 0.0 and math.isfinite(asked) and abs(asked) < 1.0


def _clocks() -> tuple[float, float]:
    return clock_offset(ping=True), clock_offset()


def test_no_steps_is_a_mistake() -> None:
    with pytest.raises(RuntimeFailure, match="0 steps"):
        train(_strategy(), SPEC, steps=0)


# ---- local ranks


def _script(folder: Path, text: str) -> list[str]:
    (folder / "ranks.py").write_text(text)
    return [str(folder / "ranks.py")]


def test_ranks_know_who_they_are(tmp_path: Path) -> None:
    text = "import os, sys; open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w').write("
    text += "' '.join(os.environ[k] for k in ('WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'OMP_NUM_THREADS', 'X')) + "
    text += "f' {len(os.sched_getaffinity(0))}')"
    launch([*_script(tmp_path, text), str(tmp_path)], 3, env={"X": "y"}, pin=True)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert said == [f"3 {rank} 127.0.0.1 {threads} y 1" for rank in range(3)]


def test_a_failing_rank_ends_the_others_and_is_quoted(tmp_path: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise SystemExit('no such thing')\ntime.sleep(600)"
    began = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"rank 1 ended with exit code 1(.|\n)*no such thing"):
        launch(_script(tmp_path, text), 3, grace_s=0.2)
    assert time.monotonic() - began < 300


def test_others_than_the_first_may_fail_where_that_is_tolerated(tmp_path: Path) -> None:
    script = _script(tmp_path, "import os, sys, time\ntime.sleep(0.5)\nsys.exit(int(os.environ['RANK']))")
    assert launch(script, 2, tolerate=True) is None
    with pytest.raises(RuntimeFailure, match="rank 1 ended with exit code 1"):
        launch(script, 2)


def test_a_killed_rank_is_named_even_if_others_fail_after_it(tmp_path: Path) -> None:
    text = "import os, signal, sys\nif os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(3)"
    with pytest.raises(RuntimeFailure, match="rank 2 was killed by signal 9"):
        launch(_script(tmp_path, text), 3)


def test_ranks_that_do_not_end_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"did not end in 0\.5 s"):
        launch(_script(tmp_path, "import time; time.sleep(600)"), 2, timeout_s=0.5)


def test_no_ranks_is_a_mistake() -> None:
    with pytest.raises(RuntimeFailure, match="cannot start 0 ranks"):
        launch([], 0)


def test_call_gives_the_result_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers.py").write_text("import os\ndef answer(x): return {'x': x, 'rank': os.environ.get('RANK')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call("answers:answer", {"x": [1]}, 2) == {"x": [1], "rank": "0"}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("answers:answer", {"x": 2}, 2) == {"x": 2, "rank": "1"}


# ---- a rank is lost in the middle of a step


def _run_out_of_memory(action: Callable[[], None]) -> None:
    """An action for which the system refuses memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, hard))
    workspace = torch.empty(2**30, dtype=torch.uint8)
    action()
    del workspace


def _lose(strategy: str, how: str, timeout_s: float = 90.0) -> str:
    """A rank that is lost in the middle of its second step, if it is rank 1; else what it is told of that."""
    model, inputs, targets, loss = load_callable(SPEC, **SIZES)
    make = partial(torch.optim.SGD, lr=0.1)
    parallel = parallelize(model, Strategy.load(strategy), loss=loss, optimizer=make, timeout_s=timeout_s)
    parallel.step(inputs, targets)
    if os.environ["RANK"] == "1" and how == "misfeed":
        with pytest.raises(RuntimeFailure, match="must be float32 of shape"):
            parallel.step((inputs[0][:-1],), targets)
        time.sleep(600)
    elif os.environ["RANK"] == "1":
        ends: dict[str, Callable[[Callable[[], None]], None]] = {
            "die": lambda _: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda _: time.sleep(600),
            "memory": _run_out_of_memory,
        }  # fmt: skip
        parallel.engine.around = lambda what, action: ends[how](action) if isinstance(what, Backward) else action()
    if os.environ["RANK"] == "1" and how == "memory":
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            parallel.step(inputs, targets)
        with pytest.raises(RuntimeFailure, match=r"the step cannot go on after a failure: .*can't allocate memory"):
            parallel.step(inputs, targets)
        time.sleep(600)
    with pytest.raises(RuntimeFailure) as caught:
        parallel.step(inputs, targets)
    with pytest.raises(RuntimeFailure, match="the step cannot go on after a failure"):
        parallel.step(inputs, targets)
    return str(caught.value)


def _lost(rank: int, port: int, strategy: str, how: str, timeout_s: float, answer: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    lose = _lose_in_a_loop if how.startswith("loop ") else partial(_lose, timeout_s=timeout_s)
    answer.send(lose(strategy, how.removeprefix("loop ")))


def _lose_in_a_loop(strategy: str, how: str) -> str:
    """A rank that is lost between a step and the next, if it is rank 1; else what clipping says to that."""
    model, inputs, targets, loss = load_callable(SPEC, **SIZES)
    step = parallelize(model, Strategy.load(strategy), loss=loss)
    step((inputs, targets))
    if os.environ["RANK"] == "1":
        if how == "raise":  # as the interpreter does with what nobody catches; multiprocessing has another way
            sys.excepthook(ValueError, ValueError("a mistake in the loop"), None)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeFailure) as caught:
        step.clip_grad_norm_(1.0)
    return str(caught.value)


LOST = "with ranks [1] failed: one of them has died, hangs or cannot be reached"


@pytest.mark.parametrize(
    ("how", "timeout_s", "reason"),
    [
        ("die", 90.0, LOST), ("hang", 4.0, LOST), ("misfeed", 4.0, "rank 1 failed: RuntimeFailure: input must be"),
        ("loop die", 90.0, f"the norm of the gradient {LOST}"),
        ("loop raise", 90.0, "rank 1 failed: ValueError: a mistake in the loop"),
        ("memory", 4.0, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes"),
    ],
)  # fmt: skip
def test_the_others_are_told_of_a_rank_lost_in_mid_step(
    tmp_path: Path, how: str, timeout_s: float, reason: str
) -> None:
    _strategy().save(tmp_path / "strategy.json")
    port, (ours, theirs) = free_port(), context.Pipe()
    ranks = [
        context.Process(target=_lost, args=(rank, port, str(tmp_path / "strategy.json"), how, timeout_s, theirs))
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        assert ours.poll(60), "rank 0 hangs with rank 1 lost"
        assert reason in ours.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _told() -> str:
    """What the second rank says when the first one has seen another die."""
    failures = Failures(dist.get_rank(), "told")
    if dist.get_rank() == 1:
        dist.barrier()
    with pytest.raises(RuntimeFailure) as caught, failures.watch():
        raise lost("all_reduce", [1, 2] if dist.get_rank() == 0 else [0, 2], RuntimeError("closed"))
    if dist.get_rank() == 0:
        dist.barrier()
    return caught.value.message


def test_a_rank_that_has_seen_another_die_is_not_said_to_have_failed() -> None:
    assert set(pool(2).run(_told)) == {f"rank 0: all_reduce {LOST.replace('[1]', '[1, 2]')} (closed)"}


def test_a_rank_killed_in_mid_step_ends_the_run_with_a_message(tmp_path: Path) -> None:
    _strategy().save(tmp_path / "strategy.json")
    arguments = {"strategy": str(tmp_path / "strategy.json"), "how": "die"}
    began = time.monotonic()
    with pytest.raises(RuntimeFailure, match="rank 1 was killed by signal 9"):
        call("tests.test_run:_lose", arguments, 2)
    assert time.monotonic() - began < 300, "long before anybody gives up waiting"


def test_the_wrong_number_of_ranks_is_refused_with_a_reason() -> None:
    for reason in pool(2).run(_refused, _file(_strategy(ranks=3))):
        assert "2 processes were started, but the strategy is for topology 'ethernet-1g:3' with 3 devices" in reason


def _refused(file: str) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        _train(file)
    return str(caught.value)


def test_a_mistake_of_the_user_ends_a_called_run_with_its_message_alone(tmp_path: Path) -> None:
    arguments = {"strategy": str(tmp_path / "none.json"), "model": SPEC}
    with pytest.raises(FileFormatError, match=r"^cannot read strategy file"):
        call("tests.test_run:_train_as_told", arguments, 1)


def _train_as_told(**arguments: Any) -> dict[str, Any]:
    return train(**arguments).summary()


# ---- verification


def test_verify_takes_the_plan_that_is_fastest_as_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the prediction says: here the last of the plans is said to be the fastest."""

    def measured(target: str, arguments: dict[str, Any], count: int) -> list[float]:
        assert count == 2 and all(Strategy.load(plan).is_plain for plan in arguments["plans"])
        return [1.0 / (1 + number) for number in range(len(arguments["plans"]))]

    monkeypatch.setattr("flexsearch.runtime.launch.call", measured)
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "300", "--verify", "2", "--verify-steps", "3", "--json")
    assert ran.code == 0, ran.err
    rows, strategy = ran.json["verified"], Strategy.load("strategy.json")
    assert {row["name"] for row in rows} > {"data-parallel", "single"} and len({row["predicted_s"] for row in rows}) > 3
    assert [row["measured_s"] for row in rows] == sorted(row["measured_s"] for row in rows)
    assert strategy.measurement == Measurement(iteration_s=rows[0]["measured_s"], steps=3, ranks=2)
    assert ran.json["plan"] == rows[0]["name"] and ran.json["iteration_s"] == rows[0]["predicted_s"]
    assert strategy.prediction is not None and strategy.prediction.iteration_s == rows[0]["predicted_s"]


def test_the_command_that_runs_a_plan_names_the_model_that_was_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flexsearch.runtime.launch.call", lambda target, arguments, count: [1.0 for _ in arguments.get("plans", ())]
    )
    OperatorGraph.load("lenet").save("mine.json")
    given = ("--model", SPEC, *(x for key, value in SIZES.items() for x in ("--set", f"{key}={value}")))
    ran = cli("optimize", "mine.json", "-t", "ethernet-1g-2", "-b", "50", "--verify", "1", *given)
    assert ran.code == 0, ran.err
    options = " ".join(f"--{key} {v}" if key == "batch" else f"--set {key}={v}" for key, v in SIZES.items())
    assert f"flexsearch run -n 2 strategy.json --model {SPEC} {options}\n" in ran.out
    assert "--model MODULE:CALLABLE" in cli("optimize", "mine.json", "-t", "ethernet-1g-2", "-b", "50").out


def _measured(plans: list[str]) -> tuple[list[float], int]:
    """Iteration times of plans on this rank, and how often the model was traced."""
    from flexsearch.runtime import parallel, verify

    traced, original = [], parallel.import_with_constants

    def counted(*arguments: Any, **options: Any) -> Any:
        traced.append(1)
        return original(*arguments, **options)

    parallel.import_with_constants = counted
    try:
        return verify.measured(plans, "ethernet-1g:2", SPEC, SIZES, 2, 60.0), len(traced)
    finally:
        parallel.import_with_constants = original


def test_all_plans_that_are_measured_share_one_trace(here: Path) -> None:
    for name in ("single", "data-parallel", "megatron"):
        _strategy(name).save(here / name)
    for times, traced in pool(2).run(_measured, [str(here / name) for name in ("single", "data-parallel", "megatron")]):
        assert len(times) == 3 and min(times) > 0.0 and traced == 1


def test_under_torchrun_the_first_rank_searches_and_all_measure(here: Path) -> None:
    command = ("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "50", "--verify", "1", "--verify-steps", "1", "--json")
    launch(module("flexsearch.cli", *command), 2, timeout_s=200.0)
    done = Strategy.load("strategy.json").measurement
    assert done is not None and done.steps == 1 and done.ranks == 2 and done.iteration_s > 0.0


def _taking(truth: Learned, name: str) -> Callable[..., list[float]]:
    """In place of ranks: plans take what is simulated where ``truth`` holds."""
    profile = Profile(device=ProfileDevice(kind="cpu", model="one server core"), torch="2", learned=truth)

    def measured(target: str, arguments: dict[str, Any], count: int) -> list[float]:
        graph = OperatorGraph.load(name)
        return [step_of_strategy(graph, Strategy.load(plan), profile).makespan_s for plan in arguments["plans"]]

    return measured


def test_a_profile_learns_from_what_was_verified(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsearch.runtime.launch.call", _taking(Learned(compute=1.5), "mlp"))
    two = Topology.load("ethernet-1g-2")
    one = tuple(device.model_copy(update={"host": "here"}) for device in two.devices)
    edited(two, name="here", devices=one).save("here.json")
    command = ("optimize", "mlp", "-t", "here.json", "-b", "50", "--verify", "2", "--profile", "p.json")
    first = cli(*command, "--json")
    assert first.code == 0, first.err
    assert first.json["learned"]["changed"] == ["compute"] and first.json["learned"]["profile"] == "p.json"
    learned = Profile.load("p.json").learned
    assert learned is not None and learned.compute == pytest.approx(1.5, rel=0.01)
    assert learned.model_dump(mode="json") == first.json["learned"]["costs"]
    written = Path("p.json").read_bytes()
    second = cli(*command, "--json")
    for row in second.json["verified"]:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.01)
    assert second.json["learned"]["changed"] == [] and Path("p.json").read_bytes() == written
    monkeypatch.setattr("flexsearch.runtime.launch.call", _taking(Learned(compute=3.0), "mlp"))
    words = " ".join(cli(*command).out.split())
    said = re.search(r"p\.json learned from \d+ plans: computing takes (\S+)x what the profile says\. Median", words)
    assert said is not None and float(said[1]) == pytest.approx(2.25, rel=0.1), words
    assert "the topology's figures, corrected by measured steps" in words


def test_without_its_network_a_cluster_teaches_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsearch.runtime.launch.call", _taking(Learned(compute=1.5), "lenet"))
    command = ("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "50", "--profile", "p.json")
    assert cli(*command).code == 2  # there is no such profile
    words = " ".join(cli(*command, "--verify", "1").out.split())
    assert "p.json learned nothing: the processes ran without the network of ethernet-1g:2." in words
    assert not Path("p.json").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("flexsearch.zoo:nothing", "has no 'nothing'"),
        ("flexsearch.zoo:mlp", "gives another one"),
        ("no_such:build", "cannot import"),
    ],
)
def test_a_wrong_model_is_noticed_before_the_search(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.setattr("flexsearch.cli.optimize._optimize", lambda *asked: pytest.fail("it searched"))
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "50", "--verify", "1", "--model", model)
    assert ran.code == 2 and says in " ".join(ran.err.split()), ran.err
    assert not Path("strategy.json").exists()


def test_a_failed_verification_says_what_the_output_has(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(target: str, arguments: dict[str, Any], count: int) -> list[float]:
        raise RuntimeFailure("rank 1 ended", "Look there.")

    monkeypatch.setattr("flexsearch.runtime.launch.call", failing)
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "50", "--verify", "1")
    assert ran.code == 2
    said = " ".join(ran.err.split())
    assert "rank 1 ended. Look there. strategy.json has the best plan as predicted; none was measured." in said
    assert Strategy.load("strategy.json").measurement is None


def test_verify_needs_the_model(cli: Cli) -> None:
    OperatorGraph.load("lenet").save("mine.json")
    ran = cli("optimize", "mine.json", "-t", "ethernet-1g-2", "-b", "50", "--verify", "1")
    assert ran.code == 2 and "Give --model" in ran.err and not Path("strategy.json").exists()
    assert "--verify K" in cli("optimize", "lenet", "--model", SPEC).err
