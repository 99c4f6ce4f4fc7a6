"""``flexsearch converge``: loss against simulated time, what is told of it, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import flexsearch
from flexsearch.errors import DatasetError, FileFormatError, ImportModelError, RecipeError, RuntimeFailure
from flexsearch.report.convergence import Convergence, Run, headline, remarks
from flexsearch.runtime.replicas import Dataset, Replicas, Training, load_dataset, load_model
from flexsearch.search.recipes import EXACT, combinations
from flexsearch.simulate.training import Workers
from flexsearch.sync import parse_recipe
from flexsearch.sync.record import Epoch
from flexsearch.topology import Topology
from tests.conftest import Cli

WORKERS = 4
QUICK = ("--step-time", 0.01, "--epochs", 1, "--batch", 2000, "-t", "ethernet-1g-4")


def blobs(samples: int = 256) -> Dataset:
    """Two classes that a line separates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    y = (x @ torch.tensor([1.0, -2.0, 0.5, 1.0, 0.0, 0.3]) > 0).long()
    return Dataset("blobs", x[64:], y[64:], x[:64], y[:64], 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def trained(*recipes: str, step_s: float | None = 0.01, epochs: int = 2, **options: object) -> Convergence:
    return flexsearch.converge(
        recipes, network(), blobs(), "ethernet-1g-4", loss=nn.functional.cross_entropy, epochs=epochs, batch=8,
        step_s=step_s, **options,  # type: ignore[arg-type]
    )  # fmt: skip


# ---- training


def test_data_parallelism_is_training_with_the_whole_batch() -> None:
    """The same numbers as one process that takes all workers' samples at once."""
    data, training, module = blobs(), Training(blobs(), 2, 8), network().double()
    data = Dataset("blobs", data.inputs.double(), data.targets, data.held_inputs.double(), data.held_targets, 2)
    training = Training(data, 2, 8)
    replicas = Replicas(module, nn.functional.cross_entropy, WORKERS)
    workers = Workers.timed(0.01, Topology.load("ethernet-1g-4"), WORKERS)
    result = training.run(parse_recipe("all-reduce:form=ring"), replicas, workers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for at in training.samples(WORKERS, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.inputs[at.flatten()]), data.targets[at.flatten()]).backward()
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.allclose(result.weights, weights, atol=1e-12, rtol=0)


def test_batched_replicas_and_one_after_the_other_give_the_same_gradients() -> None:
    data, loss, buffered = blobs(), nn.functional.cross_entropy, network().double()
    buffered.register_buffer("unused", torch.zeros(1))
    together, alone = Replicas(network().double(), loss, 3), Replicas(buffered, loss, 3)
    weights = together.initial.expand(3, -1) + torch.randn(3, together.sizes.n).double() / 10
    inputs, targets = data.inputs[:24].double().view(3, 8, 6), data.targets[:24].view(3, 8)
    assert torch.equal(together.initial, alone.initial)
    for a, b in zip(
        together.gradients(weights, inputs, targets, range(3)), alone.gradients(weights, inputs, targets, range(3)),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(a, b, atol=1e-14, rtol=0)


def test_replicas_have_statistics_of_their_own() -> None:
    """Batch normalisation sees a worker's samples, as under DDP; evaluation takes the mean of all statistics."""
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    replicas = Replicas(module, nn.functional.cross_entropy, 2)
    x = torch.stack([torch.zeros(8, 6), torch.ones(8, 6)]).double()
    weights = replicas.initial.expand(2, -1)
    replicas.gradients(weights, x, torch.zeros(2, 8).long(), range(2))
    means = [own["0.running_mean"] for own in replicas._buffers]
    assert torch.allclose(means[0], torch.zeros(6).double()) and torch.allclose(
        means[1], torch.full((6,), 0.1).double()
    )
    assert replicas.evaluate(weights[0], x[0], torch.zeros(8).long())[1] in (0.0, 1.0)


def test_every_recipe_learns_from_the_same_start(cli: Cli) -> None:
    result = trained(
        "all-reduce", "local-sgd:period=2", "gossip", "async+server", "stale:bound=1+server:shards=2",
        "diloco:period=3", "top-k:density=0.2", "qsgd", "16-bit", "powersgd:rank=1",
        "local-sgd:period=2+gossip+threshold:tau=0.001", epochs=4,
    )  # fmt: skip
    for run in result.runs:
        assert run.last.steps == 4 * 6 and run.last.accuracy > 0.85, run
        assert [e.epoch for e in run.epochs] == [1, 2, 3, 4]
        assert all(a.seconds < b.seconds and a.sent <= b.sent for a, b in pairwise(run.epochs))
    assert [run.lossy for run in result.runs][:2] == [False, True]
    assert result.runs[3].staleness is not None and result.runs[4].staleness.lead <= 1  # type: ignore[union-attr]


def test_runs_are_the_same_each_time() -> None:
    recipes = ("qsgd", "async+server+random-k:density=0.5", "gossip")
    assert trained(*recipes, jitter=0.5).data() == trained(*recipes, jitter=0.5).data()
    assert trained("gossip", jitter=0.5).data() != trained("gossip", jitter=0.5, seed=1).data()


def test_a_loss_that_is_no_number_is_an_error() -> None:
    with pytest.raises(RuntimeFailure, match="diverged"):
        trained("all-reduce", lr=3e38, epochs=3)


# ---- time


def test_a_slow_worker_holds_up_those_that_wait_for_it() -> None:
    even, slow = trained("all-reduce", "async+server"), trained("all-reduce", "async+server", slow={3: 5.0})
    assert slow.runs[0].last.seconds - even.runs[0].last.seconds == pytest.approx(12 * 0.04)
    assert slow.runs[1].last.seconds < slow.runs[0].last.seconds
    assert even.runs[0].last.seconds >= 12 * 0.01


def test_a_period_is_paid_once_in_so_many_steps() -> None:
    every, fourth = trained("all-reduce", "local-sgd:period=4").runs
    assert every.last.sent == 4 * fourth.last.sent
    assert every.last.communicated == pytest.approx(4 * fourth.last.communicated)


def test_computing_takes_what_the_simulator_says() -> None:
    result = trained("all-reduce", step_s=None, epochs=1)
    assert result.overlapped_s is not None and 0 < result.compute_s < result.overlapped_s
    assert result.runs[0].step_s > result.compute_s


def test_a_step_has_an_interval_of_what_it_computes_and_of_what_it_sends() -> None:
    result = trained("all-reduce", "async+server", "local-sgd:period=4", step_s=None, epochs=1)
    for run, told in zip(result.runs, result.data()["runs"], strict=True):
        step, last = run.step, run.last
        assert step is not None and step.seconds == run.step_s
        assert tuple(told["interval_s"]) == step.interval_s and step.interval_s[0] < run.step_s < step.interval_s[1]
        of_links = [share for source, share in step.shares.items() if source.name.startswith("links")]
        assert of_links == [last.communicated / last.steps]
        assert 0.0 < sum(step.shares.values()) - of_links[0] <= step.seconds - of_links[0] + 1e-9
    every, _, fourth = (run.step for run in result.runs)
    assert every is not None and fourth is not None and every.half > fourth.half
    assert str(result.table()).count(" ± ") == 3


def test_time_to_a_loss_lies_between_epochs() -> None:
    epochs = tuple(
        Epoch(k + 1, k + 1, 1.0, loss, 0.5, 10.0 * (k + 1), 1.0, 1, 1) for k, loss in enumerate((3, 2, 2.5, 1))
    )
    run = Run("a", False, epochs)
    assert [run.time_to(x) for x in (5.0, 3.0, 2.25, 1.75, 0.5)] == [10.0, 10.0, 17.5, 35.0, None]
    slow = Run("b", True, epochs[:2])
    result = Convergence((run, slow), "m", "d", "t", 2, 8, 10, 0.1)
    assert result.target == 2 and result.data()["runs"][1]["time_to_target_s"] == 20.0


# ---- the first at a target

ALLOWED = ("local-sgd", "top-k:density=0.2", "gossip:what=weights", "async")


def raced(**options: object) -> Convergence:
    return trained(allow=ALLOWED, target_accuracy=0.9, epochs=6, **options)


def test_the_choice_is_never_slower_than_a_single_recipe() -> None:
    """Each trained to the end by itself: what the race cut short could not have been first."""
    race, singles = raced(), [*EXACT, *combinations(ALLOWED)[0]]
    singles.remove("all-reduce:form=hierarchical")  # it needs hosts with several workers
    assert race.first is not None and race.left_out == 1
    alone = trained(*singles, race.first.name, target_accuracy=0.9, epochs=6)
    times = {run.name: t for run in alone.runs if (t := alone.time_of(run)) is not None}
    assert race.time_of(race.first) == times[race.first.name] == min(times.values())
    assert set(singles) <= {run.name for run in race.runs}


def test_training_ends_when_a_recipe_has_reached_the_target_or_cannot_be_the_first() -> None:
    race = raced()
    begun, *rest = race.runs
    assert begun.name == "all-reduce" and not begun.ended and len(begun.epochs) == 6
    best = race.time_of(begun) or math.inf
    for run in rest:
        for k in range(1, len(run.epochs)):
            before = replace(run, epochs=run.epochs[:k])
            assert race.time_of(before) is None and before.last.seconds < best
        reached = race.time_of(run)
        assert run.ended and (reached is not None or run.last.seconds >= best or len(run.epochs) == 6)
        best = min(best, reached or math.inf)


def test_combinations_are_tried_with_the_best_of_fewer_levels() -> None:
    race, rows = raced(), combinations(ALLOWED)
    names = [run.name for run in race.runs]
    pairs = [name for name in names if name in rows[1]]
    ranked = sorted(rows[0], key=lambda name: race.time_of(race.runs[names.index(name)]) or math.inf)
    assert pairs and all(any(set(one.split("+")) < set(pair.split("+")) for one in ranked[:2]) for pair in pairs)
    assert len(pairs) < len(rows[1]) and race.raced == len(names) - 1


def test_recipes_that_so_many_workers_cannot_follow_are_left_out() -> None:
    race = flexsearch.converge(
        (), network(), blobs(), "ethernet-1g-4", loss=nn.functional.cross_entropy, workers=3, epochs=1, batch=8,
        step_s=0.01, allow=["16-bit"],
    )  # fmt: skip
    assert race.left_out == 3  # halving-doubling, hierarchical, and four shards on three workers
    assert race.target == race.runs[0].best() and race.first is not None


def test_a_target_that_nothing_reaches_has_no_first() -> None:
    race = trained(allow=["16-bit"], target_loss=1e-9, epochs=1)
    assert race.first is None and any("reaches loss 0.000" in remark for remark in remarks(race))


def test_the_command_names_the_choice(cli: Cli) -> None:
    ran = cli("converge", "--allow", "local-sgd", "--target-accuracy", 0.1, *QUICK, "--json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    times = {run["recipe"]: run["time_to_target_s"] for run in data["runs"]}
    assert times[data["first"]] == min(times.values()) and data["measure"] == "accuracy"
    assert data["raced"] == len(data["runs"]) - 1
    told = cli("converge", "--allow", "local-sgd", "--target-accuracy", 0.1, *QUICK)
    assert told.code == 0 and f"{data['first']} is the first at accuracy 10.0 %" in " ".join(told.out.split())


# ---- data and models


def test_digits_come_from_scikit_learn_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DatasetError, match="pip install scikit-learn"):
        load_dataset("digits")
    fake = ModuleType("sklearn.datasets")
    images = np.arange(50 * 64).reshape(50, 64) % 17
    fake.load_digits = lambda: SimpleNamespace(data=images.astype(float), target=np.arange(50) % 10)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", fake)
    data = load_dataset("digits")
    assert (data.inputs.shape, data.held_inputs.shape) == ((40, 1, 8, 8), (10, 1, 8, 8))
    assert float(data.inputs.max()) == 1.0 and sorted(data.targets.unique().tolist()) == list(range(10))
    for name in ("mlp", "cnn"):
        model, _ = load_model(name, data)
        assert model(data.inputs[:3]).shape == (3, 10)


def test_cifar10_is_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="binary version"):
        load_dataset(f"cifar10:{tmp_path}")
    record = np.random.default_rng(0).integers(0, 256, (6, 3073)).astype(np.uint8)
    record[:, 0] = np.arange(6)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(record.tobytes())
    data = load_dataset(f"cifar10:{tmp_path}")
    assert data.inputs.shape == (6, 3, 32, 32) and data.targets.tolist() == list(range(6))
    assert data.inputs[2, 1, 0, 3].item() == pytest.approx(float(record[2, 1 + 1024 + 3]) / 127.5 - 1)
    assert load_model("cnn", data)[0](data.inputs).shape == (6, 10)
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(FileFormatError, match="records"):
        load_dataset(f"cifar10:{tmp_path}")


def test_text_is_that_of_the_library_and_always_the_same() -> None:
    data = load_dataset("text")
    assert data.inputs.shape == (60_000, 16) and data.is_text and int(data.inputs.max()) < 128
    assert torch.equal(data.inputs, load_dataset("text").inputs)
    with pytest.raises(ImportModelError, match="cnn is for images"):
        load_model("cnn", data)


# ---- the command


def test_the_command_prints_one_json_object(cli: Cli) -> None:
    ran = cli("converge", "all-reduce", "local-sgd:period=4+gossip", *QUICK, "--json", "-o", "c.svg")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert [run["recipe"] for run in data["runs"]] == ["all-reduce", "local-sgd:period=4+gossip"]
    assert data["workers"] == 4 and data["parameters"] == 51_456 and data["compute_s"] == pytest.approx(0.01)
    assert data["runs"][0]["epochs"][0]["sent"] == 7 * 2 * 3 * 4 * data["parameters"]
    assert "above T^(1/4)" in data["runs"][1]["notes"][0]
    assert Path("c.svg").read_text().startswith("<?xml")


def test_the_table_fits_into_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained("all-reduce", "local-sgd:period=16+gossip+threshold:tau=0.001+warm-up:steps=3", "stale+server")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.table())
    console.print(result.epochs_table())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80 and any("speed-up" in line for line in lines)
    assert headline(result).startswith("Sequential (74 parameters) on blobs, 4 workers of ethernet-1g, batch 8")
    assert any("updates old" in remark for remark in remarks(result))
    assert len(result.figure().axes) == 2


def test_a_strategy_is_timed_by_the_simulator(cli: Cli) -> None:
    Path("own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Embedding(128, 4), nn.Flatten(), nn.Linear(64, 128))\n"
        "    x = torch.zeros(4 * 2000, 16, dtype=torch.int64)\n"
        "    return model, (x,), x[:, 0], nn.functional.cross_entropy\n"
    )
    assert cli("import", "own.py:build", "-o", "g.json").code == 0
    saved = cli("compare", "g.json", "-t", "ethernet-1g-4", "--save", "data-parallel", "-o", "s.json", "--json")
    assert saved.code == 0, saved.err
    told = json.loads(cli("simulate", "g.json", "-t", "ethernet-1g-4", "-s", "s.json", "--json").out)
    ran = cli("converge", "s.json", "all-reduce", "--model", "own.py:build", *QUICK[2:], "--json")
    assert ran.code == 0, ran.err
    plan, exact = json.loads(ran.out)["runs"]
    assert plan["step_s"] == pytest.approx(told["iteration_s"]) and not plan["lossy"]
    assert plan["interval_s"] == told["interval_s"]
    assert [e["loss"] for e in plan["epochs"]] == [e["loss"] for e in exact["epochs"]]
    refused = cli("converge", "s.json", *QUICK[2:])
    assert refused.code == 2 and "s.json" in refused.err


WRONG = {
    ("local-sgd:period=-3",): "period of local-sgd is -3",
    ("top-k:k=999999",): "51456 elements",
    ("server:on=devices",): "--workers 3",
    ("async",): "Write async+server",
    ("gossip+ring",): "one part for each level",
    ("matrix:file=k.json",): "not doubly stochastic",
    ("all-reduce", "-t", "ethernet-1g-1"): "one device",
    ("all-reduce", "--workers", "1"): "from 2 to 4",
    ("all-reduce", "--workers", "9"): "from 2 to 4",
    ("all-reduce", "--epochs", "0"): "number of epochs",
    ("all-reduce", "--batch", "20000"): "at most 15000",
    ("all-reduce", "--lr", "-1"): "learning rate",
    ("all-reduce", "--slow", "3"): "WORKER:FACTOR",
    ("all-reduce", "--slow", "7:2"): "slow worker",
    ("all-reduce", "--jitter", "-1"): "jitter",
    ("all-reduce", "--step-time", "1e7"): "--step-time",
    ("async+server", "--slow", "1:1e15"): "more than 24 days",
    ("all-reduce", "--dataset", "mnist"): "digits, text",
    ("all-reduce", "--model", "vit"): "mlp, cnn",
    ("all-reduce", "-o", "c.bmp"): "cannot be drawn",
    ("gone.json",): "gone.json",
    (): "--allow",
    ("--allow", "local-sdg"): "local-sgd",
    ("--allow", "all", "--target-loss", "2", "--target-accuracy", "0.4"): "two targets",
    ("gossip", "--target-accuracy", "40"): "target accuracy",
}  # fmt: skip


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_mistakes_end_with_2_and_the_remedy(cli: Cli, command: tuple[str, ...]) -> None:
    Path("k.json").write_text("[[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]")
    usual = [value for option, value in zip(QUICK[::2], QUICK[1::2], strict=True) if option not in command]
    options = [o for pair in zip([o for o in QUICK[::2] if o not in command], usual, strict=True) for o in pair]
    ran = cli("converge", *command, *options)
    assert ran.code == 2, (ran.out, ran.err)
    assert WRONG[command] in " ".join(ran.err.replace("│", " ").split()) and "Traceback" not in ran.err


def test_recipes_of_one_worker_are_refused() -> None:
    with pytest.raises(RecipeError, match="one device"):
        flexsearch.converge(["gossip"], topology=Topology.load("ethernet-1g-1"))
