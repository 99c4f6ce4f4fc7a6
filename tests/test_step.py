"""What decides on proposals: in arithmetic that is the same on any machine."""

from __future__ import annotations

import ast
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest

from flexsearch import search
from flexsearch.search.moves import UNIFORMS, Draws, _length
from flexsearch.search.step import ChainState, Schedule, exponential, threshold

FOLDER = Path(search.__file__).parent
DECIDING = ("moves", "step", "space", "meshes", "requests", "move_tables", "chain", "climb", "climbs", "polish")


@pytest.mark.parametrize("uniform", [0.0, 1e-12, 0.1, 0.3, 0.5, 0.75, 0.999, 1.0 - 2.0**-53])
def test_the_threshold_is_exponential(uniform: float) -> None:
    assert exponential(uniform) == pytest.approx(-log(1.0 - uniform), rel=2e-6, abs=1e-6)


def test_the_threshold_rises_with_the_random_number() -> None:
    values = [exponential(float(u)) for u in np.linspace(0.0, 1.0, 5000, endpoint=False)]
    assert values[0] == 0.0 and all(a < b for a, b in pairwise(values))


def test_the_threshold_is_known_to_the_bit() -> None:
    assert [exponential(u).hex() for u in (0.1, 0.625, 0.99)] == HEXADECIMAL


HEXADECIMAL = ["0x1.af8ee749e9aa7p-4", "0x1.f62f40794a7b8p-1", "0x1.26bb1ffc21c4bp+2"]


@pytest.mark.parametrize("module", DECIDING)
def test_nothing_that_decides_takes_logarithms_or_powers(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    powers = [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_whole(node)
    ]  # fmt: skip
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not powers and not names & {"log", "exp", "pow", "sqrt", "log2"}


def _is_whole(node: ast.BinOp) -> bool:
    return all(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in (node.left, node.right))


def test_a_proposal_may_cost_more_the_hotter_the_chain() -> None:
    def most(excess: float, uniform: float) -> float:
        draws = Draws(
            uniform=np.full((1, UNIFORMS), uniform), row=_count(0), move=_count(0), first_candidate=_count(0),
            candidates=_count(1), half=np.zeros(1, np.uint8),
        )  # fmt: skip
        schedule = Schedule(
            freedom=np.array([4.0]), excess=np.array([excess]), patience=_count(9), worth=np.array([0.001]),
            penalty=np.array([30.0]),
        )  # fmt: skip
        seconds = [np.array([value]) for value in (3.0, 2.0, 2.0, 2.0, 2.0)]
        counts = [_count(0) for _ in range(5)]
        chain = ChainState(*seconds, *counts, np.zeros(1, np.uint32))
        return float(threshold(draws, schedule, chain))

    assert most(0.1, 0.0) == 3.0
    assert most(0.1, 0.5) == pytest.approx(3.0 + 2.0 * 0.1 / 4.0 * log(2.0))
    assert most(0.2, 0.5) > most(0.1, 0.5) > most(0.1, 0.25)


def _count(value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array([value], np.uint64)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 1000])
def test_random_lengths_favour_no_power_of_two(count: int) -> None:
    size = np.uint64(count)
    lengths = [int(_length(float(u), size)) for u in np.linspace(0.0, 1.0, 4096, endpoint=False)]
    assert lengths == sorted(lengths) and lengths[0] == 1 and max(lengths) == count
    assert set(lengths[: 4096 // count.bit_length()]) == {1}
