"""``what-if``: a plan on a changed cluster, and a new search there. It does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexsearch.cli import signals
from flexsearch.cli.common import (
    BatchOption,
    CodeOption,
    JsonOption,
    ProfileOption,
    SequenceOption,
    Size,
    check_outputs,
    setting_of,
    show,
    stdout,
    with_options,
)
from flexsearch.cli.explain import GraphOption
from flexsearch.cli.layouts import need_time, too_large
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from flexsearch.planning import PlanProgress
    from flexsearch.report.whatif import Changed
    from flexsearch.setting import Setting
    from flexsearch.spaces import Space
    from flexsearch.strategy import Strategy
    from flexsearch.topology import Topology

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class WhatIfOptions:
    """In the order of ``--help``."""

    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")]
    network: Annotated[
        list[str] | None,
        typer.Option(
            "--network",
            metavar="2x|LINKS=2x",
            help='Change the bandwidth of all links, or of links by name, as in "fabric=2x". Repeatable.',
        ),
    ] = None
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="2x|80GB", help="Change the memory of each device, in GB or GiB.")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="D|1.5x",
            help="Change the devices: a model (H100-SXM5-80GB), a preset to take them from, or a speed factor.",
        ),
    ] = None
    code: CodeOption = None
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, max=4096, metavar="N", help="Number of hosts.")] = None
    topology: Annotated[
        str | None, typer.Option("--topology", "-t", metavar="T", help="Another cluster: a topology file, or a preset.")
    ] = None
    budget: Annotated[str, typer.Option("--budget", "-b", metavar="30s|500", help="Budget of the new search.")] = "30s"
    graph: GraphOption = None
    profile: ProfileOption = None
    batch: BatchOption = None
    seq: SequenceOption = None
    save_topology: Annotated[
        Path | None, typer.Option("--save-topology", metavar="FILE", help="Write the changed cluster.")
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the fastest plan for the changed cluster.")
    ] = None
    as_json: JsonOption = False


@with_options(WhatIfOptions)
def what_if(options: WhatIfOptions) -> None:
    """Change the cluster of a plan: what the same plan takes there, and what a new search finds.

    Changes may be combined. Other devices come first, then another code, memory and links.
    """
    strategy, graph, profile, output = options.strategy, options.graph, options.profile, options.output
    outputs = {"--save-topology": options.save_topology, "--output": output}
    check_outputs(outputs, strategy, graph, options.topology, profile)
    from flexsearch.setting import parse_budget
    from flexsearch.strategy import Strategy

    parse_budget(options.budget)  # refused before the work
    if options.device is not None and profile is not None:
        raise typer.BadParameter("measured times do not hold for other devices", param_hint="--device")
    plan = Strategy.load(strategy)
    size = Size(options.batch, options.seq)
    setting = setting_of(strategy, plan, graph, None, profile, size, "--graph GRAPH")
    changed, words = _changed(setting.topology, options)
    outcome, best = _search(setting, plan, changed, words, options.budget)
    if options.save_topology is not None:
        changed.save(options.save_topology)
    if output is not None and best is not None:
        best.save(output)
    from flexsearch.report.whatif import changed_data

    data = {
        "graph": setting.graph.name, "topology": setting.topology.name, "strategy": str(strategy),
        **changed_data(outcome),
        "topology_path": str(options.save_topology) if options.save_topology is not None else None,
        "path": str(output) if output is not None and best is not None else None,
    }  # fmt: skip
    show(options.as_json, data, lambda: _say(setting, outcome, options.save_topology, output))


def _search(
    setting: Setting, plan: Strategy, changed: Topology, words: str, budget: str
) -> tuple[Changed, Strategy | None]:
    from flexsearch.changing import on_changed
    from flexsearch.setting import parse_budget

    start = plan.search.start if plan.search is not None else ""
    layouts = not plan.is_plain or start == "layouts" or too_large(setting.graph)
    if layouts:
        need_time(budget)
    space: Space = "layouts" if layouts else "free"
    each = parse_budget(budget)
    with Live(compiling(), each[0] or each[1]) as live:

        def report(now: PlanProgress) -> None:
            signals.current.graceful = now.plans > 0
            signals.current.poll()
            done = now.elapsed_s if each[0] is not None else now.plans
            live.show(f"new search: {now.phase}", done, state=now.words)

        outcome = on_changed(setting, plan, changed, words, budget, space=space, on_progress=report)
    signals.current.hold()
    return outcome


def _say(setting: Setting, outcome: Changed, topology: Path | None, output: Path | None) -> None:
    from flexsearch.cli.details import headline, tell
    from flexsearch.report.whatif import changed_table, in_a_sentence

    tell(headline(setting), indent=2)
    tell(f"What if: {outcome.change}\n")
    stdout.print(changed_table(outcome))
    tell(f"\n{in_a_sentence(outcome)}")
    for path in (topology, output if outcome.anew.fits else None):
        if path is not None:
            stdout.print(f"Wrote {path}.", soft_wrap=True)
    if output is not None and not outcome.anew.fits:
        tell(f"No plan fits, so {output} was not written.")


# ---- the changed cluster


def _changed(now: Topology, options: WhatIfOptions) -> tuple[Topology, str]:
    """The cluster that the options describe, and how it differs, in words."""
    from flexsearch.topology import Topology
    from flexsearch.topology.changes import edited, with_code
    from flexsearch.topology.sizes import Sizes

    network, hosts, topology, code = options.network or [], options.hosts, options.topology, options.code
    if not (network or options.memory or options.device or code or hosts or topology):
        raise typer.BadParameter("say what to change: --network, --memory, --device, --code, --hosts or --topology")
    cluster, words = now, list[str]()
    if topology is not None:
        cluster = Topology.load(topology)
        words.append(f"the cluster {cluster.name}")
    if hosts is not None:
        sizes = Sizes.named(topology) if topology is not None else Sizes(now)
        cluster = sizes.of_hosts(hosts)
        words.append(f"{hosts} host{'s' * (hosts > 1)} instead of {len(sizes.whole.hosts)}")
    if options.device is not None:
        cluster, said = _with_device(cluster, options.device)
        words.append(said)
    if code is not None:
        if cluster.code is not None and cluster.code.kind == code:
            raise typer.BadParameter(f"the figures of {cluster.name} are of {code} code already", param_hint="--code")
        cluster = with_code(cluster, code)
        words.append("steps captured as graphs" if code == "captured" else f"{code} code")
    for option, change in ((_with_memory, options.memory), *((_with_links, one) for one in network)):
        if change is not None:
            cluster, said = option(cluster, change)
            words.append(said)
    text = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return (cluster if topology is not None else edited(cluster, name=f"{now.name} with {text}")), text


def _with_device(cluster: Topology, text: str) -> tuple[Topology, str]:
    from flexsearch.topology.changes import device_named, with_device, with_speed

    if (factor := _factor(text, "--device")) is not None:
        return with_speed(cluster, factor), f"devices {factor:g}x as fast"
    device = device_named(text)
    return with_device(cluster, device), f"{device.model} devices"


def _with_memory(cluster: Topology, text: str) -> tuple[Topology, str]:
    from flexsearch.topology.changes import with_memory

    if (factor := _factor(text, "--memory")) is not None:
        return with_memory(cluster, factor=factor), f"{factor:g}x the memory"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B)", text)
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(
            f'"{text}" is not a size of memory; give a factor such as 2x, or a size such as 80GB',
            param_hint="--memory",
        )
    if (nbytes := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise typer.BadParameter(f'"{text}" leaves nothing; give a size above 0, as 80GB', param_hint="--memory")
    return with_memory(cluster, nbytes=nbytes), f"{text} of memory on each device"


def _with_links(cluster: Topology, text: str) -> tuple[Topology, str]:
    """All links, or the classes of links (as ``explain`` names them) that a name or pattern fits."""
    from flexsearch.simulate.whatif import link_classes
    from flexsearch.topology.changes import with_links

    name, _, number = text.rpartition("=")
    if (factor := _factor(number, "--network")) is None:
        raise typer.BadParameter(f'"{text}" is not a factor; give one such as 2x, or LINKS=2x', param_hint="--network")
    classes = link_classes(cluster)
    if not name:
        if not classes:
            raise typer.BadParameter(f"{cluster.name} has no links", param_hint="--network")
        return with_links(cluster, factor), f"links {factor:g}x as fast"
    chosen = [links for links in classes if name in links.name or fnmatchcase(links.name, name)]
    if not chosen:
        names = "; ".join(links.name for links in classes)
        raise typer.BadParameter(f'no links are called "{name}"; there are: {names}', param_hint="--network")
    resources = [resource for links in chosen for resource in links.resources]
    return with_links(cluster, factor, resources), f"{', '.join(c.name for c in chosen)} {factor:g}x as fast"


def _factor(text: str, option: str) -> float | None:
    """The number of "2x"; None for what is no such factor."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)x", text)
    if match is None:
        return None
    if not float(match[1]):
        raise typer.BadParameter(f'"{text}" leaves nothing; give a factor above 0', param_hint=option)
    return float(match[1])
