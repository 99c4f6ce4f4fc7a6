"""The walk over an exported program: each torch operator is handed to its kind, which writes operators of the graph.

Constants are folded; what no kind knows is an error that says where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError, NotationError
from flexsearch.graph.assemble import ancestors, assemble
from flexsearch.graph.blocks import Blocks, moved
from flexsearch.graph.export import source_line
from flexsearch.graph.fold import Constant, Constants, Folded, Folder, is_random, sources
from flexsearch.graph.imported import Imported
from flexsearch.graph.model import Tracing
from flexsearch.graph.operands import Operands
from flexsearch.graph.ops import find_trace
from flexsearch.graph.ops.builder import Builder, bind
from flexsearch.graph.ops.builder import opaque as emit_opaque
from flexsearch.graph.ops.calls import dtype_name
from flexsearch.graph.ops.pointwise import pointwise, pointwise_trace
from flexsearch.graph.ops.rnn import gate_count, gate_shape
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.ops.value import TensorKind as Kind
from flexsearch.graph.repeats import ENTER, LEAVE, REPEAT
from flexsearch.graph.sizes import Sizes


def _value(tensor: torch.Tensor, kind: Kind, name: str, trained: bool = False, gates: int = 0) -> Value:
    shape = gate_shape(tuple(tensor.shape), gates)
    fixed = kind in ("parameter", "constant", "buffer")
    return Value(shape, dtype_name(tensor.dtype), kind, name, weight=fixed, grad=trained, requires_grad=trained)


def _is_kept(user: torch.fx.Node) -> bool:
    """Whether what reads a tensor only hands it on: returns it, or marks where a block begins or ends."""
    return user.op == "output" or user.target in (ENTER, LEAVE)


_Origin = tuple[str, tuple[str, str], tuple[tuple[Shape, str], ...]]


def _only_checked(node: torch.fx.Node) -> bool:
    """Whether a truth value, or a number that depends on values, serves assertions alone, which plans do not make."""
    value = node.meta["val"]
    truth = isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 0 and bool(node.users)
    if not truth and not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    return all("_assert" in str(user.target) or _only_checked(user) for user in node.users)


def _origin(node: torch.fx.Node) -> _Origin:
    """Path of the module that called a torch operator, the line and library, and what the operator returns."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    results = tuple((tuple(t.shape), dtype_name(t.dtype)) for t in tensors)
    return str(stack[-1][0]) if stack else "", source_line(node.meta.get("stack_trace")), results


class Walk:
    """A walk over an exported program. ``env``: what each node is, a Value, a Folded constant, or a tuple of these.

    The nodes of a repeated block are walked again for each repetition, with an ``env`` of their own; ``place`` is then
    the path of the block that was traced, and that of its repetition.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        blocks: Blocks,
        model: nn.Module,
        tracing: Tracing,
        changed: Collection[str] = (),
    ) -> None:
        """``changed``: buffers that change although the program does not change them."""
        self.program, self.blocks, self.model, self.tracing = program, blocks, model, tracing
        self.changed = changed
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
        self.operands = Operands(self.builder)
        self.batch: int | None = None
        self.sizes = Sizes()
        self.returned: list[Value] = []
        """What the program returns besides the loss."""

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

    def run(self, name: str, inputs: list[Value], targets: list[Value], with_outputs: bool = False) -> Imported:
        """``with_outputs``: the program returns more than the loss."""
        nodes = list(self.program.graph.nodes)
        self.builder.batch = self.batch
        self._placeholders([n for n in nodes if n.op == "placeholder"], [*inputs, *targets])
        for node in nodes:
            if node.op == "call_function":
                self.env[node] = self._visit(node)
        loss, updates, counters = self._outputs(next(n for n in nodes if n.op == "output"), with_outputs)
        drafts = self.builder.drafts
        graph, leaves = assemble(
            name, drafts, loss, [*inputs, *targets], updates, counters, self.tracing, self.returned
        )
        folded = {v.name: v.folded for v in leaves if isinstance(v, Constant)}
        names = tuple(v.name for v in inputs), tuple(v.name for v in targets)
        # Kinds have constants of their own: where a random draw happens, the places that a mask selects.
        others = {v.name: v.data for v in leaves if v.kind == "constant" and not isinstance(v, Constant)}
        values = Constants(folded, {name: x for name, x in others.items() if x is not None})
        derived = {name: x for name, x in folded.items() if sources(x)}
        return Imported(graph, values, *names, derived, outputs=tuple(value.name for value in self.returned))

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
        changed = (*signature.buffers_to_mutate.values(), *self.blocks.mutated, *(f"model.{n}" for n in self.changed))
        mutated = {id(named.get(name)) for name in changed}
        values: dict[str, Value] = {}
        named_nodes: dict[int, list[torch.fx.Node]] = {}
        for node in nodes:
            if (named_tensor := named.get(specs[node.name].target or "")) is not None:
                named_nodes.setdefault(id(named_tensor), []).append(node)
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
                if own not in values:
                    where: Kind = "parameter" if kind == "PARAMETER" else "buffer"
                    gates = gate_count(named_nodes[id(tensor)]) if kind == "PARAMETER" else 0
                    values[own] = _value(tensor, where, own, kind == "PARAMETER" and tensor.requires_grad, gates)
                self.buffers[target] = values[own]
                fixed = kind == "BUFFER" and id(tensor) not in mutated
                self.env[node] = self.folder.leaf(tensor.detach(), values[own]) if fixed else values[own]
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
        if _only_checked(node):
            return None
        if not isinstance(target, torch._ops.OpOverload):
            raise b.error(
                "is a higher-order operator of torch, which has no place in a static graph",
                outside="turn off what calls it, gradient checkpointing for example, before importing.",
            )
        if target._schema.name in ("aten::item", "aten::_local_scalar_dense"):
            raise b.error(
                "makes a number of a tensor's value, and another operator reads it; graphs are static",
                "Keep it a tensor: compute with x.max(), not with x.max().item().",
                outside="choose another implementation in the model's configuration.",
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
        args, kwargs = self.operands.of(target, args, kwargs)
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

    def _outputs(self, output: torch.fx.Node, with_outputs: bool) -> tuple[Value, dict[Value, Value], list[Value]]:
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
                what, path = kind.lower().split("_mutation")[0].replace("_", " "), target.removeprefix("model.")
                remedy = "Make a new tensor."
                if what == "parameter":
                    remedy = (
                        "Make it a buffer if it is not trained, as an average of other weights (delattr(module, name); "
                        "module.register_buffer(name, tensor)), or change it after the optimizer's step."
                    )
                raise ImportModelError(f"the training step changes a {what} in place, {path!r}", remedy)
        if with_outputs:
            self.returned = [self._operand(node) for node in losses[1:]]
        elif len(losses) != 1 or not isinstance(losses[0], torch.fx.Node):
            what = f"{len(losses)} values" if len(losses) != 1 else f"a {type(losses[0]).__name__}"
            scalars = [
                k for k, node in enumerate(losses)
                if isinstance(node, torch.fx.Node) and isinstance(x := node.meta["val"], torch.Tensor)
                if not x.dim() and x.is_floating_point()
            ]  # fmt: skip
            choice = f"loss=lambda output: output[{scalars[0]}]" if len(scalars) == 1 else "loss=..."
            raise ImportModelError(
                f"the training step must return one tensor, the loss, but returns {what}. "
                f"Give {choice}, or wrap the model in a module whose forward returns the loss alone."
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
        loss = self._operand(losses[0])
        return loss, {} if with_outputs else self._stored(loss, updates), counters

    def _stored(self, loss: Value, updates: dict[Value, Value]) -> dict[Value, Value]:
        """The new values of buffers; ranks store what their operators read, so one copies what no other reads, such
        as a vector of a spectral norm that begins anew in each step and serves in evaluation."""
        read = {v for draft in ancestors(self.builder.drafts, [loss, *updates.values()]) for v in draft.inputs}
        for buffer, after in updates.items():
            if buffer not in read:
                self.builder.module = buffer.name.rpartition(".")[0]
                updates[buffer] = pointwise(self.builder, "copy.default", (buffer, after))
        return updates

    def _change(self, target: str, node: torch.fx.Node) -> None:
        """The buffer ``target`` becomes ``node``."""
        buffer = self.buffers[target]
        counted = self._counts(node, buffer)
        self.changes[target] = (buffer if counted else self._operand(node), counted)

    def _operand(self, node: torch.fx.Node) -> Value:
        entry = self.env[node]
        value: Value = self.operands.whole(entry) if isinstance(entry, Folded) else entry
        return value

    def _counts(self, node: torch.fx.Node, buffer: Value) -> bool:
        """Whether the node is ``buffer + 1`` for an integer scalar buffer, and nothing computes with either."""
        operands = (node, *node.all_input_nodes)
        return (
            buffer.shape == ()
            and buffer.dtype.startswith("int")
            and str(node.target).startswith("aten.add.")
            and self.env.get(node.args[0]) is buffer
            and node.args[1:] == (1,)
            and all(_is_kept(user) for operand in operands for user in operand.users if user is not node)
        )
