"""Modes of plain PyTorch: autocast and no gradients, which a compiled plan cannot honour, and TF32, which it leaves to
PyTorch's flag."""

from __future__ import annotations

import warnings

import torch

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.stored import Stored
from flexsearch.topology import Device


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


def tell_rounding(planned: Device, device: torch.device) -> None:
    """Warn where a plan was made for products in TF32 and PyTorch's flag is off: what is computed, the user says."""
    if device.type == "cuda" and planned.rounds("float32") and not torch.backends.cuda.matmul.allow_tf32:
        warnings.warn(
            "the plan was made for float32 matrix products in TF32, and PyTorch computes them in full: set "
            "torch.backends.cuda.matmul.allow_tf32 = True, or plan without --precision tf32",
            stacklevel=3,
        )
