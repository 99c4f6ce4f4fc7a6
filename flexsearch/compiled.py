"""Compiling loops over flat arrays with numba: how every compiled function of flexsearch is made.

Indices are unsigned everywhere: signed ones cost a test for wraparound, and mixed ones become float64.

Compiled code is kept in a folder of the user's (``folder``), in a subfolder named by a digest of all our sources:
numba's own check notices changes of the file that holds a function, not of the files that hold the functions it calls.
numba unpickles what it finds there, so a folder that another user could write to is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

F = TypeVar("F", bound=Callable[..., Any])
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

ZERO: Any = np.uint64(0)
ONE: Any = np.uint64(1)
TWO: Any = np.uint64(2)
THREE: Any = np.uint64(3)
FOUR: Any = np.uint64(4)

LEAN: Final[dict[str, Any]] = {"_nrt": False, "error_model": "numpy"}
"""Options of lean functions. Where a division by zero raises nothing, calls need not look whether something did."""

TRIED: Final = (0, 63), (0, 68)
"""First and last version of numba whose inner workings are known to be what ``linking`` relies on."""

UNUSED_S: Final = 30 * 86400
"""Code of other versions is deleted when it was not used for so long: until then, two versions in turn do not compile
anew each time."""


_MAKERS: Final = ("compiled", "packed", "linking", "translating", "untried")


def _digest() -> str:
    """Of all files of the package in which something is compiled, and of those that say how."""
    digest = hashlib.sha256()
    own = Path(__file__)
    for path in sorted(own.parent.rglob("*.py")):
        source = path.read_bytes()
        if b"flexsearch.compiled" in source or (path.parent == own.parent and path.stem in _MAKERS):
            digest.update(source)
    return digest.hexdigest()[:16]


_SOURCES: Final = _digest()


def _only_ours(path: Path) -> bool:
    """Whether nobody but us and root can change what lies at ``path``: it is ours, and neither it nor a folder above it
    can be written by others (but for folders with the sticky bit, whose entries only their owners can replace)."""
    us = os.geteuid()
    real = path.resolve(strict=True)
    if {path.lstat().st_uid, real.stat().st_uid} != {us}:  # a link in the temporary folder may be another user's
        return False
    for place in (real, *real.parents):
        status = place.stat()
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid not in (us, 0) or (shared and (place == real or not status.st_mode & stat.S_ISVTX)):
            return False
    return True


def _candidates() -> Iterator[Path]:
    if own := os.environ.get("FLEXSEARCH_CACHE"):
        yield Path(own).absolute()
    general = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(general):  # a relative one is to be ignored, says the XDG specification
        yield Path(general) / "flexsearch"
    else:
        with suppress(RuntimeError):  # no home folder
            yield Path.home() / ".cache" / "flexsearch"
    yield Path(tempfile.gettempdir()) / f"flexsearch-{os.geteuid()}"


def _folder() -> Path | None:
    """Where compiled code is kept: the first that can be written, and by nobody else; None if there is none."""
    for root in _candidates():
        with suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = root / _SOURCES
            if _only_ours(root):
                place.mkdir(mode=0o700, exist_ok=True)
                os.utime(place)  # in use
                if _only_ours(place):
                    tempfile.TemporaryFile(dir=place).close()
                    return place
    return None


folder: Final = _folder()
"""Where compiled code is kept; None: nowhere, every process compiles for itself."""


def _forget_unused() -> None:
    """Delete what other versions compiled and nobody used for long. A version that still runs then compiles again."""
    if folder is None:
        return
    for other in folder.parent.iterdir():
        if other != folder and re.fullmatch("[0-9a-f]{16}", other.name):
            with suppress(OSError):
                if time.time() - other.lstat().st_mtime > UNUSED_S:
                    shutil.rmtree(other, ignore_errors=True)


_forget_unused()


def is_warm() -> bool:
    """Whether something was compiled before by this Python, so that the next command need not wait for it."""
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return folder is not None and any(folder.rglob(f"*.{version}*.nbc"))


def compiles_for_all() -> bool:
    """Whether what one process compiles, others load and need not compile."""
    return folder is not None and _program is not None


def _find_program() -> Callable[..., Any] | None:
    """What makes a function part of our program; None: this numba is too old, or fails at it, or compiling is off."""
    version = tuple(numba.version_info[:2])
    if version < TRIED[0] or getattr(numba.config, "DISABLE_JIT", False):
        return None
    try:
        from flexsearch.linking import LARGE, program
    except (ImportError, AttributeError):  # a numba that was changed
        return None
    if version > TRIED[1]:
        from flexsearch.untried import is_fit

        return program if is_fit(program, LARGE, numba.__version__, folder) else None
    return program


_program: Final = _find_program()


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """A function of our program, or, without one, ``numba.njit``; kept in our folder."""
    options = {"nogil": True} | options
    if _program is not None:
        compiled = _program(function, options)
        _keep(compiled.entry)
    else:
        make: Any = numba.njit
        compiled = make(**options)(function)
        if hasattr(compiled, "overloads"):  # else compiling is off
            _keep(compiled)
    return compiled


def _keep(dispatcher: Any) -> None:
    """Keep what a dispatcher compiles in our folder. The user's own functions are kept wherever numba keeps them."""
    if (place := folder) is None:
        return
    ours = {"CACHE_DIR": str(place), "CACHE_LOCATOR_CLASSES": ""}
    before = {name: getattr(numba.config, name) for name in ours if hasattr(numba.config, name)}
    try:
        for name in before:
            setattr(numba.config, name, ours[name])
        dispatcher.enable_caching()
    finally:
        for name, value in before.items():
            setattr(numba.config, name, value)
    on_disk = dispatcher._cache
    save = on_disk.save_overload

    def save_alone(signature: Any, data: Any) -> None:
        # numba numbers its files by what its index holds: two processes that write at once could exchange the code of
        # two signatures. A full disk only means that the next process compiles, too.
        with suppress(OSError), open(place / "lock", "a") as lock:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            save(signature, data)

    on_disk.save_overload = save_alone
    dispatcher.alone = partial(_alone, f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}")


@cache
def _locks() -> int:
    """File whose bytes processes lock, one for each function. It stays open: closing it would release them all."""
    assert folder is not None
    return os.open(folder / "compiling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class _Waiting:
    """How long the main thread has waited for machine code: compiled by itself or another process, or loaded."""

    def __init__(self) -> None:
        self._before_s, self._since_s, self._depth = 0.0, 0.0, 0

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._since_s if self._depth else 0.0)

    @property
    def now(self) -> bool:
        return self._depth > 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self._since_s = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            if self._depth == 1:  # in this order: a signal's handler may ask in between
                now = time.monotonic()
                self._before_s += now - self._since_s
                self._since_s = now
            self._depth -= 1


_waiting: Final = _Waiting()


def compiling_s() -> float:
    """Seconds that this process's main thread has waited for machine code so far (if ``compiles_for_all``; else 0)."""
    return _waiting.seconds


def is_compiling() -> bool:
    """Whether this process's main thread waits for machine code now (as ``compiling_s`` counts it)."""
    return _waiting.now


@contextmanager
def _alone(name: str, args: Any) -> Iterator[None]:
    """While this lasts no other process compiles a function for arguments of these types, where the system and the
    file system have locks. The system ends the locks of a process that ends."""
    with _waiting.counted(), _locked(name, args):
        yield


@contextmanager
def _locked(name: str, args: Any) -> Iterator[None]:
    byte = int.from_bytes(hashlib.sha256(f"{name} {args}".encode()).digest()[:6])
    held = False
    with suppress(OSError):
        fcntl.lockf(_locks(), fcntl.LOCK_EX, 1, byte)
        held = True
    try:
        yield
    finally:
        if held:
            with suppress(OSError):
                fcntl.lockf(_locks(), fcntl.LOCK_UN, 1, byte)


def compiled(function: F) -> F:
    """``numba.njit``, kept on disk."""
    return cast(F, _jit(function))


def lean(function: F) -> F:
    """As ``compiled``, without counting references to arrays, which takes longer to compile. The function must not make
    arrays. Numbers divided by zero raise nothing."""
    return _first_that_works(function, LEAN)


def inlined(function: F) -> F:
    """As ``lean``, for functions that are small or called in one place: their code is put there, without a call."""
    return _first_that_works(function, LEAN | {"forceinline": True}, LEAN)


def wide(function: F) -> F:
    """As ``lean``, for functions that make uint64 of all whole numbers that they are given: compiled functions do that
    when they call it, and it is compiled once for all kinds of numbers."""
    compiled: Any = lean(function)
    if hasattr(compiled, "wide"):
        compiled.wide = True
    return cast(F, compiled)


def _first_that_works(function: F, *choices: dict[str, Any]) -> F:
    for options in choices:
        try:
            return cast(F, _jit(function, **options))
        except (KeyError, TypeError):  # a numba without these options
            continue
    return compiled(function)
