"""Gradients of many replicas of a model at once: their weights are rows of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from flexsearch.errors import ImportModelError
from flexsearch.sync.compression import Sizes

Loss = Callable[[Tensor, Tensor], Tensor]

_ONE_BY_ONE = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Layers that are faster for one replica after the other than as a batch of replicas on a CPU, or do not batch."""


class Replicas:
    """A model with a loss, ``loss(model(inputs), targets)``, for any weights. All parameters are taken as one row, in
    the order of ``named_parameters``. Raises ImportModelError if it has none that learn, or several types."""

    def __init__(self, model: nn.Module, loss: Loss, size: int) -> None:
        self._model, self._loss = model, loss
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if len({p.dtype for p in named.values()}) != 1:
            kinds = sorted({str(p.dtype) for p in named.values()})
            raise ImportModelError(
                f"the model's parameters are of {len(kinds)} types" if kinds else "the model has nothing to learn",
                "Give a model whose parameters are all of one type.",
            )
        self._names = tuple(named)
        self._fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self._shapes = tuple(tuple(p.shape) for p in named.values())
        self.initial = torch.cat([p.detach().flatten() for p in named.values()])
        """(n,) weights that training begins with."""
        self.sizes = Sizes(self._shapes, self.initial.element_size())
        self._buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(size)]
        layers = any(isinstance(module, _ONE_BY_ONE) for module in model.modules())
        self._batched = not self._buffers[0] and not layers
        self._one = grad_and_value(self._value)
        self._all = vmap(self._one, in_dims=(0, None, 0, 0), randomness="different")

    def gradients(
        self, weights: Tensor, inputs: Tensor, targets: Tensor, ranks: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(rows, n) and the losses, (rows,), of ``ranks`` whose weights are rows of (rows, n), and whose batches are
        those of (rows, batch, ...)."""
        self._model.train()
        if self._batched:
            gradients, losses = self._all(weights.detach(), {}, inputs, targets)
            return gradients, losses.detach()
        rows = [
            self._one(weights[k].detach(), self._buffers[rank], inputs[k], targets[k]) for k, rank in enumerate(ranks)
        ]
        return torch.stack([g for g, _ in rows]), torch.stack([value.detach() for _, value in rows])

    @torch.no_grad()
    def evaluate(self, weights: Tensor, inputs: Tensor, targets: Tensor, batch: int = 1024) -> tuple[float, float]:
        """Loss and accuracy (share of targets that get the largest output of the last dimension) of (n,) weights, with
        the mean of the replicas' buffers."""
        self._model.eval()
        buffers = {
            name: torch.stack([own[name] for own in self._buffers]).mean(0) if b.is_floating_point() else b
            for name, b in self._buffers[0].items()
        }
        total, right, count = 0.0, 0, 0
        for at in range(0, len(inputs), batch):
            x, y = inputs[at : at + batch], targets[at : at + batch]
            output = functional_call(self._model, self._named(weights, buffers), (x,))
            total += float(self._loss(output, y)) * len(x)
            if output.shape[:-1] == y.shape:
                right, count = right + int((output.argmax(-1) == y).sum()), count + y.numel()
        return total / len(inputs), right / count if count else float("nan")

    def _named(self, weights: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = torch.split(weights, [torch.Size(shape).numel() for shape in self._shapes])
        own = {name: part.view(shape) for name, part, shape in zip(self._names, parts, self._shapes, strict=True)}
        return {**self._fixed, **buffers, **own}

    def _value(self, weights: Tensor, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        output = functional_call(self._model, self._named(weights, buffers), (inputs,))
        return self._loss(output, targets)
