"""One recipe group as this rank takes part in it: its pieces of weights as one vector, and the recipe's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flexsearch.lower.recipes import RecipeGroup
from flexsearch.runtime.recipes.ranks import Ranks
from flexsearch.sync import State


class Member:
    """``parameters``: this rank's pieces, in the order of the group; none on a dedicated server, which goes through the
    same steps with a row that says no more than what payloads look like."""

    def __init__(
        self, group: RecipeGroup, ranks: Ranks, parameters: Sequence[nn.Parameter], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.group, self.ranks, self.recipe, self.parameters = group, ranks, group.recipe, tuple(parameters)
        self.sizes = replace(group.sizes, itemsize=dtype.itemsize)  # optimizers keep float32 where plans have bf16
        self._none = torch.zeros(1, 0, dtype=dtype, device=device)
        self._template = torch.zeros(1, 0 if self.parameters else self.sizes.n, dtype=dtype, device=device)
        self.state = State()

    def start(self) -> None:
        """Begin anew, from the weights that there are."""
        self.state = self.recipe.start(self.weights, self.sizes)

    @property
    def agrees(self) -> bool:
        """Whether replicas have the same weights after every step."""
        recipe = self.recipe
        return recipe.period == 1 and recipe.partners.exact and recipe.asynchronous is None

    @property
    def weights(self) -> Tensor:
        """(1, n), a copy."""
        return self._row([parameter.detach() for parameter in self.parameters])

    @weights.setter
    def weights(self, row: Tensor) -> None:
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._parts(row), strict=True):
                parameter.copy_(part)

    def synchronise_gradients(self) -> None:
        """From the gradients of the sum that this rank's samples add to the loss to those that the optimizer takes."""
        if not self.recipe.sends_gradients(self.state):
            for parameter in self.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad * self.ranks.size
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        own = self._row(gradients).mul_(self.ranks.size)  # a copy
        row, self.state = self.recipe.before_update(self.state, self.ranks, own, self.sizes)
        for parameter, part in zip(self.parameters, self._parts(row), strict=True):
            parameter.grad = part

    def synchronise_weights(self) -> None:
        """After the optimizer's step."""
        changes = self.recipe.sends_weights(self.state)
        row = self.weights if changes else self._none
        row, self.state = self.recipe.after_update(self.state, self.ranks, row, self.sizes)
        if changes:
            self.weights = row

    def check(self) -> None:
        """Raise RuntimeFailure if it cannot go on."""

    def pull(self) -> None:
        """Take the weights of a server, if there is one that has others."""

    def close(self) -> None:
        """Take no more steps."""

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.ranks.sent

    def mean(self) -> Tensor:
        """Of the weights of all replicas, (1, n)."""
        return self.ranks.all_reduce(self.weights) / self.ranks.size

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.reshape(-1) for x in tensors]).unsqueeze(0) if tensors else self._template

    def _parts(self, row: Tensor) -> list[Tensor]:
        """In the shapes of the pieces."""
        parts = torch.split(row[0], [p.numel() for p in self.parameters]) if self.parameters else ()
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
