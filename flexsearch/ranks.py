"""What a process knows of itself as a rank of a run, from its environment. Needs no torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "FLEXSEARCH_RUN"
"""Environment variable that names the folder where the ranks that flexsearch starts on one machine meet, and leave
results and errors."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun or by flexsearch itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def meeting_point() -> Path | None:
    """The file in which the ranks that flexsearch started meet; None for ranks that torchrun started."""
    return Path(folder) / "store" if is_rank() and (folder := os.environ.get(FOLDER)) else None


def rendezvous() -> dict[str, Any]:
    """Arguments of ``torch.distributed.init_process_group`` that say where the ranks meet: none if torchrun's
    environment says it."""
    if (file := meeting_point()) is None:
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"init_method": file.as_uri(), "rank": rank, "world_size": size}


def kernel_identity() -> str:
    """Processes with the same one run under one kernel: they share its clock and its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()
