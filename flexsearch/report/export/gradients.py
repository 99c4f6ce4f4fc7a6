"""What the ranks of a pipeline do to the gradients of all stages together."""

from __future__ import annotations

from flexsearch.report.export.file import File, literal


def write_tied(file: File) -> None:
    """``add_tied``."""
    file.needs("", "torch.distributed as dist")
    file.needs("torch.distributed.tensor", "DTensor")
    tied = "".join(f"    {literal(weight)},\n" for weight in file.plan.stages.tied)
    file.constants.append(f"TIED = [  # weights that several stages read, by stage\n{tied}]")
    file.functions.append(
        "@cache\n"
        "def ranks_with(stages: tuple[int, ...]) -> dist.ProcessGroup:\n"
        '    """The ranks of this pipeline that have one of these stages."""\n'
        f"    pipelines = mesh().mesh.movedim({len(file.data)}, -1).reshape(-1, len(HELD)).tolist()\n"
        "    inside = [rank for rank, held in enumerate(HELD) if set(held) & set(stages)]\n"
        "    groups = [[pipeline[rank] for rank in inside] for pipeline in pipelines]\n"
        "    return dist.new_subgroups_by_enumeration(groups)[0]\n\n\n"
        "def untie(model: nn.Module, held: tuple[int, ...]) -> None:\n"
        '    """Give stages of this rank that read the same weight one each."""\n'
        "    for names in TIED:\n"
        "        for stage in [stage for stage in held if stage in names][1:]:\n"
        "            weight = model.get_parameter(names[stage])\n"
        "            own = nn.Parameter(weight.detach().clone(), weight.requires_grad)\n"
        "            for module in (m for name in STAGES[stage] for m in model.get_submodule(name).modules()):\n"
        "                for name, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:\n"
        "                    if x is weight:\n"
        "                        setattr(module, name, own)\n\n\n"
        "def add_tied(parts: nn.ModuleList) -> None:\n"
        '    """Each of the stages that read a weight has one of its own, and the sum of their gradients."""\n'
        "    for names in TIED:\n"
        "        group, grads = ranks_with(tuple(names)), []\n"
        "        for part in parts:\n"
        "            if part.stage in names:\n"
        "                weight = part.model.get_parameter(names[part.stage])\n"
        "                if isinstance(weight, DTensor):  # gradients may lie otherwise than their weights\n"
        "                    weight.grad = weight.grad.redistribute(placements=weight.placements)\n"
        "                grads.append(weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad)\n"
        "        if grads:\n"
        "            dist.all_reduce(total := torch.stack(grads).sum(0), group=group)\n"
        "        for grad in grads:\n"
        "            grad.copy_(total)"
    )


def write_clipping(file: File) -> None:
    """``clip_grad_norm_``. One norm of all gradients that lie alike, so that few communications are needed."""
    file.needs("", "torch", "torch.distributed as dist")
    file.needs("torch.distributed.tensor", "DTensor")
    earlier, unless = "", ""
    if file.plan.stages.tied:
        earlier = (
            "        tied = [names[part.stage] for names in TIED if part.stage in names and part.stage > min(names)]\n"
            "        in_earlier_stage = {id(part.model.get_parameter(name)) for name in tied}\n"
        )
        unless = " and id(weight) not in in_earlier_stage"
    file.functions.append(
        "def clip_grad_norm_(parts: nn.ModuleList, max_norm: float) -> Tensor:\n"
        '    """Make the norm of the whole model\'s gradient at most this; what it was. PyTorch\'s own sees the parts\n'
        '    of one rank alone."""\n'
        "    alike: dict[object, list[Tensor]] = {}\n"
        "    for part in parts:\n"
        f"{earlier}"
        "        for weight in part.model.parameters():\n"
        f"            if (grad := weight.grad) is not None{unless}:\n"
        "                layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None\n"
        "                alike.setdefault(layout, []).append(grad)\n"
        f'    square = torch.zeros((), device="{file.device}", dtype=torch.float64)\n'
        "    for grads in alike.values():\n"
        "        norm = nn.utils.get_total_norm(grads)\n"
        "        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2\n"
        '    dist.all_reduce(square, group=mesh().get_group("pipeline"))\n'
        "    norm = square.sqrt()\n"
        "    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)\n"
        "    for weight in parts.parameters():\n"
        "        if weight.grad is not None:\n"
        "            (weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad).mul_(factor)\n"
        "    return norm"
    )
