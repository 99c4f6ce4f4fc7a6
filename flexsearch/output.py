"""Writing files, so that nobody ever sees half of one, and nothing is replaced that is more than a file.

A regular file is written beside its place and renamed into it; of a link, that is the place of its target. To devices,
pipes and open file descriptors (``/dev/stdout``) the bytes are streamed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flexsearch.errors import OutputError

LINKS: Final = 40
"""Links in a row that are followed, as in the kernel."""

_unfinished: set[Path] = set()


@dataclass(frozen=True)
class _Place:
    """Where the bytes go: to the open file ``descriptor``, else to ``path``, which is replaced if ``regular``. ``old``:
    the file that is there."""

    path: Path
    descriptor: int | None = None
    regular: bool = True
    old: os.stat_result | None = None


def write(path: str | Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes. Raises OutputError if that is not possible; a file is then as it was."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        place = _place(Path(path))
        if place.descriptor is not None:
            _stream(os.dup(place.descriptor), data)
        elif place.regular:
            _replace(place, data)
        else:
            _stream(os.open(place.path, os.O_WRONLY | os.O_NOCTTY | os.O_APPEND), data)
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def check(outputs: Mapping[str, str | Path | None], inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise OutputError now rather than after the work. ``outputs``: by the option that names them. None may be the
    same file as another, nor as one of the ``inputs``; what is None, or an input that does not exist, does not count.
    """
    sources = [(str(source), status) for source in inputs if source is not None and (status := _status(source))]
    taken: dict[tuple[int, int] | str, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            place = _place(Path(path))
        except (OSError, ValueError) as error:
            raise _refusal(path, error).at(option) from error
        if not place.regular or place.descriptor is not None:
            continue
        for source, status in sources:
            if place.old is not None and os.path.samestat(place.old, status):
                raise OutputError(
                    f"{option}: {path} is also an input of this command ({source})", "Give another file to write."
                )
        key = (place.old.st_dev, place.old.st_ino) if place.old is not None else str(place.path)
        if key in taken:
            raise OutputError(f"{option}: {path} is also the file of {taken[key]}", "Give another file to write.")
        taken[key] = option


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this user can read, until the end of the block or of the process."""
    folder = Path(tempfile.mkdtemp(prefix="flexsearch-"))
    _unfinished.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unfinished.discard(folder)


def discard_unfinished() -> None:
    """Delete what is being written at this moment, and temporary folders: the process ends at once."""
    for path in list(_unfinished):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _place(path: Path) -> _Place:
    """Raises OSError if nothing can be written there."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        os.fstat(descriptor)
        return _Place(path, descriptor)
    old: os.stat_result | None = None
    with suppress(FileNotFoundError):  # a link may lead to a file that is yet to be
        old = path.stat()
    if old is None or stat.S_ISREG(old.st_mode):
        real = Path(os.path.realpath(path))
        _writable(real, old)
        return _Place(real, old=old)
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(0, "it is a folder")
    if stat.S_ISBLK(old.st_mode):
        raise PermissionError(0, "it is a disk")
    if not os.access(path, os.W_OK):
        raise PermissionError(0, "you may not write to it")
    return _Place(path, regular=False)


def _writable(path: Path, old: os.stat_result | None) -> None:
    folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(0, f"the folder {folder} does not exist")
    if not folder.is_dir():
        raise NotADirectoryError(0, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, f"you may not write to the folder {folder}")
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(0, "you may not write to it")


def _descriptor(path: Path) -> int | None:
    """The open file that a path such as /dev/stdout or /proc/self/fd/3 stands for; None if it is an ordinary path."""
    for _ in range(LINKS):
        folder = os.path.realpath(path.parent)
        if (match := re.fullmatch(r"/proc/(\d+)(?:/task/\d+)?/fd", folder)) and path.name.isdecimal():
            return int(path.name) if int(match[1]) == os.getpid() else None
        try:
            path = path.parent / os.readlink(path)
        except OSError:  # no link, or nothing there
            return None
    return None


def _replace(place: _Place, data: bytes) -> None:
    temporary = place.path.parent / f".flexsearch-{secrets.token_hex(8)}"
    _unfinished.add(temporary)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if (old := place.old) is not None:
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    with suppress(OSError):  # only root can
                        os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, old.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, place.path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        _unfinished.discard(temporary)


def _stream(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0 :]


def _refusal(path: str | Path, error: OSError | ValueError) -> OutputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedy = "Give the name of another file."
    if isinstance(error, FileNotFoundError):
        remedy = f"Make it first (mkdir -p {Path(os.path.realpath(path)).parent}), or give another file."
    return OutputError(f"cannot write {path}: {reason[:1].lower()}{reason[1:]}", remedy)
