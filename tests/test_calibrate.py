"""What measured iteration times teach: planted figures come back, and bad rows are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexsearch import zoo
from flexsearch.calibrating import FAR, Calibrated, _figures, calibrate, read_rows
from flexsearch.cost import Learned, Network, Profile, ProfileDevice
from flexsearch.errors import ProfileError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.measure.learning import Fitted
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.kernels import Efficiency
from tests.conftest import Cli

CPU = Profile(device=ProfileDevice(kind="cpu", model="core"), torch="2")
GPU = Profile(device=ProfileDevice(kind="cuda", model="A100-SXM4-80GB"), torch="2")
PLANS = [
    (graph, batch, data, tensor)
    for graph, batches in (("lenet", (64, 128)), ("mlp", (64, 256)), ("alexnet", (8,)))
    for batch in batches
    for data, tensor in ((2, 1), (1, 2))
]

SHALLOW = [
    f"shallow.json,{batch},{data},{tensor},{batch}" for batch in (16, 64) for data, tensor in ((8, 1), (4, 2), (2, 4))
]


@pytest.fixture(scope="module")
def shallow() -> OperatorGraph:
    """GPT-2 with one of its twelve blocks, as a fit simulates it hundreds of times, and few words: else the gradient of
    their table would be most of a step."""
    model, inputs, targets, loss = zoo.gpt2(layers=1, vocab=2048, device="meta")
    return import_model(model, inputs, loss, targets=targets)


def rows_of(path: Path, topology: Topology, truth: Profile, extra: str = "", plans: list[str] | None = None) -> None:
    """Write rows that ``truth`` predicts, with noise of 1 % and one outlier of a factor of 2."""
    head = "graph,batch,data,tensor,group,measured_s" + (",precision" if extra else "")
    lines = plans or [f"{graph},{batch},{data},{tensor},{graph}" for graph, batch, data, tensor in PLANS]
    path.write_text("\n".join((head, *(f"{line},1{extra}" for line in lines))) + "\n")
    draw = np.random.default_rng(1)
    seconds = [row.predict(truth) * float(draw.normal(1.0, 0.01)) for row in read_rows(path, topology)]
    seconds[3] *= 2.0
    path.write_text("\n".join((head, *(f"{x},{s:.9g}{extra}" for x, s in zip(lines, seconds, strict=True)))) + "\n")


def test_planted_corrections_come_back_in_spite_of_an_outlier(tmp_path: Path) -> None:
    topology, path = Topology.load("ethernet-1g:2"), tmp_path / "rows.csv"
    planted = Learned(compute=1.6, networks={"ethernet-1g": Network(time=1.3)})
    rows_of(path, topology, CPU.model_copy(update={"learned": planted}))
    result = calibrate(read_rows(path, topology), topology, CPU)
    learned = result.profile.learned
    assert learned is not None and result.most == len(PLANS) // 3 >= len(result.changed)
    assert learned.compute == pytest.approx(1.6, rel=0.05)
    assert learned.network("ethernet-1g").time == pytest.approx(1.3, rel=0.05)
    assert np.median(np.abs(result.fitted.before)) > 0.15 and learned.error is not None and learned.error < 0.03
    assert learned.residual is not None and learned.residual.n == len(PLANS) and learned.residual.p90 > 0.05


def test_planted_efficiency_comes_back(tmp_path: Path, shallow: OperatorGraph) -> None:
    topology, path = Topology.load("dgx-a100:1"), tmp_path / "rows.csv"
    shallow.save(tmp_path / "shallow.json")
    rows_of(path, topology, GPU.model_copy(update={"learned": Learned(efficiency={"matrix": 0.3})}), ",bf16", SHALLOW)
    result = calibrate(read_rows(path, topology), topology, GPU)
    learned = result.profile.learned
    assert learned is not None and len(result.changed) <= 2 and learned.error is not None
    assert "matrix" in result.changed and learned.efficiency["matrix"] == pytest.approx(0.3, rel=0.05)
    assert learned.error < 0.04 < np.median(np.abs(result.fitted.before))


def test_figures_of_full_precision_that_a_file_names_come_back(tmp_path: Path, shallow: OperatorGraph) -> None:
    """Those of its traffic included; a profile with them is read again."""
    plain, path = Topology.load("dgx-a100:1"), tmp_path / "rows.csv"
    full = Efficiency(matrix=0.7, traffic={"normalisation": 0.5})
    devices = tuple(device.model_copy(update={"efficiency_full": full}) for device in plain.devices)
    topology = edited(plain, devices=devices)
    shallow.save(tmp_path / "shallow.json")
    planted = Learned(efficiency={"full.matrix": 0.3, "traffic.normalisation": 0.1})  # the second: of half precision
    rows_of(path, topology, GPU.model_copy(update={"learned": planted}), plans=SHALLOW)
    result = calibrate(read_rows(path, topology), topology, GPU)
    assert {figure.name for figure in result.figures} >= {"full.matrix", "full.traffic.normalisation", "time"}
    result.profile.save(tmp_path / "profile.json")
    learned = Profile.load(tmp_path / "profile.json").learned
    assert learned is not None and learned.efficiency["full.matrix"] == pytest.approx(0.3, rel=0.05)
    assert all(name.startswith("full.") for name in learned.efficiency)


def test_figures_stay_near_their_file_and_those_that_go_far_are_doubtful(tmp_path: Path) -> None:
    """Rows of another code would have starting an operator take nine times as long as its file says."""
    topology, path = Topology.load("dgx-a100:1"), tmp_path / "rows.csv"
    path.write_text("graph,data,precision,measured_s\ngpt2,8,bf16,1\n")
    rows, own = read_rows(path, topology), topology.devices[0].efficiency_for("bfloat16")
    figures = _figures(rows, topology, GPU, Learned())
    names = [figure.name for figure in figures]
    start, time = names.index("overhead_s"), names.index("time")
    assert figures[start].most == pytest.approx(FAR * own.overhead_s)
    assert figures[names.index("matrix")].least == pytest.approx(own.matrix / FAR)
    assert figures[names.index("attention_forward")].most == 2.0  # there is no more
    taught = {start: figures[start].most, time: 1.3}
    point = np.array([taught.get(k, figure.prior) for k, figure in enumerate(figures)])
    error = np.zeros(1)
    result = Calibrated(tuple(rows), GPU, Fitted(point, (start, time), error, error, error, (point,)), figures, 2)
    assert list(result.doubtful) == ["overhead_s"]
    point[time] = 9.0
    assert set(result.doubtful) == {"overhead_s", "time"} and "9 times" in result.doubtful["time"]


def test_rows_of_several_models_are_left_out_by_model(tmp_path: Path) -> None:
    topology, path = Topology.load("ethernet-1g:2"), tmp_path / "rows.csv"
    head, lines = "graph,batch,data,tensor,measured_s\n", ["lenet,64,2,1,1\n", "lenet,128,2,1,1\n", "mlp,64,2,1,1\n"]
    path.write_text(head + "".join(lines))
    assert [row.group for row in read_rows(path, topology)] == ["lenet", "lenet", "mlp"]
    path.write_text(head + "".join(lines[:2]))
    one, other = (row.group for row in read_rows(path, topology))
    assert one != other


def test_few_rows_and_one_plan_are_refused(tmp_path: Path) -> None:
    topology, path = Topology.load("ethernet-1g:2"), tmp_path / "rows.csv"
    path.write_text("graph,data,measured_s\nlenet,2,0.01\nlenet,2,0.01\nlenet,2,0.01\n")
    with pytest.raises(ProfileError, match="of one plan"):
        calibrate(read_rows(path, topology), topology, CPU)
    path.write_text("graph,data,tensor,measured_s\nlenet,2,1,0.01\nlenet,1,2,0.01\n")
    with pytest.raises(ProfileError, match="too few"):
        calibrate(read_rows(path, topology), topology, CPU)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("graph,data,measured_s\n", "has no rows"),
        ("graph,data\nlenet,2\n", "measured_s is missing"),
        ("measured_s\n1\n", "neither a column strategy nor a column graph"),
        ("graph,data,seconds,measured_s\nlenet,2,1,1\n", "unknown column 'seconds'"),
        ("graph,data,measured_s\nlenet,2,-1\n", "measured_s is '-1'"),
        ("graph,data,measured_s\nlenet,2,nan\n", "measured_s is 'nan'"),
        ("graph,data,measured_s\nlenet,2,1e300\n", "at most 1,000,000"),
        ("graph,data,data,measured_s\nlenet,1,2,1\n", "two columns 'data'"),
        ("graph,data,measured_s,seq\ngpt2,2,1,1.5\n", "seq is 1.5"),
        ("graph,data,measured_s\nnothing,2,1\n", "nothing"),
        ("graph,data,measured_s\nlenet,3,1\n", "the layout takes 3 devices"),
        ("graph,data,measured_s\nlenet,1.5,1\n", "data is 1.5"),
        ("graph,data,measured_s,states\nlenet,2,1,some\n", "states is 'some'"),
        ("graph,data,measured_s,schedule\nlenet,2,1,some\n", "schedule is 'some'"),
        ("graph,data,measured_s,precision\nlenet,2,1,bf17\n", "precision is 'bf17'"),
        ("strategy,measured_s\nnone.json,1\n", "none.json"),
        ("graph,data,measured_s\nlenet,2,1,7\n", "more than the 3 fields"),
        ("graph,data,measured_s\nlenet,2,1\nlenet,2.0,1\nlenet,02,1\n", "of one plan"),
        ("graph;data;measured_s\nlenet;2;1\n", "Separate columns by commas"),
        ("graph,data,measured_s\nlenet,2\n", "measured_s is empty"),
        ("graph,data,measured_s\n\nlenet,2,x\n", "line 3"),
        ("graph,batch,data,measured_s\nlenet,64,2,1\nlenet,62,2,1\nlenet,63,2,1\n", "line 4: a batch of 63"),
    ],
)
def test_bad_rows_end_the_command_with_a_reason(cli: Cli, text: str, said: str) -> None:
    Path("rows.csv").write_text(text)
    ran = cli("calibrate", "rows.csv", "-t", "ethernet-1g:2")
    assert ran.code == 2 and said in " ".join(ran.err.split()) and "Traceback" not in ran.err
    assert not Path("profile.json").exists()


def test_rows_as_spreadsheets_write_them_and_times_in_another_unit(cli: Cli) -> None:
    """With a byte order mark, and spaces behind commas; milliseconds in place of seconds are pointed out."""
    lines = [f"lenet, {batch}, 2, {1000 if batch == 64 else 0.01}" for batch in (64, 128, 256, 512)]
    Path("rows.csv").write_text("\n".join(("graph, batch, data, measured_s", *lines)), encoding="utf-8-sig")
    ran = cli("calibrate", "rows.csv", "-t", "ethernet-1g:2")
    assert ran.code == 0 and "rows.csv, line 2: over 100 times" in ran.out
    assert cli("calibrate", "rows.csv", "-t", "ethernet-1g:2", "--json").json["odd"] == ["rows.csv, line 2"]


def test_the_command_writes_a_profile_that_predicts_the_rows(cli: Cli) -> None:
    topology = Topology.load("ethernet-1g:2")
    rows_of(Path("rows.csv"), topology, CPU.model_copy(update={"learned": Learned(compute=2.0)}))
    ran = cli("calibrate", "rows.csv", "-t", "ethernet-1g:2", "-o", "p.json", "--json")
    assert ran.code == 0 and ran.json["figures"]["compute"]["after"] == pytest.approx(2.0, rel=0.05)
    profile = Profile.load("p.json")
    rows = read_rows(Path("rows.csv"), topology)
    assert np.median([abs(row.predict(profile) / row.measured_s - 1.0) for row in rows]) < 0.03
