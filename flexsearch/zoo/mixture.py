"""Mixture-of-experts decoder: Mixtral. Tokens (batch, seq) in, logits (batch, seq, vocab) out."""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.experts import combine, dispatch, slots
from flexsearch.zoo.base import ZooModel, build
from flexsearch.zoo.transformer import Llama, LlamaAttention, init_normal, token_loss


class Experts(nn.Module):
    """``experts`` SwiGLU feed-forward networks, of which each token uses ``choices``; (batch, seq, hidden) in and out.

    The sequences are the groups of GShard (Lepikhin et al., 2020): of each, an expert takes ``capacity_factor`` times
    its share of the choices, and drops the rest. With a factor of 1 the FLOPs are those of dropless routing whose load
    is balanced. The weights are (experts, inputs, outputs), so that the experts can be split.
    """

    def __init__(self, hidden: int, ffn: int, experts: int, choices: int, capacity_factor: float) -> None:
        super().__init__()
        self.experts, self.choices, self.capacity_factor = experts, choices, capacity_factor
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.down_proj = nn.Parameter(torch.empty(experts, ffn, hidden))
        for weight in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        capacity = max(1, round(self.capacity_factor * self.choices * x.shape[1] / self.experts))
        weights, chosen = self.router(x).softmax(-1).topk(self.choices)
        weights = weights / weights.sum(-1, keepdim=True)
        places = slots(chosen, self.experts, capacity)
        placed = dispatch(x, places, self.experts, capacity)
        gate = torch.einsum("becd,edf->becf", placed, self.gate_proj)
        up = torch.einsum("becd,edf->becf", placed, self.up_proj)
        expert_outputs = torch.einsum("becf,efd->becd", F.silu(gate) * up, self.down_proj)
        return combine(expert_outputs, places, weights)


class MixtralLayer(nn.Module):
    """Pre-normalised decoder layer with RMSNorm, whose feed-forward network is a mixture of experts."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, experts: Experts, dropout: float) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attn = LlamaAttention(hidden, heads, kv_heads, dropout)
        self.post_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.moe = experts
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.input_norm(x), cos, sin))
        return x + self.drop(self.moe(self.post_norm(x)))


class Mixtral(Llama):
    """Mixtral (Jiang et al., 2024), with a capacity for each expert; the defaults are 8x7B, 46.7 G parameters."""

    def __init__(
        self,
        layers: int = 32,
        hidden: int = 4096,
        heads: int = 32,
        kv_heads: int = 8,
        ffn: int = 14336,
        vocab: int = 32000,
        positions: int = 4096,
        experts: int = 8,
        choices: int = 2,
        capacity_factor: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(0, hidden, heads, kv_heads, ffn, vocab, positions, dropout, theta=1e6)
        self.layers = nn.ModuleList(
            MixtralLayer(hidden, heads, kv_heads, Experts(hidden, ffn, experts, choices, capacity_factor), dropout)
            for _ in range(layers)
        )
        self.layers.apply(init_normal)


def mixtral(
    batch: int = 1,
    seq: int = 2048,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    vocab: int = 32000,
    experts: int = 8,
    choices: int = 2,
    capacity_factor: float = 1.0,
    device: str | torch.device = "meta",
    dropout: float = 0.0,
) -> ZooModel:
    """Mixtral 8x7B on tokens (batch, seq); on the meta device unless told otherwise, as float32 it takes 187 GB."""
    return build(
        lambda: Mixtral(
            layers, hidden, heads, kv_heads, ffn, vocab, max(seq, 4096), experts, choices, capacity_factor, dropout
        ),
        lambda: ((torch.randint(vocab, (batch, seq)),), torch.randint(vocab, (batch, seq))),
        token_loss,
        device,
    )
