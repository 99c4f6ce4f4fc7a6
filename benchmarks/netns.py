"""Hosts on one machine, joined by a slow network: Linux network namespaces around one switch, with limited rates.

    with SlowNetwork(hosts=4, rate="1gbit") as network:
        outputs = network.run([sys.executable, "train.py"])

Each host is a namespace with one interface. The switch is a bridge in a namespace of its own, so that the machine's
own firewall and interfaces are neither used nor changed. A token bucket (``tbf``) on both ends of each host's cable
limits sending and receiving separately, as on a full-duplex Ethernet link. Needs root and iproute2.

A cable that was idle is no faster afterwards. A bucket is: it lets through at once what it holds. So each has a second
one, of one segment and 2 % more than the rate (``peakrate``), and segments have 32 KiB. With a bucket of 256 kB alone,
as many bytes crossed an idle cable of 1 Gbit/s in 0.1 ms instead of 2.1. With segments of 16 KiB, ranks that compute on
shared cores waited longer for all-reduces of 128 KiB: 9 ms instead of 2.2 on 4 hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

from flexsearch.errors import RuntimeFailure

INTERFACE = "eth0"  # of every host, inside its namespace
_NAMESPACES = Path("/run/netns")  # where iproute2 keeps the names
_PREFIX = "flexsearch"
_count = itertools.count()
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?bit)")
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SEGMENT = 32768
"""Bytes that a host hands to its cable at once, at most, of the 64 KiB that Linux would; a bucket must hold them."""
CATCH_UP_S = 288e-6
"""What a cable carries in this time, a bucket may send at once: timers are late, more so with busy processors."""

Argv = Sequence[str] | Sequence[Sequence[str]]


def unavailable() -> str | None:
    """Why a :class:`SlowNetwork` cannot be made here and what to do about it, or None if it can."""
    missing = [tool for tool in ("ip", "tc", "taskset", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run this as root"
    return None


class SlowNetwork:
    """``hosts`` namespaces around one switch; made on entering the context, removed on leaving it, however it is left.

    ``rate`` limits each direction of each host's cable (as ``tc`` writes it: "1gbit" is 1e9 bit/s); ``delay`` is added
    to what a host sends ("100us"; needs the kernel's netem). Rank r runs on core ``cores[r % len(cores)]``; by default
    the cores are those that this process may use. Raises :class:`RuntimeFailure` where such a network cannot be made.
    """

    def __init__(
        self, hosts: int, rate: str = "1gbit", delay: str | None = None, cores: Sequence[int] | None = None
    ) -> None:
        if not 1 <= hosts <= 250:
            raise RuntimeFailure(f"a slow network has 1 to 250 hosts, not {hosts}")
        allowed = os.sched_getaffinity(0)
        if cores is not None and (not cores or not set(cores) <= allowed):
            raise RuntimeFailure(f"cores {list(cores)} are not all among those of this process: {sorted(allowed)}")
        self.hosts, self.rate, self.delay = hosts, rate, delay
        self.cores = list(cores) if cores is not None else sorted(allowed)
        name = f"{_PREFIX}-{os.getpid()}-{next(_count)}"  # two benchmarks, or two networks in one, do not meet
        self.switch = f"{name}-switch"
        self.namespaces = [f"{name}-host{rank}" for rank in range(hosts)]
        self.addresses = [f"10.77.0.{rank + 1}" for rank in range(hosts)]
        self._ports = itertools.count(29500)  # a new one for each launch: the last may linger in TIME_WAIT
        self._processes: list[subprocess.Popen[Any]] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        reason = unavailable()
        if reason is not None:
            raise RuntimeFailure(f"cannot make a slow network: {reason}")
        try:
            self._cleanup.enter_context(_sigterm_raises())
            _remove_leftovers()
            self._make_switch()
            for rank in range(self.hosts):
                self._plug_in(rank)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            self._cleanup.close()

    def launch(
        self,
        argv: Argv,
        env: Mapping[str, str] | None = None,
        stdout: Sequence[IO[str]] | None = None,
        stderr: Sequence[IO[str]] | None = None,
    ) -> list[subprocess.Popen[str]]:
        """Start one process per host, with the variables of ``torchrun`` and one thread; ``env`` is added last.

        ``argv`` is one command for all ranks or a list with one for each; ``stdout`` and ``stderr``, if given, are one
        open file for each rank. The processes die with the thread that called this, and when the context is left.
        """
        each = [argument for argument in argv if not isinstance(argument, str)]
        common = [argument for argument in argv if isinstance(argument, str)]
        commands = [common] * self.hosts if common else [list(command) for command in each]
        if len(commands) != self.hosts:
            raise RuntimeFailure(f"{len(commands)} commands for {self.hosts} hosts: give one for all or one for each")
        port = next(self._ports)
        started: list[subprocess.Popen[str]] = []
        for rank, command in enumerate(commands):
            inside = ["ip", "netns", "exec", self.namespaces[rank]]
            pinned = ["taskset", "--cpu-list", str(self.cores[rank % len(self.cores)])]
            process = subprocess.Popen(
                [*inside, *pinned, "setpriv", "--pdeathsig", "KILL", "--", *command],
                env={**os.environ, **self.environment(rank, port), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout[rank] if stdout else None,
                stderr=stderr[rank] if stderr else None,
                text=True,
                start_new_session=True,  # its own process group, so that its children can be ended with it
            )
            self._processes.append(process)
            started.append(process)
        return started

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The environment variables by which ``torch.distributed`` and gloo find their way in this network."""
        return {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def run(self, argv: Argv, env: Mapping[str, str] | None = None, timeout: float = 600.0) -> list[str]:
        """Start ``argv`` as :meth:`launch` does, wait, and return what each rank wrote to its standard output.

        When a rank fails, or ``timeout`` seconds have passed, all ranks are killed and :class:`RuntimeFailure` says
        which it was and how its standard error ended.
        """
        with contextlib.ExitStack() as files:
            out, err = (
                [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(self.hosts)]
                for _ in range(2)
            )
            processes = self.launch(argv, env, out, err)
            try:
                self._wait(processes, err, time.monotonic() + timeout, timeout)
            finally:
                _kill(processes)
                self._processes = [p for p in self._processes if p not in processes]
            return [_read(file) for file in out]

    def kill(self) -> None:
        """End every process that was started here and still runs, with its children."""
        _kill(self._processes)
        self._processes.clear()

    def _wait(
        self, processes: Sequence[subprocess.Popen[str]], err: Sequence[IO[str]], deadline: float, timeout: float
    ) -> None:
        while True:
            codes = [_exit_code(p) for p in processes]
            for rank, code in enumerate(codes):
                if code:
                    how = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
                    raise RuntimeFailure(f"rank {rank} {how}; its last words:\n{_tail(err[rank])}")
            if None not in codes:
                return
            if time.monotonic() > deadline:
                slow = codes.index(None)
                raise RuntimeFailure(f"rank {slow} did not end in {timeout:g} s; its last words:\n{_tail(err[slow])}")
            time.sleep(0.05)

    def _make_switch(self) -> None:
        self._make_namespace(self.switch)
        _command("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge", "stp_state", "0")
        _command("ip", "-n", self.switch, "link", "set", "switch", "up")

    def _plug_in(self, rank: int) -> None:
        host, port = self.namespaces[rank], f"port{rank}"
        self._make_namespace(host)
        cable = ("type", "veth", "peer", "name", port, "netns", self.switch)
        _command("ip", "-n", host, "link", "add", INTERFACE, *cable)
        _command("ip", "-n", self.switch, "link", "set", port, "master", "switch", "up")
        _command("ip", "-n", host, "address", "add", f"{self.addresses[rank]}/24", "dev", INTERFACE)
        _command("ip", "-n", host, "link", "set", INTERFACE, "up")
        self._limit(host, INTERFACE, self.delay)
        self._limit(self.switch, port, None)

    def _limit(self, namespace: str, interface: str, delay: str | None) -> None:
        add = ("tc", "-n", namespace, "qdisc", "add", "dev", interface)
        parent = ["root"]
        if delay is not None:
            # netem's queue must hold all that is under way: 10,000 segments are at least 15 MB.
            _command(*add, "root", "handle", "1:", "netem", "delay", delay, "limit", "10000")
            parent = ["parent", "1:1"]
        _command("ip", "-n", namespace, "link", "set", "dev", interface, "gso_max_size", str(SEGMENT))
        # 50 ms of queue is a switch's, and TCP fills it. What timers lose, a bucket of 256 kB makes up for.
        bucket = ("rate", self.rate, "burst", "256kb", "latency", "50ms")
        _command(*add, *parent, "tbf", *bucket, *_peak(self.rate))

    def _make_namespace(self, name: str) -> None:
        self._cleanup.callback(_remove_namespace, name)
        _command("ip", "netns", "add", name)
        _command("ip", "-n", name, "link", "set", "lo", "up")


def _peak(rate: str) -> tuple[str, ...]:
    """The second bucket of a rate; none of other ways in which ``tc`` takes a rate."""
    match = _RATE.fullmatch(rate)
    if match is None:
        return ()
    most = max(SEGMENT + 3232, int(float(match[1]) * _BITS[match[2]] / 8 * CATCH_UP_S))
    return "peakrate", f"{1.02 * float(match[1]):g}{match[2]}", "mtu", str(most)


def _command(*argv: str) -> None:
    # In a session of its own, where Ctrl-C does not reach it: a network is then never half removed.
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()).rstrip(".")
        hint = " This kernel has no netem: leave the delay out." if "netem" in argv and "unknown" in said else ""
        raise RuntimeFailure(f"cannot set up the slow network: '{' '.join(argv)}' said: {said}.{hint}")


def _remove_namespace(name: str) -> None:
    """Remove a namespace, and with it its interfaces and their other ends, if it is there."""
    if (_NAMESPACES / name).exists():
        _command("ip", "netns", "delete", name)


def _remove_leftovers() -> None:
    """Remove the networks of processes that were killed before they could do it themselves."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(RuntimeFailure):  # another benchmark may be doing the same
                _remove_namespace(path.name)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """While this lasts, SIGTERM unwinds the main thread as Ctrl-C does, unless the program handles it otherwise."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_code(process: subprocess.Popen[Any]) -> int | None:
    """As ``process.poll()``, but without reaping it: its number stays its own until :func:`_kill` ends its group."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill(processes: Sequence[subprocess.Popen[Any]]) -> None:
    running = [p for p in processes if p.returncode is None]
    for process in running:
        # Its whole group, for it may have children, and may have ended before them. None is gone: we have not waited.
        os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        process.wait()


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _tail(file: IO[str], lines: int = 15) -> str:
    return "\n".join(_read(file).splitlines()[-lines:]) or "(none)"
