"""A table of command and misuse: each command answers, or says what is wrong, and harms nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.commands import OPTIMIZE, SIMULATE, clean, plan, run
from tests.conftest import Cli

WRONG: dict[tuple[str, ...], str] = {
    ("optimize", "--frobnicate"): "usage_error",
    ("frobnicate",): "usage_error",
    (): "usage_error",
    ("optimize", "lenet", "--seed", "lucky"): "usage_error",
    ("simulate", "lenet"): "usage_error",
    ("optimize", "alexnett"): "file_format_error",
    ("optimize", "lenet", "-t", "etherned-1g"): "topology_error",
    ("explain", "gone.json"): "file_format_error",
    ("diff", "gone.json", "data-parallel"): "file_format_error",
    ("compare", "lenet", "-s", "gone.json"): "file_format_error",
    ("import", "flexsearch.zoo:alexnett", "-o", "g.json"): "import_model_error",
    ("run", "plan.json", "--model", "flexsearch.zoo:lenet"): "runtime_failure",
    ("probe", "-o", "t.json"): "runtime_failure",
    ("profile", "lenet", "-o", "p.json", "--device", "abacus"): "usage_error",
}


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_an_error_is_one_json_object_too(cli: Cli, command: tuple[str, ...]) -> None:
    plan()
    ran = cli(*command, "--json")
    clean(ran)
    assert set(ran.json) == {"error"}
    error = ran.json["error"]
    assert error["kind"] == WRONG[command] and error["message"] and isinstance(error["remedy"], str)
    if error["kind"] != "file_format_error":
        assert error["remedy"] or "Give" in error["message"]
    assert ran.err.count("flexsearch: ") == 1 and error["message"].splitlines()[0][:40] in ran.err


def test_a_bug_is_an_internal_error_with_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.setting import Setting

    monkeypatch.setattr(Setting, "row", lambda *_: 1 // 0)
    ran = cli(*SIMULATE, "--json")
    assert ran.code == 1 and ran.json["error"]["kind"] == "internal_error"
    assert "Traceback" in ran.err and "ZeroDivisionError" in ran.err


NOISE = "print('noise'); os.write(1, b'noise'); os.system('echo noise')\n"
NOISY = (
    "import os, torch, atexit\n"
    f"{NOISE}"
    "atexit.register(print, 'noise')\n"
    "class Model(torch.nn.Linear):\n"
    "    def forward(self, x):\n"
    "        print('noise')\n"
    "        return super().forward(x)\n"
    "def build(batch=4, scale=1.0):\n"
    f"    {NOISE}"
    "    torch.manual_seed(0)\n"
    "    x = scale * torch.ones(batch, 4)\n"
    "    return Model(4, 4), (x,), torch.ones(batch, 4), torch.nn.functional.mse_loss\n"
)


def test_what_the_users_code_prints_is_not_in_the_json(cli: Cli, here: Path) -> None:
    """Nor what it prints when the process ends, of which there is one of the command's own for the import."""
    Path("noisy.py").write_text(NOISY)
    imported = run("import", "noisy.py:build", "-o", "graph.json", "--json")
    assert imported.code == 0 and imported.json["operators"] and "noise" in imported.err, imported.err
    plan("graph.json", "ethernet-1g:1")
    ran = cli("run", "-n", 1, "plan.json", "--model", "noisy:build", "--steps", 3, "--lr", 1e30, "--json")
    assert ran.code == 0, ran.err
    assert "noise" in ran.err
    losses = [(step["loss"] is not None, step["loss_finite"]) for step in ran.json["steps"]]
    assert losses[0] == (True, True) and losses[-1] == (False, False) and ran.json["loss_finite"] is False


DIGITS = "9" * 4400
LIMITS: list[tuple[tuple[str, ...], str]] = [
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--set", "x=" + "[" * 100_000), "nested too deeply"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--set", f"x={DIGITS}"), "too many digits"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--batch", DIGITS), "--batch"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--name", "a\nb"), "--name"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--name", "a" * 10**4), "--name"),
    ((*OPTIMIZE, "--seed", DIGITS), "--seed"),
    ((*OPTIMIZE, "--seed", str(2**64)), "--seed"),
    (("optimize", "lenet", "-b", DIGITS), "budget"),
    (("optimize", "lenet", "-b", f"{DIGITS}s"), "budget"),
    (("optimize", "lenet", "-b", "1e400s"), "budget"),
    (("optimize", "lenet", "-b", "infs"), "budget"),
    (("optimize", "lenet", "-b", "9999999h"), "budget"),
    ((*OPTIMIZE, "--exhaustive", DIGITS), "budget"),
    ((*OPTIMIZE, "--exhaustive", ""), "budget"),
    ((*OPTIMIZE, "--margin", "nan"), "--margin"),
    ((*OPTIMIZE, "-j", "99999999999"), "--processes"),
    (("explain", "plan.json", "--tries", DIGITS), "--tries"),
    (("probe", "-n", "1000000", "-o", "t.json"), "--ranks"),
    (("probe", "-n", "1", "--timeout", "nan", "-o", "t.json"), "--timeout"),
    (("probe", "-n", "1", "--timeout", "1e300", "-o", "t.json"), "--timeout"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--steps", DIGITS), "--steps"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--lr", "inf"), "--lr"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--lr", "nan"), "--lr"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--seed", "-1"), "--seed"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--trace", "t.json", "-p", "t.json"), "--profile"),
    (("optimize", "lenet", "-b", "5", "-o", "g.json", "--verify", "2", "-p", "g.json"), "--profile"),
    (("what-if", "plan.json", "--memory", "0GB"), "--memory"),
    (("profile", "lenet", "-o", "p.json", "--budget", "500"), "--budget"),
    (("profile", "lenet", "-o", "p.json", "--threads", "1000000000"), "--threads"),
    (("optimize", "-t", "ethernet-1g-2", "-b", "5"), "GRAPH"),
    (("optimize", "--resume", "plan.json", "-b", "5"), "GRAPH"),
    (("optimize", "--pin", "conv1: batch=2", "-b", "5"), "GRAPH"),
    (("compare", "-t", "ethernet-1g-2"), "GRAPH"),
    (("simulate", "--baseline", "single"), "GRAPH"),
    (("simulate", "-s", "plan.json", "--baseline", "single"), "--strategy or --baseline"),
    (("simulate", "-s", "other.json"), "GRAPH"),
    (("optimize", "lenet", "-s", "plan.json"), "-s"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--pin"), "--pin"),
    (("probe", "-n", "1", "-o", "t.json", "--pin"), "--pin"),
]


@pytest.mark.parametrize(("command", "word"), LIMITS, ids=lambda value: " ".join(value)[:60] if value else "")
def test_what_makes_no_sense_is_refused_with_the_option_that_says_it(
    cli: Cli, command: tuple[str, ...], word: str
) -> None:
    plan()
    text = Path("plan.json").read_text().replace('"lenet"', '"a graph of my own"')
    Path("other.json").write_text(text)
    ran = cli(*command, "--json")
    clean(ran)
    assert word in ran.err and len(ran.err) < 1000
    assert not {"g.json", "p.json", "t.json", "strategy.json"} & set(os.listdir())


def test_a_strategy_says_what_it_was_made_for(cli: Cli) -> None:
    plan("lenet", "ethernet-10g-2")
    own = OperatorGraph.load("lenet").model_copy(update={"name": "mine"})
    own.save("mine.json")
    baseline("single", own, Topology.load("ethernet-10g-2")).save("own.json")
    whole = cli("simulate", "lenet", "-t", "ethernet-10g-2", "-s", "plan.json", "--json").json
    assert cli("simulate", "-s", "plan.json", "--json").json == whole
    assert cli("simulate", "mine.json", "-s", "own.json", "--json").json["graph"] == "mine"
    compared = cli("compare", "-s", "plan.json", "--json").json
    assert compared["topology"] == whole["topology"] and compared["plans"][0]["name"] == "plan.json"
    clean(cli("simulate", "mlp", "-s", "plan.json"))
    clean(cli("simulate", "-t", "ethernet-1g-2", "-s", "plan.json"))


def test_one_option_name_means_one_thing() -> None:
    """Options of all commands by name: the same letter, and the same help but for what it says of defaults."""
    import typer

    from flexsearch.cli.app import app

    letters: dict[str, set[tuple[str, ...]]] = {}
    names: dict[str, set[str]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if option.param_type_name == "option":
                long = next(name for name in option.opts if name.startswith("--"))
                short = tuple(name for name in option.opts if not name.startswith("--"))
                letters.setdefault(long, set()).add(short)
                for letter in short:
                    names.setdefault(letter, set()).add(long)
    assert {letter: long for letter, long in names.items() if len(long) > 1} == {}
    assert {long: short for long, short in letters.items() if len(short) > 1} == {}
    assert names["-s"] == {"--strategy"} and "--pin-cores" in letters


def test_a_search_that_cannot_end_in_time_says_what_is_too_large(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.cli import search

    monkeypatch.setattr(search, "SLACK_S", 0.0)
    began = time.monotonic()
    ran = cli("optimize", "mlp", "-t", "ethernet-1g:4096", "-b", "1ms", "-j", "1", "--json")
    clean(ran)
    assert "ethernet-1g:4096 with 4096 devices" in ran.json["error"]["message"] and time.monotonic() - began < 300
    assert os.listdir() == []


def test_a_search_whose_time_is_over_before_its_first_climb_answers_with_a_baseline(cli: Cli) -> None:
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "1ms", "--space", "splits", "-j", "1", "--json")
    assert ran.code == 0 and "used up by the baselines" in ran.json["stopped"] and ran.json["proposals"] == 0
    assert ran.json["iteration_s"] == min(plan["iteration_s"] for plan in ran.json["plans"])
    Strategy.load("strategy.json").check(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))


FAULTS: dict[str, tuple[str, ...]] = {
    "exits": ("sys.exit(7)", "line 3"), "raises": ("KeyError", "'oops'", "line 5"), "number": ("returned a int",),
    "three": ("returned a tuple",), "no_model": ("first item", "str"), "bad_loss": ("loss that is a int",),
    "bad_inputs": ("inputs that are a int",), "constant": ("not a callable",), "nothing": ("has no 'nothing'", "exits"),
    "exits_in_forward": ("sys.exit('bye')",), "raises_in_forward": ("oops in forward",),
}  # fmt: skip
FAULTY = """import sys, torch
def exits():
    sys.exit(7)
def raises():
    raise KeyError('oops')
def number(): return 7
def three(): return 1, 2, 3
def no_model(): return 'model', (), None, None
def bad_loss(): return torch.nn.Linear(2, 2), (torch.ones(2, 2),), None, 7
def bad_inputs(): return torch.nn.Linear(2, 2), 7
constant = 3
class Exits(torch.nn.Module):
    def forward(self, x):
        sys.exit('bye')
class Raises(torch.nn.Module):
    def forward(self, x):
        raise ValueError('oops in forward')
def exits_in_forward(): return Exits(), (torch.ones(2, 2),)
def raises_in_forward(): return Raises(), (torch.ones(2, 2),)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_users_model_is_told_as_that(cli: Cli, fault: str) -> None:
    Path("faulty.py").write_text(FAULTY)
    ran = cli("import", f"faulty.py:{fault}", "-o", "g.json", "--json")
    clean(ran)
    error = ran.json["error"]
    assert error["kind"] == "import_model_error" and not Path("g.json").exists()
    for word in FAULTS[fault]:
        assert word in f"{error['message']} {error['remedy']}"


@pytest.mark.parametrize(
    ("text", "words"),
    [("import no_such_module_of_mine", "no module named 'no_such_module_of_mine'. faulty.py imports it: install it"),
     ("def f(:", "/faulty.py, line 1."), ("x = 1", "It has no function; write one"),
     ("import sys; sys.exit()", "sys.exit(None)"), ("1 / 0", "ZeroDivisionError")],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_told_as_that(cli: Cli, text: str, words: str) -> None:
    Path("faulty.py").write_text(text)
    ran = cli("import", "faulty.py:build", "-o", "g.json")
    clean(ran)
    assert words in ran.err


def test_a_fault_of_the_model_in_the_ranks_is_told_once(cli: Cli) -> None:
    plan()
    Path("faulty.py").write_text(FAULTY)
    ran = cli("run", "-n", 2, "plan.json", "--model", "faulty.py:exits", "--json")
    clean(ran)
    error = ran.json["error"]
    assert error["kind"] == "import_model_error" and "faulty.py:exits ended the process" in error["message"]
    assert ran.err.count("sys.exit(7)") == 1


MISLABELLED = """import torch
from flexsearch.zoo import lenet
def build():
    model, inputs, targets, loss = lenet()
    return model, inputs, torch.full(targets.shape, 99), loss
"""


def test_a_batch_on_which_the_model_fails_is_no_bug_of_flexsearch(cli: Cli) -> None:
    plan("lenet", "ethernet-1g:1")
    Path("mine.py").write_text(MISLABELLED)
    ran = cli("run", "-n", 1, "plan.json", "--model", "mine.py:build")
    clean(ran)
    assert "rank 0: the model fails on its batch: IndexError: Target 99 is out of bounds." in ran.err
