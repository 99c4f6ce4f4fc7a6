"""Arguments of a step that make no sense are refused before ranks wait for each other: after it the step goes on."""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flexsearch.errors import RuntimeFailure
from flexsearch.quantities import is_finite

_INSTEAD = {
    "train": "Steps train the model in the mode that it was planned in; predict in `with step.evaluating():`.",
    "eval": "Use `with step.evaluating(): step.forward(batch)`.",
    "zero_grad": "Call optimizer.zero_grad().",
    "no_sync": "Gradients add up over calls as they are: step(batch, scale=1 / k), and the optimizer's step after k.",
    "to": "The plan says on which devices, and in which precision, weights are.",
    "module": "state_dict() and named_parameters() have the names of the model itself.",
}
"""What a loop for a module or for DistributedDataParallel calls -> what it calls here."""


def absent(name: str) -> AttributeError:
    """The error for an attribute that a step has not."""
    return AttributeError(f"a step is no nn.Module and has no {name!r}. {_INSTEAD.get(name, '')}".rstrip())


def check_scale(scale: Any) -> None:
    """Raise RuntimeFailure for what gradients cannot be multiplied by."""
    if not is_finite(scale):
        raise RuntimeFailure(
            f"gradients cannot be scaled by {scale!r}", "Give a number, 1 / k to accumulate over k batches."
        )


def check_steps(steps: Any) -> None:
    """Raise RuntimeFailure for a number of steps that cannot be traced."""
    if not isinstance(steps, int) or steps < 1:
        raise RuntimeFailure(f"a trace of {steps!r} steps", "Trace at least one.")


def check_folder(folder: Any, optimizer: Any = None) -> None:
    """Raise RuntimeFailure for what is no path, or no optimizer whose state is kept there."""
    if not isinstance(folder, str | PathLike):
        raise RuntimeFailure(f"{type(folder).__name__} is no path of a folder", "Give a text or a Path.")
    if not isinstance(optimizer, Optimizer | None):
        raise RuntimeFailure(
            f"a {type(optimizer).__name__} is no optimizer", "Give the optimizer itself, and what else is kept by name."
        )


def length_of(dataset: Any) -> int:
    """Samples of a data set. Raises RuntimeFailure for one that does not say how many it has, or gives none by number,
    as a data loader."""
    what, remedy = type(dataset).__name__, "Give a data set with __len__ and __getitem__"
    if isinstance(dataset, DataLoader):
        raise RuntimeFailure(
            f"a {what} has batches, of which ranks cannot share the samples out",
            f"{remedy}: step.loader(loader.dataset, collate_fn=loader.collate_fn).",
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise RuntimeFailure(
            f"a {what} has no length, so that ranks cannot share its samples out",
            f"{remedy}, or fetch batches yourself and call step(batch).",
        ) from error
