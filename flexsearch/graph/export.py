"""Trace a training step by ``torch.export`` into a functional program whose operators are still whole."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flexsearch.errors import FlexsearchError, ImportModelError
from flexsearch.graph import repeats
from flexsearch.graph.assigned import Assigned, Following, Switching
from flexsearch.graph.blocks import NO_BLOCKS, Blocks, EntangledError, check_aliases, find_blocks
from flexsearch.graph.checks import Checks, is_about_values, without_checks_of_matrices
from flexsearch.graph.decompose import decompositions
from flexsearch.graph.experts import experts_by_token
from flexsearch.graph.flex import drop_block_masks, traceable_attention, write_out_flex_attention
from flexsearch.graph.losses import traceable_losses
from flexsearch.graph.prepare import OTHERWISE, own_loss, switches
from flexsearch.graph.private import export_prints_nothing, tables_quickly
from flexsearch.graph.records import expand_records, restore_records
from flexsearch.graph.refusals import Attributes, Refusing, refuse_hooks, weights_stay
from flexsearch.graph.regions import Detaching, drop_needless_detach, keep_layers
from flexsearch.graph.repeats import Tracer, traced
from flexsearch.graph.stand_ins import StandIns, on_one_device

Loss = Callable[..., Any]
"""Of the model's output, and of targets if there are any: a scalar, or a record whose "loss" is one."""


_TENSOR = object()


class Outputs:
    """What a model returned while it was traced. ``leaves``: of the structure, with a mark where a tensor is; ``spec``:
    how they are nested."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    def trace(self, output: Any) -> list[torch.Tensor]:
        """A scalar that depends on every tensor of the output, and these tensors in order."""
        self.leaves, self.spec = pytree.tree_flatten(expand_records(output))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ImportModelError("the model returns no tensor", "Let its forward return what it predicts.")
        self.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        reals = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
        total = reals[0].detach().float().sum()
        for x in reals[1:]:
            total = total + x.detach().float().sum()
        return [total, *tensors]

    def nested(self, tensors: Sequence[torch.Tensor]) -> Any:
        """These tensors in the structure of the model's output. ``leaves`` says where."""
        rest = iter(tensors)
        return restore_records(
            pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)
        )


class Step(nn.Module):
    """The model and then the loss, as one module; with ``outputs`` the model alone."""

    def __init__(
        self, model: nn.Module, stand_ins: StandIns, loss: Loss | None, outputs: Outputs | None, attributes: Attributes
    ) -> None:  # fmt: skip
        super().__init__()
        self.training, self.stand_ins = model.training, stand_ins
        self.model = model
        self.loss = loss
        self.outputs = outputs
        self.attributes = attributes
        self.assigned = Assigned(model, attributes.holders)
        self.tracer: Tracer | None = None
        self.checks = Checks()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Any:
        following, switching = Following((args, kwargs, targets)), Switching(self.tracer is None)
        checks = self.checks if self.checks.needed else nullcontext()
        self.assigned.start()
        try:
            with Detaching(), Refusing(), following, switching, weights_stay(), checks:
                if self.tracer is not None:
                    self.tracer.start()
                result = self._result(args, kwargs, targets)
                switching.settle()
                self.assigned.settle(following)
                self.attributes.note(self.assigned.states)
                return result
        finally:
            self.assigned.put_back()

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.outputs is not None:
            return self.outputs.trace(output)
        if self.loss is None:
            return own_loss(output)
        return own_loss(self.loss(output) if targets is None else self.loss(output, targets))


_TRIES = 4
"""Traces before blocks are no longer looked for."""


def export_step(
    model: nn.Module,
    loss: Loss | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Any,
    outputs: Outputs | None,
    attributes: Attributes,
) -> tuple[torch.export.ExportedProgram, Blocks]:
    """The functional program of ``loss(model(*args, **kwargs), targets)``, and the blocks that stand in it only once.

    With ``outputs`` it returns what the model returns (``Outputs.trace``), and there is no loss. In-place operators and
    views are gone; so are checks of values (``graph.checks``). What a call changes of ``attributes`` is noted there.
    Raises ImportModelError with the line of the user's code at which tracing failed.
    """
    if outputs is None:
        refuse_hooks(model)
    try:
        with (
            _quiet(),
            torch.enable_grad(),
            without_checks_of_matrices(),
            traceable_losses(),
            traceable_attention(),
            experts_by_token(model),
            on_one_device(model) as stand_ins,
        ):
            step, inputs = Step(model, stand_ins, loss, outputs, attributes), stand_ins.of((args, kwargs, targets))
            while True:
                try:
                    return _with_blocks(step, inputs) or (
                        _functional(step, _export(step, *inputs)),
                        NO_BLOCKS,
                    )
                except Exception as error:
                    if not step.checks.settle(error):
                        raise
    except FlexsearchError:
        raise
    except Exception as error:  # torch.export raises whatever the model does, and many types of its own
        raise _untraceable(model, error) from error


def _export(step: Step, *inputs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(step, inputs, strict=False)


def _functional(step: Step, program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    _share(program, step)
    keep_layers(program)
    flexible = write_out_flex_attention(program)
    with tables_quickly():  # it makes the program functional, too
        functional: torch.export.ExportedProgram = program.run_decompositions(decompositions())
    drop_needless_detach(functional)
    if flexible:
        drop_block_masks(functional)
    step.stand_ins.restore(functional)
    return functional


def _with_blocks(step: Step, inputs: tuple[Any, ...]) -> tuple[torch.export.ExportedProgram, Blocks] | None:
    """As :func:`export_step`, with stand-ins for the calls of blocks that repeat; None if there are none.

    Structures that turn out to be entangled with the rest are traced as they are in the next try. Whatever fails is
    tried again without stand-ins, whose error is then the one to tell.
    """
    excluded: frozenset[int] = frozenset()
    for _ in range(_TRIES):
        try:
            with traced(step, excluded) as tracer:
                if not tracer.paths:
                    return None
                step.tracer = tracer
                program = _export(step, *inputs)
            check_aliases(program, tracer)
            functional = _functional(step, program)
            return functional, find_blocks(functional, tracer)
        except EntangledError as error:
            excluded |= error.structures
        except Exception:  # of the model or of torch, which stand-ins may have caused
            return None
        finally:
            step.tracer = None
    return None


_NESTED_GRADIENTS = "fake tensor in the exported program constant", "no attribute 'constant'", "of TensorWrapper"
"""In errors of torch about what it cannot follow: ``torch.autograd.grad`` and ``.data``; the last two of
``torch.func.grad``."""


def _untraceable(model: nn.Module, error: Exception) -> ImportModelError:
    """What to tell about an error while tracing: the layer and line, and what can be done there or from outside."""
    frame = _user_frame(error)
    layer = _layer(model, error)
    where = f" in layer {layer!r}" * bool(layer) + (f" ({short_path(frame[0])}:{frame[1]})" if frame else "")
    owner = library(frame[0]) if frame else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    reason = reason if reason.endswith((".", "!", "?")) else f"{reason}."
    if is_about_values(error):
        outside = (
            f"The line is {owner}'s: {switches(model) or OTHERWISE}, or import the model in evaluation mode "
            "(model.eval())."
        )
        inside = "A graph is static: use torch.where or masks instead of Python conditions on tensors."
        if any("/torch/distributions/" in f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__)):
            inside = "Pass validate_args=False to the distribution, which checks its arguments."
        return ImportModelError(
            f"the model decides by the values of tensors{where}: {reason}", outside if owner else inside
        )
    if _packed(error):
        return ImportModelError(
            f"the model packs sequences{where}, whose shape then depends on their lengths",
            "Give the recurrent layer the padded tensor, and leave padding out of the loss (ignore_index, or a mask).",
        )
    if any(words in str(error) for words in _NESTED_GRADIENTS):
        return ImportModelError(
            "the step uses values in a way that no trace follows: a gradient inside of it (torch.autograd.grad, "
            "torch.func.grad), or the .data of a tensor",
            "Leave that out of the model and the loss; detach() takes the place of .data. What is not trained, as an "
            "average of weights, is a buffer, which may be changed in place under torch.no_grad(); other weights are "
            "changed after the optimizer's step.",
        )
    outside = (
        f"The line is {owner}'s: check that the batch is one that the model takes; else try another implementation in "
        "its configuration (for attention: attn_implementation), or evaluation mode (model.eval())."
    )
    inside = "Write torch.linalg.pinv(A) @ B, for least squares." if "linalg_lstsq" in reason else ""
    return ImportModelError(
        f"the model cannot be traced{where}: {type(error).__name__}: {reason}", outside if owner else inside
    )


def _packed(error: BaseException) -> bool:
    """Whether an error while tracing is about a PackedSequence."""
    packed = nn.utils.rnn.PackedSequence
    return any(isinstance(x, packed) for f, _ in traceback.walk_tb(error.__traceback__) for x in f.f_locals.values())


def _layer(model: nn.Module, error: BaseException) -> str:
    """Name of the innermost module of ``model`` that was called when the error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for f in reversed(frames) if (name := names.get(id(f.f_locals.get("self")), ""))), "")


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export warns and logs about its own inner life, and prints graphs that it could not finish."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch.fx", "torch")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    with warnings.catch_warnings(), export_prints_nothing():
        warnings.simplefilter("ignore")
        for logger in levels:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)


def _user_frame(error: BaseException) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of a traceback that is neither torch's nor ours."""
    here = str(Path(__file__).resolve().parent)
    frames = [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and not frame.filename.startswith((here, "<"))
    ]
    return frames[-1] if frames else None


def library(path: str) -> str:
    """The installed package that a file belongs to ("transformers"); empty for a file of the user's own."""
    parts = Path(path).parts
    places = [k for k, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return parts[places[-1] + 1].removesuffix(".py") if places and places[-1] + 1 < len(parts) else ""


def short_path(path: str) -> str:
    """The last two components: enough to recognise a file, and the same on every machine."""
    return "/".join(Path(path).parts[-2:])


_OURS = (__file__, repeats.__file__)


def source_line(stack_trace: str | None) -> tuple[str, str]:
    """From a node's stack trace, of the innermost frame that is neither torch's nor ours: ``file:line``, and the
    library that the file belongs to (empty: the user's own)."""
    frames = []
    for line in (stack_trace or "").splitlines():
        if line.strip().startswith('File "') and '", line ' in line:
            path, _, rest = line.strip()[len('File "') :].partition('", line ')
            frames.append((path, rest.split(",")[0]))
    own = [f for f in frames if "/torch/" not in f[0] and f[0] not in _OURS and not f[0].startswith("<")]
    return (f"{short_path(own[-1][0])}:{own[-1][1]}", library(own[-1][0])) if own else ("", "")


def _share(program: torch.export.ExportedProgram, step: nn.Module) -> None:
    """Use a buffer of several names (those of a layer used twice) under the first of them.

    Making the program functional fails on inputs that alias each other and are changed, so the others become others.
    """
    specs = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    named = dict(step.named_buffers(remove_duplicate=False))
    first: dict[int, torch.fx.Node] = {}
    for node in program.graph.nodes:
        target = specs.get(node.name) if node.op == "placeholder" else None
        if target is None or target not in named:
            continue
        original = first.setdefault(id(named[target]), node)
        if original is not node:
            node.replace_all_uses_with(original)
            store = program.state_dict if target in program.state_dict else program.constants
            store[target] = torch.empty_like(named[target])
    program.graph_module.recompile()
