"""Versioned JSON files: strict reading, errors that name the field, content hashes. ``output`` writes them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flexsearch import output
from flexsearch.errors import FileFormatError

M = TypeVar("M", bound=BaseModel)

MAX_FILE_BYTES: Final = 128 << 20
MAX_DEPTH: Final = 32
"""Of objects and lists in each other; our own files have 8."""
MAX_STRING: Final = 65536
"""Characters of a text; names are shorter still (``flexsearch.quantities``)."""
MAX_DIGITS: Final = 20
"""Of an integer: those of 64 bits have no more."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class FileModel(BaseModel):
    """Base of all file contents: unknown fields, NaN and silent type coercions are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_json(path: str | Path, what: str) -> Any:
    """Parsed JSON of the file at ``path``. ``what`` names the kind of file in errors ("graph", "topology", ...).

    Raises FileFormatError for what is no regular file, larger than MAX_FILE_BYTES or no JSON; names the field of a
    duplicate key, a number that is none (NaN, an integer of thousands of digits), text or nesting beyond all reason.
    """
    source = f"{what} file {printable(str(path))}"
    return parse_json(read_text(path, source, "a JSON file"), source)


def read_text(path: str | Path, source: str, wanted: str) -> str:
    """Text of the regular file at ``path``. ``source`` names it in errors; ``wanted`` says what to give instead.

    Raises FileFormatError for what is no regular file, larger than MAX_FILE_BYTES or not UTF-8."""
    try:
        return _read_regular(path, source).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        if isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError):
            reason = "the name contains a NUL character"
        raise FileFormatError(f"cannot read {source}: {reason}", f"Give the path of {wanted} in UTF-8.") from error


def _read_regular(path: str | Path, source: str) -> bytes:
    """The bytes of a regular file; never waits for a writer, never reads a device."""
    if not isinstance(path, str | os.PathLike):
        raise FileFormatError(f"cannot read {source}: {type(path).__name__} is no path", "Give a text or a Path.")
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise FileFormatError(f"cannot read {source}: it is {kind}", "Write the JSON to a file and give that.")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_FILE_BYTES:
        raise FileFormatError(f"{source} is larger than {MAX_FILE_BYTES >> 20} MiB", "Is it another kind of file?")
    return data


class _Unusable:
    """Stands in parsed data for a value that JSON text may spell but no field may hold; ``problem`` says what."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


class _Repeated(dict[str, Any]):
    """An object that gives ``key`` twice."""

    key = ""


def parse_json(text: str, source: str) -> Any:
    """``text`` as data that is safe to walk: no deeper than MAX_DEPTH, no NaN, no duplicate keys, no endless numbers.
    Raises FileFormatError that names ``source`` and the field."""
    try:
        data = json.loads(
            text, parse_int=_integer, parse_float=_number, object_pairs_hook=_object,
            parse_constant=lambda name: _Unusable(f"must be a number, not {name}"),
        )  # fmt: skip
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{source} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})",
            "It may have been cut off; make it again.",
        ) from error
    except RecursionError:
        raise FileFormatError(
            f"{source}: nested more than {MAX_DEPTH} levels deep", "No file of flexsearch is; make it again."
        ) from None
    _check_values(data, (), source)
    return data


def _integer(text: str) -> Any:
    return int(text) if len(text) <= MAX_DIGITS else _Unusable(f"is an integer of {len(text)} digits")


def _number(text: str) -> Any:
    value = float(text)
    return value if math.isfinite(value) else _Unusable("is too large for a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) == len(pairs):
        return data
    repeated = _Repeated(data)
    [(repeated.key, _)] = Counter(key for key, _ in pairs).most_common(1)
    return repeated


def _check_values(value: Any, place: tuple[str | int, ...], source: str) -> None:
    """Raise FileFormatError for the first value at or below ``place`` that nothing could mean."""
    problem = ""
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            problem = f"is a text of {len(value):,} characters; at most {MAX_STRING:,} are allowed"
        elif not value.isascii() and _SURROGATE.search(value):
            problem = "contains half of a surrogate pair, which is no character"
    elif isinstance(value, _Unusable):
        problem = value.problem
    elif isinstance(value, dict | list):
        if len(place) >= MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} levels deep"
        elif isinstance(value, _Repeated):
            problem = f"gives {_brief(value.key)} twice"
    if problem:
        raise FileFormatError(f"{source}: {dotted(place)} {problem}", "Correct the file, or make it again.")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, (*place, "(a key)"), source)
            _check_values(item, (*place, key), source)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            if not isinstance(item, int | float):
                _check_values(item, (*place, k), source)


def dotted(place: Iterable[str | int]) -> str:
    """A place in a file as people write it: ``links.0.bandwidth``."""
    return ".".join(printable(str(part), 80) for part in place) or "the top level"


def printable(text: str, most: int = 200) -> str:
    """``text`` in one line of printable characters, shortened in the middle."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * most])
    return clean if len(clean) <= most else f"{clean[: most // 2]}...{clean[-most // 4 :]}"


def _brief(value: Any) -> str:
    """What a wrong value is, in a few words: never the whole of it."""
    if isinstance(value, str):
        return f'"{printable(value, 60)}"'
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "an object" if isinstance(value, dict) else "a list"


def parse(model: type[M], data: Any, source: str, what: str) -> M:
    """``data`` as ``model``. Errors name the source, the wrong format or every wrong field, and the remedy."""
    expected = model.model_fields["format"].default if "format" in model.model_fields else None
    if not isinstance(data, dict):
        raise FileFormatError(f"{what} {source} must be a JSON object, not {_brief(data)}", _AGAIN.get(what, ""))
    if expected is not None and data.get("format") != expected:
        actual = data.get("format")
        raise FileFormatError(
            f'{what} {source} has "format": {_brief(actual)}, but this command needs "{expected}"',
            f"Give a {what} file." if actual is None else "Is it another kind of file, or of another version?",
        )
    try:
        # JSON mode lets lists become tuples under strict typing, and nothing else.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [f"  {_field(problem['loc'])}{describe(problem)}" for problem in problems[:8]]
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise FileFormatError(
            f"{what} {source} is malformed:\n" + "\n".join(lines) + more, _AGAIN.get(what, "")
        ) from error


_AGAIN: Final = {
    "graph": "Make it again with `flexsearch import`.",
    "topology": "docs/files.md describes the fields.",
    "profile": "Measure again with `flexsearch profile`.",
    "strategy": "Make it again with `flexsearch optimize`.",
}
"""Remedy by kind of file."""


def _field(place: tuple[str | int, ...]) -> str:
    return dotted(place).replace(".[key]", " (the key)") + ": " if place else ""


_PLAIN: Final = {
    "missing": "is missing", "extra_forbidden": "is no field of this kind of file; remove it",
    "string_type": "must be text", "bool_type": "must be true or false", "int_type": "must be a whole number",
    "int_from_float": "must be a whole number", "float_type": "must be a number", "finite_number": "must be finite",
    "tuple_type": "must be a list", "list_type": "must be a list", "dict_type": "must be an object",
    "model_type": "must be an object", "model_attributes_type": "must be an object",
    "greater_than_equal": "must be at least {ge:g}", "greater_than": "must be greater than {gt:g}",
    "less_than_equal": "must be at most {le:g}", "less_than": "must be less than {lt:g}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must not be empty", "too_short": "must have at least {min_length} items",
    "literal_error": "must be {expected}", "value_error": "{error}",
    "string_pattern_mismatch": "must be a word: letters, digits, underscores, a letter first",
    "int_parsing_size": "is a number with too many digits",
}  # fmt: skip
"""Message by the type of pydantic's error, with the names of its context."""
_SHOWN: Final = ("_type", "from_float", "_than", "_equal", "literal_error", "_number")
"""Ends of the types of errors after which the wrong value is shown."""


def describe(problem: Any) -> str:
    """A problem that pydantic reports, in plain English."""
    kind, context = problem["type"], problem.get("ctx", {})
    text = _PLAIN.get(kind)
    message: str = problem["msg"] if text is None else text.format(**context)
    shown = kind.endswith(_SHOWN) and not isinstance(problem["input"], BaseModel | tuple)
    return f"{message}, not {_brief(problem['input'])}" if shown else message


def load(model: type[M], path: str | Path, what: str) -> M:
    """Read, check and return the file at ``path`` as ``model``."""
    return parse(model, read_json(path, what), f"file {printable(str(path))}", what)


def save(value: BaseModel, path: str | Path) -> None:
    """Write ``value`` as JSON. Raises OutputError if that is not possible."""
    output.write(path, to_json(value))


def to_json(value: BaseModel) -> str:
    """Stable, readable JSON: two-space indent for the outer levels, fields in declaration order."""
    return _compact_leaves(json.loads(value.model_dump_json(exclude_none=True))) + "\n"


def content_hash(data: Any) -> str:
    """Hex SHA-256 (first 16 digits) of ``data``'s canonical JSON: what a strategy file says it was made for."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shipped(kind: str, name: str) -> Path | None:
    """Path of the data file ``kind``/``name``.json ("profiles" or "graphs") that comes with flexsearch, or None."""
    here = Path(__file__).resolve().parent
    for root in (here / "_data", here.parent):
        path = root / kind / f"{name}.json"
        if os.path.isfile(path):  # unlike Path.is_file, no error for a name that cannot be one
            return path
    return None


def shipped_names(kind: str) -> list[str]:
    """Names of all shipped data files of a kind, sorted."""
    here = Path(__file__).resolve().parent
    return sorted({p.stem for root in (here / "_data", here.parent) for p in (root / kind).glob("*.json")})


def _compact_leaves(value: Any, indent: int = 0) -> str:
    """JSON with containers that fit a line on one line: a thousand operators stay readable and diffable."""
    line = json.dumps(value)
    if len(line) + indent <= 110 or not isinstance(value, dict | list) or not value:
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(k)}: {_compact_leaves(v, indent + 2)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    items = [pad + _compact_leaves(v, indent + 2) for v in value]
    return "[\n" + ",\n".join(items) + "\n" + " " * indent + "]"
