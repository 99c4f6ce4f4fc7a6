"""From a PyTorch model and its loss to an operator graph, through ``torch.export``.

The exported program is functional but not decomposed; constants are folded, and each torch operator is handed to its
kind (:mod:`flexsearch.graph.ops`). What is not in the table is an error that says where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError, NotationError
from flexsearch.graph.assemble import assemble
from flexsearch.graph.blocks import Blocks, moved
from flexsearch.graph.export import Loss, export_step, source_line
from flexsearch.graph.fold import Constant, Constants, Folded, Folder, elementwise, is_random, sources
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.graph.model import OperatorGraph, Tracing
from flexsearch.graph.ops import find_trace
from flexsearch.graph.ops.builder import Builder, bind, broadcast_shapes
from flexsearch.graph.ops.builder import opaque as emit_opaque
from flexsearch.graph.ops.calls import dtype_name
from flexsearch.graph.ops.pointwise import pointwise_trace
from flexsearch.graph.ops.rnn import gate_count, gate_shape
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.ops.value import TensorKind as Kind
from flexsearch.graph.prepare import plain, unwrapped
from flexsearch.graph.repeats import ENTER, LEAVE, REPEAT
from flexsearch.graph.sizes import Sizes

__all__ = ["Imported", "Loaded", "import_model", "import_with_constants", "load_callable"]


@dataclass(frozen=True)
class Imported:
    """A graph and what is needed to run it: the constants' values and the order of the tensor arguments.

    ``constants``: CPU tensors by name; those that depend on a buffer on the meta device are meta tensors themselves. Of
    a model on the meta device they are computed when they are first read. ``derived``: those of them that were computed
    from buffers, for :func:`flexsearch.graph.fold.derive`. ``input_names``, ``target_names``: graph inputs in the order
    of the tensors in ``example_inputs`` and ``targets``.
    """

    graph: OperatorGraph
    constants: Mapping[str, torch.Tensor]
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    derived: Mapping[str, Folded] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    """Names of the inputs, in the order of import, where they were keyword arguments."""
    notes: tuple[str, ...] = ()
    """What a user should know about how the model was traced."""


def import_model(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    *,
    targets: Any = None,
    name: str | None = None,
    opaque: bool = False,
    batch_norm_groups: int = 1,
) -> OperatorGraph:
    """The operator graph of one training step, ``loss(model(*example_inputs), targets)``.

    ``example_inputs``: a tensor, a tuple of arguments or a dict of keyword arguments (a batch as a data collator gives
    it), with the global batch as first dimension; shapes are static. ``loss``: called with the model's output and
    ``targets`` (with the output alone if those are None) and returns a scalar; None if the model itself returns it, or
    a mapping with an item "loss" (``ModelOutput`` of Hugging Face). The model is traced in the mode it is in
    (``model.train()``, ``model.eval()``), on any device; on the meta device it takes no memory. What wraps it
    (``torch.compile``, DistributedDataParallel) is taken off; a KV cache is turned off, with a warning.
    ``opaque``: import operators outside the table unsplittable instead of refusing them. ``batch_norm_groups``: let
    batch normalisation in training take the statistics of so many equal parts of the batch, each on its own, which is
    another function than that of the whole batch: what DDP over as many ranks computes (ghost batch normalisation,
    Hoffer et al., 2017). Running statistics are those of the first part, as DDP keeps its first rank's.
    Raises ImportModelError that names the operator, the layer and the line.
    """
    tracing = _tracing(opaque, batch_norm_groups)
    imported = _imported(model, example_inputs, loss, targets, name, tracing)
    for note in imported.notes:
        warnings.warn(note, stacklevel=2)
    return imported.graph


def import_with_constants(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    *,
    targets: Any = None,
    name: str | None = None,
    tracing: Tracing | None = None,
) -> Imported:
    """As :func:`import_model`, with the values of constants and the names of the arguments."""
    imported = _imported(model, example_inputs, loss, targets, name, tracing or Tracing())
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        dict(imported.constants)  # now, while the buffers that they are computed from are what they are
    return imported


def _imported(
    model: nn.Module, example_inputs: Any, loss: Loss | None, targets: Any, name: str | None, tracing: Tracing
) -> Imported:
    """As :func:`import_with_constants`, whose values are still to be computed."""
    if not isinstance(model, nn.Module):
        raise ImportModelError(f"the model must be an nn.Module, not {type(model).__name__}")
    if targets is not None and loss is None:
        raise ImportModelError("targets were given without a loss; give loss=..., or pass them as inputs of the model")
    model = unwrapped(model)
    args, kwargs = _arguments(example_inputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise ImportModelError("there is no tensor among the example inputs")
    with plain(model, kwargs) as notes:
        program, blocks = export_step(model, loss, args, kwargs, targets)
    walk = _Walk(program, blocks, model, tracing or Tracing())
    inputs = walk.arguments((args, kwargs), "input")
    imported = walk.run(name or type(model).__name__, inputs, walk.arguments(targets, "target"))
    return replace(imported, keywords=tuple(kwargs), notes=tuple(notes))


def _tracing(opaque: bool, batch_norm_groups: int) -> Tracing:
    if batch_norm_groups < 1:
        raise ImportModelError(f"batch_norm_groups must be at least 1, not {batch_norm_groups}")
    return Tracing(opaque=opaque, batch_norm_groups=batch_norm_groups)


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _value(tensor: torch.Tensor, kind: Kind, name: str, trained: bool = False, gates: int = 0) -> Value:
    shape = gate_shape(tuple(tensor.shape), gates)
    fixed = kind in ("parameter", "constant", "buffer")
    return Value(shape, dtype_name(tensor.dtype), kind, name, weight=fixed, grad=trained, requires_grad=trained)


_Origin = tuple[str, tuple[str, str], tuple[tuple[Shape, str], ...]]


def _origin(node: torch.fx.Node) -> _Origin:
    """Path of the module that called a torch operator, the line and library, and what the operator returns."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    results = tuple((tuple(t.shape), dtype_name(t.dtype)) for t in tensors)
    return str(stack[-1][0]) if stack else "", source_line(node.meta.get("stack_trace")), results


class _Walk:
    """A walk over an exported program. ``env``: what each node is, a Value, a Folded constant, or a tuple of these.

    The nodes of a repeated block are walked again for each repetition, with an ``env`` of their own; ``place`` is then
    the path of the block that was traced, and that of its repetition.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, blocks: Blocks, model: nn.Module, tracing: Tracing
    ) -> None:
        self.program, self.blocks, self.model, self.tracing = program, blocks, model, tracing
        self.builder = Builder(batch_norm_groups=tracing.batch_norm_groups)
        self.env: dict[Any, Any] = {}
        self.place = ("", "")
        self.targets: dict[Any, str] = {}
        """Names of placeholders, those that parameters and buffers have."""
        self.fixed: dict[str, Any] = {}
        """What they are, by name."""
        self.origins: dict[torch.fx.Node, _Origin] = {}
        self.changes: dict[str, tuple[Any, bool]] = {}
        """By name of a buffer, its new value, and whether that is the old one plus one."""
        self.buffers: dict[str, Value] = {}
        self.folder = Folder()
        self.constants: dict[Folded, Constant] = {}
        self.expanded: dict[tuple[Folded, str], Value] = {}
        """Constants as large as the program has them, by the layer that reads them."""
        self.batch: int | None = None
        self.sizes = Sizes()

    def arguments(self, tree: Any, prefix: str) -> list[Value]:
        """Graph inputs for the tensors in ``tree``, in their order; the first dimension is the batch."""
        values: list[Value] = []
        for leaf in pytree.tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            value = _value(leaf, "input", f"{prefix}_{len(values)}" if values else prefix)
            if leaf.dim():
                self.batch = self.batch or leaf.shape[0]
                # An input of another length is a mask or a table; targets may come flattened, as (batch * seq).
                whole = leaf.shape[0] == self.batch or (prefix == "target" and leaf.shape[0] % self.batch == 0)
                value.sample = (whole,) + (False,) * (leaf.dim() - 1)
            values.append(value)
        return values

    def run(self, name: str, inputs: list[Value], targets: list[Value]) -> Imported:
        nodes = list(self.program.graph.nodes)
        self.builder.batch = self.batch
        self._placeholders([n for n in nodes if n.op == "placeholder"], [*inputs, *targets])
        for node in nodes:
            if node.op == "call_function":
                self.env[node] = self._visit(node)
        loss, updates, counters = self._outputs(next(n for n in nodes if n.op == "output"))
        drafts = self.builder.drafts
        graph = assemble(name, drafts, loss, [*inputs, *targets], updates, counters, self.tracing)
        alive = {tensor.name for tensor in graph.of_kind("constant")}
        folded = {v.name: x for x, v in self.constants.items() if v.name in alive}
        names = tuple(v.name for v in inputs), tuple(v.name for v in targets)
        # Handlers have constants of their own: where a random draw happens.
        others = {v.name: v.data for d in drafts for v in d.inputs if v.kind == "constant" and v.name not in folded}
        values = Constants(folded, {name: x for name, x in others.items() if x is not None and name in alive})
        return Imported(graph, values, *names, {name: x for name, x in folded.items() if sources(x)})

    def _placeholders(self, nodes: Sequence[torch.fx.Node], users: Sequence[Value]) -> None:
        """Inputs in their order; parameters and buffers under their first name, however many they have."""
        signature = self.program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        named: dict[str, torch.Tensor] = {
            f"model.{n}": p for n, p in self.model.named_parameters(remove_duplicate=False)
        }
        named.update({f"model.{n}": x for n, x in self.model.named_buffers(remove_duplicate=False)})
        first = {id(x): n for n, x in [*self.model.named_parameters(), *self.model.named_buffers()]}
        data = {**self.program.state_dict, **self.program.constants}
        mutated = {id(named.get(n)) for n in (*signature.buffers_to_mutate.values(), *self.blocks.mutated)}
        made: dict[str, Value] = {}
        named_nodes: dict[int, list[torch.fx.Node]] = {}
        for node in nodes:
            if (known := named.get(specs[node.name].target or "")) is not None:
                named_nodes.setdefault(id(known), []).append(node)
        self.targets = {node: specs[node.name].target or "" for node in nodes}
        of_target = {target: node for node, target in self.targets.items()}
        for target, original in self.blocks.targets.items():
            if target in named:
                named_nodes[id(named[target])].append(of_target[original])
        arguments = iter(users)
        for node in nodes:
            spec = specs[node.name]
            kind, target = spec.kind.name, spec.target or ""
            if kind == "USER_INPUT":
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self.env[node] = next(arguments)
            elif kind in ("PARAMETER", "BUFFER") and target in named:
                tensor = named[target]
                own = first[id(tensor)]
                if own not in made:
                    where: Kind = "parameter" if kind == "PARAMETER" else "buffer"
                    gates = gate_count(named_nodes[id(tensor)]) if kind == "PARAMETER" else 0
                    made[own] = _value(tensor, where, own, kind == "PARAMETER" and tensor.requires_grad, gates)
                self.buffers[target] = made[own]
                fixed = kind == "BUFFER" and id(tensor) not in mutated
                self.env[node] = self.folder.leaf(tensor.detach(), made[own]) if fixed else made[own]
            elif kind in ("BUFFER", "CONSTANT_TENSOR") and isinstance(data.get(target), torch.Tensor):
                self.env[node] = self.folder.leaf(data[target].detach())
            else:
                raise ImportModelError(
                    f"the loss has a {kind.lower().replace('_', ' ')} of its own, {target!r}; make it a part of the "
                    "model, and let its forward return the loss"
                )
            self.fixed[target] = self.env.get(node)

    def _visit(self, node: torch.fx.Node) -> Any:
        """What a node is; marks of blocks are what they mark."""
        if node.target is ENTER or node.target is LEAVE:
            marked: Any = node.args[0]
            return torch.fx.node.map_arg(marked, self.env.__getitem__)
        if node.target is REPEAT:
            return self._repeat(node)
        self._locate(node)
        return self._call(node)

    def _repeat(self, node: torch.fx.Node) -> tuple[Any, ...]:
        """Walk a block again: with other inputs, and the parameters and buffers of another module."""
        operands: Any = node.args[0]
        block, path = self.blocks.by_number[int(str(node.args[1]))], moved(str(node.args[2]), *self.place)
        outside = self.env, self.place
        env: dict[Any, Any] = {mark: self.env[operands[k]] for k, mark in block.inputs.items()}
        env.update((read, self.fixed[moved(self.targets[read], block.path, path)]) for read in block.reads)
        self.env, self.place = env, (block.path, path)
        for inner in block.nodes:
            env[inner] = self._visit(inner)
        for target, inner in block.mutated:
            self._change(moved(target, block.path, path), inner)
        self.env, self.place = outside
        return tuple(env[output] for output in block.outputs)

    def _locate(self, node: torch.fx.Node) -> None:
        """Tell the builder which layer, line and operator it is at, and what that returns."""
        if node not in self.origins:  # the nodes of repeated blocks come again
            self.sizes.settle(node)
            self.origins[node] = _origin(node)
        b = self.builder
        path, (b.source, b.library), b.results = self.origins[node]
        path = moved(path, *self.place)
        inside = path == "model" or path.startswith("model.")
        b.module = path.removeprefix("model").removeprefix(".") if inside else "loss"
        b.target = str(node.target)

    def _call(self, node: torch.fx.Node) -> Any:
        target, b = node.target, self.builder
        call: Any = (node.args, node.kwargs)
        args, kwargs = torch.fx.node.map_arg(call, self.env.__getitem__)
        if target is getitem:
            return args[0][args[1]]
        if isinstance(node.meta["val"], int):  # arithmetic on sizes
            return node.meta["val"]
        if not isinstance(target, torch._ops.OpOverload):
            raise b.error(
                "is a higher-order operator of torch, which has no place in a static graph",
                outside="turn off what calls it, gradient checkpointing for example, before importing.",
            )
        if target._schema.name.startswith("aten::_assert") or not b.results:
            return None
        if self._open():
            self.sizes.measure(node, args, kwargs)
            del self.origins[node]
            self._locate(node)
        if self._open():
            raise b.error(
                "makes a tensor whose shape depends on values; graphs are static",
                "Keep all elements and use torch.where(mask, x, 0), or select a fixed number with topk; for counts, "
                "use torch.histc or one_hot(x, n).",
                outside="choose another implementation in the model's configuration, one without selections by masks.",
            )
        if (folded := self.folder.fold(node, args, kwargs)) is not None:
            return folded
        args, kwargs = self._operands(target, args, kwargs)
        result = self._dispatch(target, args, kwargs)
        if isinstance(node.meta["val"], torch.Tensor):
            result = result[0] if isinstance(result, tuple) else result
            assert (result.shape, result.dtype) == b.results[0], f"{target}: {result.shape, result.dtype} {b.results}"
        return result

    def _open(self) -> bool:
        """Whether a shape of what the torch operator at hand returns depends on values."""
        return any(not isinstance(size, int) for shape, _ in self.builder.results for size in shape)

    def _dispatch(self, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        b, name = self.builder, str(target)
        b.args, b.kwargs = args, kwargs
        try:
            if (trace := find_trace(name) or pointwise_trace(target)) is not None:
                return trace(b, **bind(target, args, kwargs))
            problem = b.error(
                "is not in the operator table",
                "Register it (flexsearch.register, docs/operators.md), or import it "
                "unsplittable with opaque=True (--opaque).",
            )
        except ImportModelError as error:
            if not self.tracing.opaque or is_random(target, bind(target, args, kwargs)):
                raise
            problem = error
        except (NotationError, ValueError, IndexError, KeyError, TypeError, AssertionError, AttributeError) as error:
            # Where opaque operators are welcome, a form of the call that its kind does not foresee becomes one.
            problem = b.error(
                f"does not fit its pattern: {error}", "Import it unsplittable with opaque=True (--opaque)."
            )
            problem.__cause__ = error
        if is_random(target, bind(target, args, kwargs)):
            raise b.error(
                "draws random numbers, which would differ between devices",
                "Draw them outside the model and pass them in.",
                "set the rate of what is drawn (drop path, layer drop, noise) to 0 in the model's configuration, or "
                "import it in evaluation mode (model.eval()).",
            )
        if not self.tracing.opaque:
            raise problem
        return emit_opaque(b, target, args, kwargs)

    def _operands(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with constants as values: in their smallest form where the operator broadcasts them."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Value | Folded)]
        if not any(isinstance(x, Folded) and x.compact for x in tensors):
            mapped: tuple[Any, Any] = pytree.tree_map_only(Folded, self._constant, (args, kwargs))
            return mapped
        shapes = [x.small.shape if isinstance(x, Folded) else x.shape for x in tensors]
        broadcasts = elementwise(target) and broadcast_shapes(*shapes) == self.builder.shape
        bound = bind(target, args, kwargs) if target._schema.name == "aten::scaled_dot_product_attention" else {}

        def operand(x: Folded) -> Value:
            mask = bound.get("attn_mask") is x and x.small.shape[-2:] == x.shape[-2:]
            return self._constant(x) if broadcasts or mask else self._whole(x)

        mapped = pytree.tree_map_only(Folded, operand, (args, kwargs))
        return mapped

    def _constant(self, x: Folded) -> Value:
        """A constant as an operand, in its smallest form: the buffer that it is, or a constant of the graph."""
        if x.buffer is not None:
            return x.buffer
        if x not in self.constants:
            self.constants[x] = Constant(x, f"{self.builder.module}.constant" if self.builder.module else "constant")
        return self.constants[x]

    def _whole(self, x: Folded) -> Value:
        """A constant as an operand, as large as the program has it."""
        value, b = self._constant(x), self.builder
        if not x.compact:
            return value
        if (x, b.module) not in self.expanded:
            target, results, expand = b.target, b.results, torch.ops.aten.expand.default
            b.target, b.results = str(expand), ((x.shape, value.dtype),)
            whole = self._dispatch(expand, (value, list(x.shape)), {})
            b.target, b.results = target, results
            b.drafts[-1].auxiliary = True
            self.expanded[x, b.module] = whole[0] if isinstance(whole, tuple) else whole
        return self.expanded[x, b.module]

    def _outputs(self, output: torch.fx.Node) -> tuple[Value, dict[Value, Value], list[Value]]:
        """The loss, the new values of buffers, and the buffers that only count steps."""
        losses: list[Any] = []
        updates = dict(self.builder.updates)
        counters: list[Value] = []
        returned: Any = output.args[0]
        for node, spec in zip(returned, self.program.graph_signature.output_specs, strict=True):
            kind, target = spec.kind.name, spec.target or ""
            if kind == "USER_OUTPUT":
                losses.append(node)
            elif kind == "BUFFER_MUTATION" and target in self.buffers:
                self._change(target, node)
            else:
                what = kind.lower().split("_mutation")[0].replace("_", " ")
                raise ImportModelError(f"the training step changes a {what} in place, {target!r}; make a new tensor")
        if len(losses) != 1 or not isinstance(losses[0], torch.fx.Node):
            what = f"{len(losses)} values" if len(losses) != 1 else f"a {type(losses[0]).__name__}"
            raise ImportModelError(
                f"the training step must return one tensor, the loss, but returns {what}. "
                "Give loss=..., or wrap the model in a module whose forward returns the loss alone."
            )
        value = losses[0].meta["val"]
        if value.dim() or not value.is_floating_point():
            raise ImportModelError(
                "the loss (without loss=..., the model's output) must be a floating-point scalar, but it is a "
                f"{dtype_name(value.dtype)} tensor of shape {tuple(value.shape)}; reduce it by .mean()"
            )
        for target in sorted(self.changes, key=list(self.fixed).index):
            after, counted = self.changes[target]
            if counted:
                counters.append(self.buffers[target])
            else:
                updates[self.buffers[target]] = after
        return self._operand(losses[0]), updates, counters

    def _change(self, target: str, node: torch.fx.Node) -> None:
        """The buffer ``target`` becomes ``node``."""
        buffer = self.buffers[target]
        counted = self._counts(node, buffer)
        self.changes[target] = (buffer if counted else self._operand(node), counted)

    def _operand(self, node: torch.fx.Node) -> Value:
        found = self.env[node]
        value: Value = self._whole(found) if isinstance(found, Folded) else found
        return value

    def _counts(self, node: torch.fx.Node, buffer: Value) -> bool:
        """Whether the node is ``buffer + 1`` for an integer scalar buffer."""
        return (
            buffer.shape == ()
            and buffer.dtype.startswith("int")
            and str(node.target).startswith("aten.add.")
            and self.env.get(node.args[0]) is buffer
            and node.args[1:] == (1,)
        )
