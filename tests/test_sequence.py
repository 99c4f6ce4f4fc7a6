"""Recurrent layers as modules: what they become in the graph, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flexsearch.errors import ImportModelError
from flexsearch.graph.importer import import_model


class Tagger(nn.Module):
    """Classes for each position of a sequence, (batch, time) -> a loss, by a recurrent layer of any kind."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3)
        self.layer = kind(3, 4, batch_first=True, **options)  # type: ignore[arg-type]
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.packed:
            h = nn.utils.rnn.pack_padded_sequence(h, torch.tensor([5, 4, 3]), batch_first=True)
        result: Tensor = self.layer(h)[0]
        return result.mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("meta", [False, True])
def test_each_layer_and_direction_is_an_operator_without_a_state_of_zeros(kind: type[nn.RNNBase], meta: bool) -> None:
    model = Tagger(kind, num_layers=2, bidirectional=True, dropout=0.3)
    graph = import_model(model.to("meta") if meta else model, torch.zeros(3, 5, dtype=torch.int64))
    layers = [op for op in graph.operators if op.module == "layer" and op.roles.get("T")]
    assert [op.attributes["backwards"] for op in layers] == [False, True, False, True]
    assert all(op.splittable == ("b",) and op.roles["b"] == "sample" for op in layers)
    assert not [t for t in graph.tensors if t.kind == "constant"]
    dropped = [op for op in graph.operators if op.kind == "dropout"]
    assert [op.attributes["p"] for op in dropped] == [0.3]


def test_packed_sequences_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ImportModelError) as caught:
        import_model(Tagger(nn.LSTM, packed=True), torch.zeros(3, 5, dtype=torch.int64))
    assert "packs sequences in layer 'layer'" in str(caught.value)
    assert "padded tensor" in str(caught.value)
