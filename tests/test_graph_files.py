"""A graph file says what cannot be derived, once; what is read from it is what was written."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.errors import FileFormatError
from flexsearch.files import to_json
from flexsearch.graph import OperatorGraph
from flexsearch.graph.compact import to_text
from flexsearch.graph.files import GraphFile, expand
from flexsearch.graph.model import Tensor
from flexsearch.graph.runs import expanded, runs, template
from flexsearch.graph.samples import counting
from flexsearch.graph.shipped import SHIPPED
from tests import fuzz_documents as documents
from tests.fuzz_documents import CHAIN, Data


def saved(graph: OperatorGraph, path: Path) -> OperatorGraph:
    graph.save(path)
    return OperatorGraph.load(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_graphs_come_back_from_both_formats(name: str, tmp_path: Path) -> None:
    graph, path = OperatorGraph.load(name), tmp_path / "g.json"
    assert saved(graph, path) == graph
    assert json.loads(path.read_text())["format"] == "flexsearch.graph/2"
    if len(graph.operators) > 2000:
        return  # the old format has no repeated blocks, and takes long
    path.write_text(to_json(graph))
    assert json.loads(path.read_text())["format"] == "flexsearch.graph/1"
    again = OperatorGraph.load(path)
    assert again == graph and again.content_hash() == graph.content_hash()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["gpt2", "resnet50", "nmt", "rnnlm", "inception_v3"]), st.data())
def test_random_parts_of_graphs_come_back(name: str, data: st.DataObject) -> None:
    operators = OperatorGraph.load(name).operators
    count = len(operators)
    first = data.draw(
        st.integers(0, count - 2).filter(lambda k: operators[k].kind in ("linear", "conv2d", "pointwise"))
    )
    part = documents.excerpt(name, first, data.draw(st.integers(1, min(80, count - first))))
    graph = OperatorGraph.model_validate_json(json.dumps(part))
    ordered = _in_file_order(graph)
    text = to_text(ordered)
    assert '"flexsearch.graph/2"' in text
    assert expand(GraphFile.model_validate_json(text)) == ordered
    shuffled = [*ordered.tensors]
    random.Random(0).shuffle(shuffled)
    mixed = _with_tensors(ordered, shuffled)
    assert ('"flexsearch.graph/1"' in to_text(mixed)) == (_in_file_order(mixed) != mixed)


def _in_file_order(graph: OperatorGraph) -> OperatorGraph:
    """The graph with its tensors as a file lists them: by kind, then results in the order of the operators."""
    leaves = [t for kind in ("input", "parameter", "buffer", "constant") for t in graph.of_kind(kind)]
    made = [graph.tensor[name] for op in graph.operators for name in op.outputs]
    return _with_tensors(graph, [*leaves, *made])


def _with_tensors(graph: OperatorGraph, tensors: list[Tensor]) -> OperatorGraph:
    return OperatorGraph(**{field: getattr(graph, field) for field in OperatorGraph.model_fields} | {
        "tensors": tuple(tensors)
    })  # fmt: skip


def test_braces_in_names_are_not_taken_for_numbers(tmp_path: Path) -> None:
    graph = OperatorGraph.load("mlp")
    text = to_json(graph).replace('"input"', '"in{0}"').replace('"kind": "in{0}"', '"kind": "input"')
    odd = OperatorGraph.model_validate_json(text)
    assert odd.of_kind("input")[0].name == "in{0}"
    assert saved(odd, tmp_path / "g.json") == odd
    assert json.loads((tmp_path / "g.json").read_text())["format"] == "flexsearch.graph/2"


def test_repetitions_advance_the_numbers_in_names() -> None:
    assert template("l.0.norm", "l.1.norm") == "l.{0}.norm"
    assert template("l.3.add_1", "l.5.add_1") == "l.{3+2}.add_1"
    assert template("a", "b") is None and template("l.1", "l.0") is None and template("l.7", "l.07") is None
    assert [expanded("l.{0}.add_{3+2}", k) for k in range(3)] == ["l.0.add_3", "l.1.add_5", "l.2.add_7"]
    assert expanded("l.{-1}.add", 1) == "l.0.add"


@given(st.lists(st.integers(0, 2), max_size=30))
def test_runs_are_repetitions_and_do_not_overlap(tokens: list[int]) -> None:
    end = 0
    for run in runs(tokens, lambda *_: True):
        assert run.start >= end and run.times >= 2
        assert tokens[run.start : run.end] == tokens[run.start : run.start + run.period] * run.times
        end = run.end
    assert end <= len(tokens)


def test_what_repeats_is_expanded_as_if_written_out() -> None:
    graph = documents.read_graph(CHAIN)
    assert [op.name for op in graph.operators] == [f"l.{k}.{x}" for k in range(4) for x in ("linear", "relu")] + [
        "loss"
    ]
    assert [op.inputs[0] for op in graph.operators] == [
        "x", "l.0.linear", "l.0.relu", "l.1.linear", "l.1.relu", "l.2.linear", "l.2.relu", "l.3.linear", "l.3.relu",
    ]  # fmt: skip
    assert {a.name: a.role for a in graph.operators[0].axes} == {"b0": "sample", "o": "parameter", "i": "reduction"}
    assert {"l.3.weight", "l.3.relu"} <= set(graph.tensor)
    assert [op.attributes.get("salt") for op in graph.operators if op.kind == "pointwise"] == [2, 5, 8, 11]
    assert json.loads(to_text(graph)) == CHAIN


def _changed(path: tuple[str | int, ...], value: Any) -> Data:
    data: Data = json.loads(json.dumps(CHAIN))
    documents.put(data, path, value)
    return data


LINEAR = ("operators", 0, "operators", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("operators", 0, "repeat"), 10**5, "operators: are 200001 with all repetitions; at most 131072"),
        (("parameters", 0, "repeat"), 524289, "at most 524288"),
        (("operators", 0, "repeat"), 1, "repeat: must be at least 2"),
        (
            ("operators", 0, "repeat"),
            5,
            r"'l\.4\.linear' reads 'l\.4\.weight', which is not in the graph or made later",
        ),
        (("operators", 0, "first"), {}, r"operators\.0\.operators\.0\.inputs: 'l\.0\.linear' reads 'l\.-1\.relu'"),
        ((*LINEAR, "pattern"), "b0 i, o -> b0 o", r"operators\.0\.pattern: .* \('l\.0\.linear'\)"),
        ((*LINEAR, "pattern"), "b0 i, o i -> b0 o z", "the size of 'z' does not follow from the inputs; give it"),
        ((*LINEAR, "pattern"), "b0 i -> b0", "has 1 inputs, the operator 2"),
        ((*LINEAR, "sizes"), {"q": 2}, "has no axis 'q'"),
        ((*LINEAR, "sizes"), {"i": 3}, r"operators\.0 \('l\.0\.linear'\)\.pattern: axis 'i' .* is 3"),
        ((*LINEAR, "dtypes"), ["float32", "float32"], "dtypes: 'l.0.linear' has 1 outputs"),
        ((*LINEAR, "outputs"), ["a", "b"], "has 2 outputs; its pattern has 1"),
        (("operators", 0, "operators", 1, "name"), "l.{0}.linear", r"name: there are two tensors 'l\.0\.linear'"),
        ((*LINEAR, "updates"), ["a", "b"], "has 1 outputs"),
        ((*LINEAR, "updates"), ["a{0}"], r"buffer_updates\.a0"),
        (("inputs", 0, "counter"), True, r"inputs\.0\.counter: only buffers have this field"),
        (("parameters", 0, "tensors", 0, "sample"), False, "only inputs have this field"),
        (("inputs", 0, "shape"), [8, 17], "axis 'i'"),
        (("loss",), "l.3.relu", "must be a floating-point scalar"),
        (("operators", 0, "extra"), 1, "is no field of this kind of file"),
        (("format",), "flexsearch.graph/3", 'this command needs "flexsearch.graph/2"'),
    ],
)
def test_what_contradicts_itself_is_refused_where_it_stands(
    path: tuple[str | int, ...], value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "g.json"
    file.write_text(json.dumps(_changed(path, value)))
    with pytest.raises(FileFormatError, match=message) as caught:
        OperatorGraph.load(file)
    assert "g.json" in str(caught.value)


def test_a_small_file_does_not_become_a_huge_graph(tmp_path: Path) -> None:
    long = _changed((*LINEAR, "inputs"), ["l.{-1}.relu", *["l.{0}.weight"] * 4000])
    long["operators"][0]["repeat"] = 60000
    (tmp_path / "g.json").write_text(json.dumps(long))
    start = time.monotonic()
    with pytest.raises(FileFormatError, match="with all repetitions are more than 128 MiB"):
        OperatorGraph.load(tmp_path / "g.json")
    assert time.monotonic() - start < 60


def test_the_file_of_a_large_decoder_is_small(tmp_path: Path) -> None:
    from flexsearch import zoo
    from flexsearch.graph.importer import import_model

    model, inputs, targets, loss = zoo.llama7b(
        layers=24, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq=4096
    )
    graph = import_model(model, inputs, loss, targets=targets)
    assert sum(t.nbytes for t in graph.of_kind("parameter")) > 4 * 20e9
    assert saved(graph, tmp_path / "g.json") == graph
    assert (tmp_path / "g.json").stat().st_size < 20_000


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_plans_for_graphs_that_counted_targets_first_still_fit(name: str) -> None:
    graph = OperatorGraph.load(name)
    early = counting(graph)
    order = sorted(range(len(graph.operators)), key=lambda i: i not in early)
    operators = tuple(graph.operators[i] for i in order)
    made = {n for op in operators for n in op.outputs}
    leaves = tuple(t for t in graph.tensors if t.name not in made)
    fields = {field: getattr(graph, field) for field in OperatorGraph.model_fields}
    tensors = leaves + tuple(graph.tensor[n] for op in operators for n in op.outputs)
    before = OperatorGraph(**(fields | {"operators": operators, "tensors": tensors}))
    assert before.operators[0] != graph.operators[0] and before.content_hash() == graph.content_hash()
    other = (*graph.operators[:-1], graph.operators[-1].model_copy(update={"module": "elsewhere"}))
    assert OperatorGraph(**(fields | {"operators": other})).content_hash() != graph.content_hash()
