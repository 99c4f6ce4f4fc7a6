"""What tracing takes from PyTorch that is private to it, and what it does without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flexsearch.errors import ImportModelError
from flexsearch.graph import private
from flexsearch.graph.importer import import_model

NAMES = "_FAKE_TENSORS", "_EFFECTS", "_EXPORT", "_CONVERT", "_COMPOSITES", "_OPERATORS"


class Layer(nn.Module):
    def __init__(self, converts: bool = False) -> None:
        super().__init__()
        self.layer, self.converts = nn.Linear(8, 4), converts

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer.to(x.dtype) if self.converts else self.layer)(x).square().mean()


def test_this_pytorch_has_all_of_it() -> None:
    assert all(getattr(private, name) is not None for name in NAMES)  # or else the next PyTorch has moved it


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_are_imported_without_it(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    model, x = Layer().to(device), torch.ones(2, 8, device=device)
    expected = import_model(model, x).content_hash()
    for name in NAMES:
        monkeypatch.setattr(private, name, None)
    assert import_model(model, x).content_hash() == expected


def test_a_layer_that_is_converted_is_then_refused_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    import_model(Layer(converts=True), torch.ones(2, 8))
    monkeypatch.setattr(private, "_CONVERT", None)
    with pytest.raises(ImportModelError, match="cannot be traced in layer 'layer'"):
        import_model(Layer(converts=True), torch.ones(2, 8))


def test_an_import_looks_up_the_operators_of_pytorch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, lookup = [], private._COMPOSITES._materialize_cpp_cia_ops
    monkeypatch.setattr(private._COMPOSITES, "_materialize_cpp_cia_ops", lambda: calls.append(lookup()))
    import_model(Layer(), torch.ones(2, 8))
    assert len(calls) == 1


def test_operators_have_their_own_kernels_again_after_an_import() -> None:
    operator = torch.ops.aten.matmul.default
    before, register = dict(operator.py_kernels), type(operator).py_impl
    import_model(Layer(), torch.ones(2, 8))
    assert operator.py_kernels == before and type(operator).py_impl is register
