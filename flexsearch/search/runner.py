"""Runs compiled chains: converts the space to arrays for them, and adds the configs and templates that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.lower.describe import FULL, LACKING
from flexsearch.lower.keys import MISSING
from flexsearch.lower.program import Rows
from flexsearch.search.chain import (
    ACCEPTED,
    ASK,
    BEST,
    CANDIDATE,
    CURRENT,
    DONE,
    DRAWN,
    ENGINE,
    IDLE,
    IMPROVED,
    KNOWN,
    LEADERS,
    LIKE,
    MARK,
    MEMORY,
    OVER,
    REFERENCE,
    SHORTFALL,
    STEPS,
    STORED,
    SWAP,
    UNIFORMS,
    Chain,
    Moves,
    advance,
    draw,
)  # fmt: skip
from flexsearch.search.chain import (
    ROWS as NO_ROWS,
)
from flexsearch.search.evaluate import PENALTY, Configs, Evaluation, Evaluator
from flexsearch.search.space import Space, sharded
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig

MOVES: Final = {"redraw": 2.0, "copy": 3.0, "group": 4.0, "repeated": 2.0, "swap": 0.5, "shard": 0.5, "span": 2.0}
"""Moves with their relative frequencies, in the order of their numbers in ``chain``."""
CANDIDATES: Final = 48
"""Configs of each operator that a chain draws from. A quarter of them split samples only and a quarter one axis at
most, so that a search soon meets good ones."""
SETS, RENEWED = 3, 12
"""Chains use so many sets of candidates in turn, so that templates are reused; after so many chains come new sets."""
COARSE: Final = 4000
"""Configs that a coarse chain draws from, of all classes together. Three quarters are simple ones, because a chain that
moves layers between blocks of devices needs each layer on each block."""
MOST: Final = 480
"""Most of these for one class."""
COARSE_FIRST: Final = 2**24
"""Number of the first candidate of coarse chains; the numbers below are for other chains."""
ROWS: Final = 128
"""Proposals between two looks at the clock."""
EXCESS: Final = (0.3, 0.1, 0.03, 0.01, 0.003, 0.0005)
"""The temperatures of a chain, in order: by what share a plan may typically be slower than the best. Each of the N
operators that can be changed alone adds about 1 / beta to the cost (equipartition), so beta = N / excess, whatever the
model's size and speed."""
COARSE_EXCESS: Final = (0.5, 0.15, 0.05, 0.015, 0.005)
"""The same for coarse chains, where N is the number of classes."""
FIRST: Final = (1, 0, 2)
"""Where in ``EXCESS`` chains begin, in turn: a temperature that is right for a bad start would lose a good one."""


@dataclass(frozen=True, slots=True)
class Found:
    """A better plan: at which step of the chain, by which move, its iteration time (s)."""

    step: int
    move: str
    time_s: float


class Runner:
    """Chains over one space. ``steps``, ``accepted``: proposals of the chain at hand."""

    def __init__(self, evaluate: Evaluator, space: Space, seed: int) -> None:
        self.evaluate, self.space, self.seed = evaluate, space, seed
        first: dict[tuple[object, ...], int] = {}
        self._model = [first.setdefault(space.shape(i), i) for i in range(len(space.graph.operators))]
        self._drawn: dict[tuple[int, int], OperatorConfig] = {}
        self._links = [(i, link) for i, links in enumerate(space.propagation.links) for link in links]
        self._simulator: DeltaSimulator | None = None
        self._layouts: tuple[Moves, Moves]
        """For chains over single operators, and for coarse ones."""
        self._moves: Moves
        self._chain: Chain

    def begin(
        self, configs: Configs, now: Evaluation, best: Evaluation, generation: int, patience: int,
        coarse: bool = False,
    ) -> None:  # fmt: skip
        """Start a chain at ``configs``, which ``now`` evaluates. Improvements are what is better than ``best``.
        ``generation``: chains of different ones draw from different candidates. The chain ends when ``patience``
        proposals in a row brought it nothing new. ``coarse``: it changes whole classes of operators only."""
        if self._simulator is not (simulator := self.evaluate.at(configs)):
            fine = self._lay_out(simulator.templates.alike)
            self._simulator, self._layouts = simulator, (fine, self._coarse(fine))
        self._moves = self._layouts[coarse]
        excess = COARSE_EXCESS if coarse else EXCESS[FIRST[generation % len(FIRST)] :]
        operators, log = len(self.space.graph.operators), 4096
        number = generation % SETS + SETS * (generation // RENEWED)
        many = min(MOST, 1 + COARSE // len(self.space.parts))
        candidates = (COARSE_FIRST + many * number, many) if coarse else (CANDIDATES * number, CANDIDATES)
        self._chain = Chain(
            uniform=np.zeros((ROWS, UNIFORMS)), value=np.zeros(8), counts=np.zeros(9, np.uint64),
            candidates=np.array(candidates, np.uint64), excess=np.array(excess),
            patience=np.array([patience], np.uint64), penalty=np.array([PENALTY]),
            chosen=np.zeros(operators, np.uint32), best=np.zeros(operators, np.uint32), log_value=np.zeros(log),
            log_step=np.zeros(log, np.uint64), log_move=np.zeros(log, np.uint64),
        )  # fmt: skip
        self._chain.best[:] = simulator.rows.state.config
        self._chain.counts[DRAWN] = ROWS
        value = self._chain.value
        freedom = len(self.space.parts if coarse else self.space.leaders)
        value[[CURRENT, REFERENCE, LEADERS]] = now.cost, best.cost, freedom
        value[KNOWN] = best.cost if best.feasible else np.inf
        value[[BEST, MARK]] = now.cost if now.feasible else np.inf

    def go(self, rng: np.random.Generator, count: int, look: Callable[[], None] = lambda: None) -> bool:
        """Up to ``count`` (at most ROWS) proposals; whether the chain has come to its end. ``look`` is called whenever
        Python is at work; what it raises leaves the chain as it is."""
        chain, simulator = self._chain, self._simulator
        assert simulator is not None
        chain.uniform[ROWS - count :] = rng.random((count, UNIFORMS))
        chain.counts[DRAWN] = ROWS - count
        while (why := int(advance(self._moves, chain, simulator.rows.plan, simulator.engine.state))) != DONE:
            if why == ASK:
                self._answer(simulator)
                look()
            elif why == NO_ROWS:
                simulator.go_on(FULL)
            elif why == ENGINE:
                simulator.run_again()
                simulator.give_up()
            else:
                assert why == MEMORY
                plan = self._plan(simulator, simulator.rows.proposed.config)
                chain.value[SHORTFALL] = self.evaluate.shortfall(plan, simulator.held)
        return bool(chain.counts[IDLE] >= chain.patience[0])

    @property
    def steps(self) -> int:
        return int(self._chain.counts[STEPS])

    @property
    def accepted(self) -> int:
        return int(self._chain.counts[ACCEPTED])

    @property
    def cost(self) -> float:
        """Of the plan at hand, s."""
        return float(self._chain.value[CURRENT])

    def found(self) -> list[Found]:
        """What was better than anything before, since the last call."""
        names, chain = list(MOVES), self._chain
        rows = range(int(chain.counts[IMPROVED]))
        chain.counts[IMPROVED] = 0
        return [Found(int(chain.log_step[k]), names[int(chain.log_move[k])], float(chain.log_value[k])) for k in rows]

    @property
    def best(self) -> tuple[Configs, Evaluation]:
        """The best of the chain's plans that fit; the plan at hand if none did."""
        assert self._simulator is not None
        best_s = float(self._chain.value[BEST])
        if best_s < inf:
            return self._plan(self._simulator, self._chain.best), Evaluation(best_s, 0.0)
        configs = self._plan(self._simulator, self._simulator.rows.state.config)
        return configs, self.evaluate(configs)

    @staticmethod
    def _plan(simulator: DeltaSimulator, numbers: npt.NDArray[np.uint32]) -> Configs:
        found = (simulator.templates.configs[int(n)] for n in numbers)
        return tuple(config for config in found if config is not None)

    # ---- what a chain asks for

    def _answer(self, simulator: DeltaSimulator) -> None:
        """Add the templates that are missing, or all the configs that the move at hand needs."""
        change, templates = simulator.rows.change, simulator.templates
        if change.missing[0, 0] < CANDIDATE:  # then all are: configs are asked for before templates
            simulator.go_on(LACKING)
            return
        missing = True
        while missing:
            for kind, a, b in sorted({tuple(row) for row in change.missing[: int(change.lacking[0])].tolist()}):
                operator, config = self._wanted(simulator, kind, a, b)
                templates.keys.put(kind, a, b, templates.config(operator, self.space.fix(operator, config)))
            configs, shard = simulator.rows.state.config, templates.pools.config_shard
            missing = not draw(self._moves, self._chain, configs, shard, templates.keys.table, change)

    def _wanted(self, simulator: DeltaSimulator, kind: int, a: int, b: int) -> tuple[int, OperatorConfig]:
        """Operator and config that a key asks for."""
        space, configs, operators = self.space, simulator.templates.configs, simulator.templates.operators
        if kind == CANDIDATE:
            return a, self._candidate(a, b)
        old = configs[b if kind in (OVER, LIKE) else a]
        assert old is not None
        if kind == OVER:
            source, link = self._links[a]
            return link.target, space.propagation.over(source, old, link)
        if kind == SWAP:
            first, second = divmod(b, space.count)
            other = {first: second, second: first}
            return operators[a], old.on(other.get(d, d) for d in old.devices)
        if kind == LIKE:
            return a, old
        assert kind == STORED
        return operators[a], sharded(old, not old.shard_weights and len(old.devices) > 1)

    def _candidate(self, operator: int, k: int) -> OperatorConfig:
        """Candidate ``k``: the same whenever it is asked for, and for all operators of the same shape."""
        model = self._model[operator]
        if (known := self._drawn.get((model, k))) is None:
            rng = np.random.Generator(np.random.PCG64([self.seed, model, k]))
            simple = k % 4 < (3 if k >= COARSE_FIRST else 2)
            draw = partial(self.space.draw_simple, samples=k % 4 == 0) if simple else self.space.draw
            known = self._drawn[model, k] = draw(rng, model)
        return known

    def _coarse(self, moves: Moves) -> Moves:
        """The same, but only whole classes change."""
        often = [float(name == "repeated") for name in MOVES]
        classes = Rows((*self.space.parts, *self.space.loose_classes))
        return moves._replace(
            often=np.cumsum(often), class_first=classes.first, class_last=classes.last,
            class_member=classes.all, led_classes=np.array([len(self.space.parts)], np.uint64),
            apart=_apart(self.space.parts),
        )  # fmt: skip

    def _lay_out(self, alike: Sequence[int]) -> Moves:
        space = self.space
        first: dict[object, int] = {}
        kind = [
            first.setdefault((alike[i], alike[link.target], link.pairs, link.forward, link.picked), k)
            for k, (i, link) in enumerate(self._links)
        ]
        number = dict(zip(self._links, kind, strict=True))
        place = {leader: k for k, leader in enumerate(space.leaders)}
        groups = [space.groups[leader] for leader in space.leaders]
        of_group = Rows([i for _, i, _ in group] for group in groups)
        links = Rows([link.target for link in found] for found in space.propagation.links)
        classes = Rows((*space.classes, *space.loose_classes))

        # What an operator follows in a span: the producer of the largest tensor that carries degrees.
        main_source, main_link = list(range(len(space.graph.operators))), [0] * len(space.graph.operators)
        for i, found in enumerate(space.propagation.links):
            back = [link for link in found if not link.forward]
            if back:
                best = max(back, key=lambda link: (len(link.pairs) > 0, link.nbytes))
                forth = next(x for x in space.propagation.links[best.target] if x.target == i and x.forward)
                main_source[i], main_link[i] = best.target, number[best.target, forth]

        def numbers(values: list[int]) -> npt.NDArray[np.uint32]:
            return np.array(values, dtype=np.uint32)

        return Moves(
            often=np.cumsum(list(MOVES.values())) / sum(MOVES.values()),
            leader=numbers(list(space.leaders)), alike=numbers(list(alike)), likely=np.cumsum(space.importance),
            group_first=of_group.first, group_last=of_group.last, member=of_group.all,
            member_source=numbers([source for group in groups for source, _, _ in group]),
            member_link=numbers([number[source, link] for group in groups for source, _, link in group]),
            main_source=numbers(main_source), main_link=numbers(main_link),
            link_first=links.first, link_last=links.last,
            link_target=links.all, link_kind=numbers(kind),
            link_forward=np.array([link.forward for _, link in self._links], np.uint8),
            class_first=classes.first, class_last=classes.last, class_member=classes.all,
            led_classes=np.array([len(space.classes)], np.uint64), apart=_apart(space.classes),
            leader_at=numbers([place.get(i, int(MISSING)) for i in range(len(space.graph.operators))]),
            weighted=numbers(list(space.weighted)), memory=self.evaluate.memory_bytes,
        )  # fmt: skip


def _apart(classes: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """Of each two classes, whether they have no operators in common."""
    members = [set(of) for of in classes]
    return np.array([[not a & b for b in members] for a in members], np.uint8).reshape(len(classes), len(classes))
