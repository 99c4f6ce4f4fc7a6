"""What flexsearch knows about a kind of operator: one object, an :class:`OperatorKind`, in one place.

It says which torch operators it stands for, how a call becomes an access pattern, how a piece is computed on local
tensors, what that costs and keeps in memory, what a graph file may say about it, what people call its axes, and calls
for the tests. Most of this has a default: a kind that is one torch operator, is computed piece by piece by that same
operator and has one FLOP for each element of its output needs a name, its torch operators and a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from flexsearch.errors import ImportModelError
from flexsearch.graph.model import Operator, Role
from flexsearch.graph.notation import Access
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.piece import Piece
from flexsearch.graph.targets import trust

if TYPE_CHECKING:
    from flexsearch.graph.ops.builder import Builder

Shapes = Sequence[tuple[int, ...]]
"""Shapes of whole tensors."""

Kernel = Callable[..., Any]
"""Takes one tensor per operand, exactly of the piece's region (None where the region is None), and gives the piece's
contribution to its output region: a tensor, or a tuple of them for several outputs. Differentiable by autograd."""

WeightGradient = Callable[..., Sequence[Any]]
"""Takes a piece's region of the first operand (None where it is None) and of the gradient of the output; gives the
piece's contribution to the gradients of all further operands."""

Extents = Mapping[str, Any]
"""Number of indices of a piece on each axis; of many pieces, an array for each axis."""

Trace = Callable[..., Any]
"""Called as (builder, **arguments by their names in the torch operator's schema); returns what the torch operator does,
a :class:`Value` or a tuple of them."""


@dataclass
class KernelContext:
    """What a kernel reads at call time. ``seed`` and ``step`` determine every dropout mask; ``dtype`` and ``device``
    are those of a result that is made from no operand at all (a piece that lies wholly in constant padding)."""

    seed: int = 0
    step: int = 0
    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Saved(NamedTuple):
    """What autograd saves for the backward: inputs and outputs that live until then. ``alias``: the output is the
    input's memory. Besides, for each element of the outputs: ``extra`` bytes (the int64 indices of a max pool), and as
    much memory as so many half elements have."""

    inputs: bool
    outputs: bool
    alias: bool = False
    extra: int = 0
    halves: int = 0

    def besides(self, elements: Any, itemsize: int) -> Any:
        """Bytes saved besides for an output of so many elements (a number, or an array of them)."""
        return elements * self.extra + elements * self.halves * itemsize // 2


NOTHING = Saved(False, False)
INPUTS = Saved(True, False)
OUTPUTS = Saved(False, True)
BOTH = Saved(True, True)
ALIAS = Saved(False, False, alias=True)


class Attributes(BaseModel):
    """Base of the attributes of a kind, as a graph file gives them. Others than those listed mean nothing."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Sample(NamedTuple):
    """A call for the tests, ``call(*tensors)`` in plain PyTorch: traced, it must give an operator of the kind, and
    pieces of that must add up to what PyTorch computes. ``tensors`` are small, float64 where they are real numbers."""

    call: Callable[..., Any]
    tensors: Sequence[torch.Tensor]


MANY = 4096
"""Operands of a kind that takes any number."""


class OperatorKind:
    """One kind of operator. Subclasses set what differs from the defaults.

    ``name``: of the kind, as graph files give it. ``targets``: torch operators that importing recognises, with or
    without their overload ("aten.linear", "aten.max.dim", "mylib.rotate.default"). ``pattern``: access pattern, if it
    depends on ranks alone (see :mod:`flexsearch.graph.notation`). ``roles``: of axes that do not inherit theirs.
    ``inputs``, ``outputs``: least and most operands, number of results.
    """

    name: str = ""
    targets: tuple[str, ...] = ()
    pattern: str | None = None
    roles: Mapping[str, Role] = {}
    words: Mapping[str, str] = {}
    """What people call an axis: ``{"h": "heads"}``; others are named by their place in the tensor."""
    attributes: type[Attributes] = Attributes
    inputs: tuple[int, int] = (1, 1)
    outputs: int = 1

    backward: float = 1.0
    """Backward FLOPs over forward FLOPs; of a ``contraction``, for each operand that needs a gradient."""
    again: float = 0.0
    """Of ``backward``, what the forward pass has computed before."""
    contraction: bool = False
    """Whether each factor's gradient is another contraction of the same size."""
    matrix: bool = False
    """Whether most of the FLOPs are those of matrix products, as a contraction's are."""
    fused_attention: bool = False
    """Whether it is attention in one kernel, which never writes the scores."""
    table: int | None = None
    """Position of the operand of which only those elements are read that another one names."""
    traffic: Literal["copy", "loss", "normalisation", "windows"] | None = None
    """How it reads and writes memory, if it does not stream; what has a ``table`` looks up."""
    saved: Saved = BOTH
    saved_without_weights: Saved = BOTH
    """As ``saved``, where no gradients of weights are wanted."""
    windows: bool = False
    """Whether a pattern may read windows: ``(2*h+KH-1)``."""
    image: bool = False
    """Whether the dimensions are those of images: batch, channels, height, width."""
    trivial: bool = False
    """Whether it only moves or maps single elements."""
    free: bool = False
    """Whether its forward only makes another view of the same memory."""
    copies: bool = False
    """Whether each element written was read once, whatever the windows of the operands reach."""
    backward_reads: Literal["nothing", "gradients", "inputs"] = "inputs"
    """What the backward reads: nothing, as it is another view of the gradient; the gradients of the outputs; these and
    the inputs."""
    bookkeeping: bool = False
    """Whether it is no layer of its own: a count, running statistics."""
    grouped: bool = False
    """Whether an axis that counts parts of the batch comes before that of the samples in a part."""
    follows: Mapping[str, str] = {}
    """Axes that operands do not size, and the axis in proportion to which they do: places of an expert to tokens."""

    def access(self, b: Builder, *args: Any, **call: Any) -> str | None:
        """Pattern of a call whose arguments are ``call``; None: the table's (``pattern``)."""
        return self.pattern

    def trace(self, b: Builder, *args: Any, **call: Any) -> Any:
        """Append to ``b`` what a call of one of the ``targets`` comes to and return its results.

        By default one operator of this kind, whose operands are the call's tensors, in order, and whose attributes are
        the call itself. Raises ImportModelError for a form of the call that cannot be split, ``b.error``.
        """
        return b.emit_call(self.name, self.access(b, **call))

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """What is wrong with an operator of a graph file: text that follows the operator's place, or an empty one.

        ``attributes``: an instance of the kind's own; ``shapes``: of the inputs and then the outputs. Pattern and
        shapes agree already; kernels and cost rules rely on whatever else holds for operators that importing makes.
        """
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Forward FLOPs of a piece: one for each element of the outputs, unless a kind knows better."""
        return output_elements(op, extents)

    def own_seconds(self, op: Operator, extents: Extents) -> tuple[Any, Any] | None:
        """Seconds of the forward and of the backward task of a piece (of many pieces: arrays), on any device, where the
        graph itself gives them; None: they follow from FLOPs and bytes, or are measured."""
        return None

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The local computation of ``piece`` of ``op``, whose inputs have the global ``shapes``.

        Paddings, offsets and divisors are settled here, once. Adding the results of all pieces at their output regions
        gives the operator's output. By default the torch operator itself on the local tensors.
        """
        from flexsearch.graph.ops.calls import local_call

        return local_call(op, context)

    def weight_gradient(self, op: Operator, piece: Piece, shapes: Shapes) -> WeightGradient | None:
        """How the gradients of the weights of ``piece`` follow from its first operand and the gradient of its output:
        what makes it possible to split them in another way than the rest of the operator. None: it is not."""
        return None

    def saves(self, op: Operator, *before: Operator) -> Saved:
        """What is saved for the backward of ``op``. ``before``: what makes its first input, and what makes the first
        input of that."""
        return self.saved

    def looked_up(self, op: Operator, extents: Extents) -> Any:
        """Elements of the ``table`` that a piece reads: those that it writes, unless a kind adds several to one."""
        return output_elements(op, extents)

    def is_free(self, op: Operator) -> bool:
        """Whether the forward of ``op`` only makes another view of the same memory."""
        return self.free

    def integers_below(self, op: Operator) -> int:
        """How many values an integer operand takes, to measure with: classes, rows of a table."""
        return op.sizes.get("C", op.sizes.get("v", 2))

    def resized(self, op: Operator, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The attributes of ``op`` where its axes have other ``sizes``: :mod:`flexsearch.graph.batch`. Most have none
        that tell a size."""
        return op.attributes

    def samples(self) -> Iterable[Sample]:
        """Calls for the tests; together they reach all that is particular to the kind."""
        return ()


def output_elements(op: Operator, extents: Extents) -> Any:
    """Elements of the outputs of a piece."""
    return sum(prod(extents[a] for a in operand.names()) for operand in op.access.outputs)


def input_elements(op: Operator, extents: Extents) -> Any:
    """Elements of the first operand of a piece (that a normalisation or a loss is about, whatever its others)."""
    return prod(extents[a] for a in op.access.inputs[0].names())


def points(extents: Extents) -> Any:
    """Points of the iteration space of a piece."""
    return prod(extents.values())


KINDS: dict[str, OperatorKind] = {}
"""Every kind by its name."""

TRACES: dict[str, Trace] = {}
"""Torch operator, without or (first choice) with its overload, to how it is traced."""

_SHIPPED: set[str] = set()


def define(kind: OperatorKind) -> OperatorKind:
    """Add one of flexsearch's own kinds."""
    assert kind.name not in KINDS, f"two kinds are called {kind.name}"
    KINDS[kind.name] = kind
    _SHIPPED.add(kind.name)
    _add(kind.targets, kind.trace)
    return kind


def _add(targets: Iterable[str], trace: Trace) -> None:
    for target in targets:
        assert target not in TRACES, f"two kinds trace {target}"
        TRACES[target] = trace


T = TypeVar("T", bound=Trace)


def rewrite(*names: str) -> Callable[[T], T]:
    """Decorator: how operators of torch's ``aten`` namespace ("glu", "max.dim") are written with other kinds."""

    def add(trace: T) -> T:
        _add((f"aten.{name}" for name in names), trace)
        return trace

    return add


K = TypeVar("K", bound="type[OperatorKind] | OperatorKind")


def register(kind: K) -> K:
    """Add (or replace) a kind of operator of your own: an :class:`OperatorKind`, or a class of them (as a decorator).

    Do so on every rank, before importing a model, loading its graph or running a plan.
    Raises ImportModelError if the name is one of flexsearch's own, or something in it is malformed.
    """
    instance = kind() if isinstance(kind, type) else kind
    if not isinstance(instance, OperatorKind):
        raise ImportModelError(f"{instance!r} is no OperatorKind; derive your kind of operator from that class")
    what = f"operator kind {instance.name!r}"
    if not instance.name.isidentifier():
        raise ImportModelError(f"{what}: the name of a kind must be a word; set name = ...")
    if instance.name in _SHIPPED:
        raise ImportModelError(f"{what} belongs to flexsearch; register yours under another name")
    if instance.pattern is not None and instance.pattern.count("->") != 1:
        raise ImportModelError(f'pattern "{instance.pattern}" of {what} must have exactly one "->"')
    allowed = ("sample", "attribute", "parameter", "reduction")
    for axis, role in instance.roles.items():
        if role not in allowed:
            raise ImportModelError(f"role {role!r} of axis {axis!r} of {what} is none of {', '.join(allowed)}")
    for target in instance.targets:
        name = target if target.count(".") == 2 else f"{target}.default"
        try:
            trust(name)
        except ValueError as error:
            raise ImportModelError(f"target {target!r} of {what} {error}") from error
        if target.startswith("aten.") and find_trace(name) is not None:
            raise ImportModelError(f"target {target!r} of {what} is an operator that flexsearch knows")
    unregister(instance.name)
    KINDS[instance.name] = instance
    TRACES.update(dict.fromkeys(instance.targets, instance.trace))
    return kind


def unregister(name: str) -> None:
    """Take away a kind that was registered, if there is one."""
    old = KINDS.pop(name, None) if name not in _SHIPPED else None
    for target in old.targets if old is not None else ():
        TRACES.pop(target, None)


def shipped(name: str) -> bool:
    """Whether a kind is flexsearch's own, not a user's."""
    return name in _SHIPPED


def find_trace(target: str) -> Trace | None:
    """How the torch operator "aten.linear.default" is traced; None if no kind knows it."""
    return TRACES.get(target) or TRACES.get(target.rsplit(".", 1)[0])


def kind_of(op: Operator) -> OperatorKind:
    """The kind of ``op``; of one that nobody registered in this process, a kind that has all the defaults."""
    return KINDS.get(op.kind, _UNKNOWN)


_UNKNOWN = OperatorKind()


def build_kernel(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The local computation of ``piece`` of ``op``: :meth:`OperatorKind.kernel`.

    Raises ImportModelError for a kind that nobody registered.
    """
    kind = KINDS.get(op.kind)
    if kind is None:
        raise ImportModelError(
            f"operator {op.name!r} ({op.source or op.module}) has kind {op.kind!r}, which nobody registered",
            "Register it as when the model was imported, with flexsearch.register.",
        )
    whole = [tuple(shape) for shape in shapes]
    if op.half is None:
        return kind.kernel(op, piece, whole, context)
    from flexsearch.graph.ops.halves import input_half, weight_half  # they need torch

    if op.half == "weights":
        rule = kind.weight_gradient(op.plain, piece, whole)
        assert rule is not None, op.kind  # ``weight_gradients`` asks for it
        return weight_half(rule, tuple(high - low for low, high in piece.outputs[0]))
    own = Piece(piece.axes, piece.inputs[:-1], piece.outputs)
    return input_half(kind.kernel(op.plain, own, whole[:-1], context))


def axis_roles(kind: str, access: Access, sample: Collection[str], weights: Sequence[bool] = ()) -> dict[str, Role]:
    """Role of every axis of an operator.

    ``sample``: axes that run over the batch; they are samples wherever they go, also where they are summed away.
    ``weights``: for each operand, whether it is made of parameters only: its axes are the parameter axes of an einsum.
    """
    named = KINDS[kind].roles if kind in KINDS else {}
    indexed = {a for operand, weight in zip(access.inputs, weights, strict=False) if weight for a in operand.names()}
    roles: dict[str, Role] = {}
    for axis in access.axes:
        if axis in sample:
            roles[axis] = "sample"
        elif axis in named:
            roles[axis] = named[axis]
        elif axis in access.summed:
            roles[axis] = "reduction"
        else:
            roles[axis] = "parameter" if kind == "einsum" and axis in indexed else "attribute"
    return roles


def rand(*shape: int) -> torch.Tensor:
    """Normal numbers in float64, for samples."""
    return torch.randn(*shape, dtype=torch.float64)


def integers(high: int, *shape: int) -> torch.Tensor:
    """Integers below ``high``, for samples."""
    return torch.randint(high, shape)


__all__ = [
    "ALIAS", "BOTH", "INPUTS", "KINDS", "MANY", "NOTHING", "OUTPUTS", "TRACES", "Attributes", "Extents", "Kernel",
    "KernelContext", "OperatorKind", "Sample", "Saved", "Shapes", "axis_roles", "build_kernel", "define",
    "find_trace", "input_elements", "integers", "kind_of", "output_elements", "points", "rand", "register", "rewrite",
    "shipped", "unregister",
]  # fmt: skip
