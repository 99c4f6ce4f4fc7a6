"""What rank 0 works out for all ranks, by the store where they meet: a search is not made once on each of them, and
one with a time as budget may find another plan on each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final

import torch.distributed as dist

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.group import default_store

BEGIN_S: Final = 60.0
"""How much later than the others rank 0 may ask the same: all import the model before."""
_calls: Counter[str] = Counter()


def of_first_rank(make: Callable[[], str], what: str, wait_s: float, begin_s: float = BEGIN_S) -> str:
    """The text that ``make`` returns on rank 0. Each rank calls ``make`` where ranks have no store yet, as they were
    not started by torchrun, and where rank 0 fails, begins more than ``begin_s`` seconds later, as it may not ask the
    same at all, or takes more than ``wait_s``. ``what``: the question that ``make`` answers; rank 0 waits for
    nobody."""
    store, rank = _store()
    if store is None:
        return make()
    number, name = _calls[what], sha256(what.encode()).hexdigest()
    _calls[what] += 1
    key = f"flexsearch/shared/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}/{number}"
    if rank == 0:
        answer = ""
        store.set(f"{key}/asked", "")
        try:
            answer = make()
        finally:
            store.set(key, answer)
        return answer
    try:
        store.wait([f"{key}/asked"], timedelta(seconds=begin_s))
        store.wait([key], timedelta(seconds=wait_s))
    except RuntimeError:  # of the time-out
        return make()
    return store.get(key).decode() or make()


def _store() -> tuple[Any, int]:
    """The store where the ranks of this run meet, and the number of this one; None for one process, or where nobody
    can know of a store."""
    if dist.is_initialized():
        with suppress(RuntimeFailure):
            return (default_store() if dist.get_world_size() > 1 else None), dist.get_rank()
        return None, 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("WORLD_SIZE", "1") == "1":
        return None, 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    return store, int(os.environ["RANK"])
