"""What is compiled is kept, in a folder of the user's, and compiled again when any of its sources changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import flexsearch
from flexsearch.compiled import inlined, lean
from flexsearch.direct import direct
from flexsearch.linking import record

PROGRAM = "from flexsearch import caller; print(caller.twice(1.0), sum(caller.twice.stats.cache_hits.values()))"
CALLER = """
from flexsearch.compiled import compiled
from flexsearch import called


@compiled
def twice_of(pair):
    return 2.0 * called.one(pair)


def twice(x):
    return twice_of(called.pair(x, x))


twice.stats = getattr(twice_of, "stats", None)
"""
CALLED = """
from typing import NamedTuple

from flexsearch.compiled import compiled


class {name}(NamedTuple):
    a: float
    b: float


pair = {name}


@compiled
def one(pair):
    return pair.a + {added}
"""
MANY = """
from flexsearch.compiled import lean
from flexsearch.direct import direct


def _step(f):
    @lean
    def step(values, k):
        values[k] += 1.0
        return f(values, k)

    return step


@lean
def last(values, k):
    return 2.0 * values[k]


for _ in range(12):
    last = _step(last)
all_steps = last


@lean
def large(values, k):
    return all_steps(values, k)


@lean
def outer(values, k):
    return large(values, k) + 0.5


by_python, by_both = direct(large), direct(outer)
"""
"""An entry that calls so much that another calls its machine code."""
COUNT = """
import numpy as np
from numba.core import event
with event.install_recorder("numba:compile") as compiled:
    from flexsearch import many
    results = [function(np.zeros(3), np.uint64(1)) for function in (many.by_both, many.by_python)]
print(*results, sum(one.is_start for _, one in compiled.buffer))
"""


@lean
def _inner(values: Any, k: Any) -> Any:
    return 2.0 * values[k]


@inlined
def _outer(values: Any, k: Any) -> Any:
    return _inner(values, k)


@lean
def _steps(first: Any, last: Any, step: Any, values: Any) -> Any:
    total = 0
    for k in range(first, last, step):
        total += k
    for k in range(last):
        total = max(total, k)
    for k in range(first, last):
        total += min(values[np.uint64(k)], k)
    return total // (step - 2)


@lean
def _calls_steps(first: Any, last: Any, step: Any, values: Any) -> Any:
    return _steps(first, last, step, values) + 1


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small flexsearch with two compiled functions."""
    package = tmp_path / "flexsearch"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("compiled.py", "direct.py", "linking.py", "packed.py", "translating.py", "untried.py"):
        shutil.copy(Path(flexsearch.__file__).parent / name, package)
    (package / "caller.py").write_text(CALLER)
    (package / "called.py").write_text(CALLED.format(added=1.0, name="Pair"))
    return package


def start(package: Path, program: str = PROGRAM, **env: str) -> subprocess.Popen[str]:
    """A program in a process of its own. ``env``: XDG_CACHE_HOME unless told otherwise."""
    environment = {k: v for k, v in os.environ.items() if k not in ("FLEXSEARCH_CACHE", "XDG_CACHE_HOME", "PYTHONPATH")}
    env = env or {"FLEXSEARCH_CACHE": str(package.parent / "cache")}
    # -B: Python's own cache takes a file of the same size that was written in the same second for the same.
    return subprocess.Popen(
        [sys.executable, "-B", "-c", program], cwd=package.parent, env=environment | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(package: Path, program: str = PROGRAM, **env: str) -> str:
    """What a program prints."""
    process = start(package, program, **env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip()


def folder(package: Path, **env: str) -> str:
    """Where the small flexsearch keeps what it compiles."""
    return run(package, "from flexsearch.compiled import folder; print(folder)", **env)


def test_a_change_in_a_file_reaches_the_functions_of_other_files_that_call_it(package: Path) -> None:
    def changed(added: float, name: str = "Pair") -> str:
        (package / "called.py").write_text(CALLED.format(added=added, name=name))
        return run(package)

    assert changed(1.0) == "4.0 0"
    assert changed(1.0) == "4.0 1"  # from the cache
    assert changed(2.0) == "6.0 0"
    assert changed(2.0, "Couple") == "6.0 0"  # the cache holds the names of classes
    assert changed(1.0) == "4.0 1"  # two versions in turn do not compile anew each time


def test_what_no_version_used_for_long_is_deleted_and_nothing_else(package: Path) -> None:
    cache = package.parent / "cache"
    for name in ("0123456789abcdef", "fedcba9876543210", "notes"):
        (cache / name).mkdir(parents=True)
        (cache / name / "file").touch()
    for name in ("0123456789abcdef", "notes"):
        os.utime(cache / name, (0, 0))
    assert run(package) == "4.0 0"
    own = Path(folder(package, FLEXSEARCH_CACHE=str(cache))).name
    assert {path.name for path in cache.iterdir()} == {"fedcba9876543210", "notes", own}


def test_a_version_whose_folder_was_deleted_while_it_runs_goes_on(package: Path) -> None:
    program = "import shutil\nfrom flexsearch import compiled\nshutil.rmtree(compiled.folder)\n" + PROGRAM
    assert run(package, program) == "4.0 0"


def test_two_first_runs_at_once_do_not_disturb_each_other(package: Path) -> None:
    both = "from flexsearch import caller; print([caller.twice(x) for x in {}])"
    processes = [start(package, both.format(order)) for order in ("(1.0, 1)", "(1, 1.0)")]
    for process in processes:
        out, err = process.communicate()
        assert (out.strip(), process.returncode) == ("[4.0, 4.0]", 0), err
    assert run(package) == "4.0 1"


def test_code_is_kept_in_the_folder_that_is_asked_for_else_the_general_one_else_in_the_home(
    package: Path, tmp_path: Path
) -> None:
    def parent(**env: str) -> str:
        return str(Path(folder(package, **env)).parent)

    home = {"HOME": str(tmp_path / "home")}
    assert parent(FLEXSEARCH_CACHE=f"{tmp_path}/own", XDG_CACHE_HOME=f"{tmp_path}/xdg") == f"{tmp_path}/own"
    assert parent(XDG_CACHE_HOME=f"{tmp_path}/xdg", **home) == f"{tmp_path}/xdg/flexsearch"
    assert parent(**home) == f"{tmp_path}/home/.cache/flexsearch"
    assert parent(XDG_CACHE_HOME="relative", **home) == f"{tmp_path}/home/.cache/flexsearch"
    assert not (package / "__pycache__").exists()  # nothing is written beside the sources
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_without_a_home_it_is_kept_in_a_temporary_folder_of_the_user(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir(mode=0o777)
    (tmp_path / "tmp").chmod(0o1777)
    env = {"HOME": f"{tmp_path}/file", "XDG_CACHE_HOME": f"{tmp_path}/file", "TMPDIR": f"{tmp_path}/tmp"}
    expected = tmp_path / "tmp" / f"flexsearch-{os.geteuid()}"
    assert Path(folder(package, **env)).parent == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    assert [run(package, **env) for _ in range(2)] == ["4.0 0", "4.0 1"]


@pytest.mark.parametrize("how", ["written by all", "in a folder written by all", "a link in the temporary folder"])
def test_code_is_never_loaded_from_where_another_user_could_have_put_it(
    package: Path, tmp_path: Path, how: str
) -> None:
    parent, place = tmp_path / "parent", tmp_path / "parent" / "cache"
    place.mkdir(parents=True, mode=0o755)
    if how == "written by all":
        place.chmod(0o777)
    elif how == "in a folder written by all":
        parent.chmod(0o777)
    else:
        real = tmp_path / "real"
        real.mkdir()
        place.rmdir()
        place.symlink_to(real)
        if os.geteuid() != 0:
            pytest.skip("only root can give a link to another user")
        os.chown(place, 12345, 12345, follow_symlinks=False)
    env = {"FLEXSEARCH_CACHE": str(place), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert Path(folder(package, **env)).parent == tmp_path / "xdg" / "flexsearch"


def test_where_nothing_can_be_kept_everything_still_runs(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "FLEXSEARCH_CACHE"), f"{tmp_path}/file")
    program = "import tempfile\ntempfile.tempdir = '/proc'\n"
    assert run(package, f"{program}from flexsearch.compiled import folder; print(folder)", **env) == "None"
    assert [run(package, program + PROGRAM, **env) for _ in range(2)] == ["4.0 0", "4.0 0"]


def test_the_users_own_functions_are_kept_where_numba_keeps_them(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import numba\n@numba.njit(cache=True)\ndef f(x):\n    return x + 1\n")
    program = "from flexsearch import caller\nimport mine\nmine.f(1); print(mine.f._cache.cache_path)"
    assert run(package, program) == str(tmp_path / "__pycache__")


def test_what_compiled_functions_call_is_made_machine_code_and_kept_in_their_entries_alone(package: Path) -> None:
    program = (
        "from flexsearch import called, caller; caller.twice(1.0)\n"
        "made = called.one.overloads.popitem()[1]\n"
        "print(dict(called.one.entry.overloads), made.library.codegen._engine.is_symbol_defined(made.library.symbol))"
    )
    (package / "called.py").write_text(CALLED.format(added=1.0, name="Pair"))
    assert run(package, program) == "{} False"
    kept = [path.name.partition("-")[0] for path in (package.parent / "cache").rglob("*.nbc")]
    assert kept == ["caller.twice_of"]


def test_a_second_process_compiles_nothing(package: Path) -> None:
    (package / "many.py").write_text(MANY)
    waited = "from flexsearch.compiled import compiling_s; print(compiling_s() > 0.1)\n"
    first = run(package, COUNT + waited).split()
    assert first[:2] == ["24.5", "24.0"] and int(first[2]) > 12 and first[3] == "True"
    assert run(package, COUNT) == "24.5 24.0 0"


def test_an_entry_that_another_calls_is_made_again_when_it_is_lost(package: Path) -> None:
    (package / "many.py").write_text(MANY)
    run(package, COUNT)
    lost = [path for path in (package.parent / "cache").rglob("*.nb?") if path.name.startswith("many.large-")]
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    assert run(package, COUNT).startswith("24.5 24.0 ")


def test_a_large_entry_that_another_process_compiled_is_not_translated_again(package: Path) -> None:
    (package / "many.py").write_text(MANY)
    run(package, "import numpy as np; from flexsearch import many; many.by_python(np.zeros(3), np.uint64(1))")
    results, compilations = run(package, COUNT).rsplit(" ", 1)
    assert results == "24.5 24.0" and compilations == "3"  # outer, translated and compiled; large is looked up


def test_of_processes_that_need_the_same_function_one_compiles_it(package: Path) -> None:
    (package / "many.py").write_text(MANY)
    processes = [start(package, COUNT) for _ in range(2)]
    ended = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [results[:2] for results in ended] == [["24.5", "24.0"]] * 2
    fewest, most = sorted(int(results[2]) for results in ended)
    assert fewest == 0 and most > 12


def test_a_recording_says_what_would_be_compiled_and_compiles_nothing() -> None:
    calls = record(lambda: direct(_outer)(np.ones(3), np.uint64(1)))
    assert [(entry.py_func.__name__, str(types[1])) for entry, types in calls] == [("_outer", "uint64")]
    assert not _outer.overloads and not _inner.overloads  # type: ignore[attr-defined]


@pytest.mark.parametrize(("first", "last", "step"), [(0, 7, 3), (6, 1, -2), (5, 5, 1), (3, 0, 4)])
def test_lean_functions_compute_what_python_does(first: int, last: int, step: int) -> None:
    values = np.array([3, -1, 4, 1, -5, 9, 2, 6])
    assert _calls_steps(first, last, step, values) == _steps.py_func(first, last, step, values) + 1  # type: ignore[attr-defined]


def test_a_function_that_fails_tells_lean_functions_that_call_it() -> None:
    with pytest.raises(ValueError, match="zero"):
        _calls_steps(0, 5, 0, np.arange(8))


def test_lean_functions_divide_without_failing() -> None:
    assert _calls_steps(0, 5, 2, np.arange(8)) == 1


def test_a_function_is_not_inlined_because_its_caller_is() -> None:
    _outer.compile((numba.typeof(np.ones(3)), numba.uint64))  # type: ignore[attr-defined]
    texts = [str(next(iter(f.overloads.values())).library._final_module) for f in (_outer, _inner)]  # type: ignore[attr-defined]
    assert ["alwaysinline" in text for text in texts] == [True, False]


@pytest.mark.parametrize("other", ["numba.version_info = (0, 1)", "numba.config.DISABLE_JIT = True"])
def test_with_a_numba_that_is_too_old_or_off_the_same_functions_run(package: Path, other: str) -> None:
    (package / "many.py").write_text(MANY)
    (package / "called.py").write_text(CALLED.format(added=1.0, name="Pair"))
    again = f"import numba\n{other}\n"
    assert run(package, again + "from flexsearch import caller; print(caller.twice(1.0))") == "4.0"
    assert run(package, again + COUNT).startswith("24.5 24.0 ")
    loaded = "import sys, flexsearch.compiled; print('flexsearch.linking' in sys.modules)"
    assert run(package, again + loaded) == "False"


@pytest.mark.parametrize("fits", [True, False])
def test_a_newer_numba_is_relied_on_if_it_compiles_a_program(package: Path, fits: bool) -> None:
    (package / "many.py").write_text(MANY)
    newer = "import numba\nnumba.version_info, numba.__version__ = (9, 0), '9.0.0'\n"
    changed = "" if fits else "import flexsearch.translating\nflexsearch.translating.PASSES = ()\n"
    whether = "\nfrom flexsearch import compiled; print(compiled._program is not None)"
    assert run(package, newer + changed + COUNT + whether).endswith(str(fits))
    (record,) = (package.parent / "cache").rglob("numba-9.0.0")
    assert record.read_text() == ("works" if fits else "fails")
    record.write_text("under way")  # as of a process that it ended
    assert run(package, newer + whether) == "False"


def test_what_a_second_process_compiles_first_are_entries_that_a_climb_calls() -> None:
    """In a process of its own: in this one, what was compiled is called without a look at what is recorded."""
    script = """
import warnings
from functools import partial
import numpy as np
from flexsearch.graph import OperatorGraph
from flexsearch.linking import record
from flexsearch.search.ahead import ORDER, _climb
from flexsearch.topology import Topology
warnings.simplefilter("ignore")
np.seterr(over="ignore")
calls = record(partial(_climb, OperatorGraph.load("mlp"), Topology.load("p100:2")))
print(*set(ORDER) - {entry.py_func.__name__ for entry, _ in calls})
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.stdout.strip(), ran.returncode) == ("", 0), ran.stderr
