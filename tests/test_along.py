"""What works along dimensions: calls that are written with other operators, half precision, files that contradict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.errors import FileFormatError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model, import_with_constants
from flexsearch.graph.ops import Sample
from flexsearch.graph.ops.base import integers, rand
from tests.interpret import interpret
from tests.test_ops import Called, check_pieces

torch.manual_seed(3)  # what is drawn here is the same in every run
_SIGNS = (integers(2, 4, 6) * 2 - 1, integers(2, 4) * 2 - 1)
_COUNTS = integers(5, 4, 6)

REWRITTEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], set[str]]] = {
    "glu": (lambda x: F.glu(x, 1), (rand(4, 6),), {"slice"}),
    "prelu": (F.prelu, (rand(4, 6, 3), rand(6)), {"view"}),
    "rrelu": (F.rrelu, (rand(4, 6),), set()),
    "threshold": (lambda x: F.threshold(x, 0.1, 2.0), (rand(4, 6),), set()),
    "softmin": (lambda x: F.softmin(x, 1), (rand(4, 6),), {"softmax"}),
    "any": (lambda x, m: x * m.any(1, True) * (x > 0).any() * m.any((0, 1)), (rand(4, 6), rand(4, 6) > 1), {"sum"}),
    "all": (lambda x, m: x * m.all(1, True) * (x < 9).all() * m.byte().all(), (rand(4, 6), rand(4, 6) > -1), {"sum"}),
    "nan": (lambda x: (x.log().nansum(1), x.log().nanmean(0, True), x.log().nansum()), (rand(4, 6),), {"sum"}),
    "rot90": (lambda x: (x.rot90(), x.rot90(2, (0, 2)), x.rot90(-1, (2, 1))), (rand(4, 6, 3),), {"scan"}),
    "flipud": (lambda x: (x.flipud(), x.fliplr()), (rand(4, 6),), {"scan"}),
    "diff": (lambda x: (x.diff(), x.diff(2, 0), x.diff(dim=1, prepend=x[:, :2])), (rand(4, 6),), {"slice"}),
    "diff of conditions": (lambda x, m: x[:, 1:] * m.diff(), (rand(4, 6), rand(4, 6) > 0), {"slice"}),
    "areas": (
        lambda x, t: (torch.trapezoid(x), torch.trapezoid(x, dx=0.5, dim=0), torch.cumulative_trapezoid(x, t, dim=1)),
        (rand(4, 6), rand(6)),
        {"sum", "scan"},
    ),
    "diagonal matrices": (lambda x: (x.diagflat(1), x[:, 0].diag(-1)), (rand(4, 3),), {"triangle", "pad"}),
    "soft margin of several labels": (
        lambda x, t: F.multilabel_soft_margin_loss(x, t), (rand(4, 6), integers(2, 4, 6)), {"mean"}
    ),
    "several classes": (lambda x, t: F.multi_margin_loss(x, t), (rand(4, 6), integers(6, 4)), {"mean"}),
    "hinge": (F.hinge_embedding_loss, (rand(4, 6), _SIGNS[0]), {"mean"}),
    "ranking": (lambda x, y, t: F.margin_ranking_loss(x, y, t, 0.5), (rand(4, 6), rand(4, 6), _SIGNS[0]), {"mean"}),
    "triplets": (F.triplet_margin_loss, (rand(4, 6), rand(4, 6), rand(4, 6)), {"power_sum"}),
    "triplets, swapped": (
        lambda x, y, z: F.triplet_margin_loss(x, y, z, p=1.0, swap=True, reduction="sum"),
        (rand(4, 6), rand(4, 6), rand(4, 6)),
        {"power_sum"},
    ),
    "triplets by a distance": (
        F.triplet_margin_with_distance_loss, (rand(4, 6), rand(4, 6), rand(4, 6)), {"power_sum"}
    ),
    "cosine embedding": (
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.1), (rand(4, 6), rand(4, 6), _SIGNS[1]), {"einsum"}
    ),
    "Poisson": (lambda x, t: F.poisson_nll_loss(x, t, full=True), (rand(4, 6), _COUNTS), {"mean"}),
    "Poisson of rates": (
        lambda x, t: F.poisson_nll_loss(x.exp(), t, log_input=False, reduction="none"), (rand(4, 6), _COUNTS), set()
    ),
    "Gaussian": (
        lambda x, y, v: (
            F.gaussian_nll_loss(x, y, (v - 0.2).relu(), full=True) + F.gaussian_nll_loss(x, y, v[:, :1].abs())
        ),
        (rand(4, 6), rand(4, 6), rand(4, 6)),
        {"mean"},
    ),
    "inner products": (
        lambda x, y: (torch.inner(x, y), torch.inner(x, y[0, 0])),
        (rand(4, 6), rand(2, 3, 6)),
        {"einsum"},
    ),
    "real parts of real numbers": (lambda x: (x.real, x.conj(), x.mH), (rand(4, 6),), set()),
    "transforms of an image": (lambda x: torch.fft.fft2(x).abs(), (rand(2, 3, 4, 5),), {"fft"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_call_is_written_with_other_operators_that_add_up(name: str) -> None:
    call, tensors, kinds = REWRITTEN[name]
    model = Called(Sample(call, tensors))
    imported = import_with_constants(model, model.inputs())
    assert kinds <= {op.kind for op in imported.graph.operators}
    assert not any(op.kind == "opaque" for op in imported.graph.operators)
    check_pieces(model, imported, name)


class Narrow(nn.Module):
    """A function of numbers in half precision, far from 0, summed."""

    def __init__(self, call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.call, self.dtype, self.weight = call, dtype, nn.Parameter(rand(8, 16).float() + 30)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(self.weight.to(self.dtype)).float().sum() + x.sum()
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [lambda x: x.var(1), lambda x: x.std(), lambda x: x.norm(dim=0), lambda x: x.mean(1)])
def test_half_precision_is_as_exact_in_pieces_as_in_pytorch(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model, x = Narrow(call, dtype), torch.zeros(2)
    imported = import_with_constants(model, (x,))
    exact = call(model.weight.to(dtype).double()).sum()
    values = {**imported.constants, imported.input_names[0]: x, "weight": model.weight}

    def halves(op: Any) -> Any:
        return {a: [(0, n // 2), (n // 2, n)] if a in op.splittable else [(0, n)] for a, n in op.sizes.items()}

    result = interpret(imported.graph, values, cuts=halves)[imported.graph.loss]
    torch.testing.assert_close(result.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_norms_and_deviations_have_a_gradient_where_they_are_zero() -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            cosines: Tensor = F.cosine_similarity(w, x + 1).sum()
            return w.norm() + w.norm(dim=1).sum() + w.std(0).sum() + cosines + x.sum()

    model, x = Zeros(), torch.ones(4, 6, dtype=torch.float64)
    imported = import_with_constants(model, (x,))
    loss = interpret(imported.graph, {**imported.constants, imported.input_names[0]: x, "weight": model.weight})
    (gradient,) = torch.autograd.grad(loss[imported.graph.loss], [model.weight])
    (expected,) = torch.autograd.grad(model(x), [model.weight])
    torch.testing.assert_close(gradient, expected)


class Everything(nn.Module):
    """One of each kind that a file can contradict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        z = y.cumsum(1) + y.sort(1)[0] + y.tril() + y.amax(1, True) + y.logsumexp(1, True) + y.softmax(1)
        pairs = torch.view_as_real(torch.fft.fft(z.view(4, 3, 2)[..., 0]) + torch.view_as_complex(z.view(4, 3, 2)))
        z = z + torch.bucketize(y, torch.arange(3.0).double()) + y.var(1, keepdim=True) + y.norm(dim=1, keepdim=True)
        z = torch.cdist(z, y).mean() + torch.linalg.cross(z[:, :3], y[:, 3:]).mean() + pairs.sum() + y.sum(0).mean()
        loss = F.soft_margin_loss(y, torch.ones_like(y)) + F.multilabel_margin_loss(y, torch.zeros_like(y).long())
        one = torch.tensor([2] * 4)
        labels = F.ctc_loss(y.view(2, 4, 3).log_softmax(2), torch.ones(4, 2).long(), one, one)
        return z + loss + F.mse_loss(y, x) + labels


CHANGES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("scan", lambda op: op["attributes"]["args"].__setitem__(1, 9), "no dimension of shape"),
    ("scan", lambda op: op["attributes"]["args"].__setitem__(1, 0), "does not keep dimension 0 whole"),
    ("scan", lambda op: op["attributes"]["args"].__setitem__(0, 1), "the first must be"),
    ("scan", lambda op: op["attributes"].update(target="aten.relu.default"), "is none of"),
    ("scan", lambda op: op["attributes"].update(args=[]), "the first must be"),
    ("scan", lambda op: op["attributes"].update(args=[{"tensor": 0}]), "no dimension of shape"),
    ("scan", lambda op: op["attributes"].update(args=[{"tensor": 0}, True]), "no dimension of shape"),
    ("sort", lambda op: op["attributes"].update(target="aten.argsort.default"), "has 1 results, not 2"),
    ("reduction", lambda op: op["attributes"]["args"].__setitem__(1, [0]), "does not keep dimension 0 whole"),
    ("fft", lambda op: op["attributes"]["args"].__setitem__(2, "x"), "no dimension of shape"),
    ("triangle", lambda op: op["attributes"].update(diagonal="1"), "attributes.diagonal"),
    ("triangle", lambda op: op["attributes"].update(upper=3), "attributes.upper"),
    ("amax", lambda op: op["attributes"].update(dims=[0]), "must have shape"),
    ("amax", lambda op: op["attributes"].update(dims=[7]), "are not dimensions"),
    ("sum", lambda op: op["attributes"].update(dims=[1]), "must have shape"),
    ("softmax", lambda op: op["attributes"].update(dim=0), "does not keep dimension 0 whole"),
    ("softmax", lambda op: op["attributes"].update(dim=5), "no dimension of shape"),
    ("search", lambda op: op["attributes"].update(target="aten.add.Tensor"), "is none of"),
    ("squared_deviation", lambda op: op["attributes"].update(dims=[0]), "the means of shape"),
    ("power_sum", lambda op: op["attributes"].update(ord=0.5), "attributes.ord"),
    ("power_sum", lambda op: op["attributes"].pop("ord"), "attributes.ord"),
    ("root", lambda op: op["attributes"].update(ord="two"), "attributes.ord"),
    ("cdist", lambda op: op["attributes"].update(p=-1.0), "attributes.p"),
    ("cdist", lambda op: op["attributes"].update(p="nan"), "attributes.p"),
    ("cross", lambda op: op["attributes"].update(dim=-2), "three coordinates"),
    ("multilabel_margin_loss", lambda op: op["attributes"].update(reduction="max"), "attributes.reduction"),
    ("soft_margin_loss", lambda op: op["attributes"].update(has_weight=True), "its attributes speak of 3"),
    ("ctc_loss", lambda op: op["attributes"].update(blank=3), "is none of 3 classes"),
    ("ctc_loss", lambda op: op["attributes"].update(zero_infinity=1), "attributes.zero_infinity"),
    ("mse_loss", lambda op: op["attributes"].update(reduction=1), "attributes.reduction"),
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    import_model(Everything(), (rand(4, 6),)).save(path)
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize(("kind", "change", "problem"), CHANGES)
def test_a_file_that_contradicts_itself_is_refused(
    document: dict[str, Any], kind: str, change: Callable[[Any], Any], problem: str, tmp_path: Path
) -> None:
    changed = json.loads(json.dumps(document))
    change(next(op for op in changed["operators"] if op["kind"] == kind))
    (tmp_path / "graph.json").write_text(json.dumps(changed))
    with pytest.raises(FileFormatError) as caught:
        OperatorGraph.load(tmp_path / "graph.json")
    assert problem in str(caught.value)
