"""The notebook runs from top to bottom, in this interpreter, and its plan beats data parallelism."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[test]'")

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "alexnet_vs_data_parallel.ipynb"


class _ThisInterpreter(AsyncKernelManager):
    """Kernels run in the interpreter of the tests, whatever kernels are installed under the name "python3"."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="these tests", language="python")


def read() -> Any:
    """The committed notebook."""
    return nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)


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
    """What the last cell printed."""
    (output,) = notebook.cells[-1].outputs
    value = json.loads(output.text)
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def committed() -> Any:
    return read()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    notebook = read()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSEARCH_NOTEBOOK_QUICK", "1")
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        client(notebook, folder).execute()  # CellExecutionError, with the cell's traceback, if one fails
    return notebook


def test_every_cell_runs(executed: Any) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_the_found_plan_beats_data_parallelism(executed: Any) -> None:
    figures = result(executed)
    assert figures["speedup"] == pytest.approx(figures["data_parallel_s"] / figures["found_s"])
    assert figures["speedup"] >= 3


def test_its_pictures_are_drawn(executed: Any, committed: Any) -> None:
    """Bars, two timelines, sizes of the layers, scaling curve: now and in the committed file."""
    for notebook in (executed, committed):
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 5


def test_the_committed_outputs_are_whole_and_small(committed: Any) -> None:
    """Committed as executed once from the top, with nothing of the machine that did it."""
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert result(committed)["speedup"] >= 3
    assert NOTEBOOK.stat().st_size < 600_000
    texts = [
        text
        for cell in code
        for output in cell.outputs
        for text in (output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/")))
    ]
    assert not [text for text in texts if "/home/" in text or "/tmp/" in text or str(NOTEBOOK.parent.parent) in text]
