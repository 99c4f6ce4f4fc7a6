"""Standard output and error: open, of a known width, in an encoding that never fails, and free for one JSON object.

``prepare`` is for a process that is a command: what it changes stays so until the end.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
import unicodedata
from typing import Any, Final

from flexsearch.errors import OutputError

NARROW: Final = 40
"""Columns. In less room, tables and sentences are better wrapped by the terminal than by us."""
PIPE_CLOSED: Final = 141
"""Exit code when nobody reads what is printed: 128 + SIGPIPE, as of every command in a pipeline."""

_PLAIN: Final = {
    "\u00b5": "u", "\u00d7": "x", "\u2192": "->", "\u2013": "-", "\u2014": "-", "\u2026": "...", "\u2248": "~",
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2500": "-", "\u2501": "-", "\u2502": "|",
    "\u2503": "|",
}  # fmt: skip
_SPOOFS: Final = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder or break a line."""

_result: _Stream | None = None


class PipeClosed(Exception):
    """Nobody reads what is printed."""


def printable(text: str) -> str:
    """The text without what would steer a terminal: control characters (but for line ends) become "?"."""
    if text.isprintable():
        return text
    return "".join("?" if (c < " " and c != "\n") or "\x7f" <= c <= "\x9f" or c in _SPOOFS else c for c in text)


def finite(data: Any) -> Any:
    """The data with null in place of numbers that JSON has no words for."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def prepare(as_json: bool) -> None:
    """Make the standard streams of this process safe to use. ``as_json``: from now on whatever is printed, by whatever
    code, goes to standard error, and only ``emit`` writes to standard output."""
    global _result
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed; a file that is opened later would take its place
            os.open(os.devnull, os.O_RDWR)
    _normalise_width()
    out, err = sys.stdout, sys.stderr
    encoding = str(getattr(out, "encoding", None) or "utf-8"), str(getattr(err, "encoding", None) or "utf-8")
    for stream in (out, err):
        if stream is not None:
            stream.flush()
    sys.stderr = _Stream(2, encoding[1], needed=False)
    if as_json:
        _result = _Stream(os.dup(1), "ascii", needed=True)
        os.dup2(2, 1)
        sys.stdout = _Stream(1, encoding[1], needed=False)
    else:
        _result = None
        sys.stdout = _Stream(1, encoding[0], needed=True)


def emit(data: dict[str, Any]) -> None:
    """Print the one JSON object of this command."""
    (_result or sys.stdout).write(json.dumps(finite(data), indent=2, allow_nan=False) + "\n")


class _Stream(io.TextIOWrapper):
    """Text to an open file, unbuffered. If it cannot be written to: where the text is ``needed``, PipeClosed or
    OutputError, once; then, and else, the text is lost."""

    def __init__(self, descriptor: int, encoding: str, needed: bool) -> None:
        raw: Any = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(raw, encoding, "flexsearch.plain", line_buffering=True, write_through=True)
        self._needed, self._dead = needed, False

    def write(self, text: str) -> int:
        if not self._dead:
            try:
                data = memoryview(text.encode(self.encoding, "flexsearch.plain"))
                while data:
                    data = data[os.write(self.fileno(), data) :]
            except OSError as error:
                self._fail(error)
        return len(text)

    def _fail(self, error: OSError) -> None:
        self._dead = True
        if self._needed and isinstance(error, BrokenPipeError):
            raise PipeClosed from error
        if self._needed:
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def _normalise_width() -> None:
    """Let nobody read a width from the environment that nothing fits in."""
    columns = os.environ.get("COLUMNS")
    if columns is None:
        return
    if columns.isascii() and columns.isdigit() and 0 < int(columns[:9]) < 10_000:
        os.environ["COLUMNS"] = str(max(NARROW, int(columns)))
    else:
        del os.environ["COLUMNS"]


def _degrade(error: UnicodeError) -> tuple[str, int]:
    """What a terminal shows of characters that its encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or "?"


codecs.register_error("flexsearch.plain", _degrade)
