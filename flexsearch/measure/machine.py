"""What a rank runs on: host, cores and memory, and how fast its device computes. Sends no messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from flexsearch.clocks import clock_of
from flexsearch.cost.profile import cpu_model
from flexsearch.ranks import kernel_identity
from flexsearch.topology.parts import DTYPES


@dataclass(frozen=True)
class Facts:
    """One rank's surroundings. ``machine`` is the same for ranks under one kernel, ``place`` for ranks that share its
    network interfaces too (a container or network namespace is a place of its own, though its host name may not be).
    ``cores``: those it may run on. ``processor``: identity of its accelerator, empty for a CPU."""

    hostname: str
    machine: str
    place: str
    kind: str
    model: str
    cores: tuple[int, ...]
    threads: int
    processor: str
    memory_bytes: int


@dataclass(frozen=True)
class Compute:
    """What a device reaches. ``flops``: FLOP/s of a large matrix product by dtype; ``copy_bandwidth``: B/s, read and
    written, of a copy larger than the caches; ``overhead_s``: host time of one small operator."""

    flops: dict[str, float]
    copy_bandwidth: float
    overhead_s: float


def facts(device: torch.device) -> Facts:
    """This rank's surroundings."""
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        namespace = ""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(
        range(os.cpu_count() or 1)
    )  # fmt: skip
    common = socket.gethostname(), kernel_identity(), f"{kernel_identity()}/{socket.gethostname()}/{namespace}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        identity = str(getattr(properties, "uuid", device.index))
        return Facts(*common, "cuda", properties.name, cores, 1, identity, properties.total_memory)
    threads = min(torch.get_num_threads(), len(cores))
    return Facts(*common, "cpu", cpu_model(), cores, threads, "", _memory_bytes())


def measure(device: torch.device, seconds: float) -> Compute:
    """Measure ``device`` for about ``seconds``. Best of the repeats: disturbance only slows."""
    share = seconds / 6
    flops = {}
    for dtype in DTYPES:
        try:
            flops[dtype] = _matmul_flops(device, getattr(torch, dtype), share)
        except RuntimeError:  # this device does not compute in it
            if dtype == "float32":
                raise
    return Compute(flops, _copy_bandwidth(device, share), host_overhead_s(device))


def _matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of square products, doubled in size until one fills a part of the time."""
    size, best, left = 256, 0.0, seconds
    while left > 0:
        a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
        taken = _best(lambda a=a, b=b: a @ b, device, 3)  # type: ignore[misc]
        best = max(best, 2.0 * size**3 / taken)
        left -= 4 * taken
        if taken < seconds / 16 and size < 16384:
            size *= 2
    return best


def _copy_bandwidth(device: torch.device, seconds: float) -> float:
    nbytes = 2**30 if device.type == "cuda" else 128 * 2**20  # beyond any cache
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    taken = _best(lambda: target.copy_(source), device, 3)
    taken = min(taken, _best(lambda: target.copy_(source), device, max(2, min(20, int(seconds / taken) - 4))))
    return 2.0 * nbytes / taken


def host_overhead_s(device: torch.device, repeats: int = 300) -> float:
    """Host time of one task of a tiny operator: half of its forward and backward together."""
    x = torch.ones(1, 8, device=device, requires_grad=True)
    weight = torch.ones(8, 8, device=device)
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.autograd.grad(F.linear(x, weight), x, x.detach())
        taken.append(time.perf_counter() - began)
    _synchronise(device)
    return median(taken) / 2


def launch_s(device: torch.device, length: int = 32, repeats: int = 50) -> float:
    """Host time of launching a small operator of many, forward or backward."""
    x = torch.ones(1, 8, device=device, requires_grad=True)
    weight, taken = torch.ones(8, 8, device=device), []
    for _ in range(repeats):
        _synchronise(device)
        began = time.perf_counter()
        y = x
        for _ in range(length):
            y = F.linear(y, weight)
        torch.autograd.grad(y, x, x.detach())
        taken.append(time.perf_counter() - began)
    return median(taken) / (2 * length)


def kernel_start_s(device: torch.device, kernels: int = 200) -> float:
    """From the end of one small kernel to that of the next on a GPU that its host is ahead of."""
    x, clock, taken = torch.ones(1 << 8, device=device), clock_of(device), []
    for _ in range(20):
        clock.wait()
        clock.hold(1e-4 * kernels)
        start = clock.mark()
        for _ in range(kernels):
            x.add_(1.0)
        end = clock.mark()
        clock.wait()
        taken.append(clock.between(start, end))
    return min(taken) / kernels


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        _synchronise(device)
        began = time.perf_counter()
        work()
        _synchronise(device)
        best = min(best, time.perf_counter() - began)
    return best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    lines = _text("/proc/meminfo").splitlines()
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal")), 2**33)
    limits = (_text(f"/sys/fs/cgroup/{name}") for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
