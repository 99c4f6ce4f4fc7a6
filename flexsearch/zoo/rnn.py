"""Recurrent networks of the FlexFlow paper (Jia, Zaharia, Aiken, MLSys 2019, table 3), unrolled: RNNTC, RNNLM, NMT.

Every step of every layer is a call of its own (``nn.LSTMCell``), so that the graph has one operator for each, which may
run on a device of its own; all steps of a layer read the same weights. The layers are written one after the other, each
over all steps: a device that holds two layers then does not wait, at each step, for another that holds the one between.
Only the embedding is looked up for all steps at once: each lookup of its own would clear and add up a whole table of
gradients.
"""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.zoo.base import ZooModel, build

State = tuple[Tensor, Tensor]
"""Hidden and cell state of a layer, (batch, hidden) each."""


class LSTM(nn.Module):
    """``layers`` LSTM layers (Hochreiter & Schmidhuber, 1997), unrolled over the steps, with dropout before each."""

    def __init__(self, features: int, hidden: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(hidden if k else features, hidden) for k in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, inputs: Sequence[Tensor], states: Sequence[State | None] | None = None
    ) -> tuple[list[Tensor], list[State | None]]:
        """One (batch, features) for each step, and the first state of each layer (default: zeros) -> one (batch,
        hidden) of the last layer for each step, and the last state of each layer."""
        sequence = list(inputs)
        last = list(states or [None] * len(self.layers))
        for k, cell in enumerate(self.layers):
            sequence = [self.dropout(x) for x in sequence]
            for t, x in enumerate(sequence):
                last[k] = h, _ = cell(x, last[k])
                sequence[t] = h
        return sequence, last


class Embedded(nn.Module):
    """Tokens (batch, steps) -> for each step the vectors (batch, hidden) of its tokens."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.table(tokens).unbind(1)


class RNNTC(nn.Module):
    """Text classification: LSTM layers, and a linear classifier of the last step's hidden state.

    Tokens (batch, steps) -> (batch, classes). The paper's has 4 layers of 1024 features.
    """

    def __init__(
        self, vocab: int = 20000, hidden: int = 1024, layers: int = 4, classes: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = Embedded(vocab, hidden)
        self.lstm = LSTM(hidden, hidden, layers, dropout)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        sequence, _ = self.lstm(self.embed(tokens))
        return self.classifier(sequence[-1])


class RNNLM(nn.Module):
    """Language model: LSTM layers, and at each step a softmax over the vocabulary.

    Tokens (batch, steps) -> for each step (batch, vocab). The paper's has 2 layers of 2048 features; the default
    vocabulary is that of the Penn Treebank.
    """

    def __init__(self, vocab: int = 10000, hidden: int = 2048, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = Embedded(vocab, hidden)
        self.lstm = LSTM(hidden, hidden, layers, dropout)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        sequence, _ = self.lstm(self.embed(tokens))
        return tuple(self.head(h) for h in sequence)


class Attention(nn.Module):
    """Luong et al. (2015), "general" scores: what of the encoder's steps matters to a decoder's hidden state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        """h (batch, hidden), memory (batch, steps, hidden) -> (batch, hidden)."""
        scores = torch.einsum("bsh,bh->bs", memory, self.query(h))
        context = torch.einsum("bs,bsh->bh", torch.softmax(scores, dim=-1), memory)
        return torch.tanh(self.combine(torch.cat((context, h), dim=-1)))


class NMT(nn.Module):
    """Translation: LSTM encoder and decoder, attention, and at each step a softmax over the vocabulary.

    Source and (shifted) target tokens (batch, steps) -> for each step (batch, vocab). The decoder starts from the
    encoder's last states. The default vocabulary is the size of that of Wu et al. (2016).
    """

    def __init__(self, vocab: int = 32000, hidden: int = 1024, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.source, self.target = Embedded(vocab, hidden), Embedded(vocab, hidden)
        self.encoder = LSTM(hidden, hidden, layers, dropout)
        self.decoder = LSTM(hidden, hidden, layers, dropout)
        self.attention = Attention(hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        encoded, states = self.encoder(self.source(source))
        memory = torch.stack(encoded, dim=1)
        decoded, _ = self.decoder(self.target(target), states)
        attended = [self.attention(h, memory) for h in decoded]
        return tuple(self.head(h) for h in attended)


def step_loss(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, vocab), one for each step, and targets (batch, steps).

    Each step is compared on its own: the softmax of a step can run while the layers below are at the next, and no copy
    of all logits is made. The losses stay apart by sample until the end, so that a split batch is summed up only once.
    """
    losses = [F.cross_entropy(y, t, reduction="none") for y, t in zip(logits, targets.unbind(1), strict=True)]
    return reduce(torch.add, losses).mean() / len(losses)


def rnntc(
    batch: int = 64,
    steps: int = 40,
    hidden: int = 1024,
    vocab: int = 20000,
    layers: int = 4,
    classes: int = 2,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """RNNTC on random tokens (batch, steps), one class for each text."""
    return build(
        lambda: RNNTC(vocab, hidden, layers, classes, dropout),
        lambda: ((torch.randint(vocab, (batch, steps)),), torch.randint(classes, (batch,))),
        F.cross_entropy,
        device,
    )


def rnnlm(
    batch: int = 64,
    steps: int = 40,
    hidden: int = 2048,
    vocab: int = 10000,
    layers: int = 2,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """RNNLM on random tokens (batch, steps), predicting a token at every step."""
    return build(
        lambda: RNNLM(vocab, hidden, layers, dropout),
        lambda: ((torch.randint(vocab, (batch, steps)),), torch.randint(vocab, (batch, steps))),
        step_loss,
        device,
    )


def nmt(
    batch: int = 64,
    steps: int = 40,
    hidden: int = 1024,
    vocab: int = 32000,
    layers: int = 2,
    device: str | torch.device = "cpu",
    dropout: float = 0.0,
) -> ZooModel:
    """NMT on random source and target tokens (batch, steps), predicting a token at every step."""
    return build(
        lambda: NMT(vocab, hidden, layers, dropout),
        lambda: (
            (torch.randint(vocab, (batch, steps)), torch.randint(vocab, (batch, steps))),
            torch.randint(vocab, (batch, steps)),
        ),
        step_loss,
        device,
    )
