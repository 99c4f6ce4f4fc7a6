"""Whatever a file holds, a command refuses it with exit code 2, naming file and field, or answers with sane numbers.

Thousands of files, mutated by a seed, go through the real command line in this process, each under a wall-clock limit.
``FLEXSEARCH_FUZZ=100000`` sets the number (2,000 otherwise), ``FLEXSEARCH_FUZZ_SEED`` the seed. ``python -m
tests.test_fuzz SEED FIRST LAST`` runs a range and reports as it goes; ``SEED NUMBER`` shows a single case.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

from flexsearch.errors import FlexsearchError
from tests import fuzz_documents as documents
from tests.conftest import streams_restored
from tests.fuzz_documents import Data

CASES = int(os.environ.get("FLEXSEARCH_FUZZ", "150"))
SEED = int(os.environ.get("FLEXSEARCH_FUZZ_SEED", "0"))
PROFILED = int(os.environ.get("FLEXSEARCH_FUZZ_PROFILED", "100"))
"""One mutated graph of so many is measured: that imports torch."""
LIMIT_S = 30.0
"""For one case, on a busy machine; most take a hundredth."""
BASELINES = (*["data-parallel", "single", "fsdp", "megatron", "pipeline"] * 3, "one-weird-trick", "layer-wise")
SIGNED = (
    "gain",
    "change",
    "difference",
    "delta",
    "saves",
    "saved",
    "costs",
    "more",
    "worse",
    "better",
    "slower",
    "loss",
    "share",
)
"""Parts of the names of numbers that may be negative: differences."""
LATER = (
    "no plan was found that fits", "cannot be computed as the graph says", "to be measured, this machine",
    "which shares its processor", "has no operator", "is too large", "too long to be simulated", "makes no sense",
    "was made for", "the profile was measured on",
    "baseline", "pin ", "none of these operators", "inputs are not those", "no config for", "unknown operators",
)  # fmt: skip
"""Refusals that are about two files, or a file and an option, and need not name a field."""


class TooSlow(BaseException):
    """A case has used up its wall-clock limit. No command may catch it."""


@dataclass(frozen=True)
class Case:
    """A command line, what its files hold, which of the files was mutated, and how the case is found again."""

    name: str
    command: tuple[str, ...]
    files: dict[str, bytes]
    mutated: str


@dataclass(frozen=True)
class Ended:
    """``kind``: refused, answered, or what went wrong. ``text``: what the command printed, or the traceback."""

    kind: str
    text: str
    seconds: float

    @property
    def bad(self) -> bool:
        return self.kind not in ("refused", "answered")


@cache
def _plan(graph: int, topology: int, variant: int) -> str:
    rng = random.Random(f"plan {graph} {topology} {variant}")
    return json.dumps(documents.strategy(rng, documents.graphs()[graph], documents.topologies()[topology]))


def _copy(value: Data) -> Data:
    copy: Data = json.loads(json.dumps(value))
    return copy


def make_case(seed: int, number: int) -> Case:
    """Case ``number`` of a seed."""
    rng = random.Random(f"{seed}:{number}")
    g, t = rng.randrange(len(documents.graphs())), rng.randrange(len(documents.topologies()))
    mutated = rng.choices(("graph", "topology", "strategy", "profile"), (45, 25, 20, 10))[0]
    held = {"graph": _copy(documents.graphs()[g]), "topology": _copy(documents.topologies()[t])}
    if mutated == "strategy" or rng.random() < 0.25:
        held["strategy"] = json.loads(_plan(g, t, rng.randrange(3)))
    if mutated == "profile" or rng.random() < 0.1:
        held["profile"] = _copy(documents.profile(g))
    with contextlib.suppress(IndexError, KeyError, TypeError, OverflowError):  # a second one may find its place gone
        if rng.random() < 0.25:  # legal in every field, extreme in many, of all files
            for _ in range(4):
                rng.choice((documents.resize, documents.extreme))(rng, held[rng.choice(list(held))])
        else:
            for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0]):
                rng.choice(documents.STRUCTURAL)(rng, held[mutated])
    if "strategy" in held and rng.random() < 0.9:
        _sign(held, mutated)
    command = _command(rng, held, mutated, number)
    files = {f"{kind}.json": json.dumps(data).encode() for kind, data in held.items()}
    files[f"{mutated}.json"] = documents.encode(rng, held[mutated])
    return Case(f"{seed} {number}", command, files, mutated)


def _sign(held: dict[str, Data], mutated: str) -> None:
    """Make the strategy one for the other files, whatever they hold now, as a careful forger would."""
    strategy = held["strategy"]
    with contextlib.suppress(FlexsearchError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if mutated == "strategy":
            held["topology"] = _copy(strategy["cluster"])
        topology = documents.build(held["topology"])
        strategy["cluster"] = json.loads(topology.model_dump_json(exclude_none=True))
        strategy["topology"]["hash"] = topology.content_hash()
        graph = documents.read_graph(held["graph"])
        strategy["graph"]["hash"] = graph.content_hash()
        if mutated == "graph":
            strategy["inputs"] = [
                {"name": x.name, "shape": list(x.shape), "dtype": x.dtype} for x in graph.of_kind("input")
            ]


def _command(rng: random.Random, held: dict[str, Data], mutated: str, number: int) -> tuple[str, ...]:
    setting = ["graph.json", "-t", "topology.json"]
    more = ["-p", "profile.json"] if "profile" in held else []
    if mutated == "graph" and number % PROFILED == 0 and held["graph"].get("name") in ("lenet", "mlp"):
        held["extension"] = documents.extension()
        few = ("--budget", "500ms", "--repeats", "1", "--max-parts", "2", "--extend", "extension.json")
        return ("profile", "graph.json", "-o", "out.json", *few, "--json")
    if "strategy" in held:
        choice = rng.choices(("simulate", "compare", "explain", "diff", "optimize"), (40, 20, 15, 20, 2))[0]
        if choice == "explain":
            operator = rng.choice(([], ["--operator", "loss"]))
            return ("explain", "strategy.json", "-g", "graph.json", "--tries", "5", *operator, *more, "--json")
        if choice == "diff":
            other = rng.choice(("data-parallel", "single", "strategy.json"))
            return ("diff", "strategy.json", other, "-g", "graph.json", *more, "--json")
        if choice == "optimize":
            return (
                "optimize",
                *setting,
                *more,
                "--resume",
                "strategy.json",
                "--budget",
                "5",
                "-j",
                "1",
                "-o",
                "out.json",
                "--json",
            )
        return (choice, *setting, "-s", "strategy.json", *more, "--json")
    choice = rng.choices(("simulate", "compare", "optimize"), (60, 25, 5))[0]
    if choice == "optimize":
        budget = str(rng.choice((5, 10, 20)))
        return ("optimize", *setting, *more, "--budget", budget, "-j", "1", "-o", "out.json", "--json")
    extra = ["--baseline", rng.choice(BASELINES)] if choice == "simulate" else []
    return (choice, *setting, *extra, "--optimizer", rng.choice(("sgd", "momentum", "adam")), *more, "--json")


@contextlib.contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TooSlow in the block after ``seconds``; compiled code, which no signal interrupts, ends the process."""

    def stop(*_: object) -> None:
        raise TooSlow

    def end() -> None:
        print(f"\ncompiled code does not end: {what}", file=sys.__stderr__, flush=True)
        os._exit(70)

    watchdog = threading.Timer(2 * seconds, end)
    watchdog.daemon = True
    watchdog.start()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        watchdog.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _captured() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Files that hold what the block prints on standard output and error, by whatever means."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            with streams_restored():
                yield out, err
        finally:
            for descriptor, old in enumerate(before, 1):
                os.dup2(old, descriptor)
                os.close(old)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def run_case(case: Case) -> Ended:
    """Run a case in the current folder, which it leaves as empty as it was."""
    from flexsearch.cli import main

    for name, content in case.files.items():
        Path(name).write_bytes(content)
    argv, start, code = sys.argv, time.monotonic(), None
    sys.argv = ["flexsearch", *case.command]
    try:
        with _captured() as files, _limit(LIMIT_S, case.name):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
            out, err = map(_text, files)
    except TooSlow:
        return Ended("too slow", traceback.format_exc(), time.monotonic() - start)
    except BaseException:
        return Ended("traceback", traceback.format_exc(), time.monotonic() - start)
    finally:
        sys.argv = argv
        for name in (*case.files, "out.json"):
            Path(name).unlink(missing_ok=True)
    seconds = time.monotonic() - start
    if "Traceback" in out + err:
        return Ended("traceback", out + err, seconds)
    if code == 0:
        problem = _insane(out)
        return Ended("insane answer", f"{problem}\n{out}", seconds) if problem else Ended("answered", out, seconds)
    if code != 2:
        return Ended(f"exit {code}", out + err, seconds)
    return Ended(_refused(case, out), out + err, seconds)


def _refused(case: Case, out: str) -> str:
    """How well a refusal says what is wrong."""
    try:
        error = json.loads(out)["error"]
    except (ValueError, KeyError):
        return "refused without an object"
    text = f"{error['message']} {error['remedy']}"
    named = any(name in text for name in case.files) or any(words in text for words in LATER)
    return "refused" if named and len(text) < 20000 else "refused without a place"


def _says_no_number(text: str) -> bool:
    return bool({"inf", "nan", "-inf"} & set(text.split()))


def _insane(out: str) -> str:
    """What is wrong with an answer; empty if nothing is."""
    try:
        answer = json.loads(out)
    except ValueError as error:
        return f"no JSON object: {error}"
    values: list[tuple[str, Any]] = [("", answer)]
    while values:
        name, value = values.pop()
        if isinstance(value, dict):
            values += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            values += [(name, item) for item in value]
        elif isinstance(value, str):
            if name not in ("graph", "topology", "name") and _says_no_number(value):
                return f"{name} says {value[:100]!r}"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            negative = value < 0 and not any(part in name for part in SIGNED)
            if not math.isfinite(value) or abs(value) > 1e60 or negative:
                return f"{name} is {value}"
    return ""


def fuzz(seed: int, numbers: range, report: bool = False) -> list[tuple[int, Ended]]:
    """Run cases; returns those that ended badly, by number."""
    counts: Counter[str] = Counter()
    bad: list[tuple[int, Ended]] = []
    slowest = 0.0
    for number in numbers:
        case = make_case(seed, number)
        ended = run_case(case)
        counts[f"{case.command[0]}: {ended.kind}"] += 1
        counts[ended.kind] += 1
        slowest = max(slowest, ended.seconds)
        if ended.bad:
            bad.append((number, ended))
            if report:
                last = ended.text.strip().splitlines()[-1:]
                print(f"{seed} {number} {' '.join(case.command[:2])}: {ended.kind}: {last}", flush=True)
        if report and (number + 1) % 1000 == 0:
            print(number + 1, dict(sorted(counts.items())), f"slowest {slowest:.1f} s", flush=True)
    told = dict(sorted(counts.items()))
    print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1}: {told}, slowest {slowest:.1f} s")
    return bad


@pytest.mark.parametrize("part", range(4))
def test_mutated_files_are_refused_or_answered_sanely(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = fuzz(SEED, range(part * CASES // 4, (part + 1) * CASES // 4))
    assert not bad, "\n\n".join(f"python -m tests.test_fuzz {SEED} {n}: {e.kind}\n{e.text[-2000:]}" for n, e in bad[:5])


def main() -> None:
    """``SEED NUMBER`` shows one case, ``SEED FIRST LAST`` runs a range of them."""
    seed, first, *last = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if last:
            sys.exit(1 if fuzz(seed, range(first, last[0]), report=True) else 0)
        case = make_case(seed, first)
        print(case.command, case.mutated)
        if folder := os.environ.get("FLEXSEARCH_FUZZ_KEEP", ""):
            for name, content in case.files.items():
                (Path(folder) / name).write_bytes(content)
        ended = run_case(case)
        print(ended.kind, f"{ended.seconds:.2f} s", ended.text[-6000:], sep="\n")


if __name__ == "__main__":
    main()
