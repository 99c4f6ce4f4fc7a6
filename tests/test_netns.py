"""A slow network comes up, carries gloo at its rate, tells of failures, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import netns
from benchmarks.netns import SlowNetwork
from flexsearch.errors import RuntimeFailure

ROOT = Path(__file__).parent.parent
HERE = netns.unavailable()
needs_network = pytest.mark.skipif(HERE is not None, reason=f"no network namespaces here: {HERE}")

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[SlowNetwork]:
    with SlowNetwork(2) as network:
        yield network


def namespaces(owner: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if line.startswith(f"flexsearch-{owner}-")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@needs_network
def test_ranks_talk_over_gloo(network: SlowNetwork) -> None:
    assert network.run([sys.executable, "-c", ALL_REDUCE], timeout=300) == ["[3.0, 3.0, 3.0]\n"] * 2


@needs_network
def test_every_host_has_its_own_interface_core_and_environment(network: SlowNetwork) -> None:
    program = """
import json, os, socket
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "EXTRA"]
print(json.dumps({
    "cores": sorted(os.sched_getaffinity(0)),
    "interfaces": sorted(n for _, n in socket.if_nameindex()),
    "env": {n: os.environ[n] for n in names},
}))
"""
    told = [json.loads(out) for out in network.run([sys.executable, "-c", program], env={"EXTRA": "1"})]
    for rank, host in enumerate(told):
        assert host["cores"] == [network.cores[rank % len(network.cores)]]
        assert {"eth0", "lo"} <= set(host["interfaces"]) and "switch" not in host["interfaces"]
        assert host["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": network.addresses[0],
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "EXTRA": "1",
        }


@needs_network
def test_both_ends_of_every_cable_have_the_rate() -> None:
    with SlowNetwork(3, rate="250mbit") as network:
        for namespace, interfaces in [(n, ["eth0"]) for n in network.namespaces] + [
            (network.switch, ["port0", "port1", "port2"])
        ]:
            for interface in interfaces:
                command = ["tc", "-n", namespace, "qdisc", "show", "dev", interface]
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert "tbf" in shown and "rate 250Mbit" in shown and "peakrate 255Mbit" in shown


@needs_network
def test_an_idle_cable_is_no_faster_afterwards() -> None:
    program = """
import os, socket, time
address, n = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 128 << 10
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        peer, _ = server.accept()
        received = 0
        while received < n:
            received += len(peer.recv(n))
        peer.sendall(b"x")
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    time.sleep(0.1)
    start = time.perf_counter()
    peer.sendall(bytes(n))
    peer.recv(1)
    print(time.perf_counter() - start)
"""
    with SlowNetwork(2, rate="100mbit") as network:
        seconds = float(network.run([sys.executable, "-c", program], timeout=300)[1])
    assert seconds > 0.7 * (128 << 10) * 8 / 100e6


@needs_network
def test_a_delay_is_added_or_the_missing_kernel_part_named() -> None:
    program = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    socket.create_server(address).accept()
else:
    while True:
        try:
            start = time.perf_counter()
            socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    print(time.perf_counter() - start)
"""
    try:
        with SlowNetwork(2, delay="20ms") as network:
            seconds = float(network.run([sys.executable, "-c", program], timeout=300)[1])
    except RuntimeFailure as error:
        assert "This kernel has no netem: leave the delay out." in str(error)
        pytest.skip("this kernel has no netem")
    assert seconds > 0.039  # there and back


@needs_network
def test_each_rank_can_have_its_own_command(network: SlowNetwork) -> None:
    assert network.run([["echo", "a"], ["echo", "b"]]) == ["a\n", "b\n"]
    with pytest.raises(RuntimeFailure, match="3 commands for 2 hosts"):
        network.run([["echo", "a"]] * 3)


@needs_network
def test_a_failing_rank_ends_the_others_and_is_quoted(network: SlowNetwork) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"rank 1 ended with exit code 3(?s:.*)no more"):
        network.run([["sleep", "300"], ["sh", "-c", "echo no more >&2; exit 3"]])
    assert time.monotonic() - start < 100


@needs_network
def test_a_rank_that_hangs_is_killed_with_its_children(network: SlowNetwork, tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 300 & echo $! > {child}; echo stuck >&2; wait"
    with pytest.raises(RuntimeFailure, match=r"rank 1 did not end in 2 s(?s:.*)stuck"):
        network.run([["true"], ["sh", "-c", script]], timeout=2)
    assert eventually(lambda: not alive(int(child.read_text())))


@needs_network
def test_nothing_is_left_when_the_context_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), SlowNetwork(2) as network:
        ours = [network.switch, *network.namespaces]
        assert {name.split()[0] for name in namespaces(os.getpid())} >= set(ours)
        processes = network.launch(["sleep", "300"])
        raise ZeroDivisionError
    assert not {name.split()[0] for name in namespaces(os.getpid())} & set(ours)
    assert all(p.returncode == -signal.SIGKILL for p in processes)


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_benchmark_is_stopped(number: signal.Signals) -> None:
    program = """
import signal
from benchmarks.netns import SlowNetwork
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
with SlowNetwork(2) as network:
    ranks = network.launch(["sleep", "300"])
    print(*(r.pid for r in ranks), flush=True)
    ranks[0].wait()
"""
    benchmark = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    assert benchmark.stdout is not None
    ranks = [int(pid) for pid in benchmark.stdout.readline().split()]
    assert len(ranks) == 2 and len(namespaces(benchmark.pid)) == 3
    benchmark.send_signal(number)
    assert benchmark.wait(60) != 0
    benchmark.stdout.close()
    if number == signal.SIGKILL:  # nobody could remove the namespaces; the next network does
        with SlowNetwork(1):
            pass
        for pid in filter(alive, ranks):  # a rank that was still being started when its parent was killed
            os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, ranks)))
    assert not namespaces(benchmark.pid)


@needs_network
def test_a_network_that_cannot_be_set_up_says_why_and_is_removed() -> None:
    before = namespaces(os.getpid())
    with pytest.raises(RuntimeFailure, match=r"(?s)cannot set up the slow network.*tbf"), SlowNetwork(2, rate="fast"):
        pass
    assert namespaces(os.getpid()) == before


def test_impossible_networks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFailure, match="1 to 250 hosts, not 0"):
        SlowNetwork(0)
    with pytest.raises(RuntimeFailure, match="cores"):
        SlowNetwork(2, cores=[100_000])
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(RuntimeFailure, match="tc not found: install iproute2"), SlowNetwork(2):
        pass
    monkeypatch.setattr("shutil.which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(RuntimeFailure, match="needs root"), SlowNetwork(2):
        pass


@needs_network
def test_what_shares_a_link_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.link_sharing", "--quick", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    first_out = [row for row in rows if row["case"] == "message behind message" and row["delay ms"] < 50]
    # One connection: 1 MB waits for what is left of 25 MB, at least 150 ms.
    assert len(first_out) == 2 and all(row["waits ms"] > 100 for row in first_out)
    assert all(row["behind ms"] > 0 for row in rows if "share" in row)
