"""Conditions on values that only check are left out of a graph; those that choose what is computed are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flexsearch.errors import ImportModelError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model

Check = Callable[[Tensor], object]


class Checked(nn.Module):
    def __init__(self, check: Check) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, 3), check

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.check(y)
        return y


def graph_of(check: Check, device: str = "cpu") -> OperatorGraph:
    """``device``: of the batch; on the meta device it has no values, as when a step is set up."""
    return import_model(Checked(check), (torch.zeros(6, 4, device=device),), lambda y: y.square().mean())


def finite(y: Tensor) -> None:
    assert torch.isfinite(y).all(), "not finite"


def not_nan(y: Tensor) -> None:
    assert not torch.isnan(y).any()


def a_number(y: Tensor) -> None:
    assert torch.all(y < 100).item()


def of_all_elements(y: Tensor) -> None:
    """As transformers checks that there are as many places for images as images."""
    torch._check_tensor_all(y < 100)


def several_rows(y: Tensor) -> None:
    for row in y[:2]:
        assert (row > -100).all() and not (torch.isnan(row).any() or torch.isinf(row).any())


def raised(y: Tensor) -> None:
    if torch.isnan(y).any():
        message = "not a number"
        raise ValueError(message)


def raised_otherwise(y: Tensor) -> None:
    if (y < 100).all():
        pass
    else:
        raise ValueError


def by_function(y: Tensor) -> None:
    torch._assert(y.max() < 100, "too large")


@pytest.mark.parametrize(
    "check", [finite, not_nan, a_number, of_all_elements, several_rows, raised, raised_otherwise, by_function]
)
def test_checks_of_values_are_left_out(check: Check) -> None:
    without = graph_of(lambda y: None).content_hash()
    assert all(graph_of(check, device).content_hash() == without for device in ("cpu", "meta"))


def chooses(y: Tensor) -> None:
    if (y > 0).any():
        y.mul_(2)


def chooses_behind_a_check(y: Tensor) -> None:
    not_nan(y)
    chooses(y)


def raises_or_chooses(y: Tensor) -> None:
    if (y > 0).any():
        y.mul_(2)
    elif (y < -5).any():
        raise ValueError


@pytest.mark.parametrize("condition", [chooses, chooses_behind_a_check, raises_or_chooses])
def test_conditions_that_choose_what_is_computed_are_refused(condition: Check) -> None:
    with pytest.raises(ImportModelError, match="decides by the values of tensors"):
        graph_of(condition)


def shape_behind_a_check(y: Tensor) -> None:
    not_nan(y)
    assert y.shape[0] == 7, "there must be seven"


def test_checks_that_fail_whatever_the_values_are_errors() -> None:
    with pytest.raises(ImportModelError, match="there must be seven"):
        graph_of(shape_behind_a_check)
