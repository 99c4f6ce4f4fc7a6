"""Nothing is imported from the current folder unless --model asks for it, and local ranks listen on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import commands
from tests.commands import SIMULATE, alive, children, hostile, plan, run, start, until
from tests.conftest import SOURCE, Cli


@pytest.mark.parametrize(
    ("command", "child"),
    [
        (("optimize", "mlp", "-t", "ethernet-1g-4", "-b", "2s", "-j", "2"), "flexsearch.search.worker"),
        (("probe", "-n", "1", "--quick", "-o", "here.json"), "flexsearch.cli"),
        (("import", "flexsearch.zoo:lenet", "-o", "graph.json"), ""),
        (("profile", "lenet", "-o", "p.json", "--max-parts", "1", "--repeats", "1", "--busy-neighbours", "1"), "neigh"),
    ],
)
def test_no_command_imports_from_the_current_folder(here: Path, command: tuple[str, ...], child: str) -> None:
    """Nor do its processes; of ``run`` see ``test_local_ranks``."""
    hostile()
    ran = run(*command)
    assert not Path("executed").exists(), Path("executed").read_text()
    assert ran.code == 0, ran.err
    assert child in (here.parent / "started").read_text(), "its processes were not started"


def test_not_even_if_python_itself_looks_there(here: Path) -> None:
    hostile()
    for module in ("flexsearch", "flexsearch.cli"):
        assert run(*SIMULATE, how=("-m", module)).code == 0
    assert not Path("executed").exists(), Path("executed").read_text()
    # The interpreter's own start may import the others from there, before any code of ours.
    for name in set(commands.HOSTILE) - {"random", "numpy", "torch", "numba"}:
        Path(f"{name}.py").unlink()
    for path in (f"{SOURCE}:", f":{SOURCE}", f"{SOURCE}:."):
        ran = run(*SIMULATE, env={"PYTHONPATH": path})
        assert ran.code == 0, ran.err
    assert not Path("executed").exists(), Path("executed").read_text()


def test_a_module_that_was_asked_for_is_loaded_with_what_lies_beside_it(cli: Cli, tmp_path: Path) -> None:
    hostile("random", "typing")
    Path("beside_mine.py").write_text("WIDTH = 5\n")
    Path("mine_to_load.py").write_text(
        "import random, typing, torch\n"
        "def build(batch=2):\n"
        "    from beside_mine import WIDTH\n"
        "    model = torch.nn.Linear(4, WIDTH)\n"
        "    return model, (torch.ones(batch, 4),), torch.ones(batch, WIDTH), torch.nn.functional.mse_loss\n"
    )
    for spec in ("mine_to_load:build", "./mine_to_load.py:build"):
        ran = cli("import", spec, "-o", "g.json", "--json")
        assert ran.code == 0, ran.err
    assert not Path("executed").exists()


def listeners(pid: int) -> set[str]:
    """Addresses (hexadecimal, as the kernel prints them) that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            inodes.add(target.removeprefix("socket:[").removesuffix("]") if target.startswith("socket:[") else "")
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder for temporary files, which must be empty in the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield {"TMPDIR": str(folder)}
    assert not list(folder.glob("flexsearch-*"))


def test_local_ranks_listen_on_loopback_only_and_end_with_the_command(here: Path, temporary: dict[str, str]) -> None:
    plan()
    hostile()
    process = start(
        "run", "-n", 2, "plan.json", "--model", "flexsearch.zoo:lenet", "--batch", 64, "--steps", 10**6, env=temporary
    )
    for _ in range(3):  # the heading and two steps
        assert process.stdout.readline(), process.stderr.read()
    ranks = children(process.pid)
    addresses = [listeners(pid) for pid in ranks]
    assert len(ranks) == 2 and any(addresses)
    assert set().union(*addresses) <= {"0100007F"}, addresses  # 127.0.0.1
    assert not Path("executed").exists(), Path("executed").read_text()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert until(lambda: not alive(ranks))
