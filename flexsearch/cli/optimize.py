"""``optimize``: the search. It does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli import signals
from flexsearch.cli.common import (
    FINITE,
    BatchOption,
    JsonOption,
    MaybeGraphArgument,
    PriceOption,
    ProfileOption,
    SequenceOption,
    Size,
    TopologyOption,
    check_outputs,
    example,
    load_setting,
    load_strategy,
    refuse_with,
    show,
    stdout,
)
from flexsearch.cli.layouts import optimize_layouts, too_large
from flexsearch.cli.models import SetOption
from flexsearch.cli.money import tell_cost, with_cost
from flexsearch.cli.native import optimize_native
from flexsearch.cli.plans import (
    OptimizerOption,
    PrecisionOption,
    PrefetchOption,
    RecomputeOption,
    ReshardOption,
    in_order,
    make_options,
    print_plans,
)
from flexsearch.cli.progress import Live, compiling
from flexsearch.cli.space import halved
from flexsearch.cli.verify import (
    Row,
    VerifyModelOption,
    VerifyOption,
    VerifyStepsOption,
    is_follower,
    print_verified,
    shipped_model,
    verification,
)

if TYPE_CHECKING:
    from flexsearch.api import Setting
    from flexsearch.graph import OperatorGraph
    from flexsearch.proof.exhaustive import Optimum, Step
    from flexsearch.report import PlanRow
    from flexsearch.search.outcome import Progress, SearchResult
    from flexsearch.strategy import Options, Strategy


SLACK_S = 60.0
"""A search looks at the clock between two plans, and one plan for thousands of devices takes minutes: it is ended this
much later than twice its budget (once for the baselines, once for the climbs)."""

HARDLY: float = 1.1
"""A plan that is not this many times as fast as the best baseline is called hardly better."""


def optimize(
    graph: MaybeGraphArgument = None,
    topology: TopologyOption = None,
    budget: Annotated[
        str,
        typer.Option("--budget", "-b", metavar="30s|500", help="How long to search: a time, or a number of proposals."),
    ] = "30s",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Seed of the search.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Strategy file to write.")] = Path("strategy.json"),
    profile: ProfileOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="S", help="Strategy file to start from, with its options. May be the output."),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", metavar="PIN", help='Fix part of the plan: "encoder.*: batch=4, devices=0-3". Repeatable.'
        ),
    ] = None,
    optimizer: OptimizerOption = "momentum",
    precision: PrecisionOption = "as-is",
    recompute: RecomputeOption = "none",
    reshard_after_forward: ReshardOption = False,
    prefetch: PrefetchOption = 1,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            min=0.0,
            max=100.0,
            metavar="PERCENT",
            help="Keep the best baseline unless a plan beats it by so much. Default: 5.",
            **FINITE,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "-j", min=1, max=4096, metavar="N", help="Search processes. Default: one per core."
        ),
    ] = None,
    exhaustive: Annotated[
        str | None,
        typer.Option(
            "--exhaustive",
            metavar="60s|N",
            help="Then try to prove the optimum, for a time or a number of partial plans.",
        ),
    ] = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only",
            help="Search data x tensor x pipeline layouts with stages and microbatches.",
        ),
    ] = False,
    space: Annotated[
        Literal["free", "native"],
        typer.Option("--space", help="native: only plans that `flexsearch export` can write as ordinary PyTorch."),
    ] = "free",
    verify: VerifyOption = None,
    model: VerifyModelOption = None,
    set_: SetOption = None,
    verify_steps: VerifyStepsOption = 10,
    cost_per_hour: PriceOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the progress of the search: a .png, .svg or .pdf file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the fastest plan and write it to a strategy file.

    Without arguments it plans AlexNet on four hosts with 1 Gbit/s Ethernet.

    Ctrl-C ends the search and writes the best plan so far.
    """
    graph, topology = example(graph, topology, resume, profile, pin)
    check_outputs({"--output": output, "--plot": plot}, graph, topology, profile)
    _refuse_early(plot, resume, budget, exhaustive)
    from flexsearch.api import MARGIN

    size = Size(batch, seq)
    setting = load_setting(graph, topology, profile, size)
    if plan_only or (resume is None and not pin and too_large(setting.graph)):
        refuse_with(
            "over layouts (--plan-only)", resume=resume, pin=pin, plot=plot, exhaustive=exhaustive, seed=seed,
            margin=margin, verify=verify,
        )  # fmt: skip
        options = make_options(optimizer, precision, recompute, reshard_after_forward, prefetch)
        optimize_layouts(
            setting, options, budget, processes, output, as_json, size.words(), plan_only, cost_per_hour,
            space == "native",
        )
        return
    if space == "native":
        refuse_with("among native plans", resume=resume, pin=pin, plot=plot, exhaustive=exhaustive, verify=verify)
        options = make_options(optimizer, precision, recompute, reshard_after_forward, prefetch)
        half = halved(budget)
        free = _search(setting, half, seed, None, (), processes, 0.0, options)
        optimize_native(setting, options, half, free, output, as_json, size.words(), cost_per_hour)
        return
    trial = verification(verify, verify_steps, graph, topology, model, set_, setting.graph, budget)
    if trial is not None and is_follower():
        trial.follow()
        return
    first = load_strategy(resume, setting) if resume is not None else None
    # What is to be proved is the best plan, not the simplest of the good ones.
    share = margin / 100 if margin is not None else 0.0 if exhaustive is not None else MARGIN
    options = make_options(optimizer, precision, recompute, reshard_after_forward, prefetch)
    result = _search(
        setting, budget, seed, first, tuple(pin or ()), processes, share,
        first.options if first is not None else options,
    )  # fmt: skip
    _save(setting, result, output)
    result, proof = _prove(setting, result, exhaustive, tuple(pin or ()))
    if proof is not None:
        _save(setting, result, output)
    rows: list[Row] = []
    if trial is not None and not signals.current.number:
        with signals.current.released():
            result, rows = trial.verified(setting, result)
        _save(setting, result, output)
    if plot is not None:
        _draw(plot, setting, result)
    answer, others = _rows(setting, result)
    data = with_cost(_answer_data(setting, result, proof, answer, others, output), setting, cost_per_hour)
    if trial is not None:
        data["verified"] = [row._asdict() for row in rows]

    def human() -> None:
        print_plans(setting, [] if result.baseline else [answer], others)
        if rows:
            print_verified(rows, result)
        _say(graph, setting, result, proof, answer, share, output, size, cost_per_hour)

    show(as_json, data, human)


def _refuse_early(plot: Path | None, resume: Path | None, budget: str, exhaustive: str | None) -> None:
    """Raise an error for what could not be drawn, or is no budget, before the search rather than after it."""
    from flexsearch.api import parse_budget

    if plot is not None:
        check_outputs({"--plot": plot}, resume)
        if plot.suffix not in (".png", ".svg", ".pdf"):
            raise typer.BadParameter(f"{plot} cannot be drawn; give a .png, .svg or .pdf file", param_hint="--plot")
    for text in filter(None, (budget, exhaustive)):
        parse_budget(text)


def _search(
    setting: Setting, budget: str, seed: int, first: Strategy | None, pins: tuple[str, ...], processes: int | None,
    margin: float, options: Options,
) -> SearchResult:  # fmt: skip
    """The search. A signal ends it with the best plan so far; later ones only note that the command is to end. Raises
    StrategyError if the cluster is so large that not even one plan was evaluated long after the budget was used up."""
    from flexsearch import compiled
    from flexsearch.api import parse_budget
    from flexsearch.errors import StrategyError

    seconds = parse_budget(budget)[0]
    # The first time on a machine, compiling takes longer than that.
    limit = 2.0 * seconds + SLACK_S if seconds is not None and compiled.is_warm() else None
    late = StrategyError(
        f"the budget of {budget} was used up long ago: {setting.topology.name} with {len(setting.topology.devices)} "
        f"devices, or {setting.graph.name} with {len(setting.graph.operators)} operators, is too large for it",
        "Give more time, or search on fewer devices.",
    )

    def end() -> None:
        signals.no_deadline()
        signals.current.hold()

    with _Live(budget) as live, signals.deadline(limit, late):
        return setting.search(
            budget, seed=seed, start=first, pins=pins, processes=processes, margin=margin, options=options,
            on_progress=live.update, on_phase=live.prepare, on_end=end,
        )  # fmt: skip


def _prove(
    setting: Setting, result: SearchResult, budget: str | None, pins: tuple[str, ...]
) -> tuple[SearchResult, Optimum | None]:
    """The result, or what an exhaustive search puts in its place, and that search; None if there was no time for it."""
    if budget is None or signals.current.number or result.stopped.startswith("interrupted"):
        return result, None
    proof = None
    try:
        with signals.current.released(), _Live(budget) as live:
            proof = setting.prove(result, budget, pins=pins, on_progress=live.proving)
    except KeyboardInterrupt:  # elsewhere than in the search itself, which catches it
        return result, proof
    return setting.proved(result, proof), proof


def _save(setting: Setting, result: SearchResult, output: Path) -> None:
    """Write the strategy. Raises StrategyError if it fits into no memory."""
    from flexsearch.api import refuse_what_does_not_fit

    refuse_what_does_not_fit(result, setting.topology)
    result.strategy.save(output)


def _draw(path: Path, setting: Setting, result: SearchResult) -> None:
    """The picture of the chains."""
    from flexsearch.output import write
    from flexsearch.report.plots import chains, rendered

    trails = [(trail.phase, trail.points) for trail in result.trails]
    best = [(found.proposal, found.time_s) for found in result.history]
    figure = chains(trails, best, result.bound_s, f"{setting.graph.name} on {setting.topology.name}")
    write(path, rendered(figure, path.suffix.removeprefix(".")))


def _rows(setting: Setting, result: SearchResult) -> tuple[PlanRow, list[PlanRow]]:
    """The answer, and the baselines. If the answer is a baseline, it has its name and is one of them."""
    from flexsearch.report import PlanRow

    others = [PlanRow(name, o.simulation, setting.lower(o.strategy)) for name, o in result.baselines.items()]
    for row in others:
        if row.name == result.baseline:
            return row, others
    return PlanRow("found", result.simulation, setting.lower(result.strategy)), others


def _answer_data(
    setting: Setting, result: SearchResult, proof: Optimum | None, answer: PlanRow, others: list[PlanRow], output: Path
) -> dict[str, Any]:
    from flexsearch.report import groups, in_words, plan_rows

    plans = plan_rows(in_order([] if result.baseline else [answer], others))
    of_answer = next(p for p in plans if p["name"] == answer.name)
    return {
        "graph": setting.graph.name,
        "topology": setting.topology.name,
        "path": str(output),
        "plan": answer.name,
        **{k: v for k, v in of_answer.items() if k not in ("name", "note")},
        "words": in_words(answer.lowered),
        "groups": [{"layers": g.layers, "treatment": g.treatment} for g in groups(answer.lowered)],
        "seed": result.strategy.search.seed if result.strategy.search else None,
        "proposals": result.proposals,
        "accepted": result.accepted,
        "elapsed_s": result.elapsed_s,
        "proposals_per_s": result.proposals / result.elapsed_s if result.elapsed_s else None,
        "stopped": result.stopped,
        "set_aside_s": result.set_aside_s,
        "locally_optimal": result.locally_optimal,
        "few_proposals": result.few,
        "bound_s": result.bound_s,
        "proof": None
        if proof is None
        else {
            "complete": proof.complete,
            "plans": proof.plans,
            "bound_s": proof.bound_s,
            "nodes": proof.nodes,
            "simulated": proof.simulated,
            "elapsed_s": proof.elapsed_s,
            "stopped": proof.stopped,
        },
        "plans": plans,
    }


def _say(
    graph: str, setting: Setting, result: SearchResult, proof: Optimum | None, answer: PlanRow, margin: float,
    output: Path, size: Size, cost_per_hour: float | None,
) -> None:  # fmt: skip
    """The plan in words, how good it is, how the search ended, and what to do next."""
    from flexsearch.cli.details import tell, tell_plan

    tell(f"\n{_what_it_is(result, margin)}")
    tell_plan(answer.lowered)
    tell(f"\n{_how_good(result, proof)}")
    tell_cost(setting, result.simulation.makespan_s, cost_per_hour)
    basis = "compute times that were measured"
    if setting.costs.profile is None:
        basis = "data-sheet figures for the hardware; `flexsearch profile` measures yours"
    tell(f"These times are predictions, based on {basis}.")
    rate = result.proposals / result.elapsed_s if result.elapsed_s else 0.0
    tell(f"{result.proposals:,} proposals in {result.elapsed_s:.1f} s ({rate:,.0f}/s). Stopped: {result.stopped}.")
    if result.few:
        tell(_few(result))
    stdout.print(f"\nWrote {output}. To train a few steps and measure them:", soft_wrap=True)
    count = len(result.strategy.cluster.devices)
    stdout.print(f"  flexsearch run -n {count} {output} {_model(graph, setting.graph)}", soft_wrap=True)
    if given := size.words():
        stdout.print(f"To simulate, explain or plot it, give {given} again.", soft_wrap=True)


def _model(graph: str, planned: OperatorGraph) -> str:
    """The options of ``run`` that name the model of a graph, and the batch and sequence length that were planned."""
    if (shipped := shipped_model(graph, planned)) is None:
        return "--model MODULE:CALLABLE"
    model, arguments = shipped
    options = (f"--batch {v}" if name == "batch" else f"--set {name}={v}" for name, v in arguments.items())
    return " ".join((f"--model {model}", *options))


def _what_it_is(result: SearchResult, margin: float) -> str:
    """Whether the answer is a baseline or what the search found, in words."""
    from flexsearch.report.units import percent, ratio, seconds

    if result.strategy.measurement is not None:
        kind = f"the baseline {result.baseline}" if result.baseline else "found by the search"
        return f"Best plan, the fastest as measured: {kind}."
    fitting = [(o.time_s, name) for name, o in result.baselines.items() if o.feasible]
    if not result.baseline:
        if not fitting or not result.simulation.makespan_s:
            return "Best plan, found by the search (no baseline fits into memory):"
        best_s, name = min(fitting)
        gain = ratio(best_s / result.simulation.makespan_s)
        return f"Best plan, found by the search; {gain} as fast as the best baseline, {name}:"
    buckets = f" with {_buckets(result)}" if len(result.strategy.cluster.devices) > 1 else ""
    text = f"Best plan: the baseline {result.baseline}{buckets}."
    if result.few:
        return text  # nothing was found because hardly anything was tried
    if result.set_aside_s is None:
        return f"{text} The search found nothing faster."
    if margin > 0:
        near = f" (its best plan takes {seconds(result.set_aside_s)})"
        return f"{text} The search found nothing {percent(margin)} faster{near}."
    return text


def _buckets(result: SearchResult) -> str:
    """The bucket size of the answer in words."""
    size = result.strategy.options.bucket_bytes
    return f"gradient buckets of {size / 2**20:.3g} MiB"


def _few(result: SearchResult) -> str:
    """That the search has hardly begun, in words."""
    starts = [o.time_s for o in result.baselines.values() if o.feasible]
    gain = min(starts) / result.simulation.makespan_s if starts and result.simulation.makespan_s else 1.0
    meaning = "the plan is hardly better than the best start" if gain < HARDLY else "there may well be better plans"
    return (
        f"Only {result.proposals:,} proposals in {result.elapsed_s:.3g} s, where one layer of each of {result.sorts:,} "
        f"sorts has {result.alternatives:,} other configs in all: {meaning}. Give the search more time (--budget), or "
        "continue it (--resume)."
    )


def _how_good(result: SearchResult, proof: Optimum | None) -> str:
    """The time beside what is known of the optimum."""
    from flexsearch.report.units import seconds

    now, least = seconds(result.simulation.makespan_s), seconds(result.bound_s)
    text = f"It takes {now} an iteration; no plan in this space is faster than {least}."
    if result.locally_optimal:
        text += " It is locally optimal: no change to a single operator makes it 1 % faster."
    if proof is None:
        return text
    space = f"the {proof.plans:.3g} plans on aligned blocks of devices"
    if proof.complete:
        return f"{text}\nOf {space} none is faster: proved in {seconds(proof.elapsed_s)}."
    return f"{text}\nOf {space} none is faster than {seconds(proof.bound_s)}, as far as was proved: {proof.stopped}."


class _Live(Live):
    """The search: phase, how far, best so far, proposals per second, acceptance."""

    def __init__(self, budget: str) -> None:
        from flexsearch.api import parse_budget

        self.budget_s, self.limit = parse_budget(budget)
        super().__init__(compiling(), self.budget_s or self.limit)

    def prepare(self, phase: str) -> None:
        """Show what is done before the climbs. From now on there is a plan, which no signal may lose."""
        signals.current.graceful = True
        signals.current.poll()
        self.show(phase)

    def update(self, now: Progress) -> None:
        """Show where the search is."""
        from flexsearch.report.units import seconds

        signals.current.poll()
        rate = now.proposals / now.elapsed_s if now.elapsed_s else 0.0
        self.show(
            now.phase,
            now.elapsed_s if self.budget_s is not None else now.proposals,
            state=f"best {seconds(now.best_s)}   {rate:,.0f} proposals/s   {now.accepted / now.proposals:.0%} accepted",
        )

    def proving(self, now: Step) -> None:
        """Show where an exhaustive search is."""
        from flexsearch.report.units import seconds

        signals.current.poll()
        self.show(
            "proving",
            now.elapsed_s if self.budget_s is not None else now.nodes,
            state=f"best {seconds(now.best_s)}   nothing below {seconds(now.bound_s)}   {now.nodes:,} partial plans",
        )
