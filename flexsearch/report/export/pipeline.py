"""The parts of a model that the stages of a pipeline run, and what makes them: the model with stand-ins for the modules
of other stages."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Final

from flexsearch.report.export.file import File, literal, names_text
from flexsearch.report.export.gradients import write_clipping, write_tied
from flexsearch.strategy.native import SINGLE

SCHEDULES: Final = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS", "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zero-bubble-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV",
}  # fmt: skip
"""Classes of ``torch.distributed.pipelining.schedules``."""

STAND_INS: Final = '''
    @cache
    def fake() -> FakeTensorMode:
        """Tensors without values."""
        return FakeTensorMode(allow_non_fake_inputs=True)


    def without_values(module: nn.Module) -> nn.Module:
        weights = {id(x): fake().from_tensor(x).requires_grad_(x.is_floating_point()) for x in module.parameters()}
        return deepcopy(module, weights | {id(x): fake().from_tensor(x) for x in module.buffers()})


    class Absent(nn.Module):
        """In the place of a module, with its attributes; its weights have no values."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            # In a tuple, the module is no part of this one.
            self.instead_of = (without_values(module),)

        def __getattr__(self, name: str) -> object:
            return getattr(self.instead_of[0], name)


    class Passing(dict[str, list[Tensor]]):
        """By module, what it returns that passes to other stages. ``received``: by this stage, in order."""

        received: list[Tensor]

        def of(self, name: str, count: int) -> list[Tensor]:
            if name not in self:
                own, self.received = self.received[:count], self.received[count:]
                self[name] = [x.view_as(x) for x in own]
            return self[name]


    class Earlier(Absent):
        """In the place of a module of an earlier stage: it returns what this stage received of it. Where the model
        computes with more that the module returns, this stage needs nothing of that, and gets NaN."""

        def __init__(self, module: nn.Module, name: str, stage: int, passing: Passing) -> None:
            super().__init__(module)
            self.name, self.passing, self.received = name, passing, name in ENTERING[stage]
            self.returned = Returned(name, self.instead_of[0])

        def forward(self, *args: object, **named: object) -> object:
            given, output = self.returned.of(args, named)
            actual = dict(zip(map(id, given), tree_leaves((args, named))))  # it may return what it is given
            if self.received:
                passed = handed_on(self.name, given, output)
                actual.update(zip(map(id, passed), self.passing.of(self.name, len(passed))))

            def value(x: Tensor) -> Tensor:
                return real(x).clone() if self.name in WRITABLE else real(x)

            def real(x: Tensor) -> Tensor:
                if id(x) in actual:
                    return actual[id(x)]
                if not x.is_floating_point():
                    raise TypeError(f"{self.name} returns {x.dtype}; in a pipeline compute that outside of it")
                nan = torch.full((), float("nan"), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
                return nan.expand(x.shape)

            return tree_map_only(Tensor, value, output)


    class Returned:
        """What a module returns, without values."""

        def __init__(self, name: str, module: nn.Module) -> None:
            self.name, self.module = name, module
            self.by_shapes: dict[object, tuple[list[object], object]] = {}

        def of(self, args: tuple[object, ...], named: dict[str, object]) -> tuple[list[object], object]:
            """The leaves of its arguments, and what it returns."""
            given, spec = tree_flatten((args, named))
            shapes = tuple(x.shape if isinstance(x, Tensor) else None for x in given)
            if shapes not in self.by_shapes:
                with fake(), torch.enable_grad():
                    like = [self.like(x) if isinstance(x, Tensor) else x for x in given]
                    args, named = tree_unflatten(like, spec)
                    try:
                        self.by_shapes[shapes] = like, self.module(*args, **named)
                    except (DataDependentOutputException, DynamicOutputShapeException) as error:
                        raise TypeError(
                            f"the shapes of what {self.name} computes depend on values; in a pipeline they must not "
                            '(transformers: model.set_experts_implementation("grouped_mm"))'
                        ) from error
            return self.by_shapes[shapes]

        def like(self, x: Tensor) -> Tensor:
            weights = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), x.dtype)
            dtype = weights if x.is_floating_point() else x.dtype
            return torch.empty(x.shape, dtype=dtype, device=x.device, requires_grad=x.requires_grad)


    def handed_on(name: str, given: list[object], output: object) -> list[Tensor]:
        """What other stages get of what a module returns: what depends on no weight, and those of the other tensors of
        which the plan says how many dimensions, or sizes, they have."""
        tensors = {id(x): x for x in tree_leaves(output) if isinstance(x, Tensor)}
        for x in given:
            tensors.pop(id(x), None)
        computed, sizes = [x for x in tensors.values() if x.requires_grad], HANDED[name]
        for alike in (
            lambda x: True,
            lambda x: x.dim() - 1 in map(len, sizes),
            lambda x: tuple(x.shape[1:]) in sizes,
        ):
            if len(found := [x for x in computed if alike(x)]) == len(sizes):
                return [x for x in tensors.values() if not x.requires_grad or id(x) in map(id, found)]
        shapes = [tuple(x.shape) for x in computed]
        raise TypeError(
            f"{name} returns a {type(output).__name__} with tensors of {shapes}; in a pipeline make it return those "
            f"that other stages read, of {list(sizes)} for each sample"
        )


    class Later(Absent):
        """In the place of a module of a later stage: there is nothing more to compute."""

        def forward(self, *args: object, **named: object) -> Tensor:
            raise Computed


    class Computed(Exception):
        """A stage has computed what it hands on."""


    class HandOn(Absent):
        """In the place of a module that changes nothing: its first argument."""

        def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
            return next(iter((*args, *named.values())))
'''
TAKE_APART: Final = '''
    def plain(module: nn.Module) -> bool:
        """Whether it is a module of PyTorch without weights or parts."""
        own = type(module).__module__.startswith("torch.nn.")
        return own and not [*module.children(), *module.parameters(), *module.buffers()]


    def take_apart(model: nn.Module, stage: int, passing: Passing) -> nn.Module:
        """The model with the modules of one stage alone; these are not copied. Plain modules that the plan does not
        name, as they change nothing at its sizes or are computed with the loss, are left in one stage, too; those that
        several stages use, in all. A weight that is, or has another name, outside of the modules stays in the stages
        that read it; in others it is NaN, and no parameter, so that each weight that is saved has been trained."""
        stage_of = {name: k for k, names in enumerate(STAGES) for name in names}
        new: dict[int, nn.Module] = {}
        at, inside = 0, tuple(f"{name}." for name in stage_of)
        for name, module in model.named_modules():
            at = stage_of.get(name, at)
            if name in stage_of and at != stage:
                new[id(module)] = Earlier(module, name, stage, passing) if at < stage else Later(module)
            elif name in stage_of or not name.startswith(inside) and plain(module) and name not in SHARED:
                new[id(module)] = module if at == stage else HandOn(module)
        weights = [{id(x): x for name in names for x in model.get_submodule(name).parameters()} for names in STAGES]
        part = deepcopy(model, weights[stage] | new)
        elsewhere = {i for of in weights for i in of} - weights[stage].keys()
        elsewhere |= {id(model.get_parameter(name)) for name, home in OUTSIDE.items() if home != stage}
        for name, x in model.named_parameters(remove_duplicate=False):
            if not name.startswith(inside) and id(x) in elsewhere:
                owner, _, last = name.rpartition(".")
                delattr(part.get_submodule(owner), last)
                nan = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(x.shape)
                setattr(part.get_submodule(owner), last, nan.requires_grad_(x.requires_grad))
        return part
'''
PART: Final = '''
    def sendable(x: Tensor) -> Tensor:
        """A tensor of its own: schedules that split backward passes detach what was sent, which views cannot be."""
        return x.clone(memory_format=torch.contiguous_format) if x._is_view() else x.contiguous()


    class Part(nn.Module):
        """The model as one stage runs it: its own code, on the whole batch, with stand-ins for the modules of other
        stages. What it computes between modules (masks, positions) is computed in every stage."""

        def __init__(self, model: nn.Module, stage: int) -> None:
            super().__init__()
            self.stage, self.passing = stage, Passing()
            self.model = take_apart(model, stage, self.passing)
            following = ENTERING[stage + 1] if stage + 1 < len(STAGES) else []
            self.returned = {
                name: Returned(name, without_values(model.get_submodule(name)))
                for name in STAGES[stage] if name in following
            }

        def forward(self, *received: Tensor, inputs: tuple[Tensor, ...] = (), **batch: object):
            self.passing.received = list(received)
            try:
                output = self.model(*inputs, **batch)
                passed = OUTPUT
            except Computed:
                passed = tuple(sendable(x) for name in ENTERING[self.stage + 1] for x in self.passing[name])
            finally:
                self.passing.clear()
            if left := len(self.passing.received):
                raise RuntimeError(f"stage {self.stage} received {left} tensors more than it has a place for")
            return passed


    def passed_on(part: Part) -> None:
        """Note what the modules of a part return: the next stages get that."""

        def note(module: nn.Module, args: tuple[object, ...], named: dict[str, object], output: object, of: Returned):
            given, returned = of.of(args, named)
            passed = set(map(id, handed_on(of.name, given, returned)))
            pairs = zip(tree_leaves(returned), tree_leaves(output), strict=True)
            part.passing[of.name] = list({id(x): y for x, y in pairs if id(x) in passed}.values())
            return tree_map_only(Tensor, torch.clone, output) if of.name in WRITABLE else None

        for name, of in part.returned.items():
            part.model.get_submodule(name).register_forward_hook(partial(note, of=of), with_kwargs=True)
'''
HERE: Final = '''
    def here(model: nn.Module, names: list[str]) -> list[str]:
        """Those of the modules that a part of the model has."""
        gone = [name for name, module in model.named_modules() if isinstance(module, Absent)]
        return [name for name in names if not any(f"{name}.".startswith(f"{g}.") for g in gone)]
'''


def write_pipeline(file: File) -> str:
    """Write what a rank of a pipeline needs; the text of ``apply_plan``."""
    plan, strategy = file.plan, file.strategy
    kind = SCHEDULES[strategy.schedule if strategy.microbatches > 1 or max(map(len, plan.held)) > 1 else "gpipe"]
    _parts(file)
    _forward_backward(file)
    file.needs("", "torch")
    file.needs("torch.distributed.pipelining", "PipelineStage")
    file.needs("torch.distributed.pipelining.schedules", kind)
    stages = "stages[0]" if kind in (SCHEDULES[name] for name in SINGLE) else "stages"
    loss, takes = "loss", ", loss: Callable[..., Tensor]"
    if file.own_loss:
        loss, takes = "own_loss", ""
        file.functions.append(
            'def own_loss(output: Tensor, target: Tensor) -> Tensor:\n    """The model computes its loss itself."""\n'
            "    return output.mean()"
        )
    else:
        file.needs("collections.abc", "Callable")
    untied = "    untie(model, held)\n" if plan.stages.tied else ""
    return (
        f"def apply_plan(model: nn.Module{takes}):\n"
        '    """This rank\'s parts of the model, as it runs them, and the schedule that does."""\n'
        '    held, group = HELD[mesh().get_local_rank("pipeline")], mesh().get_group("pipeline")\n'
        f"{untied}"
        "    parts = nn.ModuleList([Part(model, stage) for stage in held])\n"
        "    for part in parts:\n"
        "        parallel(part)\n"
        f'    device = torch.device("{file.device}")\n'
        "    stages = [PipelineStage(p, p.stage, len(STAGES), device, group=group) for p in parts]\n"
        f"    # Schedule {strategy.schedule}: {strategy.microbatches} microbatches.\n"
        f"    return parts, {kind}({stages}, n_microbatches={strategy.microbatches}, loss_fn={loss})"
    )


def _parts(file: File) -> None:
    """The modules of each stage, and what takes a model apart."""
    plan = file.plan
    file.needs("copy", "deepcopy")
    file.needs("functools", "partial")
    file.needs("torch._subclasses", "FakeTensorMode")
    file.needs("torch._subclasses.fake_tensor", "DataDependentOutputException", "DynamicOutputShapeException")
    file.needs("torch.utils._pytree", "tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten")
    stages, entering = (
        "".join(f"    {names_text(names)},\n" for names in names_of_stages)
        for names_of_stages in (plan.stages.modules, plan.stages.entering)
    )
    file.constants += [
        f"STAGES = [\n{stages}]",
        f"ENTERING = [  # by stage: the modules whose outputs it receives\n{entering}]",
        f"HANDED = {literal(plan.stages.handed)}  # sizes of a sample of each of their tensors that pass",
        f"SHARED = {names_text(plan.stages.shared)}  # modules that several stages use",
        f"WRITABLE = {names_text(plan.stages.writable)}  # the model computes with what they return",
        f"OUTSIDE = {literal(plan.stages.outside)}  # weights in no module of a stage, and the stage that reads each",
        f"HELD = {literal(plan.held)}  # stages of each rank",
    ]
    output = 'output["loss"].reshape(1)' if file.own_loss else "output"
    for text in (STAND_INS, TAKE_APART, PART.replace("OUTPUT", output)):
        file.functions.append(dedent(text).strip())
    if plan.tensor > 1 or plan.data > 1 or file.options.recompute != "none" or not file.precise:
        file.functions.append(dedent(HERE).strip())
    layers = indent("\n".join(["model = part.model", *file.layers, "passed_on(part)"]), "    ")
    file.functions.append(
        f'def parallel(part: Part) -> None:\n    """Make a part of the model what this rank runs."""\n{layers}'
    )


def _forward_backward(file: File) -> None:
    """``forward_backward``, and what is done to gradients of all stages together."""
    if file.own_loss:
        takes, arguments = "batch: dict[str, Tensor]", f"**batch, target=torch.zeros({file.strategy.microbatches})"
    else:
        takes, arguments = "inputs: tuple[Tensor, ...], target: Tensor", "inputs=inputs, target=target"
    lines = ["losses: list[Tensor] = []", f"schedule.step({arguments}, losses=losses)"]
    if file.plan.stages.tied:
        write_tied(file)
        lines.append("add_tied(parts)")
    write_clipping(file)
    file.functions.append(
        f"def forward_backward(parts: nn.ModuleList, schedule: object, {takes}) -> Tensor | None:\n"
        '    """Forward and backward pass of this rank\'s samples in microbatches; their mean loss, where the last\n'
        '    stage is. Gradients are whole after it: to add those of several batches, use more microbatches."""\n'
        + indent("\n".join([*lines, "return torch.stack(losses).mean().detach() if losses else None"]), "    ")
    )
