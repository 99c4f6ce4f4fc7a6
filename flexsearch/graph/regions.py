"""Regions of a training step that run in a mode of their own: ``no_grad``, autocast, activation checkpoints.

``torch.export`` keeps such regions as graphs inside the graph, loses those that are nested, and making the program
functional dissolves them all. What the mode does must then stand in the operators: the tracer puts the casts of
autocast there, :class:`Detaching` what ``no_grad`` means. Checkpoints do not reach the program, because their function
is called directly.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError

CHECKPOINTS = (
    "activation checkpointing is not taken over: it changes no result, and what is stored or computed again is a "
    "matter of the plan"
)


@contextmanager
def traceable_autograd(notes: list[str]) -> Iterator[None]:
    """For a while, checkpointed functions are called directly, with :data:`CHECKPOINTS` among the ``notes``, and other
    functions whose backward is not the derivative of their forward are an ImportModelError: a trace holds the forward
    pass alone."""

    def note() -> None:
        if CHECKPOINTS not in notes:
            notes.append(CHECKPOINTS)

    class Direct:
        """Instead of CheckpointFunction."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
            note()
            return function(*args)

    def around(*_args: Any, **_options: Any) -> Iterator[None]:
        """Instead of what a checkpoint that is not reentrant runs before and after its function."""
        note()
        yield

    generator = "_checkpoint_without_reentrant_generator"  # torch 2.14 has the function itself under a second name
    own = {"CheckpointFunction": Direct, generator: around, f"{generator}_impl": around}
    with (
        _replaced(torch.utils.checkpoint, own),
        _replaced(torch.autograd.Function, {"apply": classmethod(_guarded(vars(torch.autograd.Function)["apply"]))}),
        _silent(logging.getLogger("torch.utils.checkpoint")),  # it advises on use_reentrant
    ):
        yield


def _guarded(original: Any) -> Callable[..., Any]:
    """``torch.autograd.Function.apply`` for tracing. Where a function's own backward is the derivative of its forward,
    as one that saves memory or time, its forward is called directly; others are refused."""

    def apply(function: Any, *args: Any, **options: Any) -> Any:
        if function.__module__.startswith("torch."):  # of operators that stay whole, and of flex_attention
            return original.__get__(None, function)(*args, **options)
        with ThreadPoolExecutor(1) as outside:  # the modes of tracing are those of a thread
            if outside.submit(_is_derivative, original.__get__(None, function), function, args).result():
                return _forward(function, args)
        frame = sys._getframe(1)
        path = Path(frame.f_code.co_filename)
        installed = {"site-packages", "dist-packages"}.intersection(path.parts)
        raise ImportModelError(
            f"{function.__qualname__}, called at {'/'.join(path.parts[-2:])}:{frame.f_lineno}, has a backward of its "
            "own, which a graph of forward operators would replace by theirs",
            "Import the model in evaluation mode (model.eval()), where it may not be called."
            if installed
            else "Write it with PyTorch's operators (a straight-through estimator as x + (f(x) - x).detach(), a "
            "reversed gradient as 2 * x.detach() - x).",
        )

    return apply


class _Context:
    """What the forward of an autograd function gets where nothing is saved for a backward."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *_tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _forward(function: Any, args: Sequence[Any]) -> Any:
    with torch.enable_grad():
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*args)
        return function.forward(_Context(), *args)


_SMALL = (5, 3, 4, 2, 6, 7)
"""Sizes for those of a traced call, in the order in which they are met: what is checked is the formula."""


def _is_derivative(apply: Callable[..., Any], function: Any, args: Sequence[Any]) -> bool:
    """Whether ``apply`` has the gradients of the function's forward on random numbers, on small shapes."""
    sizes: dict[int, int] = {1: 1}
    generator = torch.Generator().manual_seed(0)

    def small(x: torch.Tensor) -> torch.Tensor:
        for size in x.shape:
            sizes.setdefault(size, _SMALL[len(sizes) % len(_SMALL)])
        shape = [sizes[size] for size in x.shape]
        if not x.is_floating_point():
            return torch.ones(shape, dtype=x.dtype)
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    try:
        numbers = pytree.tree_map_only(torch.Tensor, small, tuple(args))
        leaves = [x for x in pytree.tree_leaves(numbers) if isinstance(x, torch.Tensor) and x.requires_grad]
        gradients = []
        for call in (apply, partial(_forward, function)):
            results = pytree.tree_leaves(call(*numbers) if call is apply else call(numbers))
            terms = [x.cos().sum() for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            gradients.append(torch.autograd.grad(torch.stack(terms).sum(), leaves, materialize_grads=True))
    except Exception:  # a function that takes no such shapes or dtypes cannot be checked
        return False
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*gradients, strict=True))


@contextmanager
def _replaced(place: Any, own: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of a module or class, where it has them, are others for a while."""
    before = {name: vars(place)[name] for name in own if name in vars(place)}
    for name in before:
        setattr(place, name, own[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_NO_VALUES = frozenset({"requires_grad_", "detach_"})
_ITEMS = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow"))})


class Detaching(TorchFunctionMode):
    """While autograd is off, detaches the result of each call, as an operator of its own in the trace; what is changed
    in place is its own result, so that there the other operands are detached."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if args and name not in _NO_VALUES and (name in _ITEMS or (name[-1:] == "_" and name[-2:] != "__")):
            target = args[0]
            _refuse_gradient_past(target, name)
            others, kwargs = pytree.tree_map_only(torch.Tensor, _without_gradient, (args[1:], kwargs or {}))
            return func(target, *others, **kwargs)
        result = func(*args, **(kwargs or {}))
        operands = {id(x) for x in pytree.tree_leaves((args, kwargs))}

        def detached(x: torch.Tensor) -> torch.Tensor:
            return torch.detach(x) if x.is_floating_point() and id(x) not in operands else x

        return pytree.tree_map_only(torch.Tensor, detached, result)


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.detach(x) if x.requires_grad else x


def _refuse_gradient_past(target: Any, name: str) -> None:
    """Raise ImportModelError if autograd would hand a gradient past what changes ``target`` in place."""
    if any(isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf for x in pytree.tree_leaves(target)):
        raise ImportModelError(
            f"the model changes a tensor that has a gradient in place ({name}) under no_grad, and the gradient would "
            "pass by the change",
            "Write y = x + (f(x) - x).detach(), or leave out the no_grad.",
        )


def keep_layers(program: torch.export.ExportedProgram) -> None:
    """Let operators inside regions keep their layers when the program is made functional: unlike the code of a graph,
    its interpreter tells the tracer at which node it is."""
    scores = {
        id(graph)
        for module in program.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if "flex_attention" in str(node.target)
        for used in node.all_input_nodes
        if used.op == "get_attr" and isinstance(graph := getattr(module, str(used.target), None), fx.GraphModule)
    }
    for graph in program.graph_module.modules():
        region = isinstance(graph, fx.GraphModule) and graph is not program.graph_module
        if region and id(graph) not in scores:  # those are copied, with all that they hold
            graph.forward = fx.Interpreter(graph).run


def drop_needless_detach(program: torch.export.ExportedProgram) -> None:
    """Keep only those ``detach`` whose result meets something with a gradient: of a chain of operators without
    gradients, the last."""
    graph, detach = program.graph_module.graph, torch.ops.aten.detach.default
    without_gradient: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        ends = all(user in without_gradient or user.target is detach for user in node.users)
        if node.op != "call_function" or not node.users or not ends:
            continue
        if node.target is detach:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            without_gradient.add(node)
    program.graph_module.recompile()
