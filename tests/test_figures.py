"""Figures of a device: that a fit finds those by which times were made, and that costs of other sizes follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from flexsearch.cost import Costs, Profile
from flexsearch.cost.filling import Filling, estimated
from flexsearch.cost.profile import Entry, Figures, UpdateEntry
from flexsearch.graph.model import Dtype
from flexsearch.graph.ops import KINDS
from flexsearch.measure.figures import Starts, fit_figures, residuals
from flexsearch.measure.reference import SIZES, TYPES, reference
from flexsearch.topology import Device
from flexsearch.topology.kernels import Efficiency, Launches, Traffic
from tests.test_cost import GRAPH, entry, key, machines, piece, profile

SHARES: dict[Traffic, float] = {"copy": 0.9, "loss": 0.2, "lookup": 0.5, "normalisation": 0.4, "windows": 0.3}
TRUE = Figures(
    flops={"float32": 1e11}, memory_bandwidth=5e10, overhead_s=5e-6, launches=Launches(adam=4, kernels={"softmax": 3}),
    efficiency_full=Efficiency(
        matrix=1.0, matrix_size=12.0, convolution=1.7, attention_forward=0.7, attention_backward=0.8, other=1.0,
        memory=1.0, traffic=SHARES, overhead_s=5e-6,
    ),
)  # fmt: skip


def device() -> Device:
    return Device(name="d", kind="cpu", host="h", model="any", flops={"float32": 3e9}, memory_bandwidth=1e9,
                  memory_bytes=1, overhead_s=1e-3)  # fmt: skip


def made_by(
    figures: Figures, change: Callable[[float], float] = lambda seconds: seconds, dtype: Dtype = "float32"
) -> list[Entry]:
    """Entries of all reference operators, with the times that follow from figures; of half precision, of a GPU."""
    entries, on = {}, figures.on(device())
    for case in reference("cpu" if dtype == "float32" else "cuda", dtype):
        work = case.costed.forward(case.extents), case.costed.backward(case.extents)
        one = Entry(kind=case.costed.op.kind, dtype=dtype, forward_s=0.0, backward_s=0.0, repeats=1,
                    forward=work[0], backward=work[1], product=case.costed.product_sizes(case.extents))  # fmt: skip
        seconds = [change(estimated(one, on, back)) for back in (False, True)]
        entries[case.key] = one.model_copy(update={"forward_s": seconds[0], "backward_s": seconds[1]})
    return list(entries.values())


def fitted(entries: Sequence[Entry], starts: Starts | None = None) -> Figures:
    adam = UpdateEntry(s_per_byte=2e-10, s_per_tensor=4.2 * 5e-6)
    return fit_figures({"float32": entries}, {"adam": adam}, "cpu" if starts is None else "cuda", starts)


def test_a_fit_finds_the_figures_that_times_were_made_by() -> None:
    found = fitted(made_by(TRUE))
    assert found.flops["float32"] == pytest.approx(1e11, rel=0.03)
    assert found.memory_bandwidth == pytest.approx(5e10, rel=0.03)
    assert found.overhead_s == pytest.approx(5e-6, rel=0.05)
    reached, wanted = found.efficiency_full, TRUE.efficiency_full
    for name in ("convolution", "attention_forward", "attention_backward", "memory"):
        assert getattr(reached, name) == pytest.approx(getattr(wanted, name), rel=0.05), name
    assert reached.matrix_size == pytest.approx(12.0, rel=0.15)
    shares: dict[Traffic, float] = {**SHARES, "update": 0.7}
    assert reached.traffic == {name: pytest.approx(share, rel=0.05) for name, share in shares.items()}
    assert found.launches == Launches(adam=4, kernels={"softmax": 3}, casts=2)
    assert all(fit.median < 0.03 for fit in found.fits.values())


def test_single_slow_times_do_not_change_a_fit() -> None:
    draw = np.random.default_rng(0)
    noisy = made_by(TRUE, lambda s: s * float(draw.normal(1.0, 0.03)) * (5.0 if draw.random() < 0.04 else 1.0))
    found = fitted(noisy)
    assert found.flops["float32"] == pytest.approx(1e11, rel=0.1)
    assert found.efficiency_full.traffic["loss"] == pytest.approx(0.2, rel=0.1)
    assert all(0.0 < fit.median < 0.12 for fit in found.fits.values())
    assert max(fit.p90 for fit in found.fits.values()) > 0.3  # what does not fit is told


def test_a_size_that_does_not_fit_counts_as_predicted_from_the_others() -> None:
    entries = made_by(TRUE)
    losses = [k for k, one in enumerate(entries) if one.kind == "cross_entropy"]
    for k in losses[-1:]:
        entries[k] = entries[k].model_copy(update={"forward_s": 10.0 * entries[k].forward_s})
    assert fitted(entries).fits["float32 loss"].p90 > 0.2 > fitted(made_by(TRUE)).fits["float32 loss"].p90


def test_on_a_gpu_the_host_has_a_start_of_its_own() -> None:
    found = fitted(made_by(TRUE), Starts(host_s=8e-6, kernel_s=2e-6))
    assert (found.overhead_s, found.efficiency_full.overhead_s) == (8e-6, 2e-6)
    # Where times of small operators hold their launch, a chain is no longer for a short start of kernels. A weight and
    # its gradient are cast with all others on a GPU, one by one on a CPU.
    there = fitted(made_by(TRUE)).launches
    assert found.launches == there.model_copy(update={"casts": 1}) and there.casts == 2


def test_products_that_tensor_cores_read_slowly_have_a_most_of_their_own() -> None:
    half = Efficiency(
        matrix=1.0, matrix_size=12.0, unaligned=(0.1, 0.3, 0.4), attention_forward=0.7, attention_backward=0.8,
        other=1.0, memory=1.0, traffic=SHARES, overhead_s=5e-6,
    )  # fmt: skip
    figures = TRUE.model_copy(update={"flops": {"float32": 1e11, "bfloat16": 8e11}, "efficiency": half})
    measured = {"float32": made_by(TRUE), "bfloat16": made_by(figures, dtype="bfloat16")}
    found = fit_figures(measured, {}, "cuda", Starts(5e-6, 5e-6))  # type: ignore[arg-type]
    assert found.efficiency is not None
    assert found.efficiency.unaligned == pytest.approx(half.unaligned, rel=0.05)
    assert found.efficiency_full.unaligned == (1.0, 1.0, 1.0)


def test_reference_operators_are_of_known_kinds_and_cover_every_way_of_using_memory() -> None:
    for kind, types in TYPES.items():
        cases = list(reference(kind, types[0]))
        assert all(case.costed.op.kind in KINDS for case in cases)
        assert len({case.key for case in cases}) > 15 * len(SIZES[kind].elements)


def test_costs_of_other_sizes_follow_the_measured_figures() -> None:
    """Where no entry is of the kind: whatever peaks the topology says."""
    measured = profile({}).model_copy(update={"figures": TRUE})
    costs = Costs(GRAPH, machines("chip"), measured)
    truth = Costs(GRAPH, machines("chip").model_copy(update={"devices": (TRUE.on(machines("chip").devices[0]),)}))
    for operator in range(len(GRAPH.operators)):
        assert costs.compute(operator, piece(GRAPH, operator), 0) == truth.compute(operator, piece(GRAPH, operator), 0)


def test_entries_of_one_kind_do_not_scale_kinds_that_figures_tell() -> None:
    entries = {key(GRAPH, 4): entry(GRAPH, 4, 100.0, 100.0)}
    figures = profile(entries).model_copy(update={"figures": TRUE})
    alone = Costs(GRAPH, machines("chip"), profile({}).model_copy(update={"figures": TRUE}))
    both = Costs(GRAPH, machines("chip"), figures)
    assert both.compute(0, piece(GRAPH, 0), 0) == alone.compute(0, piece(GRAPH, 0), 0)


def test_the_nearest_sizes_of_the_same_form_say_how_long_another_takes() -> None:
    small, large = entry(GRAPH, 2, 1.0, 1.0, p=2), entry(GRAPH, 2, 1.0, 1.0, p=64)
    entries = {}
    for size, factor in ((2, 2.0), (3, 2.0), (4, 2.0), (60, 5.0), (62, 5.0), (64, 5.0)):
        one = entry(GRAPH, 2, 1.0, 1.0, p=size)
        seconds = factor * estimated(one, TRUE.on(device()), False)
        entries[key(GRAPH, 2, p=size)] = one.model_copy(update={"forward_s": seconds})
    filling = Filling(profile(entries).model_copy(update={"figures": TRUE}), TRUE.on(device()))
    like = next(iter(entries)).rpartition(" | ")[0]
    for one, factor in ((small, 2.0), (large, 5.0)):
        ratio = filling.ratio(like, "linear", one.forward.flops, one.forward.nbytes, backward=False)
        assert ratio == pytest.approx(factor)
    measured = profile(entries).model_copy(update={"figures": TRUE})
    assert residuals(measured)["linear"].n == 12


def test_figures_are_kept_in_the_file_and_older_files_are_read(tmp_path: Path) -> None:
    measured = profile({key(GRAPH, 2): entry(GRAPH, 2, 1.0, 2.0)}).model_copy(update={"figures": fitted(made_by(TRUE))})
    measured.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == measured
    old = (tmp_path / "p.json").read_text().replace('"figures"', '"products"')
    (tmp_path / "old.json").write_text(old)
    assert Profile.load(tmp_path / "old.json") == measured.model_copy(update={"figures": None})
