"""Blocks that repeat are traced twice; every further call is a stand-in that the importer expands.

While ``torch.export`` runs a model, calls of modules with children are marked in the trace: ``enter`` where a tensor
goes in, ``leave`` where tensors come out. A call that would do what an earlier one did (same structure, same inputs,
and the same value in every attribute that the earlier call read) is replaced by one ``repeat`` node. Whether the marked
calls are self-contained is known when the trace is complete (:mod:`flexsearch.graph.blocks`).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from flexsearch.graph.fingerprint import Reads, UnknownStateError, fingerprint, read_too, recorded, watched


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


@torch.library.custom_op("flexsearch::enter", mutates_args=())
def enter(x: torch.Tensor, call: int, position: int) -> torch.Tensor:
    """Mark ``x`` as input ``position`` of a call."""
    return x.clone()


@torch.library.custom_op("flexsearch::leave", mutates_args=())
def leave(xs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    """Mark ``xs`` as the outputs of a call."""
    return [x.clone() for x in xs]


@torch.library.custom_op("flexsearch::repeat", mutates_args=())
def repeat(xs: list[torch.Tensor], call: int, path: str, outputs: str) -> list[torch.Tensor]:
    """Stand for the module ``path`` doing with ``xs`` what ``call`` did; ``outputs``: shapes, strides and dtypes."""
    return _outputs(xs, call, path, outputs)


def _entered(x: torch.Tensor, call: int, position: int) -> torch.Tensor:
    return _like(x)


def _left(xs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [_like(x) for x in xs]


def _outputs(xs: list[torch.Tensor], call: int, path: str, outputs: str) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=xs[0].device)
        for shape, stride, dtype in json.loads(outputs)
    ]


enter.register_fake(_entered)
leave.register_fake(_left)
repeat.register_fake(_outputs)
ENTER, LEAVE, REPEAT = (getattr(torch.ops.flexsearch, name).default for name in ("enter", "leave", "repeat"))


@dataclass(eq=False)
class Call:
    """A call of a block that was traced. ``first``: the call that it should equal, whose place others could take."""

    number: int
    module: nn.Module
    path: str
    structure: int
    reads: Reads
    first: Call | None = None
    confirmed: bool = False
    """A second call was traced as well; :func:`flexsearch.graph.blocks.blocks` compares the two."""
    like: Call | None = None
    """The call that is compared with this one; its blocks were traced where this one's are."""
    inner: list[tuple[bool, Call | None]] = field(default_factory=list)
    """For each call of a block inside: whether a stand-in was made, and of what; or its own call."""
    spec: Any = None
    results: tuple[Any, ...] = ()
    """By output: ("input", position), ("output", position) or ("plain", value)."""
    described: str = ""
    paths: dict[int, list[str]] = field(default_factory=dict)

    def planned(self, last: int = 0) -> tuple[bool, Call | None] | None:
        """What the next inner call (-1: the last) should be, for this call to be comparable with ``like``."""
        k = len(self.inner) + last
        return self.like.inner[k] if self.like is not None and k < len(self.like.inner) else None

    def matches(self, module: nn.Module) -> bool:
        """Whether all that this call read of its own modules is the same in ``module``, and the rest as it was."""
        return self.reads.unchanged(lambda owner: self._counterparts(id(owner), module))

    def read_by(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """What ``module`` would have read in this call's place."""
        return [(owner, name) for number, name in self.reads.values for owner in self._counterparts(number, module)]

    def _counterparts(self, number: int, block: nn.Module) -> list[nn.Module]:
        """What ``block`` has where this call's block has the module of that ``id``; the module itself if outside."""
        inside = self.paths.get(number)
        return [self.reads.modules[number]] if inside is None else [block.get_submodule(path) for path in inside]


class Tracer:
    """Watches the calls of a step's blocks. ``excluded``: structures that turned out not to be self-contained."""

    def __init__(self, step: nn.Module, excluded: frozenset[int]) -> None:
        self.excluded = set(excluded)
        self.structures = _structures(step)
        self.paths = {path: module for path, module in step.named_modules() if path in self.structures}
        self.start()

    def start(self) -> None:
        """Begin a trace: torch may run the step more than once, and only the last time counts."""
        self.calls: list[Call] = []
        self.bases: dict[Hashable, list[Call]] = {}
        self.open: list[Call] = []
        """Calls that are being traced, outermost first."""
        self.incomplete: set[int] = set()
        """Structures of calls that nothing can repeat: what they call may be repeated anywhere."""
        self.surprised: set[int] = set()
        """Structures of calls that changed what they were given; their trace cannot be used."""

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, marked; or a stand-in for it."""
        module, structure = self.paths[path], self.structures[path]
        if structure in self.excluded or structure in self.incomplete or _hooked(module):
            return forward(*args, **kwargs)
        if not torch.is_grad_enabled():  # torch moves such regions to graphs of their own
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
        try:
            key = (structure, _state(), spec, _describe(leaves, inputs))
            hash(key)
        except (UnknownStateError, TypeError):
            return forward(*args, **kwargs)
        if not inputs:
            return forward(*args, **kwargs)
        base = next((call for call in self.bases.get(key, ()) if call.matches(module)), None)
        outer = self.open[-1] if self.open else None
        planned = outer.planned() if outer is not None else None
        repeats = base is not None and base.confirmed
        if planned is not None:  # the call around this one is to be compared, node by node, with an earlier one
            repeats = repeats and planned == (True, base)
        if outer is not None:
            outer.inner.append((repeats, base if repeats else None))
        if repeats and base is not None:
            return self._stand_in(base, module, path, inputs)
        return self._trace(key, base, path, forward, (leaves, spec, inputs))

    def _stand_in(self, base: Call, module: nn.Module, path: str, inputs: list[torch.Tensor]) -> Any:
        read_too(base.read_by(module))
        outputs = repeat(inputs, base.number, path, base.described) if base.described != "[]" else []
        chosen = {"input": inputs, "output": outputs}
        return pytree.tree_unflatten([x if kind == "plain" else chosen[kind][x] for kind, x in base.results], base.spec)

    def _trace(self, key: Hashable, first: Call | None, path: str, forward: Callable[..., Any], flattened: Any) -> Any:
        leaves, spec, inputs = flattened
        number, module = len(self.calls), self.paths[path]
        marked = {id(x): enter(x, number, k) for k, x in enumerate(inputs)}
        inside = [marked.get(id(x), x) for x in leaves]
        args, kwargs = pytree.tree_unflatten(inside, spec)
        with recorded() as reads:
            call = Call(number, module, path, self.structures[path], reads, first, like=first)
            self.calls.append(call)
            if self.open and (planned := self.open[-1].planned(-1)) is not None:
                call.like = planned[1]
            if self.open:
                self.open[-1].inner[-1] = (False, call)
            self.open.append(call)
            try:
                output = forward(*args, **kwargs)
            finally:
                self.open.pop()
        after, spec_after = pytree.tree_flatten((args, kwargs))
        if spec_after != spec or any(a is not b for a, b in zip(after, inside, strict=True)):
            self.surprised.add(call.structure)
        originals = {id(marked[id(x)]): k for k, x in enumerate(inputs)}
        if not (reads.complete and reads.unchanged(lambda owner: [owner])):
            self.incomplete.add(call.structure)
            return self._unmarked(output, originals, inputs)
        for inner, owner in module.named_modules(remove_duplicate=False):
            call.paths.setdefault(id(owner), []).append(inner)
        return self._leave(key, call, output, originals, inputs)

    def _unmarked(self, output: Any, originals: Mapping[int, int], inputs: Sequence[torch.Tensor]) -> Any:
        """Outputs of a call that nothing can repeat, with its inputs for their marks."""
        leaves, spec = pytree.tree_flatten(output)
        if not any(id(x) in originals for x in leaves):
            return output
        return pytree.tree_unflatten([inputs[originals[id(x)]] if id(x) in originals else x for x in leaves], spec)

    def _leave(
        self, key: Hashable, call: Call, output: Any, originals: Mapping[int, int], inputs: Sequence[torch.Tensor]
    ) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        tensors = list({id(x): x for x in leaves if isinstance(x, torch.Tensor) and id(x) not in originals}.values())
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        try:
            for x in leaves:
                if not isinstance(x, torch.Tensor):
                    fingerprint(x)
        except UnknownStateError:
            return self._unmarked(output, originals, inputs)
        if not tensors or any(x.requires_grad != (grad and x.is_floating_point()) for x in tensors):
            return self._unmarked(output, originals, inputs)
        places = {id(x): k for k, x in enumerate(tensors)}
        call.spec = spec
        call.results = tuple(
            ("input", originals[id(x)]) if id(x) in originals else ("output", places[id(x)]) if id(x) in places
            else ("plain", x) for x in leaves
        )  # fmt: skip
        call.described = json.dumps([(list(x.shape), list(x.stride()), str(x.dtype)[6:]) for x in tensors])
        if call.first is None:
            self.bases.setdefault(key, []).append(call)
        elif call.described == call.first.described and call.results == call.first.results:
            call.first.confirmed = True
        chosen = {"input": inputs, "output": leave(tensors, call.number)}
        return pytree.tree_unflatten([x if kind == "plain" else chosen[kind][x] for kind, x in call.results], spec)


class _Marked:
    """Stands for ``forward`` of a block while its step is traced."""

    def __init__(self, tracer: Tracer, path: str, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.tracer, self.path, self.forward = tracer, path, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.call(self.path, self.forward, args, kwargs)


@contextmanager
def traced(step: nn.Module, excluded: frozenset[int]) -> Iterator[Tracer]:
    """Watch the calls of the blocks of ``step`` (whose forward calls :meth:`Tracer.start`) while torch traces it."""
    tracer = Tracer(step, excluded)
    try:
        for path, module in tracer.paths.items():
            vars(module)["forward"] = _Marked(tracer, path, module.forward)
        with watched(_Marked):
            yield tracer
    finally:
        for module in tracer.paths.values():
            vars(module).pop("forward", None)


def _state() -> Hashable:
    """What decides, besides modules and inputs, what torch does."""
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"),
    )  # fmt: skip


def _describe(leaves: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Hashable:
    """Everything about the arguments of a call but the values of tensors."""
    places = {id(x): k for k, x in enumerate(inputs)}
    return tuple((places[id(x)], _tensor(x)) if isinstance(x, torch.Tensor) else fingerprint(x) for x in leaves)


def _tensor(x: torch.Tensor | None) -> Hashable:
    if x is None:
        return None
    return (type(x), tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def _hooked(block: nn.Module) -> bool:
    """Whether a hook would see, or change, what happens inside a block. Hooks of the block itself run outside."""
    inner = (m for m in block.modules() if m is not block)
    return any(vars(m).get(name) for m in inner for name in _HOOKS) or any(
        getattr(torch_module, name) for name in _GLOBAL_HOOKS
    )


def _structures(step: nn.Module) -> dict[str, int]:
    """Path -> number of its structure, of the modules whose calls are worth marking.

    Those have children, appear three times in the model or in a list, and share no tensor or module with others: what
    they read is then found by their path alone.
    """
    numbers: dict[Hashable, int] = {}
    tensors = chain(step.named_parameters(remove_duplicate=False), step.named_buffers(remove_duplicate=False))
    shared = Counter(id(x) for _, x in tensors)
    modules = list(step.named_modules(remove_duplicate=False))
    shared.update(id(m) for _, m in modules)
    structures: dict[str, int] = {}
    alone: dict[str, bool] = {}
    for path, module in reversed(modules):  # children before their parents
        children = {name: f"{path}.{name}" if path else name for name, m in module.named_children()}
        own = [*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()]
        key = (
            type(module), module.training, tuple((name, _tensor(x)) for name, x in own),
            len(vars(module)["_parameters"]), tuple((n, structures[c]) for n, c in children.items() if c in structures),
        )  # fmt: skip
        structures[path] = numbers.setdefault(key, len(numbers))
        alone[path] = all(shared[id(x)] == 1 for x in (module, *(x for _, x in own if x is not None))) and all(
            alone.get(c, False) for c in children.values()
        )
    count = Counter(structures.values())
    listed = {id(m) for _, parent in modules if isinstance(parent, nn.ModuleList) for m in parent}
    return {
        path: structures[path]
        for path, module in modules
        if path.startswith("model.") and alone[path] and next(module.children(), None) is not None
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule)
        and "forward" not in vars(module) and (count[structures[path]] > 2 or id(module) in listed)
    }  # fmt: skip
