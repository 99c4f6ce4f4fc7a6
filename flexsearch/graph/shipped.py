"""The graphs that come with flexsearch; ``python -m flexsearch.graph.shipped FOLDER [NAME...]`` makes them anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flexsearch.graph.deepen import deepened
from flexsearch.graph.model import OperatorGraph

FEW = 3
"""Layers of a large model that are imported; the others repeat them."""


class Source(NamedTuple):
    """What a shipped graph is made of: a builder of ``flexsearch.zoo`` and its arguments. ``layers``: that many, the
    builder's default, of a large model, of which FEW are imported; None: the model is imported as it is."""

    builder: str
    arguments: Mapping[str, Any]
    layers: int | None = None


SHIPPED: Mapping[str, Source] = {
    "lenet": Source("lenet", {"batch": 64}),
    "mlp": Source("mlp", {"batch": 64}),
    "alexnet": Source("alexnet", {"batch": 32}),
    "alexnet256": Source("alexnet", {"batch": 256}),
    "vgg16": Source("vgg16", {"batch": 32}),
    "resnet50": Source("resnet50", {"batch": 32}),
    "resnet101": Source("resnet101", {"batch": 64}),
    "inception_v3": Source("inception_v3", {"batch": 64}),
    "rnntc": Source("rnntc", {"batch": 64}),
    "rnnlm": Source("rnnlm", {"batch": 64}),
    "nmt": Source("nmt", {"batch": 64}),
    "gpt2": Source("gpt2", {"batch": 8, "seq": 1024}),
    "bert": Source("bert", {"batch": 8, "seq": 128}),
    "bert_large": Source("bert_large", {"batch": 8, "seq": 128}),
    "llama_7b": Source("llama7b", {"batch": 16, "seq": 4096}, layers=32),
    "llama_70b": Source("llama70b", {"batch": 16, "seq": 4096}, layers=80),
    "llama_405b": Source("llama405b", {"batch": 16, "seq": 8192}, layers=126),
    "gpt3_175b": Source("gpt3", {"batch": 16, "seq": 2048}, layers=96),
    "mixtral_8x7b": Source("mixtral", {"batch": 16, "seq": 4096}, layers=32),
}
"""By graph name. The six networks of the FlexFlow paper with its batches are ``alexnet256``, ``inception_v3``,
``resnet101``, ``rnntc``, ``rnnlm`` and ``nmt``."""


def make(name: str) -> OperatorGraph:
    """The shipped graph ``name``, made anew from the zoo's model on the meta device."""
    from flexsearch import zoo
    from flexsearch.graph.importer import import_model

    builder, arguments, layers = SHIPPED[name]
    few = {} if layers is None else {"layers": FEW}
    model, inputs, targets, loss = getattr(zoo, builder)(device="meta", **arguments, **few)
    graph = import_model(model, inputs, loss, targets=targets, name=name)
    return graph if layers is None else deepened(graph, layers)


def main(arguments: list[str]) -> None:
    """Write all shipped graphs, or those named, to a folder."""
    folder, *names = arguments
    for name in names or SHIPPED:
        make(name).save(Path(folder) / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
