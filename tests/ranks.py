"""Pools of gloo ranks that stay up over many cases.

Ranks are forked from a server process that has imported torch and has run none of it: a process that has run autograd
must not fork (torch 2.14 refuses to run autograd in its children), and a fresh one takes seconds to import torch. The
server has lowered a plan, so that no rank loads compiled code; this process did it before, so that code that is not
compiled yet delays the start and runs into no timeout.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from flexsearch.children import end_with
from flexsearch.topology import Topology

START_S = 300.0
"""In which ranks must be up: on a busy machine importing torch takes long."""
THREADS = 60
"""So many threads may a rank have when it begins a case. Gloo has three for every group that was ever made, each of
which wakes 100 times a second, and groups cannot be left one by one: PyTorch's tensor parallelism finds its own by
name. With 90 groups a third of the processor's time went there."""
ON_GPUS = os.environ.get("FLEXSEARCH_TEST_DEVICE") == "cuda"
"""Ranks use CUDA and NCCL, in tests that ask ``cluster`` for their topology; several share a GPU if need be."""

context = get_context("forkserver")
context.set_forkserver_preload([
    "torch", "torch.distributed", "torch.export", "pytest", "hypothesis", "flexsearch.graph.importer",
    "flexsearch.runtime.parallel", "tests.warm",
])  # fmt: skip

_pools: dict[int, Pool] = {}


def _overload(name: str, overload: str) -> OpOverload:
    space, operator = name.split("::")
    result = getattr(getattr(getattr(torch.ops, space), operator), overload)
    assert isinstance(result, OpOverload)
    return result


# So that what was traced can be sent: the constants of an ``Imported`` say by which calls they are computed.
ForkingPickler.register(OpOverload, lambda op: (_overload, (op._schema.name, op._overloadname)))


class Pool:
    """``size`` ranks in one gloo group; ``run`` calls a function on all of them and returns the results by rank."""

    def __init__(self, size: int) -> None:
        importlib.import_module("tests.warm")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(START_S):
                self.close()
                raise AssertionError(f"{size} ranks did not start within {START_S} s")
            pipe.recv()
        self._signal(signal.SIGSTOP)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
        """Results by rank. A rank's exception is raised here, with its traceback; the pool is then closed."""
        self._signal(signal.SIGCONT)
        try:
            for pipe in self.pipes:
                pipe.send((function, arguments))
            answers: dict[int, Any] = {}
            while len(answers) < len(self.pipes):
                ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in answers], timeout_s)
                if not ready:
                    raise AssertionError(f"ranks did not answer within {timeout_s} s; only {sorted(answers)} did")
                for rank in [rank for rank, pipe in enumerate(self.pipes) if pipe in ready]:
                    ok, value = self.pipes[rank].recv()
                    if not ok:  # the others may wait for this one for ever
                        raise AssertionError(f"rank {rank}:\n{value}")
                    answers[rank] = value
        except (AssertionError, EOFError, OSError):
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _signal(self, number: signal.Signals) -> None:
        """To all ranks. Those with NCCL are left to run: its watchdog would find that nothing had gone on."""
        if not ON_GPUS:
            for process in self.processes:
                with suppress(ProcessLookupError):  # the next call will find it lost
                    os.kill(process.pid, number)  # type: ignore[arg-type]

    def threads(self) -> int:
        """Of the rank that has most of them; 0 where the system does not say."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return max(len(list(folder.iterdir())) if folder.exists() else 0 for folder in folders)

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for size, pool in list(_pools.items()):
            if pool is self:
                del _pools[size]


def cluster(size: int) -> Topology:
    """Hosts on a slow network, one for each rank of a pool; their devices are what these compute on."""
    topology = Topology.load(f"ethernet-1g:{size}")
    return on_gpus(topology) if ON_GPUS else topology


def on_gpus(topology: Topology) -> Topology:
    """The same of GPUs over NCCL."""
    fields = {name: getattr(topology, name) for name in Topology.model_fields}
    devices = tuple(device.model_copy(update={"kind": "cuda"}) for device in topology.devices)
    communication = topology.communication.model_copy(update={"backend": "nccl"})
    return Topology(**(fields | {"devices": devices, "communication": communication}))


def pool(size: int) -> Pool:
    """The pool of that size, started when first asked for, and anew once ranks have gathered many threads."""
    for full in [open_pool for open_pool in _pools.values() if open_pool.threads() > THREADS]:
        full.close()
    if size not in _pools:
        _pools[size] = Pool(size)
    return _pools[size]


@atexit.register
def _close_all() -> None:
    for open_pool in list(_pools.values()):
        open_pool.close()


class _Send:
    """A message under way, whose memory must not be written before it has been waited for."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.work, self.tensor, self.version = work, tensor, tensor._version

    def wait(self, *arguments: Any) -> Any:
        """Raises AssertionError if the tensor was written in place since."""
        result = self.work.wait(*arguments)
        assert self.tensor._version == self.version, "a tensor was written in place while it was being sent"
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _watch_sends() -> None:
    """Have this process check all that it sends (views of a tensor share its count of writes)."""
    send = dist.isend

    def isend(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        work = send(tensor, *arguments, **options)
        return None if work is None else _Send(work, tensor)

    dist.isend = dist.distributed_c10d.isend = isend


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    end_with(os.getppid())  # a process that is stopped sees no end of its pipe
    gc.set_threshold(10_000, 20, 20)
    gc.freeze()  # what was imported, half a million objects, is no garbage
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    if ON_GPUS:
        # NCCL refuses two ranks on one GPU of one host; it takes ranks of other names to be on hosts of their own.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if ON_GPUS else "gloo", timeout=timedelta(seconds=300))
    _watch_sends()
    pipe.send("ready")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
