"""``optimize``: the search. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from flexsearch.cli import signals
from flexsearch.cli.answer import answer_data, answer_rows, model_options, say, tell_run
from flexsearch.cli.common import (
    BatchOption,
    CodeOption,
    DataOption,
    JsonOption,
    MaybeGraphArgument,
    PriceOption,
    ProfileOption,
    SequenceOption,
    Size,
    TopologyOption,
    check_outputs,
    example,
    file_of,
    load_setting,
    load_strategy,
    refuse_with,
    show,
)
from flexsearch.cli.layouts import answer_layouts, optimize_layouts, search_layouts, too_large
from flexsearch.cli.models import SetOption
from flexsearch.cli.money import with_cost
from flexsearch.cli.native import optimize_native
from flexsearch.cli.plans import (
    OptimizerOption,
    PrefetchOption,
    RecomputeOption,
    ReshardOption,
    RoundedOption,
    make_options,
    print_plans,
)
from flexsearch.cli.progress import SearchLive
from flexsearch.cli.search_options import (
    AllowOption,
    BudgetOption,
    ExhaustiveOption,
    MarginOption,
    OutputOption,
    PinOption,
    PlanOnlyOption,
    PlotOption,
    ProcessesOption,
    ResumeOption,
    SeedOption,
    SpaceOption,
    WeightGradientsOption,
)
from flexsearch.cli.space import halved
from flexsearch.cli.verify import (
    Verification,
    Verified,
    VerifyModelOption,
    VerifyOption,
    VerifyStepsOption,
    is_follower,
    print_verified,
    unmeasured,
    verification,
)
from flexsearch.errors import FlexsearchError

if TYPE_CHECKING:
    from flexsearch.cli.recipes import Beside
    from flexsearch.proof.exhaustive import Optimum
    from flexsearch.search.hybrid import HybridResult
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting
    from flexsearch.strategy import Options, Strategy


SLACK_S = 60.0
"""A search looks at the clock between two plans, and one plan for thousands of devices takes minutes: it is ended this
much later than twice its budget (once for the baselines, once for the climbs)."""

STAGED = "layout"
"""Name of the best layout among the plans that --verify runs."""

@dataclass(frozen=True)
class _Asked:
    """What the options say. ``first``: the plan to go on from; ``margin``: a share; None: what tells plans apart;
    ``trained``: the options of ``run`` that name the model."""

    setting: Setting
    size: Size
    options: Options
    budget: str
    seed: int
    processes: int | None
    first: Strategy | None
    pins: tuple[str, ...]
    margin: float | None
    exhaustive: str | None
    space: Literal["free", "splits", "layouts", "native", "native-layouts"]
    output: Path
    plot: Path | None
    cost_per_hour: float | None
    as_json: bool
    weight_gradients: bool = False
    allow: tuple[str, ...] = ()
    topology: str = ""
    trained: str = ""

    @property
    def seconds(self) -> float | None:
        """The budget, if it is one for both spaces (s). What goes on from a plan, or keeps or proves something, is
        about splits, and so is a number of proposals."""
        from flexsearch.setting import parse_budget

        if self.space != "free" or self.first is not None or self.pins or self.exhaustive is not None:
            return None
        return parse_budget(self.budget)[0]


def optimize(
    graph: MaybeGraphArgument = None,
    topology: TopologyOption = None,
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    output: OutputOption = Path("strategy.json"),
    profile: ProfileOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    reads: DataOption = None,
    code: CodeOption = None,
    resume: ResumeOption = None,
    pin: PinOption = None,
    optimizer: OptimizerOption = "momentum",
    precision: RoundedOption = "as-is",
    recompute: RecomputeOption = "none",
    reshard_after_forward: ReshardOption = False,
    prefetch: PrefetchOption = 1,
    margin: MarginOption = None,
    processes: ProcessesOption = None,
    exhaustive: ExhaustiveOption = None,
    space: SpaceOption = "free",
    plan_only: PlanOnlyOption = False,
    weight_gradients: WeightGradientsOption = False,
    verify: VerifyOption = None,
    model: VerifyModelOption = None,
    set_: SetOption = None,
    verify_steps: VerifyStepsOption = 10,
    cost_per_hour: PriceOption = None,
    plot: PlotOption = None,
    allow: AllowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the fastest plan and write it to a strategy file.

    Without arguments it plans a small MLP on four hosts with 1 Gbit/s Ethernet.

    Ctrl-C ends the search and writes the best plan so far.
    """
    graph, topology = example(graph, topology, resume, profile, pin)
    source = file_of(model) if model is not None else None
    check_outputs({"--output": output, "--plot": plot}, graph, topology, profile, source)
    _refuse_early(plot, resume, budget, exhaustive)
    allowed = _read_allowed(allow)
    size = Size(batch, seq)
    learns = profile if verify is not None else None
    check_outputs({"--output": output, "--plot": plot, "--profile": learns}, graph, topology, source)
    known = None if learns is not None and not learns.exists() else profile
    setting = load_setting(graph, topology, known, size, reads, code, precision == "tf32")
    large = resume is None and not pin and space in ("free", "native") and too_large(setting.graph)
    layouts, native = plan_only or large or "layouts" in space, "native" in space
    if layouts or native:
        _refuse_others(
            layouts, seed, resume=resume, pin=pin, plot=plot, exhaustive=exhaustive, verify=verify, allow=allow,
            weight_gradients=weight_gradients or None,
        )  # fmt: skip
    trial = verification(verify, verify_steps, graph, topology, model, set_, setting.graph, budget, learns)
    if trial is not None and is_follower():
        trial.follow()
        return
    if trial is not None:
        trial.check(setting)
    # What is to be proved is the best plan, not the simplest of the good ones.
    share = margin / 100 if margin is not None else 0.0 if exhaustive is not None else None
    first = load_strategy(resume, setting) if resume is not None else None
    options = make_options(optimizer, precision, recompute, reshard_after_forward, prefetch)
    asked = _Asked(
        setting, size, options, budget, seed, processes, first, tuple(pin or ()), share, exhaustive, space, output,
        plot, cost_per_hour, as_json, weight_gradients, allowed, topology,
        model_options(graph, setting.graph, (trial.model, trial.arguments) if trial is not None else None),
    )  # fmt: skip
    if layouts:
        optimize_layouts(
            setting, options, budget, processes, output, as_json, size.words(), large, cost_per_hour,
            partial(_free_layouts, asked, large) if native else None, share,
        )
    elif native:
        _native(asked)
    else:
        _optimize(asked, trial)


def _native(asked: _Asked) -> None:
    """Two searches, each with half of the budget: among all plans, and among those of one stage that can be
    exported."""
    half = halved(asked.budget)
    splits, layouts = _free(replace(asked, margin=0.0), half)
    optimize_native(
        asked.setting, asked.options, half, splits, layouts, asked.output, asked.as_json, asked.size.words(),
        asked.cost_per_hour,
    )


def _free(asked: _Asked, budget: str) -> tuple[SearchResult, HybridResult | None]:
    """The best plans of both spaces, for what native ones stand beside."""
    from flexsearch.setting import parse_budget
    from flexsearch.spaces import search_both

    if (seconds := parse_budget(budget)[0]) is None:
        return _search(asked, budget), None
    return search_both(
        seconds, asked.setting.graph, len(asked.setting.topology.devices), lambda share: _search(asked, share),
        lambda share: _search_layouts(asked, share),
    )


def _free_layouts(asked: _Asked, large: bool, budget: str) -> float | None:
    """Seconds of the best plan of both spaces, where that of layouts is at hand; None: none fits. ``large``: the model
    is too large for the search over splits."""
    splits, layouts = (None, _search_layouts(asked, budget)) if large else _free(replace(asked, margin=0.0), budget)
    times = [layouts.best.seconds] if layouts is not None and layouts.best.feasible else []
    times += [splits.simulation.makespan_s] if splits is not None and splits.feasible else []
    return min(times, default=None)


def _optimize(asked: _Asked, trial: Verification | None) -> None:
    """Search, prove and verify as asked; write the best plan and print it."""
    from flexsearch.search.garbage import rare_collections
    from flexsearch.spaces import prefers_layout, search_both

    setting, seconds = asked.setting, asked.seconds
    layouts: HybridResult | None = None
    if seconds is None:
        result = _search(asked, asked.budget)
    else:
        result, layouts = search_both(
            seconds, setting.graph, len(setting.topology.devices), lambda share: _searched_and_saved(asked, share),
            lambda share: _search_layouts(asked, share),
        )  # fmt: skip
    staged = layouts if prefers_layout(layouts, result, asked.margin) else None
    _save(asked, result, staged)
    result, proof = _prove(asked, result)
    if proof is not None:
        _save(asked, result, staged)
    verified: Verified | None = None
    if trial is not None and not signals.current.number:
        others = {} if layouts is None or layouts.strategy.is_plain or not layouts.best.feasible else {
            STAGED: layouts.strategy
        }  # fmt: skip
        try:
            with signals.current.released():
                result, verified = trial.verified(setting, result, others)
        except FlexsearchError as error:
            raise unmeasured(error, asked.output) from error
        staged = layouts if verified.rows[0].name == STAGED else None
        _save(asked, result, staged)
    if asked.plot is not None:
        _draw(asked.plot, setting, result)
    beside = _beside(asked, result, staged)
    more = {} if trial is None else (verified or Verified([])).data()
    more |= {} if beside is None else beside.data()
    if staged is not None:
        answer_layouts(
            setting, staged, asked.output, asked.as_json, asked.size.words(), asked.cost_per_hour,
            more={"space": asked.space, **more}, splits=result.strategy if result.feasible else None,
            say_more=lambda: _say_more(asked, verified, staged.strategy, beside),
        )  # fmt: skip
    else:
        with rare_collections():  # of all that the search left
            _answer(asked, result, proof, layouts, verified, more, beside)


def _say_more(asked: _Asked, verified: Verified | None, strategy: Strategy, beside: Beside | None) -> None:
    """Behind a layout: what was verified, what recipes bring, and how to run it."""
    if verified is not None:
        print_verified(verified, strategy)
    if beside is not None:
        beside.say()
    tell_run(asked.trained, asked.output, len(strategy.cluster.devices))


def _answer(
    asked: _Asked, result: SearchResult, proof: Optimum | None, layouts: HybridResult | None,
    verified: Verified | None, more: dict[str, Any], beside: Beside | None,
) -> None:  # fmt: skip
    """Print a plan of one stage. ``more``: further data; ``beside``: what recipes bring."""
    setting = asked.setting
    answer, others = answer_rows(result)
    data = {"path": str(asked.output), "space": asked.space, **more}
    data |= answer_data(setting, result, proof, answer, others, layouts)

    def human() -> None:
        print_plans(setting, [] if result.baseline else [answer], others)
        if verified is not None:
            print_verified(verified, result.strategy)
        say(setting, result, proof, answer, asked.margin, asked.output, asked.size, asked.cost_per_hour, layouts,
            asked.trained)  # fmt: skip
        if beside is not None:
            beside.say()

    show(asked.as_json, with_cost(data, setting, asked.cost_per_hour), human)


def _read_allowed(allow: str | None) -> tuple[str, ...]:
    """The names, or recipes, of ``--allow``. Raises RecipeError for one that there is not, before the search."""
    from flexsearch.search.recipes import read_allowed

    return read_allowed(allow) if allow is not None else ()


def _beside(asked: _Asked, result: SearchResult, staged: HybridResult | None) -> Beside | None:
    """What recipes bring to the best plan and to data parallelism, if some are allowed; the plan with the fastest one
    is written beside the exact one."""
    if not asked.allow or signals.current.number:
        return None
    from flexsearch.cli.recipes import beside

    parallel = result.baselines.get("data-parallel")
    exact, time_s = (result.strategy, result.simulation.makespan_s) if staged is None else (
        staged.strategy, staged.step.makespan_s
    )  # fmt: skip
    plans = [exact, *([parallel.strategy] if parallel is not None and result.baseline != "data-parallel" else [])]
    return beside(asked.setting, plans, time_s, asked.allow, asked.output, asked.topology)


def _refuse_others(layouts: bool, seed: int, **given: object) -> None:
    """Raise an error for options that say nothing about layouts, or native plans."""
    if layouts:
        refuse_with("over layouts (--space layouts)", seed=seed, **given)
    refuse_with("among native plans", **given)


def _refuse_early(plot: Path | None, resume: Path | None, budget: str, exhaustive: str | None) -> None:
    """Raise an error for what could not be drawn, or is no budget, before the search rather than after it."""
    from flexsearch.setting import parse_budget

    if plot is not None:
        check_outputs({"--plot": plot}, resume)
        if plot.suffix not in (".png", ".svg", ".pdf"):
            raise typer.BadParameter(f"{plot} cannot be drawn; give a .png, .svg or .pdf file", param_hint="--plot")
    for text in (budget, exhaustive):
        if text is not None:
            parse_budget(text)


def _search(asked: _Asked, budget: str) -> SearchResult:
    """The search over splits. A signal ends it with the best plan so far; later ones only note that the command is to
    end. Raises StrategyError if the cluster is so large that not even one plan was evaluated long after the budget was
    used up."""
    from flexsearch import compiled
    from flexsearch.errors import StrategyError
    from flexsearch.setting import parse_budget

    seconds, setting = parse_budget(budget)[0], asked.setting
    # The first time on a machine, compiling takes longer than that.
    limit = 2.0 * seconds + SLACK_S if seconds is not None and compiled.is_warm() else None
    late = StrategyError(
        f"the budget of {asked.budget} was used up long ago: {setting.topology.name} with "
        f"{len(setting.topology.devices)} devices, or {setting.graph.name} with {len(setting.graph.operators)} "
        "operators, is too large for it",
        "Give more time, or search on fewer devices.",
    )

    def end() -> None:
        signals.no_deadline()
        signals.current.hold()

    with SearchLive(budget) as live, signals.deadline(limit, late):
        return setting.search(
            budget, seed=asked.seed, start=asked.first, pins=asked.pins, processes=asked.processes,
            margin=asked.margin, options=asked.first.options if asked.first is not None else asked.options,
            weight_gradients=asked.weight_gradients, on_progress=live.update, on_phase=live.prepare, on_end=end,
        )  # fmt: skip


def _searched_and_saved(asked: _Asked, budget: str) -> SearchResult:
    """The search over splits, whose plan no signal may lose from then on."""
    result = _search(asked, budget)
    if result.feasible:
        _save(asked, result, None)
    return result


def _search_layouts(asked: _Asked, budget: str) -> HybridResult | None:
    """The search over layouts; None if it was interrupted before it had a plan. Raises StrategyError."""
    if signals.current.number:
        return None
    try:
        with signals.current.released():
            return search_layouts(asked.setting, asked.options, budget, asked.processes, margin=asked.margin)
    except KeyboardInterrupt:
        return None


def _prove(asked: _Asked, result: SearchResult) -> tuple[SearchResult, Optimum | None]:
    """The result, or what an exhaustive search puts in its place, and that search; None if there was no time for it."""
    budget = asked.exhaustive
    if budget is None or signals.current.number or result.stopped.startswith("interrupted"):
        return result, None
    proof = None
    try:
        with signals.current.released(), SearchLive(budget) as live:
            proof = asked.setting.prove(result, budget, pins=asked.pins, on_progress=live.proving)
    except KeyboardInterrupt:  # elsewhere than in the search itself, which catches it
        return result, proof
    return asked.setting.proved(result, proof), proof


def _save(asked: _Asked, result: SearchResult, staged: HybridResult | None) -> None:
    """Write the plan of one stage, or that of the layout. Raises StrategyError if it fits into no memory."""
    from flexsearch.api import refuse_what_does_not_fit

    if staged is not None:
        staged.strategy.save(asked.output)
        return
    refuse_what_does_not_fit(result, asked.setting.topology)
    result.strategy.save(asked.output)


def _draw(path: Path, setting: Setting, result: SearchResult) -> None:
    """The picture of the chains."""
    from flexsearch.output import write
    from flexsearch.report.plots import chains, rendered

    trails = [(trail.phase, trail.points) for trail in result.trails]
    best = [(found.proposal, found.time_s) for found in result.history]
    figure = chains(trails, best, result.bound_s, f"{setting.graph.name} on {setting.topology.name}")
    write(path, rendered(figure, path.suffix.removeprefix(".")))
