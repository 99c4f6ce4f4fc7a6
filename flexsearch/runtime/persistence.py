"""The state of a run, written to files and read from them: whole, in pieces, as Hugging Face has it, or with all that
a run needs to go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flexsearch.graph.ops import KernelContext
from flexsearch.runtime import checkpoint, safetensors
from flexsearch.runtime.arguments import check_folder
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.recipes.synchronisation import Synchronisation
from flexsearch.runtime.stored import Stored


class Persistent:
    """A run on one rank whose state can be saved: ``step.Parallel``."""

    stored: Stored
    context: KernelContext
    failures: Failures
    synchronisation: Synchronisation
    optimizer: Optimizer | None

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state under the original names, on every rank (CPU tensors). All ranks must call it."""
        with self.synchronisation.agreed():
            return self.stored.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole model's state (as ``state_dict`` gives it). Raises RuntimeFailure on missing or unknown
        names or wrong shapes, before anything is changed."""
        self.stored.load_state_dict(state)
        self.synchronisation.restart()

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """The model's state for ``torch.distributed.checkpoint``, in pieces with their places in the whole tensors:
        saving reads them, loading writes them in place; call :meth:`loaded` then."""
        return checkpoint.model_state(self.stored)

    def save_safetensors(self, folder: str | Path) -> None:
        """Write the weights as ``model.safetensors``, as Hugging Face's models read it. All ranks must call it."""
        check_folder(folder)
        with self.failures.watch(), self.synchronisation.agreed():
            safetensors.save(folder, self.stored)

    def load_safetensors(self, folder: str | Path) -> None:
        """Read weights of Hugging Face, in one file or several. All ranks must call it."""
        check_folder(folder)
        with self.failures.watch():
            safetensors.load(folder, self.stored)
            self.synchronisation.restart()

    def loaded(self) -> None:
        """Compute what follows from a state that was loaded in place. All ranks must call it."""
        self.stored.changed()
        self.synchronisation.restart()

    def save(self, folder: str | Path, optimizer: Optimizer | None = None, **extra: Any) -> None:
        """Write a checkpoint (``torch.distributed.checkpoint``): model, optimizer, the state of dropout, and whatever
        is passed by name, such as ``scheduler=scheduler.state_dict()``. No rank holds the whole. All ranks must call
        it."""
        check_folder(folder, optimizer)
        with self.failures.watch():
            checkpoint.save(folder, self.stored, self.context, optimizer or self.optimizer, extra, self.synchronisation)

    def load(self, folder: str | Path, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Read a checkpoint that was saved under any plan on any number of ranks; returns what was passed to ``save``
        by name. Only load what you trust: it is unpickled. All ranks must call it. Raises RuntimeFailure."""
        check_folder(folder, optimizer)
        with self.failures.watch():
            return checkpoint.load(folder, self.stored, self.context, optimizer or self.optimizer, self.synchronisation)
