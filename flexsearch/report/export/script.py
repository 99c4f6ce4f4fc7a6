"""A plan as a file of ordinary PyTorch that a training script imports. Writing it does not import torch."""

from __future__ import annotations

from copy import copy
from textwrap import indent, wrap
from typing import Final

from flexsearch.graph import OperatorGraph
from flexsearch.report.export.file import WIDTH, File, literal
from flexsearch.report.export.layers import write_layers
from flexsearch.report.export.pipeline import write_pipeline
from flexsearch.report.units import seconds
from flexsearch.simulate.staged import step_of_strategy
from flexsearch.strategy import States, Strategy
from flexsearch.strategy.native import torch_plan

_NOTABLE: Final = 0.002
"""Share of a step by which all-reduces must change its predicted time for a file to say so."""


def torch_file(strategy: Strategy, graph: OperatorGraph, note: str | None = None) -> str:
    """The text of a file with ``apply_plan``. ``note``: what ``summing_note`` says. Raises StrategyError with the first
    operator or option of the plan that PyTorch's parts cannot express."""
    plan = torch_plan(strategy, graph)
    file = File(graph, strategy, plan, note=summing_note(strategy, graph) if note is None else note)
    _mesh(file)
    write_layers(file)
    if plan.pipeline > 1:
        return file.text(_head(file), write_pipeline(file))
    if strategy.microbatches > 1:
        _microbatches(file)
    layers = indent("\n".join([*file.layers, "return model"]), "    ")
    doc = '    """The model as this rank runs it. Call it before the optimizer is made."""\n'
    return file.text(_head(file), f"def apply_plan(model: nn.Module) -> nn.Module:\n{doc}{layers}")


def summing_note(strategy: Strategy, graph: OperatorGraph) -> str:
    """That replicas of whole weights sum gradients by all-reduces in PyTorch, where that is not as fast as what the
    plan says; empty if it is. Raises StrategyError as ``torch_file``."""
    plan, options = torch_plan(strategy, graph), strategy.options
    if plan.data == 1 or plan.states > States.OPTIMIZER or options.synchronise_by == "all-reduce":
        return ""
    other = copy(strategy)
    other.options = options.model_copy(update={"synchronise_by": "all-reduce"})
    own_s, other_s = (step_of_strategy(graph, each).makespan_s for each in (strategy, other))
    if abs(other_s / own_s - 1.0) < _NOTABLE:
        return ""
    return (
        f"PyTorch sums the gradients of replicas by all-reduces, whatever the plan says (synchronise_by: "
        f"{options.synchronise_by}): {seconds(other_s)} a step by the simulator, instead of {seconds(own_s)}."
    )


def _head(file: File) -> str:
    plan, strategy = file.plan, file.strategy
    sizes = (("data", plan.data), ("pipeline", plan.pipeline), ("tensor", plan.tensor))
    layout = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"
    lines = [f"{strategy.graph.name} on {strategy.cluster.name}: {layout}.", ""]
    if strategy.prediction is not None:
        time_s = strategy.prediction.iteration_s
        lines += [f"Predicted: {seconds(time_s)} a step with a global batch of {file.graph.batch}.", ""]
    lines += [*wrap(file.note, WIDTH), ""] if file.note else []
    lines += ["Start one process for each device; rank r is device r of the plan. In the training script:", ""]
    where = "model.cuda()" if file.device == "cuda" else "model"
    use = ["dist.init_process_group()", f"model = apply_plan({where})"]
    step = "loss(model(share(inputs)), share(target)).backward()"
    if plan.pipeline > 1:
        loss = "" if file.own_loss else ", loss"
        use[1] = f"parts, schedule = apply_plan({where}{loss})  # the optimizer takes parts.parameters()"
    if file.own_loss:
        use.append("own = {name: share(x) for name, x in batch.items()}")
        step = 'model(**own)["loss"].backward()' if strategy.microbatches == 1 else "forward_backward(model, own)"
    elif strategy.microbatches > 1:
        step = "forward_backward(model, loss, (share(inputs),), share(target))"
    if plan.pipeline > 1:
        own = "own" if file.own_loss else "(share(inputs),), share(target)"
        step = f"loss = forward_backward(parts, schedule, {own})  # None where the last stage is not"
    if file.device == "cuda":
        use.insert(0, 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    use.append(step)
    if plan.pipeline > 1:
        use.append("clip_grad_norm_(parts, 1.0)  # if they are clipped: PyTorch's own sees one rank's stages alone")
    lines += [f"    {line}" for line in use]
    lines += ["", "The loss is a mean over samples; gradients are means over replicas and microbatches."]
    if plan.elsewhere:
        count = len(plan.elsewhere)
        what = ", ".join(plan.elsewhere[:3]) + (", ..." if count > 3 else "")
        lines += ["", f"The plan splits some operators without weights otherwise: {what}."]
    return "\n".join([*lines, ""])


def _mesh(file: File) -> None:
    """``mesh`` and ``share``."""
    plan = file.plan
    inner = [(name, size) for name, size in (("pipeline", plan.pipeline), ("tensor", plan.tensor)) if size > 1]
    names, shape = (tuple(column) for column in zip(*file.data, *inner, strict=True))
    order = [device for stages in zip(*plan.mesh, strict=True) for row in stages for device in row]
    file.needs("torch", "Tensor", "nn")
    file.needs("functools", "cache")
    file.needs("torch.distributed.device_mesh", "DeviceMesh")
    if order == sorted(order):
        file.needs("torch.distributed.device_mesh", "init_device_mesh")
        body = f'    return init_device_mesh("{file.device}", {shape}, mesh_dim_names={literal(names)})'
    else:
        file.needs("", "torch")
        body = f"    ranks = torch.tensor({order}).reshape{shape}\n"
        body += f'    return DeviceMesh("{file.device}", ranks, mesh_dim_names={literal(names)})'
    (outer, _), *parts = file.data
    own = f'mesh().get_local_rank("{outer}")'
    for name, size in parts:
        own += f' * {size} + mesh().get_local_rank("{name}")' if size > 1 else ""
    file.functions += [
        f'@cache\ndef mesh() -> DeviceMesh:\n    """All ranks."""\n{body}',
        'def share(batch: Tensor) -> Tensor:\n    """This rank\'s samples of a global batch."""\n'
        f"    return batch.chunk({plan.data})[{own}]",
    ]


def _microbatches(file: File) -> None:
    """``forward_backward``."""
    count = file.strategy.microbatches
    if file.own_loss:
        takes = "model: nn.Module, batch: dict[str, Tensor]"
        each = f"batches = ({{name: x.chunk({count})[k] for name, x in batch.items()}} for k in range({count}))"
        loop, value = "for k, own in enumerate(batches):", 'model(**own)["loss"]'
    else:
        file.needs("collections.abc", "Callable")
        takes = "model: nn.Module, loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], target: Tensor"
        each = f"samples = zip(*(x.chunk({count}) for x in inputs))"
        loop = f"for k, (own, wanted) in enumerate(zip(samples, target.chunk({count}))):"
        value = "loss(model(*own), wanted)"
    body = [f"value = {value} / {count}", "value.backward()"]
    if file.plan.states <= States.OPTIMIZER and file.plan.data > 1:
        if file.wrapped:
            file.needs("contextlib", "nullcontext")
            body = [f"with nullcontext() if k == {count - 1} else model.no_sync():", *(f"    {b}" for b in body)]
        else:
            body = [f"model.set_requires_gradient_sync(k == {count - 1})", *body]
        body.insert(0, "# Gradients are exchanged once, after the last microbatch.")
    elif file.plan.shards < file.plan.data:
        body.insert(0, f"model.set_requires_all_reduce(k == {count - 1})")
        body.insert(0, "# Those that have the same shard exchange its gradients once, after the last microbatch.")
    file.needs("", "torch")
    file.functions.append(
        f"def forward_backward(\n    {takes}\n) -> Tensor:\n"
        f'    """Forward and backward pass of this rank\'s samples in {count} microbatches; their mean loss."""\n'
        f"    losses = []\n    {each}\n    {loop}\n"
        + indent("\n".join([*body, "losses.append(value.detach())"]), "        ")
        + "\n    return torch.stack(losses).sum()"
    )
