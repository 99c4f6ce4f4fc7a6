"""What the task graph has of the transports that concern a rank: when they are issued, by which tasks, how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from flexsearch.lower import Lowered, Move, TaskKind
from flexsearch.lower.taskgraph import Purpose
from flexsearch.runtime.instructions import Transport, reshard_of


class Transports:
    """Those of ``device``. ``early``: operators that run for all microbatches before anything else."""

    def __init__(self, lowered: Lowered, device: int, early: Collection[int]) -> None:
        self.lowered, self.device, self.early = lowered, device, early
        self.place = {task: k for k, task in enumerate(self._order())}
        """Where a task stands in the order in which all ranks issue communications."""
        self.ends: dict[Transport, int] = {}
        """The last task of a transport in that order."""
        self.task_of: dict[tuple[Transport, int, int], tuple[int, int]] = {}
        """(transport, phase, exchange) -> (task, member)."""
        self.tasks_of: dict[Transport, set[int]] = {}
        """Communications that bring parts of a gather here."""
        self.members_of: dict[int, list[Transport]] = {}
        """Gathers of which such a communication brings parts."""
        self.sends: Counter[Transport] = Counter()
        """First phases that this device issues."""
        self.parts: Counter[Transport] = Counter()
        """Parts of all phases that this device issues or receives."""
        self.repeated: set[tuple[Purpose, int]] = set()
        """What is sent for each microbatch."""
        self.again: set[Transport] = set()
        """Gathers whose memory is let go of before the backward pass."""
        self._read_tasks()

    def _read_tasks(self) -> None:
        tasks = self.lowered.tasks
        for task, what in enumerate(tasks.communication):
            for m, member in enumerate(what.members if what is not None else ()):
                assert what is not None
                transport = Transport(what.purpose, member.key, tasks.microbatch[task])
                if transport.microbatch:
                    self.repeated.add((what.purpose, member.key))
                self.task_of[transport, member.phase, member.exchange] = task, m
                if what.purpose in ("gather", "regather") and self.device in member.what.receivers:
                    self.tasks_of.setdefault(transport, set()).add(task)
                    self.members_of.setdefault(task, []).append(transport)
                if self.place[self.ends.setdefault(transport, task)] < self.place[task]:
                    self.ends[transport] = task
                self.sends[transport] += self.device in what.senders and member.phase == 0
                self.parts[transport] += self.device in what.devices
                if what.purpose == "regather" and self.device in what.receivers:
                    self.again.add(transport._replace(purpose="gather"))

    def _order(self) -> list[int]:
        """The tasks in the order of the graph; before them, for all microbatches, those of counts over the batch. The
        update comes last, as it takes the gradients of all microbatches, whichever of them it stands with."""
        tasks = self.lowered.tasks
        first = [t for t in range(len(tasks)) if self._is_early(t)]
        first.sort(key=lambda t: (tasks.identity[t][1:3], tasks.identity[t].microbatch, tasks.identity[t].number))
        last = [t for t, kind in enumerate(tasks.kind) if kind == TaskKind.UPDATE]
        apart = {*first, *last}
        return [*first, *(t for t in range(len(tasks)) if t not in apart), *last]

    def _is_early(self, task: int) -> bool:
        what = self.lowered.tasks.communication[task]
        if what is None:
            return self.lowered.tasks.kind[task] == TaskKind.FORWARD and (
                self.lowered.tasks.operator[task] in self.early
            )
        if what.purpose != "forward":
            return False
        names = (self.lowered.edges[member.key].tensor for member in what.members)
        return all(self.lowered.graph.producer[name] in self.early for name in names)

    def instance(self, purpose: Purpose, key: int, microbatch: int) -> Transport:
        """The transport that serves a microbatch: its own, or the one of the step."""
        return Transport(purpose, key, microbatch if (purpose, key) in self.repeated else 0)

    def together(self, transport: Transport) -> list[Transport]:
        """Gathers that come in messages of this one."""
        return sorted({other for task in self.tasks_of.get(transport, ()) for other in self.members_of[task]})

    def receives(self, transport: Transport) -> bool:
        """Whether this device gets something from another one in a transport."""
        return any(self.device in exchange.receivers for exchange in reshard_of(self.lowered, transport).exchanges)

    def moves(self, transport: Transport) -> bool:
        """Whether this device takes part in a communication of a transport."""
        return any(
            self.device in exchange.senders or self.device in exchange.receivers
            for phase in reshard_of(self.lowered, transport).phases for exchange in phase.exchanges
        )  # fmt: skip

    def local(self, transport: Transport, phase: int) -> list[tuple[int, Move]]:
        """Moves of a phase that cross no devices, but for those that the backend adds to what crosses."""
        step, tasks = reshard_of(self.lowered, transport).phases[phase], self.lowered.tasks
        summed: set[int] = set()
        for x, exchange in enumerate(step.exchanges):
            what = tasks.communication[self.task_of[transport, phase, x][0]]
            if what is not None and what.sums:
                summed.update(move.destination for move in exchange.moves)
        return [(m, move) for m, move in enumerate(step.local) if move.destination not in summed]
