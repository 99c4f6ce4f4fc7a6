"""Intervals of predictions: what they rest on, how wide they are, and when two plans cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flexsearch.cost import Learned, Network, Profile, ProfileDevice
from flexsearch.cost.sources import Sources
from flexsearch.cost.ticks import TICK
from flexsearch.cost.uncertainty import DEVIATIONS, NOISE, UNEQUAL, Estimate, Source
from flexsearch.graph import OperatorGraph
from flexsearch.graph.precision import with_precision
from flexsearch.lower.pieces import Pieces
from flexsearch.lower.rows import COMPUTE, Rows, steps_of
from flexsearch.report.uncertainty import apart_words, aside_words, near
from flexsearch.report.units import spread
from flexsearch.setting import Setting
from flexsearch.simulate import uncertainty
from flexsearch.simulate.simulation import makespan
from flexsearch.simulate.uncertainty import Scaled
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited, with_links
from tests.conftest import Cli

MATRIX, LINKS = Source.of("matrix products", "guessed"), Source.of("links", "guessed")


def setting(learned: Learned | None = None) -> Setting:
    profile = None if learned is None else Profile(
        device=ProfileDevice(kind="cpu", model="core"), torch="2", learned=learned
    )  # fmt: skip
    return Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g:2"), profile)


def test_the_parts_of_a_time_add_up_to_it_and_scale_with_their_source() -> None:
    here = setting()
    for name, strategy in here.baselines().items():
        estimate = here.row(name, strategy).simulation.estimate
        assert estimate.seconds == makespan(here.lower(strategy))
        assert sum(estimate.shares.values()) == pytest.approx(estimate.seconds, rel=0.02), name
    single = here.row("single", here.baseline("single")).simulation.estimate
    moving = sum(share for source, share in single.shares.items() if "links" in source.name)
    assert moving < 0.01 * single.seconds
    slow = with_links(here.topology, 1.0 / 1.1, None)
    there = Setting.of(here.graph, slow)
    plan = here.lower(here.baseline("megatron"))
    (links,) = [s for source, s in here.row("", here.baseline("megatron")).simulation.estimate.shares.items()
                if source.name == "links between hosts"]  # fmt: skip
    copy = Strategy.make(there.graph, slow, here.baseline("megatron").configs, plan.options)
    assert makespan(there.lower(copy)) - makespan(plan) == pytest.approx(0.1 * links, rel=0.05)


def test_a_step_that_waits_for_hosts_rests_on_what_launching_takes() -> None:
    here = Setting.of(OperatorGraph.load("lenet"), Topology.load("dgx-a100:1"))
    estimate = here.row("single", here.baseline("single")).simulation.estimate
    parts = {source: share for source, share in estimate.shares.items() if "code" not in source.name}
    assert sum(parts.values()) == pytest.approx(estimate.seconds, rel=0.02)
    launching = sum(share for source, share in estimate.shares.items() if source.name.startswith("launches"))
    assert launching > 0.9 * estimate.seconds


def test_the_starts_of_kernels_rest_on_the_device_and_not_on_its_host() -> None:
    """They were fitted with the other figures of the device; what launching takes is another host's guess."""
    graph = with_precision(OperatorGraph.load("gpt2"), "bf16")
    here = Setting.of(graph, Topology.load("hgx-h100:1").subset([0]))
    plan = here.baseline("single", Options(precision="bf16"))
    shares = here.row("single", plan).simulation.estimate.shares
    found = {source.name.partition(" on ")[0]: (source, share) for source, share in shares.items()}
    starts, share = found["starts of kernels"]
    assert starts.kind == "measured" and share > 0.05 * sum(shares.values())
    assert found.get("launches", (None, 0.0))[1] < 0.01 * sum(shares.values())


def _plain_computing(
    sources: Sources, pieces: Pieces, rows: Rows, configs: Sequence[OperatorConfig]
) -> Iterator[Scaled]:  # fmt: skip
    """The definition of ``uncertainty._computing``, step by step."""
    segments, kinds = rows.segments, pieces.costs.kinds
    for step, block, device in zip(*(x.tolist() for x in steps_of(segments, rows.segment, len(kinds))), strict=True):
        kind, operator, sort = int(rows.schedule.kind[block]), int(rows.schedule.argument[block]), int(kinds[device])
        here, ticks = np.array([step]), segments.step_ticks[[step]]
        yield sources.launching(sort), "step_host", here, segments.step_host[here]
        if segments.step_kind[step] != COMPUTE:
            continue
        if kind not in uncertainty.OF_OPERATORS:
            yield sources.update(sort), "step_ticks", here, ticks
            continue
        launch = np.minimum(ticks, round(sources.launch_s(operator, sort) / TICK))
        extents = uncertainty._extents(pieces, operator, configs[operator])
        yield sources.computing(operator, extents, sort), "step_ticks", here, ticks - launch
        yield sources.start(operator, sort), "step_ticks", here, launch


def _plain_moving(sources: Sources, pieces: Pieces, rows: Rows) -> Iterator[Scaled]:
    """The definition of ``uncertainty._moving``, communication by communication."""
    segments, starting = rows.segments, sources.starting()
    source_of = {int(pieces.image[r]): source for r, source in sources.links().items()}
    for segment in rows.segment.tolist():
        for c in range(segments.communication_first[segment], segments.communication_last[segment]):
            first, last = int(segments.link_first[c]), int(segments.link_last[c])
            ticks = segments.link_ticks[first:last]
            busiest = int(ticks.max(initial=0))
            of_link = [source_of.get(r, starting) for r in segments.link[first:last].tolist()]
            for source in dict.fromkeys(of_link):
                own = np.array([one is source for one in of_link])
                yield source, "link_ticks", first + np.flatnonzero(own), ticks[own]
                longest = int((ticks + np.where(own, ticks // uncertainty.STEP, 0)).max()) - busiest
                yield source, "communication_ticks", np.array([c]), np.array([longest * uncertainty.STEP])
            drags = np.arange(segments.drag_first[c], segments.drag_last[c])
            if len(drags) and of_link:
                yield of_link[int(ticks.argmax())], "drag_ticks", drags, segments.drag_ticks[drags]
            yield starting, "communication_ticks", np.array([c]), segments.communication_ticks[[c]] - busiest


def _two_kinds() -> Topology:
    topology = Topology.load("p100:1")
    first, *others = topology.devices
    return edited(topology, devices=(first.model_copy(update={"model": "other"}), *others))


def _gloo_over_links_of_both_sorts() -> Topology:
    """Moving bytes takes processor time, and transfers cross links inside hosts and between them."""
    return edited(Topology.load("p100:2"), communication=Topology.load("ethernet-1g:2").communication)


@pytest.mark.parametrize("topology", [Topology.load("ethernet-1g:2"), _two_kinds(), _gloo_over_links_of_both_sorts()],
                         ids=["Ethernet", "two kinds", "gloo"])  # fmt: skip
def test_what_rests_on_a_source_is_that_of_the_definition(topology: Topology) -> None:
    here, seen = Setting.of(OperatorGraph.load("lenet"), topology, None), set[tuple[str, str]]()
    for name in ("data-parallel", "fsdp", "one-weird-trick", "placement"):
        lowered = here.lower(here.baseline(name))
        pieces, rows, configs = lowered.lowering, lowered.rows, lowered.configs
        sources = Sources(pieces.costs, pieces.network)
        longer = _longer(rows, [
            *uncertainty._computing(sources, pieces, rows, configs), *uncertainty._moving(sources, pieces, rows),
        ])  # fmt: skip
        assert longer == _longer(rows, [
            *_plain_computing(sources, pieces, rows, configs), *_plain_moving(sources, pieces, rows),
        ])  # fmt: skip
        seen |= {(source.name, column) for source, column in longer}
    assert len(seen) > 5


def _longer(rows: Rows, scaled: Sequence[Scaled]) -> dict[tuple[Source, str], list[int]]:
    """By source and column of the segments that it changes, what is in it with that source longer."""
    parts: dict[Source, uncertainty._Part] = {}
    for source, column, places, ticks in scaled:
        parts.setdefault(source, uncertainty._Part(rows)).add(column, places, ticks)
    columns = ("step_host", "step_ticks", "communication_ticks", "link_ticks", "drag_ticks")
    changed = {(s, c): getattr(part.longer(), c) for s, part in parts.items() for c in columns}
    before = rows.segments
    return {key: row.tolist() for key, row in changed.items() if not np.array_equal(row, getattr(before, key[1]))}


def test_the_staged_step_rests_on_the_same() -> None:
    here = setting()
    plan = here.baseline("data-parallel")
    one, other = here.step(plan).estimate, here.row("", plan).simulation.estimate
    assert one.seconds == other.seconds
    assert {s.name: v for s, v in one.shares.items()} == pytest.approx({s.name: v for s, v in other.shares.items()})


def test_measured_figures_make_intervals_shorter() -> None:
    networks = {"ethernet-1g": Network(time=1.01, start_s=1e-6)}
    sure = setting(Learned(compute=1.01, task_s=1e-7, networks=networks, plans=6, error=0.03))
    rough = setting(Learned(compute=1.01, task_s=1e-7, networks=networks, plans=6, error=0.2))
    halves = []
    for here in (sure, rough, setting()):
        estimate = here.row("", here.baseline("data-parallel")).simulation.estimate
        halves.append(estimate.half / estimate.seconds)
        assert estimate.interval_s[0] < estimate.seconds < estimate.interval_s[1]
    assert halves[0] < 0.5 * halves[1] and halves[0] < 0.5 * halves[2]


def test_what_no_measured_step_has_taught_is_guessed() -> None:
    """The half-precision figures of a DGX A100 are of decoders, which have no convolutions."""
    kinds = {}
    for name in ("alexnet", "gpt2"):
        here = Setting.of(OperatorGraph.load(name), Topology.load("dgx-a100:1").subset([0]))
        plan = here.baseline("single", Options(precision="bf16"))
        kinds[name] = {source.name: source.kind for source in here.row("", plan).simulation.estimate.shares}
    assert kinds["alexnet"]["convolutions on A100-SXM4-80GB"] == "guessed"
    assert kinds["alexnet"]["matrix products on A100-SXM4-80GB"] == "measured"
    assert kinds["gpt2"]["other operators on A100-SXM4-80GB"] == "measured"
    assert kinds["gpt2"]["normalisation on A100-SXM4-80GB"] == "guessed"


def test_figures_of_other_codes_make_intervals_wider_than_ones_own() -> None:
    """Guessed, fitted to steps of others, and measured with the code at hand."""
    graph, options, halves = OperatorGraph.load("mlp"), Options(precision="bf16"), []
    device = ProfileDevice(kind="cuda", model="A100-SXM4-80GB")
    own = Profile(device=device, torch="2", learned=Learned(compute=1.01, plans=6, error=0.03))
    wide = Topology.load("dgx-a100:1").subset([0])
    fast = edited(wide, devices=tuple(d.model_copy(update={"overhead_s": 0.0}) for d in wide.devices))
    plain = edited(fast, code=None)
    for topology, profile in ((edited(fast, sources=()), None), (fast, None), (plain, None), (fast, own)):
        here = Setting.of(graph, topology, profile)
        estimate = here.row("", here.baseline("single", options)).simulation.estimate
        halves.append(estimate.half / estimate.seconds)
        codes = [source for source in estimate.shares if "code" in source.name]
        assert [source.error for source in codes] == ([0.053] if topology.code and not profile else [])
        assert all(estimate.shares[source] == estimate.seconds for source in codes)
    assert halves[0] > halves[1] > halves[2] > halves[3]
    assert halves[1] ** 2 == pytest.approx(halves[2] ** 2 + (DEVIATIONS * 0.053) ** 2)


def test_plans_of_one_code_are_told_apart_as_if_it_were_known() -> None:
    code = Source("fused code of others", "published", 0.05)
    a, b = (Estimate(s, {MATRIX: 0.9 * s, code: s}) for s in (1.0, 1.1))
    c, d = (Estimate(s, {MATRIX: 0.9 * s}) for s in (1.0, 1.1))
    assert a.half > c.half and a.apart(b) < 1.05 * c.apart(d)


def test_errors_of_common_sources_cancel() -> None:
    a = Estimate(1.0, {MATRIX: 0.9, LINKS: 0.1})
    same, other = Estimate(1.05, {MATRIX: 0.93, LINKS: 0.12}), Estimate(1.05, {MATRIX: 0.1, LINKS: 0.95})
    assert a.apart(a) == pytest.approx(DEVIATIONS * NOISE * 2**0.5) == pytest.approx(UNEQUAL)
    assert a.apart(same) < 0.1 * a.half < 0.5 * a.apart(other)
    assert a.apart(same) == same.apart(a)
    assert not a.is_near(same) and a.is_near(other)
    assert near(a, {"same": same, "other": other}) == ["other"]
    assert a.weightiest() is MATRIX


def test_two_plans_are_said_to_be_too_close_or_not() -> None:
    a, near_a, other = Estimate(1.0, {MATRIX: 0.9}), Estimate(1.1, {LINKS: 1.0}), Estimate(3.0, {MATRIX: 2.8})
    assert "cannot tell which is faster: the two would have to differ by 518 ms" in apart_words(a, near_a)
    assert "A takes 1.00 s ± 0.35, B 3.00 s ± 1.08. Predictions tell them apart from" in apart_words(a, other)


def test_a_fifth_of_normal_errors_lies_outside() -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    estimate = Estimate(1.0, {MATRIX: 0.6, LINKS: 0.4})
    errors = draw.normal(size=(20_000, 3)) * (MATRIX.error * 0.6, LINKS.error * 0.4, NOISE)
    low, high = estimate.interval_s
    inside = np.mean((1.0 + errors.sum(axis=1) > low) & (1.0 + errors.sum(axis=1) < high))
    assert inside == pytest.approx(0.8, abs=0.01)


def test_a_plan_is_kept_aside_until_predictions_tell_it_apart() -> None:
    here = setting()
    kept = here.search(200, processes=1)
    loose = here.search(200, processes=1, margin=0.0)
    assert not loose.baseline and loose.set_aside is None
    best = min(loose.baselines.values(), key=lambda outcome: outcome.time_s).simulation.estimate
    gain = best.seconds - loose.simulation.makespan_s
    assert bool(kept.baseline) == (gain <= loose.simulation.estimate.apart(best))
    strict = here.search(200, processes=1, margin=0.9)
    assert strict.set_aside is not None and strict.baseline
    assert strict.prediction.interval_s == strict.simulation.estimate.interval_s


def test_layouts_keep_to_the_same_rule() -> None:
    here = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g:2"))
    loose, strict = (here.search_layouts("2s", processes=1, margin=margin) for margin in (0.0, 0.99))
    assert strict.baseline and strict.step.makespan_s == strict.best.seconds
    assert strict.set_aside is None if loose.baseline else strict.set_aside is not None
    assert strict.strategy.prediction is not None and strict.strategy.prediction.interval_s is not None


def test_intervals_are_printed_and_stored(cli: Cli) -> None:
    ran = cli("optimize", "lenet", "-t", "ethernet-1g:2", "-b", "30", "-j", "1", "--json")
    low, high = ran.json["interval_s"]
    assert low < ran.json["iteration_s"] < high and ran.json["rests_on"][0]["kind"] == "guessed"
    prediction = Strategy.load(Path("strategy.json")).prediction
    assert prediction is not None and prediction.interval_s == (low, high)
    plan = "-s", "strategy.json"
    for command in (("explain", "strategy.json"), ("simulate", *plan), ("compare", *plan)):
        assert " ± " in cli(*command).out, command
    told = cli("simulate", *plan, "--json").json
    assert tuple(told["interval_s"]) == prediction.interval_s and told["rests_on"] == ran.json["rests_on"]


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [(1.02, 0.081, "1.02 s ± 0.08"), (0.0158, 0.0042, "15.8 ms ± 4.2"), (0.632, 0.2, "632 ms ± 200"),
     (1.0, 1e-4, "1.00 s ± 0.000100")],
)  # fmt: skip
def test_spreads(value: float, half: float, text: str) -> None:
    assert spread(value, half) == text


def test_what_is_set_aside_is_told() -> None:
    answer = Estimate(1.0, {MATRIX: 1.0})
    assert "tell these two apart only if they differ by" in aside_words(answer, Estimate(0.99, {MATRIX: 0.99}))
    assert "gains less than --margin" in aside_words(answer, Estimate(0.9, {MATRIX: 0.9}))
