"""The notebooks run from top to bottom, in this interpreter, and what they say is what they computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[test]'")

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from flexsearch.sync.configurations import configurations

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PICTURES = {
    "alexnet_vs_data_parallel": 5, "where_data_parallelism_stops": 3, "ten_configurations": 2, "gtop_k_on_32_hosts": 3,
    "model_and_batch_groups": 2,
}  # fmt: skip
"""How many each notebook draws."""
MOST_BYTES = {"alexnet_vs_data_parallel": 600_000}
"""Of a committed notebook; others have 300 kB."""


class _ThisInterpreter(AsyncKernelManager):
    """Kernels run in the interpreter of the tests, whatever kernels are installed under the name "python3"."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="these tests", language="python")


def read(name: str) -> Any:
    """The committed notebook."""
    return nbformat.reads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"), as_version=4)


def client(notebook: Any, folder: Path) -> NotebookClient:
    """What executes ``notebook`` in ``folder``."""
    return NotebookClient(
        notebook,
        kernel_manager_class=_ThisInterpreter,  # a manager given as ``km`` would leave its kernel running
        timeout=300,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )


def result(notebook: Any) -> dict[str, Any]:
    """What the last cell printed: in several pieces, where the machine is busy."""
    value = json.loads("".join(output.text for output in notebook.cells[-1].outputs))
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module", params=PICTURES)
def name(request: pytest.FixtureRequest) -> str:
    value = request.param
    assert isinstance(value, str)
    return value


@pytest.fixture(scope="module")
def executed(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSEARCH_NOTEBOOK_QUICK", "1")
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, str(folder / variable.lower()))
        client(notebook, folder).execute()  # CellExecutionError, with the cell's traceback, if one fails
    return notebook


def pictures(notebook: Any) -> int:
    """How many there are in the outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


# ---- all of them


def test_a_notebook_runs_and_draws_its_pictures(name: str, executed: Any) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert pictures(executed) == PICTURES[name]
    CHECKS[name](result(executed))


@pytest.mark.parametrize("notebook_name", PICTURES)
def test_the_committed_outputs_are_whole_and_small(notebook_name: str) -> None:
    """Committed as executed once from the top, with nothing of the machine that did it."""
    committed = read(notebook_name)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert pictures(committed) == PICTURES[notebook_name]
    assert (FOLDER / f"{notebook_name}.ipynb").stat().st_size < MOST_BYTES.get(notebook_name, 300_000)
    texts = [
        text
        for cell in code
        for output in cell.outputs
        for text in (output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/")))
    ]
    assert not [text for text in texts if "/home/" in text or "/tmp/" in text or str(FOLDER.parent) in text]


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)


# ---- what each computes, with few hosts


def check_alexnet(figures: dict[str, Any]) -> None:
    assert figures["speedup"] == pytest.approx(figures["data_parallel_s"] / figures["found_s"])
    assert figures["speedup"] >= 3


def check_scaling(figures: dict[str, Any]) -> None:
    """On 4 hosts: one server is the slowest way, faster networks are better ones. A ring sends as much as servers on
    all hosts, but sums up in between."""
    for row in figures["speedup"].values():
        assert min(row, key=row.get) == "one parameter server"
        assert row["ring"] == pytest.approx(row["parameter server on all hosts"], rel=0.05)
    one, ten, hundred = (figures["weak_efficiency"][gbit] for gbit in ("1", "10", "100"))
    assert one < ten < hundred < 1


def check_configurations(figures: dict[str, Any]) -> None:
    rows = figures["configurations"]
    assert [row["recipe"] for row in rows] == list(configurations(figures["workers"]))
    for row in rows:  # one exchange in 16 steps, whatever else is saved
        often = "period=16" not in row["recipe"]
        assert often == (row["communication_s"] > rows[0]["communication_s"] / 12), row["recipe"]
    assert all(0 < row["communication_s"] < row["total_s"] for row in rows)


def check_gtop_k(figures: dict[str, Any]) -> None:
    """On 4 hosts top-k is still better."""
    assert all(gain > 10 for gain in figures["over"]["dense"].values())
    assert all(gain < 1 for gain in figures["over"]["top-k"].values())


def check_grid(figures: dict[str, Any]) -> None:
    """On 4 hosts data parallelism is best, unless convolutions are split by images."""
    assert figures["best"] == {"megatron": [1, 4], "one-weird-trick": [2, 2]}


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "alexnet_vs_data_parallel": check_alexnet, "where_data_parallelism_stops": check_scaling,
    "ten_configurations": check_configurations, "gtop_k_on_32_hosts": check_gtop_k,
    "model_and_batch_groups": check_grid,
}  # fmt: skip


# ---- what is said of the committed figures


def test_data_parallelism_stops_where_the_text_says() -> None:
    figures = result(read("where_data_parallelism_stops"))
    assert figures["stops_at"] == {"1": 1, "10": 2, "100": 16}
    slow = [figures["speedup"][gbit][name] for gbit in ("1", "10", "100") for name in
            ("everyone to everyone", "one parameter server")]  # fmt: skip
    assert max(slow) < 1


def test_the_plan_of_four_hosts_beats_data_parallelism() -> None:
    assert result(read("alexnet_vs_data_parallel"))["speedup"] >= 3


def test_what_the_ten_configurations_save_and_cost() -> None:
    rows = result(read("ten_configurations"))["configurations"]
    saved = [rows[0]["communication_s"] / row["communication_s"] for row in rows]
    lost = [rows[0]["accuracy"] - row["accuracy"] for row in rows]
    assert 38 < saved[8] < 48 and 15 < saved[1] < 18 and saved[3] < 1
    assert 0.03 < lost[8] < 0.04 and lost[1] < 0 and max(lost) == lost[2]


def test_gtop_k_against_the_ranges_of_its_paper() -> None:
    over = result(read("gtop_k_on_32_hosts"))["over"]
    assert all(1.1 < gain < 1.75 for gain in over["top-k"].values())
    assert [model for model, gain in over["dense"].items() if 2.7 < gain < 12] == ["resnet50"]


def test_the_best_grids_of_64_hosts() -> None:
    figures = result(read("model_and_batch_groups"))
    assert figures["best"] == {"megatron": [8, 8], "one-weird-trick": [16, 4]}
    gains = figures["speedup"]["one-weird-trick"]
    assert 46 < gains["16x4"] < 50 and 6 < gains["1x64"] < 8
