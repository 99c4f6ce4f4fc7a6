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


class Images(nn.Module):
    """Transposed convolution, interpolation, border padding, unfinished blocks; running instance norm; sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, output_padding=1)
        self.odd = nn.ConvTranspose2d(4, 2, 3, stride=3, groups=2, bias=False)
        self.mix = nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect")
        self.where = nn.Linear(4 * 3 * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(x))
        wide = F.interpolate(x, scale_factor=2, mode="bilinear") + F.pad(self.up(x), (0, -1, 0, -1))
        y = F.interpolate(self.odd(x), scale_factor=2 / 3, mode="nearest")
        both = self.mix(wide + y.repeat(1, 2, 1, 1)[..., :6, :8])
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), [*both.shape], align_corners=False)
        return F.fold(F.unfold(F.grid_sample(both, grid, align_corners=False), 3, padding=1), (6, 8), 3, padding=1)


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


class Lookups(nn.Module):
    """Bags of rows, messages along edges, scattered features, assignments by masks and indices, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.bag, self.longest = nn.EmbeddingBag(7, 6, mode="mean", padding_idx=1), nn.EmbeddingBag(7, 6, mode="max")
        self.classes, self.token = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(6))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0], [1, 1, 4, 2, 0, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 4).long().clamp(max=6)
        h = torch.tanh(self.layer(x))
        h = h.index_add(1, self.edges[1], h[:, self.edges[0]]) + F.one_hot(ids, 7).to(h.dtype) @ self.classes
        slots = h.new_zeros(len(x), 7, 6).scatter_add(1, ids[..., None].expand_as(h), h)
        slots = slots.scatter_reduce(1, ids[..., None].expand_as(h), h, "amax", include_self=False) * 1.5
        slots[slots > 1.5] = 0.5
        slots[torch.arange(len(x)), ids[:, 0]] = self.token
        counts = torch.zeros(7, dtype=torch.int64).index_add(0, ids.flatten(), torch.ones_like(ids.flatten()))
        flat = F.embedding_bag(ids.flatten(), self.classes, torch.tensor([0, 2, 9]), mode="sum")
        mixed = slots.amax(1) + self.bag(ids) + self.longest(ids) + flat.sum(0)
        return self.head(mixed * counts.to(h.dtype).softmax(0)[:6])


class Dropped(nn.Module):
    """Drop path, and dropout in place: both draw their numbers by operators of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.25, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        kept = (0.5 + torch.rand((x.shape[0], 1), dtype=y.dtype)).floor_()
        return self.drop(y * kept / 0.5)


class Statistics(nn.Module):
    """Norms, deviations over the batch, cosines and distances of all pairs, triangles, sorting, scans, conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 4), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        spread = y.std((0, 1)) + y.var(1, keepdim=True).mean(0)
        z = F.normalize(y, dim=2) / (spread + 0.5) + y.norm(dim=(1, 2), keepdim=True)
        flat = z.flatten(0, 1)
        near = torch.cdist(flat, flat[:5].detach(), 1.0) + torch.cosine_similarity(flat[:, None], flat[None, :5], -1)
        best, place = z.cumsum(1).topk(2, 2)
        near = near.view(*y.shape[:2], 5).tril(1) * (place.sum(2, keepdim=True) > 2)
        kept = torch.where((x > 0.5).any(2, keepdim=True) | (x < 1).all(), best, best.flip(1))
        features = torch.cat((near, kept, z.logsumexp(2, True), z.amax(2, True)), 2)
        return self.head(torch.tanh(0.1 * features)).mean(1)


class Rotary(nn.Module):
    """Attention with rotary embeddings by complex numbers, as in the first Llama, and mixing by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(5.0), 0.1 ** torch.arange(2.0))
        self.register_buffer("angles", angles, persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(self.angles), self.angles).view(5, 1, 2)
        pairs = torch.view_as_complex(x.view(*x.shape[:2], 2, 2, 2))
        return torch.view_as_real(pairs * turn).flatten(3).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.turned(self.q(x)), self.turned(self.k(x)), v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        mixed = torch.fft.fft2(y).real + torch.fft.irfft(torch.fft.rfft(y, dim=1), 5, dim=1)
        return self.out(y + 0.1 * mixed).mean(1)


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
    elif name == "images":
        made = Case(Images(), (torch.randn(3, 2, 6, 8),), torch.randn(3, 3, 6, 8).double(), _mean_square)
    elif name == "recurrent":
        made = Case(Recurrent(), (torch.randn(3, 3, 4),), torch.randint(4, (3,)), F.cross_entropy)
    elif name == "experts":
        made = Case(Experts(), (torch.randn(5, 4, 4),), torch.randint(4, (5,)), F.cross_entropy)
    elif name == "towers":
        made = Case(Towers(), (torch.randn(3, 5, 6),), torch.randint(3, (3,)), F.cross_entropy)
    elif name == "lookups":
        made = Case(Lookups(), (torch.randn(4, 5, 6),), torch.randint(3, (4,)), F.cross_entropy)
    elif name == "translation":
        made = Case(*zoo.nmt(batch=3, steps=2, hidden=5, vocab=7))
    elif name == "statistics":
        made = Case(Statistics(), (torch.randn(3, 5, 6),), torch.randint(3, (3,)), F.cross_entropy)
    elif name == "rotary":
        made = Case(Rotary(), (torch.randn(3, 5, 8),), torch.randint(8, (3,)), F.cross_entropy)
    else:
        made = Case(Decoder(), (torch.randint(11, (3, 5)),), torch.randint(11, (3, 5)), _tokens)
    kind = getattr(torch, dtype)
    inputs = tuple(t.to(kind) if t.is_floating_point() else t for t in made.inputs)
    return made._replace(model=made.model.to(kind), inputs=inputs)


NAMES = (
    "mlp", "mlp_mse", "convolutions", "ghosts", "images", "sequence1d", "decoder", "recurrent", "towers", "lookups",
    "translation", "statistics", "rotary", "experts",
)  # fmt: skip


class Checked(nn.Module):
    """Asserts something of the values that it is given (here: pytest rewrites assertions in tests)."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(4, 3), used

    def forward(self, x: Tensor) -> Tensor:
        largest = (x > 0).sum(1).max().item()
        assert largest <= 4
        return self.layer(x) * (largest if self.used else 1)
