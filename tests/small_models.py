"""Small models that together use every operator of the table, with odd sizes so that splits are uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.graph.experts import combine, dispatch, expert_linear, slots


class Case(NamedTuple):
    """A model in float64 with a batch. ``groups``: parts of the batch with batch-norm statistics of their own."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    loss: Callable[..., Tensor]
    groups: int = 1


class Mlp(nn.Module):
    """Linear layers with and without bias, addmm on a shared weight, activations, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 7, bias=False), nn.Linear(7, 3)
        self.shift = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.a(x))
        x = x + torch.tanh(self.b(x)) * 0.5
        x = torch.addmm(self.shift, x, self.b.weight)
        return self.c(F.relu(x))


class Convolutions(nn.Module):
    """Stride, padding, dilation, groups; max, average and adaptive pools; batch and group norm; pad, cat, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, bias=False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.mean = nn.AvgPool2d(2, stride=1, padding=1)
        self.groups = nn.GroupNorm(2, 6)
        self.adapt = nn.AdaptiveAvgPool2d((2, 3))
        self.fc = nn.Linear(60, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.one(x)))
        x = self.groups(self.two(x))
        y = self.mean(self.pool(x))
        z = torch.cat([F.pad(y, (1, 0, 0, 1)), F.pad(y, (0, 1, 1, 0))[:, :4]], dim=1)
        return self.fc(self.adapt(z).flatten(1))


class Sequence1d(nn.Module):
    """conv1d and 1-D pools, softmax attention by hand, einsum, bmm, stack, select, reductions, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 6)
        self.mix = nn.Parameter(torch.randn(8, 5))
        self.gate = nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x))
        x = F.max_pool1d(x, 2, stride=1) + F.avg_pool1d(x, 2, stride=1)
        x = x.permute(0, 2, 1)
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / 6**0.5
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        y = torch.einsum("bqk,bkc,co->bqo", weights, x, self.mix) * self.gate.expand(x.shape[0], -1, -1)
        y = torch.stack([y, y.square()], dim=2).sum(dim=3).unsqueeze(-1).squeeze(-1)
        features = torch.cat([y.mean(dim=1), y.amax(dim=1), y.select(1, 0), y[:, 1:].sum(dim=1, keepdim=True)[:, 0]], 1)
        return F.log_softmax(features, dim=1)


class Decoder(nn.Module):
    """Embeddings tied to the head, positions, fused and grouped-query attention, layer and rms norm, gated MLP."""

    def __init__(self, vocabulary: int = 11, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * 10), nn.Linear(10, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, -1)
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        gate, up = self.up(self.after(x)).split(10, dim=-1)
        return self.head(x + F.dropout(self.down(F.silu(gate) * up), 0.0))


class Recurrent(nn.Module):
    """Unrolled LSTM layers: plain, without biases, and one of whose weights another operator reads as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.unbiased = nn.LSTMCell(4, 5), nn.LSTMCell(5, 6, bias=False)
        self.shared = nn.LSTMCell(6, 3)
        self.head = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = second = third = None
        for t in range(x.shape[1]):
            first = self.plain(x[:, t], first)
            second = self.unbiased(first[0], second)
            third = self.shared(second[0], third)
        h, c = third
        return self.head(torch.cat((F.linear(h, self.shared.weight_hh), c), dim=1))


class Towers(nn.Module):
    """Layers used on different sizes, each sample scored against every other; indices, windows, empty parts, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(10, 4)
        self.prompt = nn.Parameter(torch.randn(1, 5, 6))
        self.table = nn.Parameter(torch.randn(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        tower = torch.tanh(self.layer(x) + self.layer(self.prompt))
        cache = torch.cat((torch.tensor([], dtype=x.dtype), tower[:, :0], tower), dim=1)
        rows = self.table[(cache[:, :2, 0] > 0).long() - 2] + cache[:, [-1, 0]]
        kept = rows.gather(2, (rows > 0).long() + (rows < 1).long())
        kept = kept * ((kept > -0.5) & (rows.abs() < 2) | (kept > 1))
        windows = cache.unfold(1, 2, 2).sum(-1) + F.unfold(cache[:, None], (2, 3), padding=(0, 1), stride=(2, 1)).mean(
            1
        ).view(-1, 2, 6)
        features = self.head(torch.cat((kept, windows.cumsum(1)[..., :4]), dim=2)).flatten(1)
        other = self.head(torch.cat((windows[..., 1:], rows[..., 1:]), dim=2)).flatten(1)
        return features @ other.T


class Dropped(nn.Module):
    """Drop path, and dropout in place: both draw their numbers by operators of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.25, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        kept = (0.5 + torch.rand((x.shape[0], 1), dtype=y.dtype)).floor_()
        return self.drop(y * kept / 0.5)


class Experts(nn.Module):
    """A recurrent layer of two directions, experts by token, experts with a capacity, and a GRU cell at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.router = nn.Linear(6, 3)
        self.tokens = nn.Parameter(torch.randn(3, 5, 6) / 2)
        self.up, self.down = nn.Parameter(torch.randn(3, 5, 7) / 2), nn.Parameter(torch.randn(3, 7, 5) / 2)
        self.cell = nn.GRUCell(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)[0]
        weights = self.router(x).softmax(-1)
        chosen = weights.detach().argmax(-1)
        x = expert_linear(x, self.tokens, chosen, transposed=True)
        where = slots(chosen[..., None], 3, 2)
        y = torch.einsum("gecd,edh->gech", dispatch(x, where, 3, 2), self.up).tanh()
        y = torch.einsum("gech,ehd->gecd", y, self.down)
        x = x + combine(y, where, weights.amax(-1, keepdim=True))
        made: Tensor = self.cell(x[:, 1], self.cell(x[:, 0]))
        return made


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def _smooth(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=3)


def case(name: str, dtype: str = "float64") -> Case:
    """The named case, always the same."""
    torch.manual_seed(0)
    if name == "mlp":
        made = Case(Mlp(), (torch.randn(5, 6),), torch.randint(3, (5,)), _smooth)
    elif name == "mlp_mse":
        made = Case(Mlp(), (torch.randn(5, 6),), torch.randn(5, 3).double(), _mean_square)
    elif name == "convolutions":
        made = Case(Convolutions(), (torch.randn(3, 3, 11, 9),), torch.randint(5, (3,)), F.cross_entropy)
    elif name == "ghosts":
        made = Case(Convolutions(), (torch.randn(6, 3, 7, 6),), torch.randint(5, (6,)), F.cross_entropy, groups=3)
    elif name == "sequence1d":
        made = Case(Sequence1d(), (torch.randn(3, 3, 7),), torch.randint(8, (3,)), F.nll_loss)
    elif name == "recurrent":
        made = Case(Recurrent(), (torch.randn(3, 3, 4),), torch.randint(4, (3,)), F.cross_entropy)
    elif name == "experts":
        made = Case(Experts(), (torch.randn(5, 4, 4),), torch.randint(4, (5,)), F.cross_entropy)
    elif name == "towers":
        made = Case(Towers(), (torch.randn(3, 5, 6),), torch.randint(3, (3,)), F.cross_entropy)
    elif name == "translation":
        made = Case(*zoo.nmt(batch=3, steps=2, hidden=5, vocab=7))
    else:
        made = Case(Decoder(), (torch.randint(11, (3, 5)),), torch.randint(11, (3, 5)), _tokens)
    kind = getattr(torch, dtype)
    inputs = tuple(t.to(kind) if t.is_floating_point() else t for t in made.inputs)
    return made._replace(model=made.model.to(kind), inputs=inputs)


NAMES = (
    "mlp", "mlp_mse", "convolutions", "ghosts", "sequence1d", "decoder", "recurrent", "towers", "translation",
    "experts",
)  # fmt: skip
