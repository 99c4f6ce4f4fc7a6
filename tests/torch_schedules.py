"""The orders of PyTorch's own pipeline schedules, without processes: what ``lower.actions`` must equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B, "breadth-first": schedules.ScheduleLoopedBFS,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble, "zero-bubble-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}  # fmt: skip
SINGLE = ("gpipe", "1f1b")
"""Schedules whose classes take one stage on each rank."""
PASSES = {"F", "B", "I", "W"}


class RecordingStage:
    """A stage that computes nothing, sends nothing and notes its passes."""

    def __init__(self, index: int, count: int) -> None:
        self.stage_index, self.num_stages, self.is_last = index, count, index == count - 1
        self.passes: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.passes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.passes.append(f"{self.stage_index}B{microbatch}")

    def _nothing(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = _nothing


def order_of(kind: str, ranks: int, each: int, microbatches: int) -> list[list[str]]:
    """What each rank computes, in PyTorch's words. Raises ValueError where a class does not take such numbers."""
    if kind in SINGLE:
        return [_run(kind, rank, ranks, microbatches) for rank in range(ranks)]
    names: dict[str, Any] = {"num_stages": ranks * each, "group_size": ranks, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=k * ranks, is_first=k == 0, is_last=False, **names) for k in range(each)]
    built = CLASSES[kind](stages, microbatches)
    return [_flat(built.pipeline_order[rank]) for rank in range(ranks)]


def _run(kind: str, rank: int, ranks: int, microbatches: int) -> list[str]:
    """The passes that a step runs: ``pipeline_order`` of these classes is for display, and is off by one in places."""
    stage = RecordingStage(rank, ranks)
    built = CLASSES[kind](stage, microbatches)
    built._initialize_stage = lambda *_: None
    built._has_backward = True
    built._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.passes


def _flat(actions: list[Any]) -> list[str]:
    """Passes alone, one after the other."""
    found = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
    passes = [a for a in found if a.computation_type.value in PASSES]
    return [f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}" for a in passes]
