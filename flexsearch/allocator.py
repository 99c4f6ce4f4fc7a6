"""Keeping freed memory in the process. A training step frees and takes the same large tensors again and again; by
default glibc gives them back to the system each time, and on a CPU the page faults cost 15-25 % of a step."""

from __future__ import annotations

import ctypes
import ctypes.util

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to reuse freed memory instead of returning it. False where there is no glibc."""
    libc = _libc()
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> bool:
    """Return what is free now to the system, after a model that is not needed any more. Whether there was any."""
    libc = _libc()
    return bool(libc.malloc_trim(0)) if libc is not None and hasattr(libc, "malloc_trim") else False


def _libc() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("c")
    return ctypes.CDLL(name) if name else None
