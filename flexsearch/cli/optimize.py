"""``optimize``: the search. It does not import torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from flexsearch.cli import search, signals
from flexsearch.cli.answer import answer_data, answer_rows, model_options, say, tell_run
from flexsearch.cli.common import (
    check_outputs,
    example,
    file_of,
    load_setting,
    load_strategy,
    refuse_with,
    show,
    with_options,
)
from flexsearch.cli.layouts import answer_layouts, optimize_layouts, too_large
from flexsearch.cli.money import with_cost
from flexsearch.cli.native import optimize_native
from flexsearch.cli.plans import make_options, print_plans
from flexsearch.cli.search import Asked
from flexsearch.cli.search_options import OptimizeOptions
from flexsearch.cli.space import halved
from flexsearch.cli.verify import Verification, Verified, is_follower, print_verified, unmeasured, verification
from flexsearch.errors import FlexsearchError

if TYPE_CHECKING:
    from flexsearch.cli.recipes import Beside
    from flexsearch.graph import OperatorGraph
    from flexsearch.proof.exhaustive import Optimum
    from flexsearch.search.hybrid import HybridResult
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy

STAGED = "layout"
"""Name of the best layout among the plans that --verify runs."""


@with_options(OptimizeOptions)
def optimize(options: OptimizeOptions) -> None:
    """Search for the fastest plan and write it to a strategy file.

    Without arguments it plans a small MLP on four hosts with 1 Gbit/s Ethernet.

    Ctrl-C ends the search and writes the best plan so far.
    """
    graph, topology = example(options.graph, options.topology, options.resume, options.profile, options.pin)
    allow = _refuse_early(options, graph, topology)
    learns = options.profile if options.verify is not None else None
    profile = None if learns is not None and not learns.exists() else options.profile
    setting = load_setting(
        graph, topology, profile, options.size, options.reads, options.code, options.precision == "tf32"
    )
    kind = _Kind.of(options, setting.graph)
    kind.refuse_others(options)
    trial = verification(
        options.verify, options.verify_steps, graph, topology, options.model, options.set_, setting.graph,
        options.budget, learns,
    )  # fmt: skip
    if trial is not None and is_follower():
        trial.follow()
        return
    if trial is not None:
        trial.check(setting)
    first = load_strategy(options.resume, setting) if options.resume is not None else None
    step = make_options(
        options.optimizer, options.precision, options.recompute, options.reshard_after_forward, options.prefetch,
        options.gradients,
    )  # fmt: skip
    trained = model_options(graph, setting.graph, (trial.model, trial.arguments) if trial is not None else None)
    asked = Asked(options, setting, step, first, options.share, allow, topology, trained)
    if kind.layouts:
        _layouts(asked, kind)
    elif kind.native:
        _native(asked)
    else:
        _optimize(asked, trial)


class _Kind(NamedTuple):
    """Which plans are searched. ``large``: the model is too large for the search over splits."""

    layouts: bool
    native: bool
    large: bool

    @classmethod
    def of(cls, options: OptimizeOptions, graph: OperatorGraph) -> _Kind:
        """What the options say, and the size of the model."""
        free = options.resume is None and not options.pin and options.space in ("free", "native")
        large = free and too_large(graph)
        return cls(options.plan_only or large or "layouts" in options.space, "native" in options.space, large)

    def refuse_others(self, options: OptimizeOptions) -> None:
        """Raise an error for options that say nothing about layouts, or native plans."""
        names = "resume", "pin", "plot", "exhaustive", "verify", "allow", "weight_gradients"
        others = {name: getattr(options, name) for name in names}
        if self.layouts:
            refuse_with("over layouts (--space layouts)", seed=options.seed, **others)
        if self.layouts or self.native:
            refuse_with("among native plans", **others)


def _refuse_early(options: OptimizeOptions, graph: str, topology: str) -> tuple[str, ...]:
    """Raise an error for what could not be written or drawn, or is no budget or recipe, before the search rather than
    after it. Returns the names, or recipes, of ``--allow``."""
    from flexsearch.setting import parse_budget

    plot, profile = options.plot, options.profile
    source = file_of(options.model) if options.model is not None else None
    outputs = {"--output": options.output, "--plot": plot}
    check_outputs(outputs, graph, topology, profile, source)
    if plot is not None:
        check_outputs({"--plot": plot}, options.resume)
        if plot.suffix not in (".png", ".svg", ".pdf"):
            raise typer.BadParameter(f"{plot} cannot be drawn; give a .png, .svg or .pdf file", param_hint="--plot")
    for text in (options.budget, options.exhaustive):
        if text is not None:
            parse_budget(text)
    allow: tuple[str, ...] = ()
    if options.allow is not None:
        from flexsearch.search.recipes import read_allowed

        allow = read_allowed(options.allow)
    if options.verify is not None:  # what was measured is learned
        check_outputs(outputs | {"--profile": profile}, graph, topology, source)
    return allow


def _layouts(asked: Asked, kind: _Kind) -> None:
    """The search over layouts: all of them, or with half of the budget those that can be exported."""
    options = asked.options
    optimize_layouts(
        asked.setting, asked.step, options.budget, options.processes, options.output, options.as_json,
        options.size.words(), kind.large, options.cost_per_hour,
        partial(_free_layouts, asked, kind.large) if kind.native else None, asked.margin,
    )  # fmt: skip


def _native(asked: Asked) -> None:
    """Two searches, each with half of the budget: among all plans, and among those of one stage that can be
    exported."""
    options = asked.options
    half = halved(options.budget)
    splits, layouts = search.free(replace(asked, margin=0.0), half)
    optimize_native(
        asked.setting,
        asked.step,
        half,
        splits,
        layouts,
        options.output,
        options.as_json,
        options.size.words(),
        options.cost_per_hour,
    )


def _free_layouts(asked: Asked, large: bool, budget: str) -> float | None:
    """Seconds of the best plan of both spaces, where that of layouts is at hand; None: none fits. ``large``: the model
    is too large for the search over splits."""
    splits, layouts = (
        (None, search.layouts(asked, budget)) if large else search.free(replace(asked, margin=0.0), budget)
    )
    times = [layouts.best.seconds] if layouts is not None and layouts.best.feasible else []
    times += [splits.simulation.makespan_s] if splits is not None and splits.feasible else []
    return min(times, default=None)


def _optimize(asked: Asked, trial: Verification | None) -> None:
    """Search, prove and verify as asked; write the best plan and print it."""
    from flexsearch.search.garbage import rare_collections
    from flexsearch.spaces import prefers_layout

    options, setting = asked.options, asked.setting
    layouts: HybridResult | None = None
    if asked.both:
        result, layouts = search.free(asked, options.budget, search.saved_splits)
    else:
        result = search.splits(asked, options.budget)
    staged = layouts if prefers_layout(layouts, result, asked.margin) else None
    search.save(asked, result, staged)
    result, proof = search.prove(asked, result)
    if proof is not None:
        search.save(asked, result, staged)
    verified: Verified | None = None
    if trial is not None and not signals.current.number:
        others = {} if layouts is None or layouts.strategy.is_plain or not layouts.best.feasible else {
            STAGED: layouts.strategy
        }  # fmt: skip
        try:
            with signals.current.released():
                result, verified = trial.verified(setting, result, others)
        except FlexsearchError as error:
            raise unmeasured(error, options.output) from error
        staged = layouts if verified.rows[0].name == STAGED else None
        search.save(asked, result, staged)
    if options.plot is not None:
        _draw(options.plot, setting, result)
    beside = _beside(asked, result, staged)
    more = {} if trial is None else (verified or Verified([])).data()
    more |= {} if beside is None else beside.data()
    if staged is not None:
        answer_layouts(
            setting, staged, options.output, options.as_json, options.size.words(), options.cost_per_hour,
            more={"space": options.space, **more}, splits=result.strategy if result.feasible else None,
            say_more=lambda: _say_more(asked, verified, staged.strategy, beside),
        )  # fmt: skip
    else:
        with rare_collections():  # of all that the search left
            _answer(asked, result, proof, layouts, verified, more, beside)


def _say_more(asked: Asked, verified: Verified | None, strategy: Strategy, beside: Beside | None) -> None:
    """Behind a layout: what was verified, what recipes bring, and how to run it."""
    if verified is not None:
        print_verified(verified, strategy)
    if beside is not None:
        beside.say()
    tell_run(asked.trained, asked.options.output, len(strategy.cluster.devices))


def _answer(
    asked: Asked, result: SearchResult, proof: Optimum | None, layouts: HybridResult | None,
    verified: Verified | None, more: dict[str, Any], beside: Beside | None,
) -> None:  # fmt: skip
    """Print a plan of one stage. ``more``: further data; ``beside``: what recipes bring."""
    options, setting = asked.options, asked.setting
    answer, others = answer_rows(result)
    data = {"path": str(options.output), "space": options.space, **more}
    data |= answer_data(setting, result, proof, answer, others, layouts)

    def human() -> None:
        print_plans(setting, [] if result.baseline else [answer], others)
        if verified is not None:
            print_verified(verified, result.strategy)
        say(
            setting, result, proof, answer, asked.margin, options.output, options.size, options.cost_per_hour, layouts,
            asked.trained,
        )  # fmt: skip
        if beside is not None:
            beside.say()

    show(options.as_json, with_cost(data, setting, options.cost_per_hour), human)


def _beside(asked: Asked, result: SearchResult, staged: HybridResult | None) -> Beside | None:
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
    return beside(asked.setting, plans, time_s, asked.allow, asked.options.output, asked.topology)


def _draw(path: Path, setting: Setting, result: SearchResult) -> None:
    """The picture of the chains."""
    from flexsearch.output import write
    from flexsearch.report.plots import chains, rendered

    trails = [(trail.phase, trail.points) for trail in result.trails]
    best = [(improvement.proposal, improvement.time_s) for improvement in result.history]
    figure = chains(trails, best, result.bound_s, f"{setting.graph.name} on {setting.topology.name}")
    write(path, rendered(figure, path.suffix.removeprefix(".")))
