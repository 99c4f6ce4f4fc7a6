"""Casts of many tensors in one call: the same values, types and strides as one by one."""

from __future__ import annotations

import pytest
import torch

from flexsearch.runtime import casts
from flexsearch.runtime.casts import cast, in_parts


@pytest.mark.parametrize("known", [True, False])
def test_tensors_cast_together_are_as_if_cast_one_by_one(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4, device="cpu"),
        torch.randn(0), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5).double(),
    ]  # fmt: skip
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.half]
    if not known:
        monkeypatch.setattr(casts, "_COPY", None)
    found = cast(tensors, dtypes, together=True)
    for tensor, dtype, result in zip(tensors, dtypes, found, strict=True):
        expected = tensor.to(dtype)
        assert result.dtype == dtype
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)
    assert found[3] is tensors[3]


def test_weights_that_want_gradients_give_casts_that_are_leaves() -> None:
    (found,) = cast([torch.randn(3, requires_grad=True)], [torch.bfloat16], together=True)
    assert found.is_leaf


def test_parts_hold_so_many_bytes_or_one_that_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "TOGETHER", 10)
    assert in_parts([4, 6, 1, 30, 2, 8, 1]) == [range(2), range(2, 3), range(3, 4), range(4, 6), range(6, 7)]
    assert in_parts([]) == []
