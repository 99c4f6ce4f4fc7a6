"""What ranks tell each other when one of them fails: the first failure's message reaches all that then wait for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from flexsearch.errors import FlexsearchError, RuntimeFailure
from flexsearch.runtime.group import default_store

REMEDY = "Look at the output of the other ranks, then start all ranks again."
_DIED = "one of them has died, hangs or cannot be reached"
_STARTED: WeakSet[Failures] = WeakSet()
"""Of all steps of this process that are alive."""
ASK = timedelta(seconds=5)
"""How long a rank waits for the store, which may have died with the rank that kept it."""


def lost(what: str, peers: Collection[int], error: Exception) -> RuntimeFailure:
    """What to raise for the backend's ``error``, where this rank does ``what`` with others."""
    return RuntimeFailure(
        f"rank {dist.get_rank()}: {what} with ranks {sorted(peers)} failed: {_DIED} ({error})",
        "Look at the output of those ranks, then start all ranks again.",
    )


@contextmanager
def with_all(what: str) -> Iterator[None]:
    """For a communication of all ranks alone: errors of the backend are told as those of a lost rank."""
    try:
        yield
    except RuntimeError as error:
        raise lost(what, set(range(dist.get_world_size())) - {dist.get_rank()}, error) from error


def _words(error: BaseException) -> str:
    """What to tell other ranks of an error."""
    if isinstance(error, FlexsearchError) and _DIED in error.message:
        return error.message
    return f"{type(error).__name__}: {error}"


class Failures:
    """The first failure of a run, in the store where its ranks met. After it, nothing goes on."""

    def __init__(self, rank: int, run: str) -> None:
        self.rank, self._key = rank, f"flexsearch/{run}/failure"
        self._failure: RuntimeFailure | None = None
        _tell_what_ends_the_process()
        _STARTED.add(self)

    @property
    def goes_on(self) -> bool:
        """Whether this rank neither has failed nor seen another fail."""
        return self._failure is None

    def check(self) -> None:
        """Raise RuntimeFailure if this rank has failed, or seen another fail, before."""
        if self._failure is not None:
            raise RuntimeFailure(
                f"the step cannot go on after a failure: {self._failure.message}", self._failure.remedy
            )

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Whatever is raised in the block ends the run: the others are told of it. Raises RuntimeFailure with the
        message of the rank that failed first, if that is another one."""
        self.check()
        try:
            yield
        except Exception as error:
            first = self.tell(error)
            if first is not None and first["rank"] != self.rank:
                # A rank that has seen another die is not to blame.
                whose = "" if _DIED in first["message"] else f"rank {first['rank']} failed: "
                self._failure = RuntimeFailure(f"{whose}{first['message']}", REMEDY)
                raise self._failure from error
            message = error.message if isinstance(error, FlexsearchError) else f"{type(error).__name__}: {error}"
            remedy = error.remedy if isinstance(error, FlexsearchError) else REMEDY
            self._failure = RuntimeFailure(message, remedy)
            raise

    def tell(self, error: BaseException) -> dict[str, Any] | None:
        """Leave a failure in the store, unless there is one: the first one. None: the store cannot be reached."""
        own = json.dumps({"rank": self.rank, "message": _words(error)})
        with suppress(Exception):  # the store may be gone; the error at hand is then what there is to say
            store = default_store()
            usual = store.timeout
            store.set_timeout(ASK)
            try:
                first: dict[str, Any] = json.loads(store.compare_set(self._key, "", own))
            finally:
                store.set_timeout(usual)
            return first
        return None


@cache
def _tell_what_ends_the_process() -> None:
    """Have an error of the user's own code, between two calls of a step, reach the others, too: it ends this rank, for
    which they wait. What else the process does with errors stays."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for failures in list(_STARTED):
            if failures.goes_on:
                failures.tell(error)
        before(kind, error, trace)

    sys.excepthook = hook
