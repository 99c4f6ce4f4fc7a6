"""The fit of published steps finds the figures that made them, and the table of intervals counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.decoders import Model
from benchmarks.harness import options_with_data, parser
from benchmarks.truth import FILES, PIPELINE_ROWS, Case, Scored, interval_rows, tables_of
from benchmarks.truth_causes import CAUSES, causes
from benchmarks.truth_fit import SHARES, START, another_code, figures_of, fit_gpu, rows_of, with_pipelines
from flexsearch.cost import Learned
from flexsearch.search.hybrid import Layout
from flexsearch.strategy import Options

PLANTED = {
    "matrix": 0.8, "matrix_size": 200.0, "attention_forward": 0.9, "attention_backward": 0.5, "memory": 0.9,
    "overhead_s": 14e-6,
}  # fmt: skip


def seconds(case: Case, learned: Learned) -> float:
    """A step in which each figure has a part that depends on the case in its own way."""
    parts = {name: 0.1 + (case.batch * (k + 3) * 37 % 101) / 50 for k, name in enumerate(START)}
    return sum(
        part * (START[name] / learned.efficiency[name] if name in SHARES else learned.efficiency[name] / START[name])
        for name, part in parts.items()
    )


def case(hidden: int, batch: int, measured_s: float = 1.0, pipeline: int = 1) -> Case:
    model = Model(hidden, 8, 8, 1000, 128, fused=True, bias=False)
    layout = Layout(8, 1, pipeline, 1)
    return Case("fsdp", "there", (batch,), "a step", model, batch, "a100_80gb", layout, Options(), measured_s)


def current(cases: Sequence[Case]) -> list[Scored]:
    """As a profile says them, a tenth to each side."""
    return [Scored(one, one.measured_s, width=0.1) for one in cases]


def test_planted_figures_are_recovered_and_a_size_that_is_left_out_is_predicted() -> None:
    planted = Learned(efficiency=PLANTED)
    cases = []
    for hidden in (512, 1024, 2048, 4096):
        for k in range(6):
            blank = case(hidden, hidden // 512 * 13 + k)
            # One run took twice as long, as runs sometimes do.
            factor = 2.0 if (hidden, k) == (1024, 3) else 1.0
            cases.append(case(hidden, blank.batch, factor * seconds(blank, planted)))
    taught = fit_gpu("A100", [*cases, case(512, 5, 1e6, pipeline=2)], seconds)
    assert len(taught.cases) == 24  # pipelines are none of the fit
    assert taught.figures() == pytest.approx(PLANTED, rel=0.1)
    lines = {line["part"]: line for line in rows_of(taught, current(cases))}
    for hidden in (512, 2048, 4096):
        assert lines[f"hidden {hidden}"]["left_out_mape"] < 0.02
        assert lines[f"hidden {hidden}"]["left_out_covered"] == 1.0
    assert 0.05 < lines["hidden 1024"]["left_out_mape"] < 0.12  # the run that took twice as long is counted
    assert lines["all"]["rows"] == lines["there"]["rows"] == 24


def test_a_size_is_predicted_by_what_the_others_teach() -> None:
    planted, others = Learned(efficiency=PLANTED), Learned(efficiency=figures_of([2.0] * 6))
    cases = [
        case(hidden, hidden // 512 * 13 + k, seconds(case(hidden, hidden // 512 * 13 + k), by))
        for hidden, by in ((512, planted), (1024, planted), (2048, planted), (4096, others))
        for k in range(6)
    ]
    taught = fit_gpu("A100", cases, seconds)
    lines = {line["part"]: line for line in rows_of(taught, current(cases))}
    assert lines["hidden 4096"]["left_out_mape"] > 0.3
    assert lines["hidden 4096"]["left_out_bias"] < -0.3
    assert lines["hidden 4096"]["left_out_covered"] == 0.0


def test_a_source_is_predicted_by_what_the_others_teach() -> None:
    planted, others = Learned(efficiency=PLANTED), Learned(efficiency=figures_of([2.0] * 6))
    cases = [
        replace(case(512, 13 * k + hidden), table=table, measured_s=seconds(case(512, 13 * k + hidden), by))
        for table, by in (("fsdp", planted), ("megatron", planted), ("pipelines", others))
        for hidden, k in ((one, one + 3) for one in range(8))
    ]
    taught = fit_gpu("A100", cases, seconds, "source")
    staged = [replace(one, layout=replace(one.layout, pipeline=2)) for one in cases]

    def scored(one: Case, learned: Learned) -> Scored:
        return Scored(one, seconds(one, learned), width=0.1)

    lines = {line["part"]: line for line in with_pipelines(taught, staged, scored)}
    assert lines["vtrain, with pipelines"]["left_out_covered"] == 0.0
    assert lines["vtrain, with pipelines"]["left_out_bias"] < -0.15
    assert taught.without(cases[0]) != taught.figures()
    # Two that agree and one that is far off: a fourth may be as far.
    assert 0.2 < another_code(taught)["error"] < 1.0


def test_steps_in_their_intervals_are_counted() -> None:
    rows = [Scored(case(512, 1, 1.0), predicted, width=0.1) for predicted in (0.88, 0.95, 1.05, 1.2)]
    (line,) = interval_rows("fsdp", rows)
    assert (line["rows"], line["covered"], line["share"], line["half_width"]) == (4, 2, 0.5, 0.1)


def test_a_cause_that_made_the_errors_explains_them() -> None:
    name = "gradients in float32"
    cases = [case(512 * k, 8 * k, pipeline=2) for k in range(1, 6)]
    rows = [
        Scored(replace(one, measured_s=1e-3 * k + 2.0 * CAUSES[name](one, 0.0)), 1e-3 * k)
        for k, one in enumerate(cases, 1)
    ]
    lines = {line["cause"]: line for line in causes(rows)}
    assert lines[name]["scale"] == pytest.approx(2.0, rel=0.02)
    assert lines[name]["mape"] < 0.01 < 0.1 < lines["none"]["mape"]


def test_tables_whose_files_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["truth.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        options_with_data(parser(""), *FILES.values())
    assert f"{tmp_path} has no llm_foundry_fsdp.csv" in capsys.readouterr().err
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / PIPELINE_ROWS).touch()
    folder = options_with_data(parser(""), *FILES.values()).data
    assert folder == tmp_path / "measured" and tables_of(folder) == ["pipelines", "megatron"]
