"""Modes of plain PyTorch (autocast, no gradients) that a compiled plan cannot honour."""

from __future__ import annotations

import torch

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.stored import Stored


def refuse_modes(what: str, stored: Stored, evaluating: bool) -> None:
    """Raise RuntimeFailure if ``what`` ("step", "forward") is called in a mode that it cannot honour, or without
    weights. ``evaluating``: whether it is called in ``evaluating()``."""
    if not stored.loaded:
        raise RuntimeFailure(
            "the model was on the meta device and has no weights yet",
            "Pass parallelize(initialise=...), or call load_state_dict or load before the first step.",
        )
    if torch.is_autocast_enabled(stored.device.type):
        raise RuntimeFailure(
            f"{what} is called under torch.autocast, which has no effect on a plan",
            "Leave the autocast region, and plan with optimize(options=Options(precision='bf16')).",
        )
    if what == "step" and not torch.is_grad_enabled():
        raise RuntimeFailure(
            "step(batch) computes gradients, but is called under torch.no_grad() or inference_mode()",
            "Call it outside, or `with step.evaluating(): step.forward(batch)` for predictions.",
        )
    if what == "step" and evaluating:
        raise RuntimeFailure("step(batch) trains, but is called in step.evaluating()", "Call step.forward(batch).")
