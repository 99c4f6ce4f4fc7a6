"""This machine as a cluster of slow hosts: its topology, its profile, plans for it, and runs on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import say
from benchmarks.layouts import MODELS
from benchmarks.netns import SlowNetwork
from benchmarks.worker import Job, Measured
from flexsearch.cost import Profile
from flexsearch.cost.profile import cpu_model
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.lower import Lowered
from flexsearch.measure.cases import count, plan
from flexsearch.measure.profiler import profile_graph
from flexsearch.runtime.launch import launch
from flexsearch.setting import Setting
from flexsearch.simulate import Simulation, makespan, simulate
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Device, Topology

BATCH = {"alexnet": 32, "vgg16": 16, "mlp": 64, "resnet50": 32, "gpt2": 8, "llama": 8}
"""Global batch of each model. VGG-16 with 32 takes half a minute a step on two cores."""
SMALL = ("gpt2", "llama")
"""Models that are as small here as in ``benchmarks.layouts``; the others are those of the zoo."""
BATCH_NORM_GROUPS = {"resnet50": 4}
"""Parts of the batch that batch norm normalises on their own, as DDP on 4 hosts does."""
OPTIONS = Options(optimizer="momentum")
_PROBE = "from flexsearch.measure.probe import main_from_env; main_from_env({path!r}, quick={quick})"


@dataclass(frozen=True)
class Effort:
    """How much is done. ``budget``: of each search. ``profile_s``: of each model at most. ``rounds``: turns of each
    variant, ``steps`` to a turn. ``strategies``: compared for each model and setting. ``variant_s``: where its turns
    would take longer in all than this, a variant has fewer of them, but at least two."""

    budget: str
    profile_s: float
    rounds: int
    steps: int
    strategies: int
    variant_s: float
    quick_probe: bool


QUICK = Effort(budget="5s", profile_s=20.0, rounds=2, steps=1, strategies=4, variant_s=4.0, quick_probe=True)
FULL = Effort(budget="60s", profile_s=240.0, rounds=7, steps=2, strategies=8, variant_s=120.0, quick_probe=False)


class Machine:
    """The cores of this machine, and what is known of it. ``folder`` keeps profile and topologies, ``scratch`` what
    workers are given."""

    def __init__(self, folder: Path, scratch: Path, effort: Effort) -> None:
        self.folder, self.scratch, self.effort = folder, scratch, effort
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        self._profiled: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def topology(self, hosts: int, network: str = "1gbit") -> Topology:
        """``hosts`` hosts on a network that share this machine's cores in turn; figures by ``probe``. ``network``: the
        rate of its links as ``tc`` writes it, or "loopback"."""
        path = self.folder / (f"topology-{hosts}.json" if network == "1gbit" else f"topology-{hosts}-{network}.json")
        if not path.exists():
            say(f"probing {hosts} hosts, {network}")
            probed = self.scratch / f"probed-{hosts}.json"
            script = _PROBE.format(path=str(probed), quick=self.effort.quick_probe)
            self._run(["-c", script], hosts, network, 300.0)
            emulate(Topology.load(probed), Topology.load(f"ethernet-1g-{hosts}"), len(self.cores)).save(path)
        return Topology.load(path)

    def profile(self, graph: OperatorGraph, max_parts: int = 4) -> Profile:
        """Measurements of the pieces of ``graph``, one thread, the other core busy with the same work.

        What an earlier call measured, of this graph or another, is not measured again; each graph has one budget.
        """
        path = self.folder / "profile.json"
        known = Profile.load(path) if path.exists() else None
        missing = count(plan(graph, max_parts, frozenset(known.entries if known else ())))
        if known is not None and known.recipe_work and (not missing or graph.name in self._profiled):
            return known
        say(f"profiling {missing} pieces of {graph.name} (at most {self.effort.profile_s:g} s)")
        with pinned(self.cores[0]):
            made = profile_graph(
                graph, max_parts=max_parts, known=known, budget_s=self.effort.profile_s,
                busy_neighbours=len(self.cores) - 1,
            )  # fmt: skip
        made.save(path)
        self._profiled.add(graph.name)
        return made

    def measure(self, job: Job, hosts: int, network: str = "1gbit") -> dict[str, Measured]:
        """Run a job on ``hosts`` hosts. Raises RuntimeFailure if a rank fails or time is up; nothing is left behind."""
        file = self.scratch / "job.json"
        job.save(file)
        result = self._run(["-m", "benchmarks.worker", str(file)], hosts, network, job.timeout_s)
        return {name: Measured.from_json(row) for name, row in result.items()}

    def _run(self, arguments: Sequence[str], hosts: int, network: str, timeout_s: float) -> Any:
        """``python ARGUMENTS`` on each host; what rank 0 reports, or prints as JSON on its last line."""
        if network == "loopback":
            return launch(arguments, hosts, pin=True, timeout_s=timeout_s)
        with SlowNetwork(hosts, network, cores=self.cores) as slow:
            output = slow.run([sys.executable, *arguments], timeout=timeout_s)[0].splitlines()
        return json.loads(output[-1]) if output else None

    def room_bytes(self, hosts: int) -> int:
        """Memory for the tensors of all ranks together: what is available, less an interpreter with torch for each."""
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return int(0.8 * available) - hosts * 400 * 2**20


class Plans:
    """What is simulated for one model on a number of hosts; ``found`` is searched on first use."""

    def __init__(self, machine: Machine, model: str, hosts: int, batch: int | None = None) -> None:
        self.machine, self.model, self.hosts, self.batch = machine, model, hosts, batch or BATCH[model]
        small = MODELS[model] if model in SMALL else None
        self.target = f"flexsearch.zoo:{model}" if small is None else small.target
        self.arguments: dict[str, Any] = {} if small is None else dict(small.arguments)
        made = load_callable(self.target, batch=self.batch, device="meta", **self.arguments)
        self.graph: OperatorGraph = import_model(
            made.model, made.inputs, made.loss, targets=made.targets, name=model,
            batch_norm_groups=BATCH_NORM_GROUPS.get(model, 1),
        )  # fmt: skip
        self.topology = machine.topology(hosts)
        self.profile = machine.profile(self.graph)
        self.setting = Setting.of(self.graph, self.topology, self.profile)

    @cached_property
    def found(self) -> Strategy:
        """The plan that the search finds within the budget."""
        say(f"searching a plan for {self.model} on {self.hosts} hosts ({self.machine.effort.budget})")
        return self.setting.search(self.machine.effort.budget, options=OPTIONS).strategy

    @cached_property
    def baselines(self) -> dict[str, Strategy]:
        """Every baseline of one stage and one microbatch that makes sense here, by name."""
        return {name: plan for name, plan in self.setting.baselines(OPTIONS).items() if plan.is_plain}

    def predict(self, strategy: Strategy) -> tuple[Lowered, Simulation]:
        """The strategy's task graph and its simulation."""
        lowered = self.setting.lower(strategy)
        return lowered, simulate(lowered)

    def predict_unshared(self, strategy: Strategy) -> float:
        """Predicted iteration time (s) if every host had a processor of its own."""
        topology = unshared(self.topology)
        alone = Strategy.make(self.graph, topology, strategy.configs, strategy.options)
        return makespan(Setting.of(self.graph, topology, self.profile).lower(alone))

    def save(self, strategies: Mapping[str, Strategy]) -> dict[str, str]:
        """Write strategy files for the workers; their paths by name."""
        files = {}
        for k, (name, strategy) in enumerate(strategies.items()):
            path = self.machine.scratch / f"strategy-{self.model}-{self.hosts}-{k}.json"
            strategy.save(path)
            files[name] = str(path)
        return files


def emulate(probed: Topology, preset: Topology, cores: int) -> Topology:
    """The preset's hosts with the probe's figures: all alike (medians), host r on core r modulo ``cores``."""
    flops = {dtype: median(d.flops[dtype] for d in probed.devices) for dtype in probed.devices[0].flops}
    figures = {
        "model": cpu_model(),
        "flops": flops,
        "memory_bandwidth": median(d.memory_bandwidth for d in probed.devices),
        "memory_bytes": min(d.memory_bytes for d in probed.devices),
        "overhead_s": median(d.overhead_s for d in probed.devices),
    }
    names = ("bandwidth", "latency_s") if probed.links else ()
    wire = {name: median(getattr(link, name) for link in probed.links) for name in names}
    return Topology(
        name=preset.name,
        devices=tuple(
            Device(**(dict(d) | figures | {"processor": f"core{r % cores}"})) for r, d in enumerate(preset.devices)
        ),
        switches=preset.switches,
        links=tuple(link.model_copy(update=wire) for link in preset.links),
        communication=probed.communication,
        source=probed.source,
    )


def unshared(topology: Topology) -> Topology:
    """The topology as if each device had a processor of its own."""
    fields = {name: getattr(topology, name) for name in Topology.model_fields}
    alone = tuple(device.model_copy(update={"processor": None}) for device in topology.devices)
    return Topology(**(fields | {"devices": alone}))  # not a copy: that would keep the resources of the old devices


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and what it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
