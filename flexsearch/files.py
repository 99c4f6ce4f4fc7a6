"""Versioned JSON files: strict reading, errors that name the field, content hashes. ``output`` writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flexsearch import output
from flexsearch.errors import FileFormatError

M = TypeVar("M", bound=BaseModel)


class FileModel(BaseModel):
    """Base of all file contents: unknown fields, NaN and silent type coercions are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_json(path: str | Path, what: str) -> Any:
    """Parsed JSON of the file at ``path``. ``what`` names the kind of file in errors ("graph", "topology", ...)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FileFormatError(f"cannot read {what} file {path}: {reason}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{what} file {path} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}). "
            f"It may have been cut off; make it again."
        ) from error


def parse(model: type[M], data: Any, source: str, what: str) -> M:
    """``data`` as ``model``. Errors name the source, the wrong format or every wrong field, and the remedy."""
    expected = model.model_fields["format"].default if "format" in model.model_fields else None
    if not isinstance(data, dict):
        raise FileFormatError(f"{what} {source} must be a JSON object, not {type(data).__name__}")
    if expected is not None and data.get("format") != expected:
        found = data.get("format")
        raise FileFormatError(
            f'{what} {source} has "format": {json.dumps(found)}, but this command needs "{expected}". '
            + (f"Give a {what} file." if found is None else "Was another kind of file, or another version, given?")
        )
    try:
        # JSON mode lets lists become tuples under strict typing, and nothing else.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        lines = []
        for problem in error.errors()[:8]:
            where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
            lines.append(f"  {where}: {problem['msg'].removeprefix('Value error, ')}")
        more = f"\n  ... and {len(error.errors()) - 8} more" if len(error.errors()) > 8 else ""
        raise FileFormatError(f"{what} {source} is malformed:\n" + "\n".join(lines) + more) from error


def load(model: type[M], path: str | Path, what: str) -> M:
    """Read, check and return the file at ``path`` as ``model``."""
    return parse(model, read_json(path, what), f"file {path}", what)


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
        if path.is_file():
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
