"""Joins the ranks of a run: the process group, each rank's device, and a check that all ranks agree on the plan."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flexsearch.allocator import keep_freed_memory
from flexsearch.directions import Directions
from flexsearch.errors import RuntimeFailure
from flexsearch.quantities import is_finite
from flexsearch.ranks import prefer_throughput, rendezvous
from flexsearch.topology import Topology

_RUN = "run"
LONGEST_S = 366 * 86400.0


def default_store() -> Any:
    """The store where the ranks of the process group met. Raises RuntimeFailure where PyTorch does not tell: nothing
    public does."""
    from torch.distributed import distributed_c10d

    if (ask := getattr(distributed_c10d, "_get_default_store", None)) is None:
        raise RuntimeFailure("this version of PyTorch does not tell where its ranks meet")
    return ask()


def directions(topology: Topology, timeout_s: float) -> Directions:
    """The process groups of messages between the ranks of a cluster. All ranks must ask together the first time."""
    apart = dist.get_backend() == "gloo" and not topology.shares_processors
    return Directions([d.host for d in topology.devices] if apart else None, timedelta(seconds=timeout_s))


def _not_connected(error: Exception) -> RuntimeFailure:
    return RuntimeFailure(
        f"the ranks could not be connected: {error}",
        "Check that every rank was started and can reach MASTER_ADDR at MASTER_PORT.",
    )


def join(topology: Topology, timeout_s: float) -> torch.device:
    """Make the process group from torchrun's environment unless there is one, and return this rank's torch device.

    Raises RuntimeFailure if the world size is not the topology's number of devices, or a CUDA device is missing.
    """
    if not (is_finite(timeout_s) and 0 < timeout_s <= LONGEST_S):
        raise RuntimeFailure(
            f"timeout_s={timeout_s!r} is no time to wait for a silent rank", "Give seconds above 0, at most a year."
        )
    count = len(topology.devices)
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing and count > 1:
            raise RuntimeFailure(
                f"this strategy needs {count} processes, but {', '.join(missing)} is not set",
                "Start the script with `torchrun --nproc-per-node N script.py`, one process for each device of "
                f"topology {topology.name!r}.",
            )
        _check_world(int(os.environ.get("WORLD_SIZE", "1")), topology)
        try:
            if missing:
                with tempfile.TemporaryDirectory() as folder:
                    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            else:
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group(topology.communication.backend, timeout=timeout, **rendezvous())
            atexit.register(_leave)
        except (RuntimeError, ValueError) as error:
            raise _not_connected(error) from error
    _check_world(dist.get_world_size(), topology)
    try:  # before ranks agree on what they run: from then on one may run, and die, while another is still here
        directions(topology, timeout_s)
    except RuntimeError as error:
        raise _not_connected(error) from error
    if topology.devices[dist.get_rank()].kind == "cpu":
        keep_freed_memory()
        prefer_throughput()
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % max(1, torch.cuda.device_count())))
    if local >= torch.cuda.device_count():
        raise RuntimeFailure(
            f"rank {dist.get_rank()} needs CUDA device {local}, but this machine has {torch.cuda.device_count()}",
            "Start one process for each GPU, or use a topology of CPU devices.",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _leave() -> None:
    """Leave the group that ``join`` made before the interpreter ends: gloo's threads may hold tensors, and abort the
    process when they drop them after that (pytorch/pytorch#179291); NCCL warns of what it has not freed. Where an error
    ends this rank, its peers may be gone, and NCCL would wait for them."""
    if dist.is_initialized() and (dist.get_backend() == "gloo" or not hasattr(sys, "last_value")):
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _check_world(size: int, topology: Topology) -> None:
    if size != len(topology.devices):
        raise RuntimeFailure(
            f"{size} processes were started, but the strategy is for topology {topology.name!r} with "
            f"{len(topology.devices)} devices",
            "Start one process for each device, or optimize for another topology.",
        )


def agree(what: Mapping[str, str]) -> str:
    """Exchange facts (hashes of graph, strategy, ...) and raise RuntimeFailure on every rank where they differ. Returns
    a name for the run that follows, the same on all ranks."""
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {**what, _RUN: uuid.uuid4().hex})
    first = everyone[0] or {}
    for key in what:
        value = first.get(key)
        different = [rank for rank, facts in enumerate(everyone) if facts is not None and facts.get(key) != value]
        if different:
            values = {rank: (everyone[rank] or {}).get(key) for rank in different[:4]}
            raise RuntimeFailure(
                f"the ranks do not have the same {key}: rank 0 has {value}, others have {values}",
                "Give every rank the same model, strategy file and versions.",
            )
    return first[_RUN]


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of named tensors' contents (a strided sample of large ones), to see whether ranks agree."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        if tensor.device.type != "meta":
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 4096)].to("cpu", torch.float64).contiguous()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
