"""What ``optimize`` says of the plan that its search over splits found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexsearch.cli.common import Size, stdout
from flexsearch.cli.money import tell_cost
from flexsearch.cli.plans import in_order
from flexsearch.cli.verify import shipped_model

if TYPE_CHECKING:
    from flexsearch.cost import Profile
    from flexsearch.cost.uncertainty import Estimate
    from flexsearch.graph import OperatorGraph
    from flexsearch.proof.exhaustive import Optimum
    from flexsearch.report import PlanRow
    from flexsearch.search.hybrid import HybridResult
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting

HARDLY: float = 1.1
"""A plan that is not this many times as fast as the best baseline is called hardly better."""
LITTLE: float = 0.01
"""A search that could gain at most this share of the time is not told to go on."""
NEAR: float = 1.8
"""No errors that are taken make plans of which one takes so many times as long too near to be told apart."""


def answer_rows(result: SearchResult) -> tuple[PlanRow, list[PlanRow]]:
    """The answer, and the baselines. If the answer is a baseline, it has its name and is one of them."""
    from flexsearch.report import PlanRow

    others = [PlanRow(name, o.simulation, o.simulation.lowered) for name, o in result.baselines.items()]
    for row in others:
        if row.name == result.baseline:
            return row, others
    return PlanRow("found", result.simulation, result.simulation.lowered), others


def near_baselines(result: SearchResult) -> dict[str, Estimate]:
    """Baselines that fit and take at most so much longer than the answer that they may be too near."""
    most = NEAR * result.simulation.makespan_s
    others = {name: o for name, o in result.baselines.items() if name != result.baseline}
    return {name: o.simulation.estimate for name, o in others.items() if o.feasible and o.time_s < most}


def answer_data(
    setting: Setting, result: SearchResult, proof: Optimum | None, answer: PlanRow, others: list[PlanRow],
    layouts: HybridResult | None,
) -> dict[str, Any]:  # fmt: skip
    """The answer as JSON: the plan, how it was found, and beside it the baselines and the best layout."""
    from flexsearch.report import groups, in_words, plan_rows
    from flexsearch.report.reading import reading, reading_data
    from flexsearch.report.uncertainty import estimate_data, near

    plans = plan_rows(in_order([] if result.baseline else [answer], others))
    of_answer = next(p for p in plans if p["name"] == answer.name)
    return {
        "graph": setting.graph.name,
        "topology": setting.topology.name,
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
        **estimate_data(answer.simulation.estimate),
        **reading_data(reading(answer.lowered, answer.simulation.makespan_s)),
        "too_near": near(answer.simulation.estimate, near_baselines(result)),
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
        "layouts": None if layouts is None else {
            "iteration_s": layouts.step.makespan_s, "fits": layouts.best.feasible, "words": _layout_words(layouts),
            "plans_considered": layouts.considered, "plans_simulated": layouts.plans,
        },
        "plans": plans,
    }  # fmt: skip


def say(
    setting: Setting, result: SearchResult, proof: Optimum | None, answer: PlanRow, margin: float | None, output: Path,
    size: Size, cost_per_hour: float | None, layouts: HybridResult | None, trained: str,
) -> None:  # fmt: skip
    """The plan in words, how good it is, how the search ended, and what to do next. ``trained``: ``model_options``."""
    from flexsearch.cli.details import tell, tell_plan
    from flexsearch.report.reading import reading
    from flexsearch.report.uncertainty import basis_words, near_words

    tell(f"\n{_what_it_is(result)}")
    tell_plan(answer.lowered)
    tell(f"\n{_how_good(result, proof)}")
    own = answer.simulation.estimate
    for text in filter(None, (basis_words(own), near_words(own, near_baselines(result)))):
        tell(text)
    if (read := reading(answer.lowered, answer.simulation.makespan_s)) is not None:
        tell(read.words())
    if layouts is not None:
        tell(_beside(layouts, result, margin))
    tell_cost(setting, result.simulation.makespan_s, cost_per_hour)
    tell(f"These times are predictions, based on {_basis(setting.costs.profile)}.")
    rate = result.proposals / result.elapsed_s if result.elapsed_s else 0.0
    tell(f"{result.proposals:,} proposals in {result.elapsed_s:.1f} s ({rate:,.0f}/s). Stopped: {result.stopped}.")
    if result.few:
        tell(_few(result))
    stdout.print(f"\nWrote {output}.", soft_wrap=True)
    tell_run(trained, output, len(result.strategy.cluster.devices))
    if options := size.words():
        stdout.print(f"To simulate, explain or plot it, give {options} again.", soft_wrap=True)


def _basis(profile: Profile | None) -> str:
    """Where costs come from."""
    if profile is None:
        return "the topology's figures; `flexsearch profile` measures yours"
    basis = "compute times that were measured" if profile.entries else "the topology's figures"
    return f"{basis}, corrected by measured steps" if profile.learned is not None else basis


def _layout_words(layouts: HybridResult) -> str:
    from flexsearch.report.layouts import StagedRow, layout_words

    best = layouts.best
    row = StagedRow("", best.pipeline, best.options, layouts.step, best.layout.sharding, best.changed)
    return layout_words(row)


def _beside(layouts: HybridResult, result: SearchResult, margin: float | None) -> str:
    """What the search over layouts found, where its plan is not the answer, in words."""
    from flexsearch.report.units import percent, seconds

    if not layouts.best.feasible:
        return "No plan with stages or microbatches fits into memory."
    if layouts.strategy.is_plain:
        return "Stages, microbatches and recomputation gain nothing here."
    slower = layouts.step.makespan_s / result.simulation.makespan_s - 1.0
    near = margin is None and layouts.step.estimate.is_near(result.simulation.estimate)
    how = "too close to tell apart" if near else f"{percent(slower)} slower"
    if slower <= 0 and not near:
        how = "not enough faster to be chosen (--margin)"
    return (
        f"The best plan with stages or microbatches takes {seconds(layouts.step.makespan_s)}, {how}: "
        f"{_layout_words(layouts)}."
    )


def tell_run(trained: str, output: Path, ranks: int) -> None:
    """Print the command that runs a plan. ``trained``: ``model_options``."""
    stdout.print("To train a few steps and measure them:", soft_wrap=True)
    stdout.print(f"  flexsearch run -n {ranks} {output} {trained}", soft_wrap=True)


def model_options(graph: str, planned: OperatorGraph, trained: tuple[str, Mapping[str, Any]] | None) -> str:
    """The options of ``run`` that name the model of a graph. ``trained``: the callable and its arguments, where the
    user has given them; else those of a shipped graph, with the batch and sequence length that were planned."""
    if (call := trained or shipped_model(graph, planned)) is None:
        return "--model MODULE:CALLABLE"
    model, arguments = call
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    options = [
        f"--batch {text}" if name == "batch" else f"--set {shlex.quote(f'{name}={text}')}"
        for name, text in texts.items()
    ]
    return " ".join([f"--model {shlex.quote(model)}", *options])


def _what_it_is(result: SearchResult) -> str:
    """Whether the answer is a baseline or what the search found, in words."""
    from flexsearch.report.layouts import changed_words
    from flexsearch.report.uncertainty import aside_words
    from flexsearch.report.units import ratio

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
    options = changed_words(result.strategy.options)
    if len(result.strategy.cluster.devices) > 1:
        options.insert(0, _buckets(result))
    with_options = f" with {', '.join(options)}" if options else ""
    text = f"Best plan: the baseline {result.baseline}{with_options}."
    if result.set_aside is not None:
        return f"{text}\n{aside_words(result.simulation.estimate, result.set_aside)}"
    return text if result.few else f"{text} The search found nothing faster."  # few: because hardly anything was tried


def _buckets(result: SearchResult) -> str:
    """The bucket size of the answer in words."""
    size = result.strategy.options.bucket_bytes
    return f"gradient buckets of {size / 2**20:.3g} MiB"


def _few(result: SearchResult) -> str:
    """That the search has hardly begun, in words, and whether it is worth going on."""
    from flexsearch.report.units import percent

    begun = (
        f"Only {result.proposals:,} proposals in {result.elapsed_s:.3g} s, although one layer of each of the "
        f"{result.sorts:,} kinds has {result.alternatives:,} other configs in all"
    )
    now_s = result.simulation.makespan_s
    if result.feasible and now_s - result.bound_s <= LITTLE * now_s:
        return f"{begun}; but little is left to gain: no plan in this space is {percent(LITTLE)} faster."
    starts = [o.time_s for o in result.baselines.values() if o.feasible]
    gain = min(starts) / now_s if starts and now_s else 1.0
    meaning = "there may well be better plans"
    if gain < HARDLY and result.set_aside is None:
        meaning = "the plan is hardly better than the best baseline"
        if result.baseline:
            meaning = "nothing better than the baselines has been found yet"
    return f"{begun}: {meaning}. Give the search more time (--budget), or continue it (--resume)."


def _how_good(result: SearchResult, proof: Optimum | None) -> str:
    """The time beside what is known of the optimum."""
    from flexsearch.report.uncertainty import time_words
    from flexsearch.report.units import seconds

    now, least = time_words(result.simulation.estimate), seconds(result.bound_s)
    text = f"Predicted: {now} per iteration. No plan in this space can be faster than {least}."
    if result.locally_optimal:
        text += " The plan is locally optimal: no change to a single operator makes it 1 % faster."
    if proof is None:
        return text
    space = f"the {proof.plans:.3g} plans on aligned blocks of devices"
    if proof.complete:
        return f"{text}\nProved in {seconds(proof.elapsed_s)}: none of {space} is faster."
    return f"{text}\nProved so far: none of {space} is faster than {seconds(proof.bound_s)}. Stopped: {proof.stopped}."
