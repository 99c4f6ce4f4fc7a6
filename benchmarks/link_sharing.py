"""What two communications that share a link do to each other, on two emulated hosts, gloo.

    python -m benchmarks.link_sharing            # root, iproute2; about a minute

A large one is issued, then, while it is under way, a small one behind it; both as the runtime issues them: all-reduces
on a process group of their own, messages on the world group with the receive posted beforehand. The table shows the
small one alone, behind the large one, the large one alone and with the small one in between (ms, medians), and what
follows: the share of the link that the small one got, and the time for which it had to wait if it then had the link
to itself. *Predicted* is how long the simulator says that the small one takes behind the large one, with the figures of
``ethernet-1g``. The last rows send several small messages at once: what each further message costs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Row, parser, report, say
from benchmarks.netns import SlowNetwork, unavailable
from flexsearch.cost.communication import Pricing
from flexsearch.cost.tally import turn_of
from flexsearch.cost.ticks import TICK
from flexsearch.lower.exchanges import connection_of
from flexsearch.lower.program import make_machine
from flexsearch.lower.rows import COMPUTE, FORWARD, ISSUE, Schedule
from flexsearch.simulate.engine import Engine
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.parts import FORMS
from tests.random_rows import Arena, Block, Communication

MEGA = 10**6
DELAYS_S = (0.005, 0.02, 0.06, 0.11)
"""From issuing the large one to issuing the small one. At 1 Gbit/s 25 MB take 200 ms; the queue of a switch fills."""
CASES = (
    ("message behind bucket", "all_reduce", 25 * MEGA, "message", MEGA),
    ("small message behind bucket", "all_reduce", 25 * MEGA, "message", MEGA // 10),
    ("large message behind bucket", "all_reduce", 25 * MEGA, "message", 8 * MEGA),
    ("bucket behind message", "message", 25 * MEGA, "all_reduce", MEGA),
    ("message behind message", "message", 25 * MEGA, "message", MEGA),
    ("bucket behind bucket", "all_reduce", 25 * MEGA, "all_reduce", MEGA),
)
"""Name, kind and bytes of the large one, kind and bytes of the small one."""
MESSAGES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Times:
    """Seconds from issuing (of a message on its sender, else on both ranks) to the end on the slower rank: of the small
    one, of the large one. The ranks are processes of one machine and read the same clock."""

    small: float
    large: float


class _Rank:
    """One rank of the measurement; both ranks call the same methods in the same order."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.group = dist.new_group([0, 1])
        self.control = dist.new_group([0, 1])
        self.tag = 0

    def issue(self, kind: str, nbytes: int, receive: Any) -> Any:
        """Start a communication; returns what to wait for. Messages go from rank 0 to rank 1."""
        if kind == "all_reduce":
            return self.dist.all_reduce(self.torch.zeros(nbytes // 4), group=self.group, async_op=True)
        return receive if self.rank == 1 else self.dist.isend(self.torch.zeros(nbytes // 4), 1, tag=self.tag)

    def posted(self, kind: str, nbytes: int) -> Any:
        """The receive of a message, posted before anything is sent."""
        self.tag += 1
        if kind == "all_reduce" or self.rank == 0:
            return None
        return self.dist.irecv(self.torch.zeros(nbytes // 4), 0, tag=self.tag)

    def measure(self, large: tuple[str, int] | None, small: tuple[str, int] | None, delay_s: float) -> Times:
        """Issue the large one, and the small one ``delay_s`` later."""
        works: list[tuple[str, float, Any]] = []
        receives = []
        for what in (large, small):
            receives.append((self.posted(*what), self.tag) if what is not None else (None, 0))
        self.dist.barrier(group=self.control)
        began = time.monotonic()
        for name, what, (receive, tag), wanted in (
            ("large", large, receives[0], 0.0), ("small", small, receives[1], delay_s),
        ):  # fmt: skip
            if what is None:
                continue
            while time.monotonic() - began < wanted:
                time.sleep(0.0005)
            self.tag = tag
            at = time.monotonic()
            works.append((name, at, self.issue(*what, receive)))
        self.tag = max(tag for _, tag in receives)
        spans = {"small": (0.0, 0.0), "large": (0.0, 0.0)}
        for name, at, work in sorted(works, key=lambda row: row[0] == "large"):  # the small one ends first
            if work is not None:
                work.wait()
            spans[name] = at, time.monotonic()
        everyone: list[Any] = [None, None]
        self.dist.all_gather_object(everyone, spans, group=self.control)
        taken = []
        for name, what in (("small", small), ("large", large)):
            (sent, left), (other, arrived) = (rank[name] for rank in everyone)
            issued = max(sent, other) if what is not None and what[0] == "all_reduce" else sent
            taken.append(max(left, arrived) - issued)
        return Times(*taken)

    def burst(self, count: int) -> float:
        """Seconds for ``count`` messages of a few bytes in each direction, at once."""
        torch, dist = self.torch, self.dist
        first = self.tag + 1
        self.tag += count
        peer = 1 - self.rank
        works = [dist.irecv(torch.zeros(2), peer, tag=first + k) for k in range(count)]
        dist.barrier(group=self.control)
        began = time.monotonic()
        works += [dist.isend(torch.zeros(2), peer, tag=first + k) for k in range(count)]
        for work in works:
            assert work is not None
            work.wait()
        taken = time.monotonic() - began
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, taken, group=self.control)
        return float(max(everyone))


def rank_main(repeats: int) -> None:
    """Measure everything; rank 0 prints the figures in seconds as JSON."""
    rank = _Rank()
    rows: list[dict[str, Any]] = []
    for name, big, big_bytes, little, little_bytes in CASES:
        large, small = (big, big_bytes), (little, little_bytes)
        for _ in range(2):
            rank.measure(large, None, 0.0), rank.measure(None, small, 0.0)
        alone = median(rank.measure(None, small, 0.0).small for _ in range(repeats))
        whole = median(rank.measure(large, None, 0.0).large for _ in range(repeats))
        for delay in DELAYS_S:
            both = [rank.measure(large, small, delay) for _ in range(repeats)]
            rows.append({
                "case": name, "bytes": little_bytes, "delay_s": delay, "alone_s": alone,
                "behind_s": median(t.small for t in both), "large_s": whole,
                "large_both_s": median(t.large for t in both),
            })  # fmt: skip
    bursts = {}
    for count in MESSAGES:
        rank.burst(count)
        bursts[count] = median(rank.burst(count) for _ in range(4 * repeats))
    if rank.rank == 0:
        print(json.dumps({"rows": rows, "bursts": bursts}))
    rank.dist.destroy_process_group()


def predicted(large: tuple[str, int], small: tuple[str, int], delay_s: float, rate: str) -> float:
    """Seconds that the small one takes behind the large one, as the simulator says."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    bandwidth = float(rate[:-4]) * units[rate[-4:]] / 8
    topology = edited(Topology.load("ethernet-1g:2"), links=tuple(
        link.model_copy(update={"bandwidth": bandwidth}) for link in Topology.load("ethernet-1g:2").links
    ))  # fmt: skip
    pricing = Pricing(topology)
    rows = [_row(pricing, *what) for what in (large, small)]
    steps: list[list[tuple[int, ...]]] = [[], []]
    for number, row in enumerate(rows):
        for d in row.senders:
            steps[d] += [(COMPUTE, 0, d, round(delay_s / TICK))] * number + [(ISSUE, 0, number, 0)]
    arena = Arena(2)
    segment = np.array([arena.add(Block(steps, rows))], np.uint32)
    none, once = np.zeros(1, np.uint32), np.ones(1, np.uint32)
    schedule = Schedule(
        kind=np.full(1, FORWARD, np.uint8), argument=none, once=np.zeros(1, np.uint8), last=np.zeros(1, np.uint8),
        group=np.zeros(2, np.uint32), action_first=none, action_last=once, block_first=none, block_last=once,
        microbatch=none, microbatches=once, final=none,
    )  # fmt: skip
    image = np.arange(len(topology.resources), dtype=np.uint32)
    machine = make_machine(topology, [np.inf, np.inf], topology, image)._replace(contended=np.zeros(1, np.uint8))
    times = Engine(schedule, machine).times(arena.segments(), segment)
    return float(times.communication_end[0, 1] * TICK - delay_s)


def _row(pricing: Pricing, kind: str, nbytes: int) -> Communication:
    """A communication as a row of the simulator."""
    both, form = kind == "all_reduce", np.uint64(FORMS.index("all_reduce" if kind == "all_reduce" else "exchange"))
    send, receive = ([0, 1], [0, 1]) if both else ([0], [1])
    cost = pricing.all_reduce(send, nbytes) if both else pricing.transfer("exchange", [(0, 1, nbytes)])
    links, ends = np.array([r for r, _ in cost.links], np.uint32), (np.uint64(0), np.uint64(len(send)))
    rates, longest = pricing.rates, max(s for _, s in cost.links)
    turn = turn_of(
        rates, rates.bandwidth, form, ends[1], np.uint64(1), links, np.uint64(0), np.uint64(len(links)), longest
    )
    connection = connection_of(rates, form, np.array(send, np.uint32), *ends, np.array(receive, np.uint32), *ends)
    held = [(r, round(s / TICK)) for r, s in cost.links]
    ticks = round(cost.duration_s / TICK)
    return Communication(send, receive, ticks, held, turn=int(turn), connection=int(connection))


def run(rate: str, repeats: int) -> list[Row]:
    """The rows of the table."""
    with SlowNetwork(2, rate) as network:
        command = [sys.executable, "-m", "benchmarks.link_sharing", "--rank", str(repeats)]
        measured = json.loads(network.run(command, timeout=600.0)[0])
    cases = {name: ((big, size), (little, few)) for name, big, size, little, few in CASES}
    rows: list[Row] = [
        {
            "case": row["case"], "bytes": row["bytes"], "delay ms": 1e3 * row["delay_s"],
            "alone ms": 1e3 * row["alone_s"], "behind ms": 1e3 * row["behind_s"],
            "waits ms": 1e3 * (row["behind_s"] - row["alone_s"]), "share": row["alone_s"] / row["behind_s"],
            "predicted ms": 1e3 * predicted(*cases[row["case"]], row["delay_s"], rate),
            "large alone ms": 1e3 * row["large_s"], "large with ms": 1e3 * row["large_both_s"],
        }
        for row in measured["rows"]
    ]  # fmt: skip
    for count, seconds in measured["bursts"].items():
        rows.append({"case": f"{count} messages of 8 bytes", "alone ms": 1e3 * seconds})
    return rows


def main() -> None:
    """The command line."""
    options = parser(__doc__)
    options.add_argument("--rate", default="1gbit", help="of each host's cable, as tc writes it")
    options.add_argument("--rank", type=int, help="used by this program for its ranks")
    chosen = options.parse_args()
    if chosen.rank is not None:
        rank_main(chosen.rank)
        return
    if (reason := unavailable()) is not None:
        sys.exit(f"cannot measure: {reason}")
    say("measuring what communications on one link do to each other (two hosts)")
    repeats = 1 if chosen.quick else 7
    report(run(chosen.rate, repeats), f"Two communications on a link of {chosen.rate}, gloo", chosen.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
