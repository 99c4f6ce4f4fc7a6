"""When Python looks for reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Looks for reference cycles only rarely: the caches hold millions of tuples, there are hardly any cycles, and
    walking over them all the time takes half of a search; over each million once still takes 0.4 to 0.8 s."""
    before = gc.get_threshold()
    gc.set_threshold(10_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
