"""A plan in few lines: layers that are treated alike are told once, however often the model repeats them.

Layers are rolled up over the numbered blocks of the model. Operators that neither compute nor have weights, such as
slices of a sequence, are counted rather than named. If that still takes more than ``MOST`` printed lines, treatments
are told once each, with the largest parts of the model that have it, groups with hardly any computing are counted, then
layers that differ from their kind, and at last only the groups in which most is computed are told one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flexsearch.graph import OperatorGraph
from flexsearch.graph.ops import forward_flops
from flexsearch.report.grid import wrapped

MOST: Final = 10
"""Printed lines in which every plan is told."""
WIDTH: Final = 80
"""Cells of a line, as they are counted."""
INDENT: Final = 2
"""Cells before a group, and as many more before its further lines."""
ENTRY: Final = 2
"""Lines of a group, beyond which fewer of its names are told."""
NAMES: Final = 3
"""Layers of a treatment that are named at most."""
FEW: Final = 6
"""Up to so many groups are told in the order of the layers."""
MAIN: Final = "most layers"
"""Those of the treatment that has most of the computing, where they are too many to name."""
OTHERS: Final = "other layers"
"""Those that are counted rather than named."""
MAINLY: Final = 0.8
"""A layer's operators (steps, blocks) are told by what so many of them have in common."""
NOTABLE: Final = 0.0005
"""Share of the computing from which on it is given."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name that is a number
_CALL = re.compile(r"_(\d+)$")


@dataclass(frozen=True)
class Group:
    """Layers with the same treatment: ``layers`` as a name or range, what is done, and the operators' indices."""

    layers: str
    treatment: str
    operators: tuple[int, ...]

    @property
    def words(self) -> str:
        """The group in a line of text."""
        return f"{self.layers}: {self.treatment}"


def lines(groups: Iterable[Group]) -> int:
    """Printed lines that groups take in a terminal of ``WIDTH``."""
    return sum(len(wrapped(group.words, WIDTH - INDENT, WIDTH - 2 * INDENT)) for group in groups)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in short: "0-3,6"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def layer_range(layers: Sequence[str]) -> str:
    """Layers that follow each other in a word: "features.conv1..conv5", "stem.0,1"; a block is left out beside its own
    parts."""
    names = list(dict.fromkeys(layers))
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    a, b = first.split("."), last.split(".")
    common = 0
    while common < min(len(a), len(b)) - 1 and a[common] == b[common]:
        common += 1
    dots = ".." if len(names) > 2 else "," if b[-1].isdigit() else ", "
    return f"{first}{dots}{'.'.join(b[common:])}"


def layer_of(graph: OperatorGraph, operator: int) -> str:
    """The layer that an operator belongs to: its module, if it has one."""
    op = graph.operators[operator]
    return op.module or op.name


@dataclass(frozen=True)
class _Row:
    """Operators of a layer with the same treatment. ``pattern``: the layer, its block's number replaced by ``*``."""

    pattern: str
    treatment: str
    operators: tuple[int, ...]


def summarised(graph: OperatorGraph, told: Mapping[int, str]) -> tuple[Group, ...]:
    """The operators of ``told`` (with their treatments) as groups of at most ``MOST`` lines; each is in one of them."""
    sorts: dict[tuple[str, str], list[int]] = {}
    for i, text in told.items():
        sorts.setdefault((_NUMBER.sub("*", layer_of(graph, i), count=1), text), []).append(i)
    rows = [_Row(pattern, text, tuple(operators)) for (pattern, text), operators in sorts.items()]
    idle = [row for row in rows if not any(_matters(graph, i) for i in row.operators)]
    rows = [row for row in rows if row not in idle] or rows
    for shorter in (None, _mainly):
        rows = rows if shorter is None else shorter(rows)
        joined = told_apart(graph, _joined(graph, rows))
        by_treatment = _by_treatment(graph, joined, _treatments(graph, rows))
        ways = (joined, by_treatment) if not by_treatment[0].layers.startswith(MAIN) else (by_treatment,)
        fitted = sorted((_fitted(graph, groups, idle) for groups in ways), key=lambda fit: not fit.complete)
        for fit in fitted:
            if fit.complete or fit.counted < NOTABLE:
                return fit.groups
    return fitted[-1].groups


@dataclass(frozen=True)
class _Fit:
    """Groups in ``MOST`` lines. ``complete``: all but idle layers are told one by one. ``counted``: the share of the
    computing in those that are not."""

    groups: tuple[Group, ...]
    complete: bool
    counted: float


def _fitted(graph: OperatorGraph, groups: Sequence[Group], idle: Sequence[_Row]) -> _Fit:
    """As many of the groups as fit, those in which most is computed, and the others with the ``idle`` rows as one; idle
    ones that are treated as a group is belong to it, without a name."""
    unnamed: dict[str, list[int]] = {}
    for row in idle:
        unnamed.setdefault(row.treatment, []).extend(row.operators)
    groups = [replace(one, operators=(*one.operators, *unnamed.pop(one.treatment, ()))) for one in groups]
    rest = [Group(OTHERS, text, tuple(operators)) for text, operators in unnamed.items()]
    flops = [_flops(graph, [group]) for group in groups]
    largest = sorted(range(len(groups)), key=lambda k: (-flops[k], k))
    for count in range(min(MOST, len(groups)), -1, -1):
        shown = tuple(groups[k] for k in sorted(largest[:count]))
        if lines(shown) > MOST:
            continue
        counted = [*rest, *(groups[k] for k in largest[count:])]
        told = (*shown, _counted(graph, counted, shown)) if counted else shown
        if lines(told) <= MOST or not count:
            break
    return _Fit(told, count == len(groups), sum(flops[k] for k in largest[count:]) / (sum(flops) or 1.0))


def told_apart(graph: OperatorGraph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups of the same layers by the one layer that they are part of, "attention.query"; else with what they compute,
    "attention (einsum, softmax)", "attention (cat)"; and where that is the same, too, with its steps: "head (linear,
    steps 0-9)", "head (linear, 23 of 40 steps from 4 on)"."""
    same = Counter(group.layers for group in groups)
    groups = [_by_layer(graph, group) if same[group.layers] > 1 else group for group in groups]
    kinds = [tuple(dict.fromkeys(graph.operators[i].kind for i in group.operators)) for group in groups]
    same = Counter(group.layers for group in groups)
    alike = Counter((group.layers, of) for group, of in zip(groups, kinds, strict=True))
    result = []
    for group, of in zip(groups, kinds, strict=True):
        layers = group.layers
        if same[layers] > 1:
            steps = _steps(graph, group.operators) if alike[layers, of] > 1 else ""
            layers += f" ({', '.join(of[:3])}{', ...' if len(of) > 3 else ''}{steps})"
        result.append(Group(layers, group.treatment, group.operators))
    return tuple(result)


def _by_layer(graph: OperatorGraph, group: Group) -> Group:
    layer, *others = {layer_of(graph, i) for i in group.operators}
    return group if others else Group(layer, group.treatment, group.operators)


def _steps(graph: OperatorGraph, operators: Sequence[int]) -> str:
    """What tells operators from others of their layer: how often it was called before, which their names end in; of
    steps that do not follow each other only how many there are."""
    layer = layer_of(graph, operators[0])
    steps = _calls(graph, operators)
    every = _calls(graph, (i for i in range(len(graph.operators)) if layer_of(graph, i) == layer))
    told = ranges(steps)
    if "," in told:
        return f", {len(steps)} of {len(every)} steps from {min(steps)} on"
    return f", step{'s' if len(steps) > 1 else ''} {told}"


def _calls(graph: OperatorGraph, operators: Iterable[int]) -> set[int]:
    """How often the layer of each operator was called before."""
    matches = (_CALL.search(graph.operators[i].name) for i in operators)
    return {int(match[1]) if match else 0 for match in matches}


def _joined(graph: OperatorGraph, rows: Iterable[_Row]) -> tuple[Group, ...]:
    """Rows that follow each other and are treated alike in the same blocks, as groups."""
    merged: list[tuple[str, str, list[str], list[int]]] = []
    for row in rows:
        matches = (_NUMBER.search(layer_of(graph, i)) for i in row.operators)
        numbers = ranges({int(match[0]) for match in matches if match is not None})
        if merged and merged[-1][:2] == (row.treatment, numbers):
            merged[-1][2].append(row.pattern)
            merged[-1][3].extend(row.operators)
        else:
            merged.append((row.treatment, numbers, [row.pattern], list(row.operators)))
    return tuple(
        Group(layer_range([name.replace("*", numbers, 1) for name in names]), text, tuple(sorted(operators)))
        for text, numbers, names, operators in merged
    )


def _mainly(rows: Sequence[_Row]) -> list[_Row]:
    """Layers most of whose operators are treated alike are told by that, with the number of the others."""
    of_layer: dict[str, list[_Row]] = {}
    for row in rows:
        of_layer.setdefault(row.pattern, []).append(row)
    shorter = []
    for pattern, members in of_layer.items():
        operators = tuple(sorted(i for row in members for i in row.operators))
        main = max(members, key=lambda row: len(row.operators))
        others = len(operators) - len(main.operators)
        if others and len(main.operators) >= MAINLY * len(operators):
            text = f"{main.treatment} ({others} of {len(operators)} otherwise)"
            shorter.append(_Row(pattern, text, operators))
        else:
            shorter += members
    return shorter


def _treatments(graph: OperatorGraph, rows: Iterable[_Row]) -> dict[str, set[str]]:
    """Of each layer, and each part of the model that has layers, the different treatments."""
    by_part: dict[str, set[str]] = {}
    for row in rows:
        for layer in {layer_of(graph, i) for i in row.operators}:
            parts = layer.split(".")
            for k in range(len(parts)):
                by_part.setdefault(".".join(parts[: k + 1]), set()).add(row.treatment)
    return by_part


def _names(graph: OperatorGraph, groups: Iterable[Group], treatments: Mapping[str, set[str]]) -> list[str]:
    """Layers of the same treatment by the largest parts of the model that have no other: "blocks.4.deep"; numbers that
    tell such names apart in short: "blocks.5-7.deep"."""
    names: list[str] = []
    for group in sorted(groups, key=lambda group: group.operators[0]):
        layers = dict.fromkeys(layer_of(graph, i) for i in group.operators)
        partial = any(len(treatments[layer]) > 1 for layer in layers)  # only some operators of a layer
        names += [group.layers] if partial else [_part(layer, treatments) for layer in layers]
    return _numbers_joined(_numbers_joined(names, -1), 0)


def _part(layer: str, treatments: Mapping[str, set[str]]) -> str:
    """The largest part of the model around a layer that has a single treatment."""
    while len(treatments.get(parent := layer.rpartition(".")[0], ())) == 1:
        layer = parent
    return layer


def _numbers_joined(names: Iterable[str], place: int) -> list[str]:
    """Names, once each, of those that differ in one number only (``place`` -1: the last of a name, 0: the first) one
    with all of them."""
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(names):
        matches = list(_NUMBER.finditer(name))
        match = matches[place] if matches else None
        pattern = name[: match.start()] + "*" + name[match.end() :] if match else name
        numbers.setdefault(pattern, []).extend([int(match[0])] if match else [])
    return list(dict.fromkeys(pattern.replace("*", ranges(own), 1) for pattern, own in numbers.items()))


def _listed(names: Sequence[str]) -> str:
    """Names in a row, of those with the same parent the first in full: "attn.k_proj, v_proj"."""
    parents = [name.rpartition(".")[0] for name in names]
    pairs = zip(names, parents, ["", *parents], strict=False)
    return ", ".join(name[len(own) + 1 :] if own and own == before else name for name, own, before in pairs)


def _by_treatment(
    graph: OperatorGraph, groups: Sequence[Group], treatments: Mapping[str, set[str]]
) -> tuple[Group, ...]:  # fmt: skip
    """Each treatment once, with the first few of its layers. The one of most of the computing comes first: other lines
    are exceptions from it. ``treatments``: see ``_treatments``."""
    same: dict[str, list[Group]] = {}
    for group in groups:
        same.setdefault(group.treatment, []).append(group)
    result, whole = list[Group](), _flops(graph, groups)
    for text, members in same.items():
        layers, share = _names(graph, members, treatments), _flops(graph, members) / (whole or 1.0)
        operators = tuple(sorted(i for group in members for i in group.operators))
        if len(layers) > NAMES and share > 0.5:
            result.insert(0, Group(f"{MAIN} ({100 * share:.0f} % of the computing)", text, operators))
            continue
        for count in range(min(NAMES, len(layers)), 0, -1):
            more = f" and {len(layers) - count} more" if len(layers) > count else ""
            group = Group(_listed(layers[:count]) + more, text, operators)
            if lines([group]) <= ENTRY:
                break
        result.append(group)
    return tuple(result)


def _matters(graph: OperatorGraph, operator: int) -> bool:
    """Whether an operator computes anything, or has weights."""
    op = graph.operators[operator]
    return bool(forward_flops(op, op.sizes)) or any(graph.tensor[name].kind == "parameter" for name in op.inputs)


def _flops(graph: OperatorGraph, groups: Iterable[Group]) -> int:
    operators = (graph.operators[i] for group in groups for i in group.operators)
    return int(sum(forward_flops(op, op.sizes) for op in operators))


def _counted(graph: OperatorGraph, rest: Sequence[Group], told: Sequence[Group]) -> Group:
    """Groups as one that says how many treatments they have, and by what most of their computing is split, if that
    leaves it one line; ``told``: those that have lines of their own."""
    operators = tuple(sorted(i for group in rest for i in group.operators))
    own = _flops(graph, rest)
    share = own / (_flops(graph, told) + own or 1.0)
    words = f"{100 * share:.2g} % of the computing" if share >= NOTABLE else "hardly any computing"
    treatments = {group.treatment for group in rest}
    if len(treatments) == 1:
        return Group(OTHERS, f"{treatments.pop()} ({words})", operators)
    splits = Counter[str]()
    for group in rest:
        splits[_split_of(group.treatment)] += _flops(graph, [group])
    text = f"{len(treatments)} other ways ({words})"
    for common in (splits.most_common(1), splits.most_common(2)) if share >= NOTABLE else ():
        longer = Group(OTHERS, f"{text}, mostly {' or '.join(split for split, _ in common)}", operators)
        if 2 * sum(flops for _, flops in common) > own and lines([longer]) == 1:
            return longer
    return Group(OTHERS, text, operators)


def _split_of(treatment: str) -> str:
    """By what a treatment splits layers, wherever they run and into however many parts."""
    split = re.split(" over | on ", treatment)[0]
    return "on one device" if treatment.startswith("on ") else re.sub(r" \(\d+\)", "", split)
