"""Batch size and sequence length as the user gives them: ``512``, ``1M-tokens``, ``2048``."""

from __future__ import annotations

import re
from fractions import Fraction

from flexsearch.errors import NotationError, UsageError
from flexsearch.graph.batch import with_batch
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.sequence import sequence_length, with_sequence
from flexsearch.quantities import MAX_SIZE

_TOKENS = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kKmM]?)-?tokens?")
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def resized(graph: OperatorGraph, batch: int | str | None = None, sequence: int | None = None) -> OperatorGraph:
    """``graph`` with another global batch, in samples or as :func:`parse_batch` takes it, and other sequences, in
    tokens; None: as it is. Which constants are cut, and what is refused: :func:`with_sequence` and :func:`with_batch`.

    Raises UsageError for what is no batch or length, NotationError where the graph cannot be changed so.
    """
    if sequence is not None:
        if not 1 <= sequence < MAX_SIZE:
            raise UsageError(f"a sequence cannot have {sequence} tokens", "Give at least 1.")
        graph = with_sequence(graph, sequence)
    if batch is not None:
        samples = parse_batch(batch, graph)
        if samples != graph.batch:
            graph = with_batch(graph, Fraction(samples, graph.batch))
    return graph


def parse_batch(batch: int | str, graph: OperatorGraph) -> int:
    """Samples of a batch: 512 or "512"; "1M-tokens" or "4k-tokens", where k is 1024 and M its square, are that many
    tokens over the graph's sequence length. Raises UsageError, with the nearest batches where that does not divide."""
    text = str(batch).strip()
    if text.isascii() and text.isdigit() and 1 <= len(text) <= 15 and 1 <= int(text) < MAX_SIZE:
        return int(text)
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise UsageError(
            f'batch "{text[:100]}" is neither a number of samples nor one of tokens',
            "Give a number of samples, as 512, or of tokens, as 1M-tokens or 4k-tokens (k is 1024).",
        )
    length = sequence_length(graph)
    if length is None:
        raise UsageError(f"graph {graph.name!r} has no sequences of tokens", "Give the batch in samples, as 512.")
    tokens = Fraction(match[1]) * _UNITS[match[2].lower()]
    if tokens % length or not tokens:
        below = int(tokens // length)
        near = [f"{n * length}-tokens ({n} sample{'s' * (n > 1)})" for n in (below, below + 1) if n]
        raise UsageError(
            f"a batch of {float(tokens):.15g} tokens is no whole number of sequences of {length}",
            f"The nearest that are: {' and '.join(near)}.",
        )
    return int(tokens // length)


def options_for(graph: OperatorGraph, shape: tuple[int, ...], digest: str) -> str:
    """The options that make of ``graph`` the one with this content hash, as "--batch 512 --seq 2048", if it differs in
    batch and sequence alone; empty otherwise. ``shape``: of its first input."""
    length = sequence_length(graph)
    batch = shape[0] if shape and shape[0] != graph.batch else None
    sequence = shape[1] if length is not None and len(shape) > 1 and shape[1] != length else None
    if batch is None and sequence is None:
        return ""
    try:
        same = resized(graph, batch, sequence).content_hash() == digest
    except (UsageError, NotationError):
        return ""
    options = (("--batch", batch), ("--seq", sequence))
    return " ".join(f"{option} {value}" for option, value in options if value is not None) if same else ""
