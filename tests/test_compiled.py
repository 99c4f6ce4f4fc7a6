"""What is compiled is compiled again when any of its sources changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import flexsearch

PROGRAM = "from flexsearch import caller; print(caller.twice(1.0), sum(caller.twice.stats.cache_hits.values()))"
CALLER = """
from flexsearch.compiled import compiled
from flexsearch import called


@compiled
def twice_of(pair):
    return 2.0 * called.one(pair)


def twice(x):
    return twice_of(called.pair(x, x))


twice.stats = twice_of.stats
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


def test_a_change_in_a_file_reaches_the_functions_of_other_files_that_call_it(tmp_path: Path) -> None:
    package = tmp_path / "flexsearch"
    package.mkdir()
    (package / "__init__.py").touch()
    source = Path(flexsearch.__file__).parent
    shutil.copy(source / "compiled.py", package)
    (package / "caller.py").write_text(CALLER)

    def run(added: float, name: str = "Pair") -> str:
        (package / "called.py").write_text(CALLED.format(added=added, name=name))
        # -B: Python's own cache takes a file of the same size that was written in the same second for the same.
        return subprocess.run(
            [sys.executable, "-B", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run(1.0) == "4.0 0"
    assert run(1.0) == "4.0 1"  # from the cache
    assert run(2.0) == "6.0 0"
    assert run(2.0, "Couple") == "6.0 0"  # the cache holds the names of classes
    assert len([*package.glob("__pycache__/*.nbi")]) == 2  # of the present sources only
