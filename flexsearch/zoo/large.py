"""Builders of large decoders, on the meta device unless told otherwise: they fit into the memory of no one machine."""

from __future__ import annotations

import torch

from flexsearch.zoo.base import ZooModel, build
from flexsearch.zoo.transformer import GPT2, Llama, token_loss


def llama7b(
    batch: int = 1,
    seq: int = 2048,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    ffn: int = 11008,
    vocab: int = 32000,
    device: str | torch.device = "meta",
    dropout: float = 0.0,
    theta: float = 10000.0,
) -> ZooModel:
    """Llama 2 7B on tokens (batch, seq); on the meta device unless told otherwise, as float32 it takes 27 GB."""
    return build(
        lambda: Llama(layers, hidden, heads, kv_heads, ffn, vocab, max(seq, 4096), dropout, theta),
        lambda: ((torch.randint(vocab, (batch, seq)),), torch.randint(vocab, (batch, seq))),
        token_loss,
        device,
    )


def llama70b(
    batch: int = 1, seq: int = 4096, layers: int = 80, device: str | torch.device = "meta", dropout: float = 0.0
) -> ZooModel:
    """Llama 2 70B with grouped-query attention on tokens (batch, seq); as float32 it takes 276 GB."""
    return llama7b(
        batch, seq, layers, hidden=8192, heads=64, kv_heads=8, ffn=28672, device=device, dropout=dropout
    )  # fmt: skip


def llama405b(
    batch: int = 1, seq: int = 8192, layers: int = 126, device: str | torch.device = "meta", dropout: float = 0.0
) -> ZooModel:
    """Llama 3.1 405B (Grattafiori et al., 2024) on tokens (batch, seq); as float32 it takes 1.6 TB."""
    return llama7b(
        batch, seq, layers, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, device=device,
        dropout=dropout, theta=500000.0,
    )  # fmt: skip


def gpt3(
    batch: int = 1, seq: int = 2048, layers: int = 96, device: str | torch.device = "meta", dropout: float = 0.0
) -> ZooModel:
    """GPT-3 175B (Brown et al., 2020), with dense attention in every layer and GPT-2's vocabulary, on tokens (batch,
    seq); as float32 it takes 698 GB."""
    hidden, heads, vocab = 12288, 96, 50257
    return build(
        lambda: GPT2(layers, hidden, heads, vocab, max(seq, 2048), dropout),
        lambda: ((torch.randint(vocab, (batch, seq)),), torch.randint(vocab, (batch, seq))),
        token_loss,
        device,
    )
