"""Files that commands write: through links, into pipes and devices, whole or not at all, never over an input."""

from __future__ import annotations

import json
import os
import resource
import stat
import threading
import time
from pathlib import Path

import pytest

from flexsearch import output
from flexsearch.errors import OutputError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Strategy
from flexsearch.topology import Topology
from tests.commands import ROOT, SIMULATE, clean, plan, run, start
from tests.conftest import Cli


def test_a_link_stays_a_link_and_its_target_is_written(cli: Cli) -> None:
    Path("folder").mkdir()
    Path("folder/old.json").write_text("old")
    Path("folder/old.json").chmod(0o640)
    for link, target in (("a.json", "folder/old.json"), ("b.json", "folder/new.json")):
        Path(link).symlink_to(target)
        assert cli(*SIMULATE, "--trace", link).code == 0
        assert os.readlink(link) == target
        assert json.loads(Path(target).read_text())["traceEvents"]
    assert stat.S_IMODE(Path("folder/old.json").stat().st_mode) == 0o640
    assert {path.name for path in Path("folder").iterdir()} == {"old.json", "new.json"}


def test_a_pipe_is_written_to(cli: Cli) -> None:
    os.mkfifo("pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(Path("pipe").read_text()))
    reader.start()
    assert cli(*SIMULATE, "--trace", "pipe").code == 0
    reader.join(10)
    assert json.loads(received[0])["traceEvents"] and stat.S_ISFIFO(Path("pipe").stat().st_mode)


@pytest.mark.skipif(not ROOT, reason="only root can make device nodes, and replace them")
@pytest.mark.parametrize(("minor", "code"), [(3, 0), (7, 2)])
def test_a_device_stays_a_device(cli: Cli, minor: int, code: int) -> None:
    try:
        os.mknod("device", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        Path("device").write_text("")
    except PermissionError:
        pytest.skip("this container has no device nodes")
    for option in (("-b", "5", "-o"), ("-b", "5", "-o", "s.json", "--plot")):
        if option[-1] == "--plot":
            os.symlink("device", "device.png")
        ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", *option, "device.png" if "--plot" in option else "device")
        clean(ran, code)
        assert stat.S_ISCHR(Path("device").stat().st_mode)
        assert code == 0 or "No space left on device".lower() in ran.err.lower()


def test_standard_output_is_streamed_to(here: Path) -> None:
    ran = run(*SIMULATE, "--trace", "/dev/stdout")
    assert ran.code == 0 and '"traceEvents"' in ran.out and "single" in ran.out
    with open("all", "w") as file:
        file.write("before\n")
        file.flush()
        assert start(*SIMULATE, "--trace", "/dev/stdout", stdout=file).wait(60) == 0
        file.write("after\n")
    text = Path("all").read_text()
    assert text.startswith("before\n") and '"traceEvents"' in text and "single" in text
    data = run(*SIMULATE, "--trace", "/dev/stdout", "--json")
    assert data.json["trace"] == "/dev/stdout" and '"traceEvents"' in data.err
    assert Path("/dev/stdout").is_symlink()


def test_a_file_that_does_not_fit_is_not_half_written(here: Path) -> None:
    Path("trace.json").write_text("old")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    ran = run(*SIMULATE, "--trace", "trace.json", preexec_fn=limit)
    clean(ran)
    assert "cannot write trace.json: file too large" in ran.err
    assert Path("trace.json").read_text() == "old" and os.listdir() == ["trace.json"]


LONG = "x" * 300
WRITING: dict[str, tuple[str, ...]] = {
    "optimize -o": ("optimize", "lenet", "--budget", "10m", "-o"),
    "optimize --plot": ("optimize", "lenet", "--budget", "10m", "--plot"),
    "simulate --trace": (*SIMULATE, "--trace"),
    "import -o": ("import", "flexsearch.zoo:llama7b", "-o"),
    "profile -o": ("profile", "vgg16", "-o"),
    "probe -o": ("probe", "-n", "2", "-o"),
    "run --trace": ("run", "-n", "2", "plan.json", "--model", "flexsearch.zoo:lenet", "--trace"),
}
PLACES = {
    "no-such-folder/x.png": "does not exist", "file/x.png": "not a directory", ".": "it is a folder",
    "loop.png": "too many levels of symbolic links", f"{LONG}.png": "file name too long",
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", WRITING)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(cli: Cli, command: str, place: str) -> None:
    Path("file").touch()
    os.symlink("loop.png", "loop.png")
    plan()
    began, before = time.monotonic(), set(os.listdir())
    ran = cli(*WRITING[command], place, "--json")
    clean(ran)
    error = ran.json["error"]
    assert error["kind"] == "output_error" and PLACES[place] in error["message"] and error["remedy"]
    assert set(os.listdir()) == before
    assert time.monotonic() - began < 120


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(cli: Cli) -> None:
    Path("folder").mkdir(mode=0o500)
    clean(cli(*SIMULATE, "--trace", "folder/x.json"))


@pytest.mark.parametrize(
    "command",
    [
        ("optimize", "g.json", "-t", "t.json", "-b", "5", "-o", "g.json"),
        ("optimize", "g.json", "-t", "t.json", "-b", "5", "-o", "link.json"),
        ("optimize", "g.json", "-t", "t.json", "-b", "5", "-p", "p.png", "--plot", "p.png"),
        ("optimize", "g.json", "-b", "5", "--resume", "plan.json", "--plot", "plan.json"),
        ("optimize", "g.json", "-b", "5", "-o", "same.png", "--plot", "same.png"),
        ("simulate", "g.json", "-t", "t.json", "-s", "plan.json", "--trace", "plan.json"),
        ("profile", "g.json", "-o", "g.json"),
        ("import", "model.py:build", "-o", "model.py"),
        ("run", "-n", "2", "plan.json", "--model", "model.py:build", "--trace", "plan.json"),
        ("run", "-n", "2", "plan.json", "--model", "model.py:build", "--trace", "model.py"),
    ],
)
def test_an_input_is_not_overwritten(cli: Cli, command: tuple[str, ...]) -> None:
    OperatorGraph.load("lenet").save("g.json")
    Topology.load("ethernet-1g-2").save("t.json")
    Path("model.py").write_text("")
    Path("p.png").write_text("")
    os.symlink("t.json", "link.json")
    plan()
    before = {path: path.read_bytes() for path in Path().iterdir()}
    ran = cli(*command)
    clean(ran)
    assert "is also" in ran.err
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_strategy_may_be_gone_on_from_in_place(cli: Cli) -> None:
    plan()
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "5", "--resume", "plan.json", "-o", "plan.json")
    assert ran.code == 0, ran.err
    assert Strategy.load("plan.json").search is not None


def test_a_shipped_file_is_an_input_too(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OutputError, match="also an input"):
        output.check({"-o": file}, [file])
    from flexsearch.cli.common import check_outputs
    from flexsearch.files import shipped

    with pytest.raises(OutputError, match="also an input"):
        check_outputs({"-o": shipped("graphs", "lenet")}, "lenet")
    with pytest.raises(OutputError, match="also an input"):
        check_outputs({"-o": shipped("profiles", "ethernet-1g")}, "ethernet-1g-4")


def test_a_graph_does_not_replace_the_module_of_its_model(cli: Cli) -> None:
    Path("net.py").write_text("def build(): raise SystemExit")
    for model in ("net:build", "net.py:build"):
        ran = cli("import", model, "-o", "net.py")
        assert ran.code == 2 and "net.py is also an input of this command" in ran.err
    assert "def build" in Path("net.py").read_text()


def test_what_is_being_written_when_the_process_ends_at_once_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        output.discard_unfinished()
        assert not list(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        output.write(tmp_path / "x.json", "{}")
