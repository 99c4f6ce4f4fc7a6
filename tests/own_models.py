"""Architectures of our own, as people write them: each with an operator or two that the zoo does not use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import Training

BATCH = 4


class SpatialAttention(nn.Module):
    """Self-attention over the pixels of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class ResidualBlock(nn.Module):
    """Two convolutions, conditioned on the noise level."""

    def __init__(self, into: int, out: int, condition: int, drop: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.condition, self.norm = nn.Linear(condition, out), nn.GroupNorm(2, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()
        self.drop = nn.Dropout(drop, inplace=True)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.first(F.silu(x)) + self.condition(condition)[:, :, None, None]
        return self.skip(x) + self.second(self.drop(F.silu(self.norm(y))))


class UNet(nn.Module):
    """A denoiser: attention in the middle, one level up by a transposed convolution, one by interpolation."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8))
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.outer, self.inner = ResidualBlock(4, 6, 8, drop), ResidualBlock(6, 8, 8, drop)
        self.down = nn.ModuleList([nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)])
        self.middle = SpatialAttention(8)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.smooth = nn.Conv2d(16, 6, 3, padding=1)
        self.leave = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.arange(1, 4, device=t.device)
        condition = self.level(torch.cat([angles.sin(), angles.cos()], dim=-1))
        fine = self.outer(self.enter(x), condition)
        coarse = self.inner(self.down[0](fine), condition)
        y = self.up(self.middle(self.down[1](coarse)))
        y = F.interpolate(self.smooth(torch.cat([y, coarse], 1)), scale_factor=2, mode="bilinear", align_corners=False)
        return self.leave(torch.cat([y, fine], 1))


class Dlrm(nn.Module):
    """Deep learning recommendation: bags of categories, dense features, and all pairs of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 6, mode=mode) for n, mode in ((11, "sum"), (7, "mean")))
        self.top = nn.Sequential(nn.Linear(6 + 3, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("rows", torch.tensor([1, 2, 2]), persistent=False)
        self.register_buffer("columns", torch.tensor([0, 0, 1]), persistent=False)

    def forward(self, dense: Tensor, first: Tensor, second: Tensor) -> Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, self.bags[0](first), self.bags[1](second)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([low, products], dim=1)).squeeze(1)


class RecurrentLanguageModel(nn.Module):
    """Embedding, recurrent layers of PyTorch's own, a vocabulary."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(13, 6), recurrent, nn.Linear(width, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


class PointNet(nn.Module):
    """Segments a cloud: features of edges are gathered from points, summed back onto them, and the largest of all
    points is a feature of each. All clouds have the same graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.edge, self.head = nn.Linear(3, 6), nn.Linear(12, 6), nn.Linear(12, 4)
        ring = torch.arange(9)
        self.register_buffer("senders", torch.cat([ring, ring]))
        self.register_buffer("receivers", torch.cat([(ring + 1) % 9, (ring + 4) % 9]))

    def forward(self, points: Tensor) -> Tensor:
        x = F.relu(self.lift(points))
        pairs = torch.cat([x.index_select(1, self.senders), x.index_select(1, self.receivers)], dim=-1)
        messages = F.relu(self.edge(pairs))
        index = self.receivers[None, :, None].expand(messages.shape)
        local = torch.zeros_like(x).scatter_add(1, index, messages)
        whole = local.amax(dim=1, keepdim=True).expand_as(local)
        return self.head(torch.cat([local, whole], dim=-1)).transpose(1, 2)


class Detector(nn.Module):
    """Dense boxes and scores; the best few are refined by features that are gathered at them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.score, self.box = nn.Conv2d(6, 1, 1), nn.Conv2d(6, 4, 1)
        self.refine = nn.Linear(6, 4)

    def forward(self, images: Tensor, boxes: Tensor) -> Tensor:
        features = self.backbone(images)
        scores = self.score(features).flatten(1)
        best, where = scores.topk(5, dim=1)
        proposals = self.box(features).flatten(2).transpose(1, 2)
        chosen = proposals.gather(1, where[..., None].expand(-1, -1, 4))
        pooled = features.flatten(2).transpose(1, 2).gather(1, where[..., None].expand(-1, -1, 6))
        distance = torch.cdist(chosen + self.refine(pooled), boxes, p=1.0).amin(dim=2)
        return (distance * best.sigmoid()).mean() + F.softplus(scores).mean()


class MixtureOfExperts(nn.Module):
    """Tokens go to the two best of four experts, each with a bounded capacity (GShard); a balancing loss."""

    def __init__(self, capacity: int = 6) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(6, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((6, 10), (10, 6)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.topk(2, dim=-1)
        picks = F.one_hot(chosen, 4).to(x.dtype)
        order = picks.flatten(1, 2).cumsum(1).reshape(picks.shape) - 1
        slot = (order * picks).sum(-1).long()
        kept = (slot < self.capacity).to(x.dtype)
        slots = F.one_hot(slot.clamp(max=self.capacity - 1), self.capacity).to(x.dtype) * kept[..., None]
        combine = torch.einsum("btk,btke,btkc->btec", best, picks, slots)
        inside = torch.einsum("btec,btd->becd", (combine > 0).to(x.dtype), x)
        inside = torch.einsum("becf,efd->becd", F.gelu(torch.einsum("becd,edf->becf", inside, self.up)), self.down)
        y = x + torch.einsum("btec,becd->btd", combine, inside)
        balance = (weights.mean((0, 1)) * picks.mean((0, 1, 2))).sum()
        return self.head(y).logsumexp(-1).mean() + balance


class Translator(nn.Module):
    """Encoder and decoder of PyTorch's own, each with a mask that is made in the forward pass. The batch has one that
    nobody reads."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 12, drop, batch_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, source: Tensor, target: Tensor, unread: Tensor) -> Tensor:
        mask = self.body.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        window = torch.ones(source.shape[1], source.shape[1]).triu(3).bool()
        return self.head(self.body(self.embed(source), self.embed(target), src_mask=window, tgt_mask=mask))


class Queries(nn.Module):
    """A class token beside the words, and queries that look at them: weights that are expanded for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.queries = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 3, 8))
        self.norm, self.query, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        queries = self.queries.expand(x.shape[0], -1, -1)
        read = F.scaled_dot_product_attention(self.query(self.norm(queries)), x, x)
        return self.head((queries + read).mean(1))


class Adversarial(nn.Module):
    """Both losses of a GAN in one step. The generator's reads the discriminator with its weights switched off; buffers
    that are assigned, and read in two forms, hold the mean of what is real; one that is changed in place averages a
    weight."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
        self.judge = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))
        self.register_buffer("center", torch.zeros(1, 5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("slow", self.made[0].weight.detach().clone())

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake, real = self.made(noise), real - self.center
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        self.judge.requires_grad_(False)
        fooled = F.softplus(-self.judge(fake)).mean()
        for parameter in self.judge.parameters():
            parameter.requires_grad = True
        self.center = 0.9 * self.center + 0.1 * real.mean(0, keepdim=True)
        self.calls = self.calls + 1
        with torch.no_grad():
            self.slow.lerp_(self.made[0].weight, 0.1)
        return judged + fooled + F.mse_loss(self.made[0](noise), F.linear(noise, self.slow))


def _translator(drop: float) -> Training:
    batch = {"source": torch.randint(13, (BATCH, 6)), "target": torch.randint(13, (BATCH, 5))}
    batch["unread"] = torch.ones_like(batch["source"])
    return Training(
        Translator(drop), batch, lambda output, targets: F.cross_entropy(output.transpose(1, 2), targets),
        torch.randint(13, (BATCH, 5)),
    )  # fmt: skip


def _unet(drop: float) -> Training:
    batch = {"x": torch.randn(BATCH, 3, 12, 12), "t": torch.rand(BATCH)}
    return Training(UNet(drop), batch, F.mse_loss, torch.randn(BATCH, 3, 12, 12))


def _dlrm(drop: float) -> Training:
    batch = {
        "dense": torch.randn(BATCH, 5), "first": torch.randint(11, (BATCH, 3)), "second": torch.randint(7, (BATCH, 4)),
    }  # fmt: skip
    return Training(Dlrm(), batch, F.binary_cross_entropy_with_logits, torch.rand(BATCH))


def _language(recurrent: nn.Module, width: int) -> Training:
    return Training(
        RecurrentLanguageModel(recurrent, width), {"tokens": torch.randint(13, (BATCH, 5))},
        lambda output, targets: F.cross_entropy(output.transpose(1, 2), targets), torch.randint(13, (BATCH, 5)),
    )  # fmt: skip


def _points(drop: float) -> Training:
    return Training(PointNet(), {"points": torch.randn(BATCH, 9, 3)}, F.cross_entropy, torch.randint(4, (BATCH, 9)))


MODELS: dict[str, Callable[[float], Training]] = {
    "unet": _unet,
    "dlrm": _dlrm,
    "translator": _translator,
    "lstm": lambda drop: _language(nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=drop), 8),
    "lstm both ways": lambda drop: _language(nn.LSTM(6, 5, batch_first=True, bidirectional=True), 10),
    "gru": lambda drop: _language(nn.GRU(6, 8, num_layers=2, batch_first=True, dropout=drop), 8),
    "rnn": lambda drop: _language(nn.RNN(6, 8, batch_first=True, nonlinearity="relu"), 8),
    "pointnet": _points,
    "detector": lambda drop: Training(
        Detector(), {"images": torch.randn(BATCH, 3, 10, 10), "boxes": torch.randn(BATCH, 3, 4)}
    ),
    "queries": lambda drop: Training(
        Queries(), {"x": torch.randn(BATCH, 5, 8)}, F.cross_entropy, torch.randint(3, (BATCH,))
    ),
    "adversarial": lambda drop: Training(
        Adversarial(), {"noise": torch.randn(BATCH, 4), "real": torch.randn(BATCH, 5)}
    ),
    "mixture of experts": lambda drop: Training(MixtureOfExperts(), {"x": torch.randn(BATCH, 7, 6)}),
}
"""Of a drop rate, where the model has one."""

DRAWING = ("unet", "lstm", "gru")


def build(name: str, draws: bool) -> Training:
    """A model in float64 and in training mode, with the same weights each time, and its batch."""
    torch.manual_seed(0)
    model, batch, loss, targets = MODELS[name](0.2 if draws else 0.0)

    def double(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    own = {key: double(x) for key, x in batch.items()}
    return Training(model.double().train(), own, loss, None if targets is None else double(targets))
