"""A run of operators as one callable, which ``torch.compile`` can take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from flexsearch.saved import aside

Kernel = Callable[..., Any]
Body = Callable[..., Sequence[Any]]
STEPS = 16
"""Autograd's nodes of a call, about as many as most have."""
_NUMBER = count()


@dataclass(frozen=True)
class Call:
    """A kernel, the places of its operands (None: it reads nothing there) and those of its results among all values:
    the leaves, and behind them the results. ``draws``: random numbers, which differ from step to step."""

    kernel: Kernel
    places: tuple[int | None, ...]
    results: Sequence[int]
    draws: bool = False


def body_of(
    calls: Sequence[Call], leaves: int, wanted: tuple[int, ...], compiler: str | None, edges: tuple[int, ...] = (),
    weights: tuple[tuple[int, int], ...] = (), released: Collection[tuple[int, int]] = (),
    lasting: Collection[int] = (),
) -> Body:  # fmt: skip
    """Takes the leaves, gives the values at the places ``wanted``. ``compiler``: a backend of ``torch.compile``, for
    all but what draws random numbers; None: the operators as they are. Behind the values it gives where the gradients
    of results at the places ``edges`` enter (None: they have none), and where those of ``weights`` (number of the call,
    place) come out; last, if there are weights, a list of what autograd has saved for the other calls, and of those
    ``weights`` that are ``released``: once it is cleared, only gradients of weights can be had, none of which is made
    of a released one; and a list of what else it has saved of calls with released weights. Not of what is compiled.
    ``lasting``: weights that are the same tensors in every step."""
    if compiler is None:
        return _run(calls, tuple(range(leaves)), wanted, edges, weights, released, lasting)
    assert not edges and not weights
    parts = list(_parts(calls, wanted, compiler))

    def body(*values: Tensor) -> list[Tensor]:
        at = dict(enumerate(values))
        for run, read, written in parts:
            at.update(zip(written, run(*(at[place] for place in read)), strict=True))
        return [at[place] for place in wanted]

    return body


def _parts(
    calls: Sequence[Call], wanted: tuple[int, ...], backend: str
) -> Iterator[tuple[Body, tuple[int, ...], tuple[int, ...]]]:
    """Runs of calls that are compiled, and calls that are not: (callable, places it reads, places it writes)."""
    runs = [(draws, list(run)) for draws, run in groupby(calls, key=lambda call: call.draws)]
    for k, (draws, run) in enumerate(runs):
        here = {place for call in run for place in call.results}
        read = tuple(dict.fromkeys(p for call in run for p in call.places if p is not None and p not in here))
        later = {p for _, rest in runs[k + 1 :] for call in rest for p in call.places} | set(wanted)
        written = tuple(sorted(here & later))
        body = _run(run, read, written)
        yield (body if draws else _compiled(body, backend)), read, written


class _Raised(torch.autograd.Function):
    """A weight, above a rung in autograd's graph. On its way from a result to a weight the engine looks through all
    that may lie above the weight: from a leaf, at the bottom, through all that was computed before the result, too,
    which takes longer than the gradients of a small decoder's weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rung: Tensor) -> Tensor:
        return weight.detach()  # no view, which autograd would refuse once the weight has been updated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None


class _Weight(NamedTuple):
    """A weight: as it comes, raised, and where its gradient comes out."""

    leaf: Tensor
    raised: Tensor
    edge: GradientEdge


def _above(earlier: dict[int, _Weight], number: int, leaf: Any, rung: Tensor, lasts: bool) -> _Weight:
    """A weight above a rung; if it ``lasts``, as it was raised in an earlier step."""
    weight = earlier.get(number)
    if weight is None or weight.leaf is not leaf:
        raised = _Raised.apply(leaf, rung)  # type: ignore[no-untyped-call]
        weight = _Weight(leaf, raised, get_gradient_edge(raised))
        if lasts:
            earlier[number] = weight
    return weight


def _rungs(heights: Sequence[int]) -> list[Tensor]:
    """Values so many steps above the bottom of a graph that leads to nothing; ``heights`` ascend."""
    value, result = torch.zeros((), requires_grad=True), []
    with torch.enable_grad():
        for before, height in pairwise((0, *heights)):
            for _ in range(height - before):
                value = -value
            result.append(value)
    return result


def _aside_of(saved: list[Tensor | None], weights: Sequence[Tensor], others: list[Tensor]) -> saved_tensors_hooks:
    """As ``saved.aside``, of ``weights`` alone, which autograd asks for even where it does not read them: once they are
    gone it gets something of their shape without memory. What it saves besides is noted in ``others``."""
    memories = {weight.untyped_storage()._cdata for weight in weights}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage()._cdata not in memories:
            others.append(tensor)
            return tensor
        shape, dtype, device, place = tensor.shape, tensor.dtype, tensor.device, len(saved)
        saved.append(tensor)

        def take() -> Tensor:
            if saved and (weight := saved[place]) is not None:
                saved[place] = None
                return weight
            return torch.empty((), dtype=dtype, device=device).expand(shape)

        return take

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    return saved_tensors_hooks(pack, unpack)


def _entry(result: Tensor | None) -> GradientEdge | None:
    """Where the gradient of a result enters; None: it has none, or a kernel updates in place."""
    return get_gradient_edge(result) if result is not None and result.requires_grad else None


def _apart(result: Tensor | None) -> Tensor | None:
    """A result as a node of its own: it may be made of another one of the same call, at which the gradient of both
    would come out."""
    return result.view_as(result) if result is not None and result.requires_grad else result


def _run(
    calls: Sequence[Call], held: tuple[int, ...], wanted: tuple[int, ...], edges: tuple[int, ...] = (),
    weights: tuple[tuple[int, int], ...] = (), released: Collection[tuple[int, int]] = (),
    lasting: Collection[int] = (),
) -> Body:  # fmt: skip
    """The calls one after the other: takes the values at ``held``, gives those at ``wanted``, and what ``body_of`` says
    of ``edges`` and ``weights``. It is written out in Python, a line for each call: a loop over them takes a
    microsecond a call more, which small models feel. A value is let go of behind its last use, as in a module's code.
    """
    name = f"operators_{next(_NUMBER)}"
    rungs = _rungs([STEPS * (k + 1) for k in range(len(calls))] if weights else [])
    names: dict[str, Any] = {f"k{k}": call.kernel for k, call in enumerate(calls)}
    names |= {f"rung{k}": rung for k, rung in enumerate(rungs)}
    names |= {"above": _above, "earlier": dict[int, _Weight](), "entry": _entry, "apart": _apart}
    names |= {"aside": aside, "aside_of": _aside_of, "__name__": __name__}
    lines = [f"def {name}({_values(held)}):"]
    if weights:
        lines.append(" saved, others = [], []")
        lines.append(" set_aside = aside(saved)")
    last = {p: k for k, call in enumerate(calls) for p in (*call.results, *call.places) if p is not None}
    entered = ["None"] * len(edges)
    for k, call in enumerate(calls):
        trained = {p: e for e, (reader, p) in enumerate(weights) if reader == k}
        loose = [p for reader, p in released if reader == k]
        lines += _call(k, call, trained, loose, lasting, bool(weights))
        marked = [(e, p) for e, p in enumerate(edges) if p in call.results]
        for e, p in marked:
            entered[e] = f"e{e}"
            lines += [f" v{p} = apart(v{p})"] if len(marked) > 1 else []
            lines.append(f" e{e} = entry(v{p})")
        lines += [f" v{p} = None" for p, reader in last.items() if reader == k and p not in wanted]
    aside_too = ["saved", "others"] if weights else []
    returned = [*(f"v{p}" for p in wanted), *entered, *(f"w{e}.edge" for e in range(len(weights))), *aside_too]
    lines.append(f" return [{', '.join(returned)}]")
    exec(compile("\n".join(lines), f"<{name}>", "exec"), names)  # of numbers alone: nothing in it comes from a file
    body: Body = names[name]
    return body


def _values(places: Sequence[int | None]) -> str:
    """The values at these places, as arguments."""
    return ", ".join("None" if p is None else f"v{p}" for p in places)


def _call(
    k: int, call: Call, trained: Mapping[int, int], loose: Sequence[int], lasting: Collection[int], apart: bool
) -> list[str]:
    """The lines of call number ``k``. ``trained``: weights that it reads above rungs, by place, with their numbers;
    ``loose``: those that can be let go of. ``apart``: what autograd saves for a call without trained weights is set
    aside."""
    lines = [f" w{e} = above(earlier, {e}, v{p}, rung{k}, {p in lasting})" for p, e in trained.items()]
    above = {p: f"w{e}.raised" for p, e in trained.items()}
    operands = ", ".join(_values([p]) if p is None or p not in above else above[p] for p in call.places)
    results = ", ".join(f"v{p}" for p in call.results)
    line = f"{results} = k{k}({operands})" if results else f"k{k}({operands})"
    if loose:
        line = f"with aside_of(saved, [{_values(loose)}], others): {line}"
    elif apart and not trained:
        line = f"with set_aside: {line}"
    lines.append(f" {line}")
    if len(call.results) == 1:
        lines.append(f" if isinstance({results}, tuple): {results}, = {results}")
    return lines


def _compiled(body: Body, backend: str) -> Body:
    """``torch.compile`` of a callable, from its second call on: in the first, kernels look up names of PyTorch for good
    (``graph.ops.lazy``), which it cannot follow. It caches by code, and gives up at a code that it has compiled often:
    each run gets code of its own."""
    compiled: Body = torch.compile(body, backend=backend, dynamic=False)
    calls = 0

    def run(*values: Tensor) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        return body(*values) if calls == 1 else compiled(*values)

    return run
