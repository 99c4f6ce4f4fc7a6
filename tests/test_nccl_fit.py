"""Figures of all-reduces that are fitted to measured ones: those that made the times come back."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.nccl_fit import FORMS, errors, fit, missed, tables
from flexsearch.topology import Topology

PLANTED = {2: [60e-6, 1.4], 3: [30e-6, 1.4, 70e-6], 5: [30e-6, 1.9, 100e-6, 1.3, 70e-6]}


def _table(folder: Path, members: int, form: int) -> None:
    """A file as the measured ones, of times that the planted parameters give."""
    nbytes = np.arange(1, 129) * 2**20
    x = 2 * (members - 1) / members * nbytes / 300e9
    seconds = FORMS[form][1](np.array(PLANTED[form]), x)
    (folder / "nccl_allreduce_a100").mkdir(exist_ok=True)
    with (folder / "nccl_allreduce_a100" / f"AR_GPU{members}_1M_128M_LUT").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size(B)", "count", "type", "time(ns)"])
        writer.writerows([n, n // 4, "float", 1e9 * s] for n, s in zip(nbytes.tolist(), seconds.tolist(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_planted_parameters_come_back(tmp_path: Path, form: int) -> None:
    _table(tmp_path, 4, form)
    (table,) = tables(tmp_path, Topology.load("dgx-a100"))
    fitted = fit(form, table)
    assert fitted == pytest.approx(PLANTED[form], rel=0.02)
    assert errors(form, fitted, table).max() < 0.01


def test_fewer_parameters_miss_what_more_explain(tmp_path: Path) -> None:
    for members in (2, 8):
        _table(tmp_path, members, 5)
    for table in tables(tmp_path, Topology.load("dgx-a100")):
        two, three, five = (missed(form, fit(form, table), table) for form in (2, 3, 5))
        assert five < 0.01 < three <= two + 1e-9
