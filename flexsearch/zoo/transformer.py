"""Transformers: GPT-2 and Llama decoders, BERT encoder. Tokens (batch, seq) in, logits (batch, seq, vocab) out."""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.zoo.base import ZooModel, build


class Attention(nn.Module):
    """Multi-head self-attention, (batch, seq, hidden) -> (batch, seq, hidden), with biases as in GPT-2 and BERT."""

    def __init__(self, hidden: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q = _split_heads(self.q_proj(x), self.heads)
        k = _split_heads(self.k_proj(x), self.heads)
        v = _split_heads(self.v_proj(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out_proj(_merge_heads(y))


class FeedForward(nn.Module):
    """hidden -> 4 hidden -> hidden with GELU."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.gelu(self.fc1(x))))


class GPT2Block(nn.Module):
    """Pre-normalised decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, causal=True, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.ln2 = nn.LayerNorm(hidden)
        self.mlp = FeedForward(hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019); the defaults are its small size, 124.4 M parameters. Output weights are tied."""

    position_ids: Tensor

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        vocab: int = 50257,
        positions: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(positions, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPT2Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("position_ids", torch.arange(positions), persistent=False)
        self.apply(init_normal)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_ids[: tokens.shape[1]]
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BERTLayer(nn.Module):
    """Post-normalised encoder layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attn = Attention(hidden, heads, causal=False, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.ln1 = nn.LayerNorm(hidden, eps=1e-12)
        self.mlp = FeedForward(hidden, dropout)
        self.ln2 = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.drop(self.attn(x)))
        return self.ln2(x + self.mlp(x))


class BERT(nn.Module):
    """BERT (Devlin et al., 2018) with its masked-language-model head over all positions; the defaults are base size.

    ``forward(tokens, segments)``, both (batch, seq). The output weights are tied to the token embedding.
    """

    position_ids: Tensor

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        vocab: int = 30522,
        positions: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.segment_embedding = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BERTLayer(hidden, heads, dropout) for _ in range(layers))
        self.transform = nn.Linear(hidden, hidden)
        self.gelu = nn.GELU()
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.decoder = nn.Linear(hidden, vocab)
        self.decoder.weight = self.token_embedding.weight
        self.register_buffer("position_ids", torch.arange(positions), persistent=False)
        self.apply(init_normal)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = self.position_ids[: tokens.shape[1]]
        x = self.token_embedding(tokens) + self.position_embedding(positions) + self.segment_embedding(segments)
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.transform_norm(self.gelu(self.transform(x))))


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions; each of ``kv_heads`` serves heads / kv_heads queries."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        head_size = hidden // heads
        self.heads, self.kv_heads, self.dropout = heads, kv_heads, dropout
        self.q_proj = nn.Linear(hidden, heads * head_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_size, bias=False)
        self.o_proj = nn.Linear(heads * head_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(_split_heads(self.q_proj(x), self.heads), cos, sin)
        k = _rotate(_split_heads(self.k_proj(x), self.kv_heads), cos, sin)
        v = _split_heads(self.v_proj(x), self.kv_heads)
        dropout, grouped = self.dropout if self.training else 0.0, self.kv_heads < self.heads
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.o_proj(_merge_heads(y))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) with ``ffn`` inner features (Shazeer, 2020)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    """Pre-normalised decoder layer with RMSNorm."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attn = LlamaAttention(hidden, heads, kv_heads, dropout)
        self.post_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, ffn)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.input_norm(x), cos, sin))
        return x + self.drop(self.mlp(self.post_norm(x)))


class Llama(nn.Module):
    """Llama 2 (Touvron et al., 2023); the defaults are its smallest size, 6.74 G parameters, untied output weights.

    ``theta``: base of the rotary embedding's wavelengths.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        layers: int = 32,
        hidden: int = 4096,
        heads: int = 32,
        kv_heads: int | None = None,
        ffn: int = 11008,
        vocab: int = 32000,
        positions: int = 4096,
        dropout: float = 0.0,
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads, kv_heads or heads, ffn, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        size = hidden // heads
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies  # (positions, size / 2)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(init_normal)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, seq, vocab) and targets (batch, seq), which are already shifted."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, seq, heads * size) -> (batch, heads, seq, size)."""
    batch, seq, features = x.shape
    return x.view(batch, seq, heads, features // heads).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, seq, size) -> (batch, seq, heads * size)."""
    return x.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of x (batch, heads, seq, size) by the angles of cos, sin (seq, size)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def init_normal(module: nn.Module) -> None:
    """N(0, 0.02) weights and zero biases, as in GPT-2: a fresh model then starts at a loss of about log(vocab)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt2(
    batch: int = 8,
    seq: int = 256,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """GPT-2 (small) as a language model on random tokens (batch, seq)."""
    return build(
        lambda: GPT2(layers, hidden, heads, vocab, max(seq, 1024), dropout),
        lambda: ((torch.randint(vocab, (batch, seq)),), torch.randint(vocab, (batch, seq))),
        token_loss,
        device,
    )


def bert(
    batch: int = 8,
    seq: int = 128,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """BERT (base) on random tokens and segments (batch, seq), predicting a token at every position."""
    return build(
        lambda: BERT(layers, hidden, heads, vocab, max(seq, 512), dropout),
        lambda: (
            (torch.randint(vocab, (batch, seq)), torch.randint(2, (batch, seq))),
            torch.randint(vocab, (batch, seq)),
        ),
        token_loss,
        device,
    )


def bert_large(
    batch: int = 8,
    seq: int = 128,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    vocab: int = 30522,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """BERT (large) on random tokens and segments (batch, seq), predicting a token at every position."""
    return bert(batch, seq, layers, hidden, heads, vocab, device, dropout)
