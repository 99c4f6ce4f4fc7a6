"""A table of command and misuse: each command answers, or says what is wrong, and harms nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flexsearch import output
from flexsearch.errors import OutputError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.conftest import SOURCE, Cli, Ran

SCRIPT = "from flexsearch.cli import main\nmain()\n"
SIMULATE = ("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "single")
ROOT = os.geteuid() == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and beside it a console script and a log of the Python processes that are started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flexsearch").write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import sys\nwith open({str(tmp_path / 'started')!r}, 'a') as log:\n    print(sys.orig_argv, file=log)\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def start(*arguments: object, how: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any) -> Any:
    """A command as a process of its own, in the current folder."""
    top = Path.cwd().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(top / "site"), SOURCE)), **(env or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(
        [sys.executable, *(how or (str(top / "bin" / "flexsearch"),)), *map(str, arguments)], env=environment, **streams
    )


def run(*arguments: object, **options: Any) -> Ran:
    """The same, to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return Ran(process.returncode, out or "", err or "")


def plan(graph: str = "lenet", topology: str = "ethernet-1g-2", path: str = "plan.json") -> None:
    """Write a strategy."""
    baseline("data-parallel", OperatorGraph.load(graph), Topology.load(topology)).save(path)


def clean(ran: Ran, code: int = 2) -> None:
    """A message and nothing else: no traceback, no file left behind."""
    assert ran.code == code, (ran.out, ran.err)
    assert "Traceback" not in ran.err and "Error ignored" not in ran.err and "Exception ignored" not in ran.err, ran.err
    assert not [path for path in Path().rglob(".flexsearch-*")]


# ---- nothing is imported from the current folder, unless --model asks for it

HOSTILE = (
    "random",
    "json",
    "numpy",
    "typing",
    "enum",
    "logging",
    "torch",
    "typer",
    "rich",
    "pathlib",
    "numba",
    "pickle",
)


def hostile(*names: str) -> None:
    """Files that say that they were executed."""
    for name in names or HOSTILE:
        Path(f"{name}.py").write_text(f"open('executed', 'a').write({name!r})\nraise RuntimeError('hostile')\n")


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
    assert run(*SIMULATE, how=("-m", "flexsearch.cli")).code == 0
    assert not Path("executed").exists(), Path("executed").read_text()
    for name in set(HOSTILE) - {"random", "numpy", "torch", "numba"}:  # the interpreter's own start may import these
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


# ---- files that are written


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
    assert time.monotonic() - began < 20


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


# ---- processes


def children(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def listeners(pid: int) -> set[str]:
    """Addresses (hexadecimal, as the kernel prints them) that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            inodes.add(target.removeprefix("socket:[").removesuffix("]") if target.startswith("socket:[") else "")
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [p for p in pids if Path(f"/proc/{p}/stat").exists() and ") Z" not in Path(f"/proc/{p}/stat").read_text()]


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
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert until(lambda: not alive(ranks))


# ---- one JSON object, whatever happens

WRONG: dict[tuple[str, ...], str] = {
    ("optimize", "--frobnicate"): "usage_error",
    ("frobnicate",): "usage_error",
    (): "usage_error",
    ("optimize", "lenet", "--seed", "lucky"): "usage_error",
    ("simulate", "lenet"): "usage_error",
    ("optimize", "alexnett"): "file_format_error",
    ("optimize", "lenet", "-t", "etherned-1g"): "topology_error",
    ("explain", "gone.json"): "file_format_error",
    ("diff", "gone.json", "data-parallel"): "file_format_error",
    ("compare", "lenet", "-s", "gone.json"): "file_format_error",
    ("import", "flexsearch.zoo:alexnett", "-o", "g.json"): "import_model_error",
    ("run", "plan.json", "--model", "flexsearch.zoo:lenet"): "runtime_failure",
    ("run", "-n", "2", "plan.json", "--model", "flexsearch.zoo:mlp"): "strategy_error",
    ("probe", "-o", "t.json"): "runtime_failure",
    ("profile", "lenet", "-o", "p.json", "--device", "abacus"): "usage_error",
}


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_an_error_is_one_json_object_too(cli: Cli, command: tuple[str, ...]) -> None:
    plan()
    ran = cli(*command, "--json")
    clean(ran)
    assert set(ran.json) == {"error"}
    error = ran.json["error"]
    assert error["kind"] == WRONG[command] and error["message"] and isinstance(error["remedy"], str)
    if error["kind"] != "file_format_error":
        assert error["remedy"] or "Give" in error["message"]
    assert ran.err.count("flexsearch: ") == 1 and error["message"].splitlines()[0][:40] in ran.err


def test_a_bug_is_an_internal_error_with_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch import api

    monkeypatch.setattr(api.Setting, "row", lambda *_: 1 // 0)
    ran = cli(*SIMULATE, "--json")
    assert ran.code == 1 and ran.json["error"]["kind"] == "internal_error"
    assert "Traceback" in ran.err and "ZeroDivisionError" in ran.err


NOISE = "print('noise'); os.write(1, b'noise'); os.system('echo noise')\n"
NOISY = (
    "import os, torch, atexit\n"
    f"{NOISE}"
    "atexit.register(print, 'noise')\n"
    "class Model(torch.nn.Linear):\n"
    "    def forward(self, x):\n"
    "        print('noise')\n"
    "        return super().forward(x)\n"
    "def build(batch=4, scale=1.0):\n"
    f"    {NOISE}"
    "    torch.manual_seed(0)\n"
    "    x = scale * torch.ones(batch, 4)\n"
    "    return Model(4, 4), (x,), torch.ones(batch, 4), torch.nn.functional.mse_loss\n"
)


def test_what_the_users_code_prints_is_not_in_the_json(here: Path) -> None:
    Path("noisy.py").write_text(NOISY)
    imported = run("import", "noisy.py:build", "-o", "graph.json", "--json")
    assert imported.code == 0 and imported.json["operators"] and "noise" in imported.err, imported.err
    plan("graph.json")
    ran = run("run", "-n", 2, "plan.json", "--model", "noisy:build", "--steps", 3, "--lr", 1e30, "--json")
    assert ran.code == 0, ran.err
    assert "noise" in ran.err
    losses = [(step["loss"] is not None, step["loss_finite"]) for step in ran.json["steps"]]
    assert losses[0] == (True, True) and losses[-1] == (False, False) and ran.json["loss_finite"] is False


# ---- standard streams

OPTIMIZE = ("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "20")


def shell(command: str, *arguments: object, **env: str) -> Ran:
    """A shell's pipeline; ``F`` is the command line of flexsearch."""
    top = Path.cwd().parent
    words = [sys.executable, str(top / "bin" / "flexsearch"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": SOURCE, **env}
    done = subprocess.run(
        ["bash", "-c", f'F() {{ "$@"; echo "code $?" >> code; }}; {command}', "bash", *words],
        env=environment, capture_output=True, timeout=120,
    )  # fmt: skip
    return Ran(int(Path("code").read_text().split()[-1]), done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ('F "$@" >&-', 0), ('F "$@" > /dev/full', 2), ('F "$@" | head -c0', 141), ('F "$@" 2>&-', 0),
        ('F "$@" 2> /dev/full', 0), ('F "$@" >&- 2>&- <&-', 0), ('F "$@" --json > /dev/full', 2),
        ('F "$@" --json | head -c0', 141), ('F "$@" --json 2>&-', 0),
    ],
)  # fmt: skip
def test_a_stream_that_fails_ends_nothing_but_the_printing(here: Path, command: str, code: int) -> None:
    ran = shell(command, *OPTIMIZE)
    clean(ran, code)
    Strategy.load("strategy.json")
    if code == 2:
        assert "standard output" in ran.err
    if code == 141:
        assert not ran.err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_will_do(here: Path, encoding: str) -> None:
    (here / "r\u00easeau \u2192.json").write_text(Topology.load("ethernet-1g-2").model_dump_json(exclude_none=True))
    plan(path="plan \u00b5 \u2192 \u754c.json")
    command = ("compare", "lenet", "-s", "plan \u00b5 \u2192 \u754c.json", "-t", "r\u00easeau \u2192.json")
    ran = run(*command, env={"PYTHONIOENCODING": encoding}, encoding="utf-8" if encoding == "utf-8" else "latin-1")
    clean(ran, 0)
    assert "data-parallel" in ran.out and "ms" in ran.out
    if encoding != "utf-8":
        assert "->" in ran.out and "\u2503" not in ran.out and "+--" in ran.out
    if encoding == "ascii":
        assert ran.out.isascii() and "plan u -> ?.json" in ran.out


@pytest.mark.parametrize("columns", ["0", "20", "80", "wide", "9" * 30])
def test_any_width_will_do(here: Path, columns: str) -> None:
    ran = run(*SIMULATE, env={"COLUMNS": columns})
    clean(ran, 0)
    assert "single" in ran.out and "data parallel" in ran.out
    if columns == "80":
        assert max(map(len, ran.out.splitlines()[1:6])) <= 80


def test_names_are_printed_as_they_are(cli: Cli) -> None:
    topology = Topology.load("ethernet-1g-2").model_dump(mode="json", exclude_none=True)
    text = json.dumps(topology).replace("host0/cpu", "[/x][bold]host0").replace("ethernet-1g:2", "[red]name[/y]")
    Path("[x].json").write_text(text)
    ran = cli("simulate", "lenet", "-t", "[x].json", "--baseline", "data-parallel")
    assert ran.code == 0, ran.err
    assert "[/x][bold]host0" in ran.out and "[red]name[/y]" in ran.out
    ran = cli("optimize", "lenet", "-t", "[x].json", "-b", "5", "-o", "[bold].json")
    assert ran.code == 0 and "Wrote [bold].json" in ran.out and "[red]name[/y]" in ran.out
    for command in (("explain", "[bold].json"), ("explain", "[bold].json", "--operator", "conv1")):
        assert "[red]name[/y]" in cli(*command).out
    assert "[x].json" in cli("explain", "[x].json").err


def test_nothing_that_is_named_steers_the_terminal(cli: Cli) -> None:
    evil = "evil\x1b[2J\x07\x9b\u202e.json"
    plan(path=evil)
    ran = cli("compare", "lenet", "-t", "ethernet-1g-2", "-s", evil)
    assert ran.code == 0 and "evil?[2J?" in ran.out
    wrong = cli("explain", f"no such {evil}")
    assert "evil?[2J???" in wrong.err
    for text in (ran.out, wrong.err):
        assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_progress_is_told_without_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch import compiled
    from flexsearch.cli import progress

    monkeypatch.setattr(progress, "EVERY_S", 0.1)
    ran = cli("optimize", "alexnet", "-t", "ethernet-1g-4", "-b", "2s", "-j", "1", "--json")
    assert ran.code == 0 and "proposals/s" in ran.err and " s, " in ran.err and "%)" in ran.err
    assert "Compiling" not in ran.err
    monkeypatch.setattr(compiled, "is_warm", lambda: False)
    assert "Compiling for this machine" in cli(*OPTIMIZE).err


# ---- signals

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LONG_SEARCH = ("optimize", "alexnet", "-t", "ethernet-1g-4", "-b", "10m", "-j", "2")


def searching(process: Any) -> list[int]:
    """Wait until the search has a worker; the workers."""
    workers = until(lambda: [p for p in children(process.pid) if b"search.worker" in _cmdline(p)])
    assert isinstance(workers, list)
    return workers


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_search_with_the_best_plan_so_far(here: Path, number: signal.Signals) -> None:
    process = start(*LONG_SEARCH, "--json", "--exhaustive", "10m")
    workers = searching(process)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == SIGNALS[number], err
    assert json.loads(out)["stopped"].startswith("interrupted") and time.monotonic() - began < 20
    Strategy.load("strategy.json").check(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4"))
    assert until(lambda: not alive(workers)) and os.listdir() == ["strategy.json"]


def test_ctrl_c_at_a_terminal_reaches_the_workers_too_and_they_say_nothing(here: Path) -> None:
    process = start(*LONG_SEARCH, start_new_session=True)
    searching(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "Wrote strategy.json" in out, err


def test_a_second_signal_ends_it_at_once(here: Path) -> None:
    process = start(*LONG_SEARCH)
    workers = searching(process)
    os.kill(process.pid, signal.SIGSTOP)  # so that both wait for it
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.6)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode in (143, -signal.SIGTERM) and time.monotonic() - began < 5
    assert until(lambda: not alive(workers)) and set(os.listdir()) <= {"strategy.json"}
    if Path("strategy.json").exists():
        Strategy.load("strategy.json")


@pytest.mark.parametrize("delay", [0.4, 0.9, 1.4, 1.9, 2.4])
def test_a_signal_at_any_moment_leaves_a_plan_or_says_that_there_is_none(here: Path, delay: float) -> None:
    process = start("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "300", "--exhaustive", "1s", "-j", "1")
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    if process.returncode == 0:  # it was quicker
        assert "Wrote" in out
    elif Path("strategy.json").exists():
        assert process.returncode in (143, -signal.SIGTERM)  # the latter: nothing was left to do
        Strategy.load("strategy.json").check(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))
    else:
        assert process.returncode in (143, -signal.SIGTERM)  # the latter: Python itself was still starting
        assert process.returncode < 0 or "interrupted before a plan was found; nothing was written" in err
    assert set(os.listdir()) <= {"strategy.json"}


def test_a_signal_while_the_plan_is_written_is_obeyed_after_that(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Strategy.save

    def slowly(self: Strategy, path: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.05)
        save(self, path)

    monkeypatch.setattr(Strategy, "save", slowly)
    ran = cli(*OPTIMIZE)
    assert ran.code == 143 and "Wrote strategy.json" in ran.out, ran.err
    Strategy.load("strategy.json")


def test_a_process_that_has_nothing_to_save_ends_even_if_it_does_not_react(here: Path) -> None:
    """Compiling is such a time, as is waiting for a lock in C: Python learns of a signal only when it is over."""
    script = "import ctypes, flexsearch.cli.optimize as optimize\ndef load(*_):\n    open('stuck', 'w').close()\n"
    script += "    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
    script += "    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)\n"
    script += f"optimize.load_setting = load\n{SCRIPT}"
    (here.parent / "bin" / "flexsearch").write_text(script)
    process = start(*OPTIMIZE, "--json")
    until(lambda: Path("stuck").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "nothing was written" in err
    assert json.loads(out)["error"]["kind"] == "interrupted"


def test_nohup_is_obeyed(here: Path) -> None:
    process = start(*OPTIMIZE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    time.sleep(1.5)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0


# ---- limits, and what was meant

DIGITS = "9" * 4400
LIMITS: list[tuple[tuple[str, ...], str]] = [
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--set", "x=" + "[" * 100_000), "nested too deeply"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--set", f"x={DIGITS}"), "too many digits"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--batch", DIGITS), "--batch"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--name", "a\nb"), "--name"),
    (("import", "flexsearch.zoo:mlp", "-o", "g.json", "--name", "a" * 10**4), "--name"),
    ((*OPTIMIZE, "--seed", DIGITS), "--seed"),
    ((*OPTIMIZE, "--seed", str(2**64)), "--seed"),
    (("optimize", "lenet", "-b", DIGITS), "budget"),
    (("optimize", "lenet", "-b", f"{DIGITS}s"), "budget"),
    (("optimize", "lenet", "-b", "1e400s"), "budget"),
    (("optimize", "lenet", "-b", "infs"), "budget"),
    (("optimize", "lenet", "-b", "9999999h"), "budget"),
    ((*OPTIMIZE, "--exhaustive", DIGITS), "budget"),
    ((*OPTIMIZE, "--margin", "nan"), "--margin"),
    ((*OPTIMIZE, "-j", "99999999999"), "--processes"),
    (("explain", "plan.json", "--tries", DIGITS), "--tries"),
    (("probe", "-n", "1000000", "-o", "t.json"), "--ranks"),
    (("probe", "-n", "1", "--timeout", "nan", "-o", "t.json"), "--timeout"),
    (("probe", "-n", "1", "--timeout", "1e300", "-o", "t.json"), "--timeout"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--steps", DIGITS), "--steps"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--lr", "inf"), "--lr"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--lr", "nan"), "--lr"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--seed", "-1"), "--seed"),
    (("profile", "lenet", "-o", "p.json", "--budget", "500"), "--budget"),
    (("profile", "lenet", "-o", "p.json", "--threads", "1000000000"), "--threads"),
    (("optimize", "-t", "ethernet-1g-2", "-b", "5"), "GRAPH"),
    (("optimize", "--resume", "plan.json", "-b", "5"), "GRAPH"),
    (("optimize", "--pin", "conv1: batch=2", "-b", "5"), "GRAPH"),
    (("compare", "-t", "ethernet-1g-2"), "GRAPH"),
    (("simulate", "--baseline", "single"), "GRAPH"),
    (("simulate", "-s", "plan.json", "--baseline", "single"), "--strategy or --baseline"),
    (("simulate", "-s", "other.json"), "GRAPH"),
    (("optimize", "lenet", "-s", "plan.json"), "-s"),
    (("run", "plan.json", "-n", "2", "-m", "flexsearch.zoo:lenet", "--pin"), "--pin"),
    (("probe", "-n", "1", "-o", "t.json", "--pin"), "--pin"),
]


@pytest.mark.parametrize(("command", "word"), LIMITS, ids=lambda value: " ".join(value)[:60] if value else "")
def test_what_makes_no_sense_is_refused_with_the_option_that_says_it(
    cli: Cli, command: tuple[str, ...], word: str
) -> None:
    plan()
    text = Path("plan.json").read_text().replace('"lenet"', '"a graph of my own"')
    Path("other.json").write_text(text)
    ran = cli(*command, "--json")
    clean(ran)
    assert word in ran.err and len(ran.err) < 1000
    assert not {"g.json", "p.json", "t.json", "strategy.json"} & set(os.listdir())


def test_a_strategy_says_what_it_was_made_for(cli: Cli) -> None:
    plan("lenet", "ethernet-10g-2")
    own = OperatorGraph.load("lenet").model_copy(update={"name": "mine"})
    own.save("mine.json")
    baseline("single", own, Topology.load("ethernet-10g-2")).save("own.json")
    whole = cli("simulate", "lenet", "-t", "ethernet-10g-2", "-s", "plan.json", "--json").json
    assert cli("simulate", "-s", "plan.json", "--json").json == whole
    assert cli("simulate", "mine.json", "-s", "own.json", "--json").json["graph"] == "mine"
    compared = cli("compare", "-s", "plan.json", "--json").json
    assert compared["topology"] == whole["topology"] and compared["plans"][0]["name"] == "plan.json"
    clean(cli("simulate", "mlp", "-s", "plan.json"))
    clean(cli("simulate", "-t", "ethernet-1g-2", "-s", "plan.json"))


def test_one_option_name_means_one_thing() -> None:
    """Options of all commands by name: the same letter, and the same help but for what it says of defaults."""
    import typer

    from flexsearch.cli.app import app

    letters: dict[str, set[tuple[str, ...]]] = {}
    names: dict[str, set[str]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if option.param_type_name == "option":
                long = next(name for name in option.opts if name.startswith("--"))
                short = tuple(name for name in option.opts if not name.startswith("--"))
                letters.setdefault(long, set()).add(short)
                for letter in short:
                    names.setdefault(letter, set()).add(long)
    assert {letter: long for letter, long in names.items() if len(long) > 1} == {}
    assert {long: short for long, short in letters.items() if len(short) > 1} == {}
    assert names["-s"] == {"--strategy"} and "--pin-cores" in letters


def test_a_search_that_cannot_end_in_time_says_what_is_too_large(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.cli import optimize

    monkeypatch.setattr(optimize, "SLACK_S", 0.5)
    began = time.monotonic()
    ran = cli("optimize", "mlp", "-t", "ethernet-1g:4096", "-b", "100ms", "-j", "1", "--json")
    clean(ran)
    assert "ethernet-1g:4096 with 4096 devices" in ran.json["error"]["message"] and time.monotonic() - began < 60
    assert os.listdir() == []


def test_a_search_whose_time_is_over_before_its_first_climb_answers_with_a_baseline(cli: Cli) -> None:
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "1ms", "-j", "1", "--json")
    assert ran.code == 0 and "used up by the baselines" in ran.json["stopped"] and ran.json["proposals"] == 0
    assert ran.json["iteration_s"] == min(plan["iteration_s"] for plan in ran.json["plans"])
    Strategy.load("strategy.json").check(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))


# ---- the user's code

FAULTS: dict[str, tuple[str, ...]] = {
    "exits": ("sys.exit(7)", "line 3"), "raises": ("KeyError", "'oops'", "line 5"), "number": ("returned a int",),
    "three": ("returned a tuple",), "no_model": ("first item", "str"), "bad_loss": ("loss that is a int",),
    "bad_inputs": ("inputs that are a int",), "constant": ("not a callable",), "nothing": ("has no 'nothing'", "exits"),
    "exits_in_forward": ("sys.exit('bye')",), "raises_in_forward": ("oops in forward",),
}  # fmt: skip
FAULTY = """import sys, torch
def exits():
    sys.exit(7)
def raises():
    raise KeyError('oops')
def number(): return 7
def three(): return 1, 2, 3
def no_model(): return 'model', (), None, None
def bad_loss(): return torch.nn.Linear(2, 2), (torch.ones(2, 2),), None, 7
def bad_inputs(): return torch.nn.Linear(2, 2), 7
constant = 3
class Exits(torch.nn.Module):
    def forward(self, x):
        sys.exit('bye')
class Raises(torch.nn.Module):
    def forward(self, x):
        raise ValueError('oops in forward')
def exits_in_forward(): return Exits(), (torch.ones(2, 2),)
def raises_in_forward(): return Raises(), (torch.ones(2, 2),)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_users_model_is_told_as_that(cli: Cli, fault: str) -> None:
    Path("faulty.py").write_text(FAULTY)
    ran = cli("import", f"faulty.py:{fault}", "-o", "g.json", "--json")
    clean(ran)
    error = ran.json["error"]
    assert error["kind"] == "import_model_error" and not Path("g.json").exists()
    for word in FAULTS[fault]:
        assert word in f"{error['message']} {error['remedy']}"


@pytest.mark.parametrize(
    ("text", "words"),
    [("import no_such_module_of_mine", "no module named 'no_such_module_of_mine'"), ("def f(:", "SyntaxError"),
     ("import sys; sys.exit()", "sys.exit(None)"), ("1 / 0", "ZeroDivisionError")],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_told_as_that(cli: Cli, text: str, words: str) -> None:
    Path("faulty.py").write_text(text)
    ran = cli("import", "faulty.py:build", "-o", "g.json")
    clean(ran)
    assert words in ran.err


def test_a_fault_of_the_model_in_the_ranks_is_told_once(here: Path) -> None:
    plan()
    Path("faulty.py").write_text(FAULTY)
    ran = run("run", "-n", 2, "plan.json", "--model", "faulty.py:exits", "--json")
    clean(ran)
    error = ran.json["error"]
    assert error["kind"] == "import_model_error" and "faulty.py:exits ended the process" in error["message"]
    assert ran.err.count("sys.exit(7)") == 1
