"""A plan as flags of torchtitan and Megatron-LM, whose models have layers of their own: a layout is what they take."""

from __future__ import annotations

from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.sequence import sequence_length
from flexsearch.report.export.pipeline import SCHEDULES
from flexsearch.strategy import States, Strategy
from flexsearch.strategy.native import NativePlan, native_plan

TITAN_SCHEDULES: Final = {kind: name.removeprefix("Schedule") for kind, name in SCHEDULES.items()}
"""As ``torch.distributed.pipelining.schedules.get_schedule_class`` takes them."""
SHARDING: Final = {States.GRADIENTS: "optim_grads", States.WEIGHTS: "optim_grads_params"}
"""Of Megatron-FSDP."""
DTYPES: Final = {"as-is": "float32", "bf16": "bfloat16", "fp16": "float16"}

Flags = list[tuple[str, str]]
"""(flag, value); an empty value is none."""


def torchtitan_flags(strategy: Strategy, graph: OperatorGraph) -> Flags:
    """Flags of torchtitan's ``train.py`` (its ``JobConfig`` since version 0.2). Raises StrategyError with the first
    operator or option that they cannot express."""
    plan, options = native_plan(strategy, graph), strategy.options
    _check_layers(plan, graph, "torchtitan")
    if plan.states == States.OPTIMIZER:
        raise _no("states: optimizer: torchtitan replicates weights or shards them (fully_shard)", "weights or whole")
    if plan.states == States.WHOLE and plan.data > 1 and (plan.pipeline > 1 or plan.tensor > 1):
        raise _no("states: whole: torchtitan replicates weights (DDP) beside no other parallelism", "states weights")
    if options.recompute == "attention" or options.recompute_blocks is not None:
        raise _no("recompute: torchtitan computes whole layers again, all of them", "recompute full or none")
    if options.precision == "fp16":
        raise _no("precision: torchtitan trains in float32 and bfloat16", "precision bf16")
    if options.precision == "bf16" and options.gradients == "as-is":
        raise _no("gradients: torchtitan adds up and sends those of bfloat16 weights in float32", "gradients float32")
    if options.precision == "bf16" and plan.states == States.WHOLE and (plan.pipeline > 1 or plan.tensor > 1):
        raise _no("precision: torchtitan casts through fully_shard, and the weights are whole", "states weights")
    sharded = plan.states != States.WHOLE
    shards = plan.shards if sharded else 1
    share = graph.batch // plan.data
    local = share if plan.pipeline > 1 else share // strategy.microbatches
    flags: Flags = [
        ("--parallelism.data_parallel_replicate_degree", str(plan.data // shards)),
        ("--parallelism.data_parallel_shard_degree", str(shards)),
        ("--parallelism.tensor_parallel_degree", str(plan.tensor)),
        ("--parallelism.pipeline_parallel_degree", str(plan.pipeline)),
    ]
    if sharded:
        again = plan.states == States.WEIGHTS and options.reshard_after_forward
        flags.append(("--parallelism.fsdp_reshard_after_forward", "always" if again else "never"))
    if plan.pipeline > 1:
        layers = _equal_layers(plan)
        flags += [
            ("--parallelism.pipeline_parallel_schedule", TITAN_SCHEDULES[strategy.schedule]),
            ("--parallelism.pipeline_parallel_layers_per_stage", str(layers)),
            ("--parallelism.pipeline_parallel_first_stage_less_layers", "0"),
            ("--parallelism.pipeline_parallel_last_stage_less_layers", "0"),
            ("--parallelism.pipeline_parallel_microbatch_size", str(share // strategy.microbatches)),
        ]
    flags += [
        ("--training.local_batch_size", str(local)),
        ("--training.global_batch_size", str(graph.batch)),
        *_sequence("--training.seq_len", graph),
        ("--training.mixed_precision_param", DTYPES[options.precision]),
        ("--training.mixed_precision_reduce", "float32"),
        ("--activation_checkpoint.mode", options.recompute),
        ("--optimizer.name", _optimizer(strategy, {"adam": "AdamW"}, "torchtitan")),
    ]
    return flags


def megatron_flags(strategy: Strategy, graph: OperatorGraph) -> Flags:
    """Flags of Megatron-LM's ``pretrain_gpt.py`` (``megatron/training/arguments.py``). Raises StrategyError with the
    first operator or option that they cannot express."""
    plan, options = native_plan(strategy, graph), strategy.options
    _check_layers(plan, graph, "Megatron-LM")
    flags: Flags = [
        ("--tensor-model-parallel-size", str(plan.tensor)),
        ("--pipeline-model-parallel-size", str(plan.pipeline)),
    ]
    if plan.pipeline > 1:
        flags += _megatron_pipeline(strategy, plan)
    flags += [
        ("--micro-batch-size", str(graph.batch // plan.data // strategy.microbatches)),
        ("--global-batch-size", str(graph.batch)),
        *_sequence("--seq-length", graph),
    ]
    if options.recompute == "attention":
        flags.append(("--recompute-granularity", "selective"))
    elif options.recompute == "full":
        blocks = options.recompute_blocks
        if isinstance(blocks, tuple):
            raise _no("recompute_blocks: Megatron computes as many layers again in every stage", "one number")
        method = [("--recompute-method", "uniform" if blocks is None else "block")]
        flags += [("--recompute-granularity", "full"), *method, ("--recompute-num-layers", str(blocks or 1))]
    if plan.states == States.OPTIMIZER:
        flags.append(("--use-distributed-optimizer", ""))
    elif plan.states in SHARDING:
        if not options.reshard_after_forward and plan.states == States.WEIGHTS:
            raise _no(
                "states: weights: Megatron-FSDP frees gathered weights after the forward pass, the plan keeps them",
                "`flexsearch optimize --reshard-after-forward`",
            )
        flags += [
            ("--use-megatron-fsdp", ""), ("--use-distributed-optimizer", ""),
            ("--data-parallel-sharding-strategy", SHARDING[plan.states]), ("--ckpt-format", "fsdp_dtensor"),
            ("--no-gradient-accumulation-fusion", ""),
        ]  # fmt: skip
    if plan.states and plan.shards < plan.data:
        flags.append(("--num-distributed-optimizer-instances", str(plan.data // plan.shards)))
        flags += [("--outer-dp-sharding-strategy", "no_shard")] if plan.states in SHARDING else []
    if options.precision != "as-is":
        flags.append((f"--{options.precision}", ""))
    if options.gradients == "float32":
        flags.append(("--accumulate-allreduce-grads-in-fp32", ""))
    elif options.precision == "bf16":  # which turns that on by itself
        flags.append(("--grad-reduce-in-bf16", ""))
    return [*flags, ("--optimizer", _optimizer(strategy, {"adam": "adam", "momentum": "sgd"}, "Megatron-LM"))]


def _megatron_pipeline(strategy: Strategy, plan: NativePlan) -> Flags:
    chunks = len(plan.held[0])
    if strategy.schedule not in ("1f1b", "interleaved-1f1b") or (strategy.schedule == "1f1b" and chunks > 1):
        raise _no(f"schedule: {strategy.schedule}: Megatron-LM runs 1F1B", "1f1b or interleaved-1f1b")
    flags: Flags = []
    if chunks > 1:
        flags.append(("--num-layers-per-virtual-pipeline-stage", str(_equal_layers(plan))))
    else:
        counts = _layer_counts(plan)
        if len(set(counts)) > 1:
            middle = counts[1:-1]
            if len(set(middle)) > 1:
                what = f"stages: they have {counts} layers; Megatron-LM needs equal ones between the ends"
                raise _no(what, "equal stages")
            flags += [
                ("--decoder-first-pipeline-num-layers", str(counts[0])),
                ("--decoder-last-pipeline-num-layers", str(counts[-1])),
            ]
    if plan.data > 1 and _is_by_replica(plan):
        flags.append(("--use-tp-pp-dp-mapping", ""))
    return flags


def _no(what: str, remedy: str) -> StrategyError:
    return StrategyError(what, f"Use {remedy}, or export to torch.")


def _check_layers(plan: NativePlan, graph: OperatorGraph, program: str) -> None:
    """Raise StrategyError unless layers are split as these programs split theirs: all that are repeated."""
    for i, op in enumerate(graph.operators):
        repeated = any(part.isdigit() for part in op.module.split("."))
        if plan.tensor > 1 and op.kind == "linear" and repeated and (i not in plan.split or i in plan.flow.gathered):
            raise StrategyError(
                f"operator {op.name!r} is not split by the plan, or its output is gathered; {program} splits every "
                "linear layer of a block",
                "Export to torch.",
            )
    stacks = {stack for op in graph.operators if (stack := _stack(op.module))}
    if len(stacks) > 1 and (plan.tensor > 1 or plan.pipeline > 1):
        raise StrategyError(
            f"the model has several stacks of layers ({', '.join(sorted(stacks))}), and {program} counts those of one",
            "Export to torch.",
        )
    replicas_first = program == "Megatron-LM" and _is_by_replica(plan)
    ranks = [device for stage in plan.mesh for row in stage for device in row]
    if ranks != sorted(ranks) and not replicas_first:
        by = "stage, replica and tensor part" + (", or replica, stage and tensor part" * (program == "Megatron-LM"))
        raise StrategyError(
            f"stages: devices are in another order; {program} numbers ranks by {by}",
            "Export to torch, which names the devices.",
        )


def _is_by_replica(plan: NativePlan) -> bool:
    """Whether ranks are numbered by replica, stage and tensor part."""
    ranks = [device for stages in zip(*plan.mesh, strict=True) for row in stages for device in row]
    return ranks == sorted(ranks)


def _stack(module: str) -> str:
    """The list of layers that a module is in; else nothing."""
    parts = module.split(".")
    return next((".".join(parts[:k]) for k, part in enumerate(parts) if part.isdigit()), "")


def _layers(names: tuple[str, ...]) -> int:
    """Repeated layers among the modules of a stage."""
    return sum(name.rpartition(".")[2].isdigit() for name in names)


def _layer_counts(plan: NativePlan) -> list[int]:
    """Repeated layers of the stages. Raises StrategyError where one has none."""
    counts = [_layers(names) for names in plan.stages.modules]
    if not all(counts):
        raise _no(f"stages: they have {counts} layers, and each needs one", "stages with layers")
    return counts


def _equal_layers(plan: NativePlan) -> int:
    counts = _layer_counts(plan)
    if len(set(counts)) > 1:
        raise _no(f"stages: they have {counts} layers, and need equally many", "equal stages")
    return counts[0]


def _sequence(flag: str, graph: OperatorGraph) -> Flags:
    length = sequence_length(graph)
    return [] if length is None else [(flag, str(length))]


def _optimizer(strategy: Strategy, names: dict[str, str], program: str) -> str:
    name = strategy.options.optimizer
    if name not in names:
        raise StrategyError(
            f"optimizer: {program} has none that is {name}", f"Use {' or '.join(names)}, or export to torch."
        )
    return names[name]
