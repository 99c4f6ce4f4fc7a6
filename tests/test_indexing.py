"""Forms of indexing and assignment: each gives what PyTorch gives, in any pieces, and errors say what to do instead."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.errors import FileFormatError, ImportModelError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.notation import parse
from flexsearch.graph.ops import Sample
from tests.interpret import interpret
from tests.op_samples import Called, imported, written
from tests.test_ops import _close, _cuts, _values

MASK = torch.tensor([[True, False, True, False, True], [False] * 5, [True] * 5, [False, True, False, False, True]])
ROWS = torch.tensor([True, False, True, True])
PICKED = torch.tensor([2, 0, 4, 2])


def assigned(part: Any, value: Any, add: bool = False) -> Callable[..., Tensor]:
    """``x[part] = value``, or ``+=``, where either may be a function of the other tensors."""

    def call(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 1
        where = part(*others) if callable(part) else part
        what = value(*others) if callable(value) else value
        if add:
            y[where] += what
        else:
            y[where] = what
        return y

    return call


def last(*others: Tensor) -> Tensor:
    return others[-1]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


X = randn(4, 5, 3)

FORMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], set[str]]] = {
    "a number where a mask says": (assigned(lambda m: m, 0.5), (X, MASK), {"pointwise"}),
    "a row where a mask says": (assigned(lambda m, v: m, last), (X, MASK, randn(3)), {"pointwise"}),
    "rows in order where a mask says": (
        assigned(lambda m, v: m, last),
        (X, MASK, randn(int(MASK.sum()), 3)),
        {"mask_positions", "index", "pointwise"},
    ),
    "where a mask of a later dimension says": (
        assigned(lambda m, v: (slice(None), m), last),
        (X, MASK[2] & MASK[0], randn(4, 1, 3)),
        {"pointwise"},
    ),
    "where a constant mask says": (assigned(ROWS, last), (X, randn(3, 5, 3)), {"mask_positions"}),
    "a mask and an index": (
        assigned((ROWS, torch.tensor([0, 4, 2])), last),
        (X, randn(3, 3)),
        {"index_put"},
    ),
    "a number where a mask says, on masks": (
        lambda x, m: x * assigned(m, 1)(torch.zeros(4, 5, dtype=torch.int64))[..., None],
        (X, MASK),
        {"pointwise"},
    ),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m[..., None], s), (X, MASK, randn(40, 3)), {"mask_positions"}),
    "masked_scatter into what broadcasts": (
        lambda x, m, s: x[:1].masked_scatter(m[..., None], s),
        (X, MASK, randn(40)),
        {"mask_positions"},
    ),
    "one element of each row": (
        assigned(lambda i, v: (torch.arange(4), i), last),
        (X, PICKED, randn(4, 3)),
        {"index_put"},
    ),
    "one element of some rows": (
        assigned(lambda i, v: (torch.arange(1, 4), i[:3]), last),
        (X, PICKED, randn(3, 3)),
        {"index_put"},
    ),
    "elements of an outer product": (
        assigned(lambda i, v: (i[:2, None] - 3, slice(None), torch.arange(3)), last),
        (X, PICKED, randn(2, 3, 5)),
        {"index_put"},
    ),
    "a whole range and one element": (
        assigned((torch.arange(4), torch.tensor(2)), last),
        (X, randn(4, 3)),
        {"index_put"},
    ),
    "ranges alone": (assigned((torch.arange(4)[:, None], torch.arange(5)), last), (X, randn(5, 3)), {"index_put"}),
    "add to picked rows": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (X, PICKED % 4, randn(4, 1, 3)),
        {"index_put"},
    ),
    "inverse of a permutation": (
        lambda x, i: x[assigned(lambda j: j, torch.arange(4))(torch.zeros(4, dtype=torch.int64), i)],
        (X, torch.tensor([2, 0, 3, 1])),
        {"index_put", "index"},
    ),
    "add to the same rows": (lambda x, i, v: x.index_add(1, i, v), (X, PICKED, randn(4, 4, 3)), {"index_put"}),
    "put": (lambda x, i, v: x.put(i, v, accumulate=True), (X, torch.tensor([3, 3, -1]), randn(3)), {"index_put"}),
    "index_fill": (lambda x, i: x.index_fill(2, i, 7.0), (X, torch.tensor([0, -1])), {"index_put"}),
    "index_reduce": (
        lambda x, i, v: x.index_reduce(0, i, v, "amax"),
        (X, PICKED % 4, randn(4, 5, 3)),
        {"scatter"},
    ),
    "every second element": (assigned((slice(None), slice(1, None, 2)), last), (X[:, :4], randn(4, 2, 3)), {"cat"}),
    "every second element of an odd number": (
        assigned((slice(None), slice(0, None, 2)), last),
        (X, randn(4, 3, 3)),
        {"index_put"},
    ),
    "the last row": (assigned(-1, last), (X, randn(5, 3)), {"cat"}),
    "a number on the diagonal": (
        lambda x: (
            x * 1 + torch.diagonal_scatter(x, torch.zeros(4, 3, dtype=torch.float64), 1, 1, 2)
            if x.shape[1] > 5
            else torch.diagonal_scatter(x, torch.ones(4, 2, dtype=torch.float64), 1, 1, 2)
        ),
        (X,),
        {"index_put"},
    ),
    "diagonal in place": (lambda x: _zero_diagonal(x), (X,), {"index_put"}),
    "scatter a number": (lambda x, i: x.scatter(1, i, 0.5), (X, PICKED[:, None, None].expand(4, 1, 3)), {"scatter"}),
    "scatter into a part": (
        lambda x, i, s: x.scatter_add(1, i, s),
        (X, torch.tensor([[[0, 1], [4, 4], [0, 0]]]), randn(1, 3, 2)),
        {"scatter", "cat"},
    ),
    "scatter, the old reduction": (
        lambda x, i: x.detach().scatter(0, i, 2.0, reduce="multiply") * x,
        (X, torch.tensor([[[0], [3]]])),
        {"scatter"},
    ),
    "scatter into a scalar": (
        lambda x, i: x + torch.zeros((), dtype=torch.float64).scatter_add(0, i, x.sum()),
        (X, torch.tensor(0)),
        {"scatter"},
    ),
    "diagonal matrices": (lambda x: torch.diag_embed(x, 1, 0, 2), (X,), {"triangle"}),
    "a diagonal matrix": (lambda x: torch.diag(x[0, :4, 0]) @ torch.diag(x[:, :, 0], 1)[:, None], (X,), {"triangle"}),
    "take": (lambda x, i: x.take(i), (X, torch.tensor([[3, -1], [59, 0]])), {"index"}),
    "take_along_dim of all": (lambda x, i: torch.take_along_dim(x, i), (X, torch.tensor([3, 59, 0])), {"gather"}),
    "take_along_dim, broadcast": (
        lambda x, i: torch.take_along_dim(x[:1], i, 1),
        (X, PICKED[:, None, None]),
        {"gather"},
    ),
    "selected by a constant mask": (lambda x: x[ROWS, 1:].flatten(1).exp(), (X,), {"index"}),
    "selected by a constant mask of a later dimension": (lambda x: x[:, MASK[3]] @ x[0, :3].T, (X,), {"slice"}),
    "selected by the places of a constant mask": (
        lambda x: torch.cat((x[ROWS.nonzero()[:, 0]], x[:1])) * 2,
        (X,),
        {"index", "cat"},
    ),
    "masked_select": (lambda x: x.masked_select(MASK[..., None]).view(-1, 3), (X,), {"index"}),
    "copied where a constant mask says": (
        lambda x, y: x.index_put((ROWS,), y[ROWS] * 2),
        (X, randn(4, 5, 3)),
        {"index"},
    ),
    "a diagonal": (lambda x: x.diagonal(-1, 2, 0), (X,), {"einsum"}),
    "counts of integers": (
        lambda x, i: x * torch.histc(i.double(), 3, 0, 2),
        (X, PICKED),
        {"histogram"},
    ),
    "messages on a graph": (
        lambda x, w, s, d: torch.zeros_like(x[:, 0]).index_add(0, d, x[:, 0][s] * w[:, None]),
        (X, randn(6), torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([1, 1, 0, 0, 2, 1])),
        {"index", "index_put"},
    ),
}


def _zero_diagonal(x: Tensor) -> Tensor:
    y = x * 1
    y.diagonal(0, 1, 2).zero_()
    return y


@pytest.mark.parametrize("name", FORMS)
def test_a_form_gives_what_pytorch_gives_in_any_pieces(name: str) -> None:
    call, tensors, kinds = FORMS[name]
    model = Called(Sample(call, tensors))
    imported = import_with_constants(model, model.inputs())
    assert kinds <= {op.kind for op in imported.graph.operators}
    expected = model(*model.inputs())
    leaves = list(model.parameters())
    gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    draw = random.Random(name)
    for _ in range(5):
        result = interpret(imported.graph, _values(model, imported), cuts=lambda op: _cuts(op, draw))
        loss = result[imported.graph.loss]
        _close(loss.detach(), expected.detach())
        for x, y in zip(torch.autograd.grad(loss, leaves, allow_unused=True), gradients, strict=True):
            _close(torch.zeros(()) if x is None else x, torch.zeros(()) if y is None else y)


class Fn(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.w).sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x[x > 0], r"shape depends on values"),
        (lambda x: F.embedding(x.long()[..., 0], x[0], scale_grad_by_freq=True), r"scale_grad_by_freq=False"),
        (lambda x: x * torch.multinomial(x[0].abs(), 3), r"draws random numbers"),
        (lambda x: x * torch.randint(2**40, (3,)), r"draws integers from a range of more than 2\^31"),
    ],
)
def test_what_cannot_be_split_says_what_to_do(call: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        import_with_constants(Fn(call), (X,))


def test_numbers_are_drawn_from_their_distributions() -> None:
    def call(x: Tensor) -> tuple[Tensor, ...]:
        n = 200_000
        normal, waits = torch.normal(1.0, 2.0, (n,)), torch.empty(n).exponential_(0.5)
        dice, coins = torch.randint(1, 7, (n,)), torch.full((n,), 0.3).bernoulli_(torch.full((n,), 0.3))
        assert normal.shape == waits.shape
        return x, normal, waits, dice, coins

    model = Called(Sample(call, (randn(2),)))
    imported = import_with_constants(model, model.inputs())
    values = interpret(imported.graph, _values(model, imported))
    drawn = {op.kind: values[op.outputs[0]] for op in imported.graph.operators if "salt" in op.attributes}
    normal, waits, dice = drawn["normal"].double(), drawn["exponential"].double(), drawn["randint"]
    assert abs(normal.mean()) < 0.01 and abs(normal.var() - 1) < 0.02 and abs((normal**4).mean() - 3) < 0.1
    assert abs(waits.mean() - 1) < 0.01 and abs(waits.var() - 1) < 0.03 and waits.min() > 0
    counts = dice.bincount()
    assert len(counts) == 7 and counts[0] == 0 and (counts[1:] / len(dice) - 1 / 6).abs().max() < 0.005
    assert drawn["uniform"].min() >= 0 and abs(drawn["uniform"].mean() - 0.5) < 0.005


def _pattern(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    """Change of an operator in a file: other axes in its pattern, and so in their list."""

    def change(op: dict[str, Any]) -> None:
        assert old in op["pattern"]
        op["pattern"] = op["pattern"].replace(old, new)
        sizes = {axis["name"].lower(): axis for axis in op["axes"]}
        names = parse(op["pattern"]).axes
        op["axes"] = [sizes[name.lower()] | {"name": name} for name in names]

    return change


def _attributes(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(op: dict[str, Any]) -> None:
        op["attributes"] |= values

    return change


CONTRADICTIONS: list[tuple[str, int, Callable[[dict[str, Any]], None], str]] = [
    ("index", 0, _attributes(rank=3), "rank do not make a result"),
    ("index", 2, _attributes(indices=[{"axis": 4}, {"operand": 0}, None]), "dimension that 1 dimensions of indices"),
    ("index", 0, _pattern("V1", "v1"), "is not that of index"),
    ("gather", 0, _attributes(dim=3), "is no dimension of shape"),
    ("gather", 0, _pattern("V", "v"), "is not that of gather"),
    ("scatter", 0, _pattern("+a", "a"), "is not that of scatter"),
    ("scatter", 3, _pattern("Source", "source"), "is not that of scatter"),
    ("scatter", 0, _attributes(reduce="prod"), "is not that of scatter"),
    ("scatter", 0, _attributes(reduce="any"), "attributes.reduce"),
    ("index_put", 1, _attributes(accumulate=False), "is not that of index_put"),
    ("index_put", 2, _pattern("Source0", "source0"), "is not that of index_put"),
    ("index_put", 4, _attributes(indices=[{"axis": None}, {"operand": 0}, None]), "do not say how elements are put"),
    (
        "index_put",
        4,
        _attributes(indices=[{"axis": 0}, {"axis": 0}, {"operand": 0}]),
        "two ranges run along one dimension",
    ),
    ("index_put", 4, _attributes(rank=9), "is not that of index_put"),
    ("embedding", 0, _pattern("v d", "d v"), "is not that of embedding|has other sizes|axis"),
    ("embedding_bag", 0, _attributes(mode="max"), "is not that of embedding_bag"),
    ("embedding_bag", 6, _attributes(mode="mean"), "weights of bags are those of a sum"),
    ("embedding_bag", 2, _attributes(padding_idx=1), "is not that of embedding_bag"),
    ("ragged_bag", 0, _attributes(last=True), "do not make bags of shape"),
    ("ragged_bag", 2, _pattern("O", "o"), "is not that of ragged_bag"),
    ("one_hot", 0, _pattern("a0 a1 c", "a1 a0 c"), "axis"),
    ("histogram", 0, _attributes(high=-1.0), "is not that of histogram"),
    ("histogram", 0, _attributes(high=-3.0), "is below low"),
    ("mask_positions", 0, _pattern("A0", "a0"), "is not that of mask_positions"),
    ("dropout", 0, _attributes(p=1.5), "attributes.p"),
    ("normal", 0, _attributes(salt=2**70), "attributes.salt"),
    ("randint", 0, _attributes(low=7), "is not 1 to 2"),
]


@pytest.mark.parametrize(("kind", "number", "change", "message"), CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(
    kind: str, number: int, change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    document = written(imported(kind, number).graph)
    change(next(op for op in document["operators"] if op["kind"] == kind))
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=message):
        OperatorGraph.load(path)
