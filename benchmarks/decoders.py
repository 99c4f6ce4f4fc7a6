"""Decoders as those had them whose training was measured: fused or plain attention, with or without biases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.graph import OperatorGraph
from flexsearch.graph.deepen import deepened
from flexsearch.graph.importer import import_model
from flexsearch.graph.shipped import FEW
from flexsearch.zoo.base import build
from flexsearch.zoo.transformer import token_loss


@dataclass(frozen=True)
class Model:
    """A decoder. ``fused``: whether attention is one kernel; else scores, softmax, dropout and product are apart.
    ``bias``: of linear layers."""

    hidden: int
    heads: int
    layers: int
    vocab: int
    seq: int
    fused: bool
    bias: bool


class Block(nn.Module):
    """Pre-normalised decoder layer, (batch, seq, hidden) -> the same."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        h, self.model = model.hidden, model
        self.norm1, self.norm2 = nn.LayerNorm(h, bias=model.bias), nn.LayerNorm(h, bias=model.bias)
        self.qkv = nn.Linear(h, 3 * h, bias=model.bias)
        self.out_proj = nn.Linear(h, h, bias=model.bias)
        self.up, self.down = nn.Linear(h, 4 * h, bias=model.bias), nn.Linear(4 * h, h, bias=model.bias)
        self.drop = nn.Dropout(0.0 if model.fused else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = self.qkv(y).unflatten(-1, (self.model.heads, 3, -1)).transpose(1, 2).unbind(-2)
        y = self._attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out_proj(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.model.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)  # Megatron's kernel scales and masks in the same pass
        return self.drop(scores) @ v  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, vocab); output weights are tied."""

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(layers))
        self.norm = nn.LayerNorm(model.hidden, bias=model.bias)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@cache
def graph_of(model: Model) -> OperatorGraph:
    """The training step of a model, float32 until a plan says otherwise, with a batch of 4."""
    built = build(
        lambda: Decoder(model, FEW),
        lambda: ((torch.randint(model.vocab, (4, model.seq)),), torch.randint(model.vocab, (4, model.seq))),
        token_loss,
        "meta",
    )
    name = f"decoder_{model.layers}x{model.hidden}"
    return deepened(import_model(built.model, built.inputs, built.loss, targets=built.targets, name=name), model.layers)
