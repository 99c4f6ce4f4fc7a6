"""The graphs that come with flexsearch; ``python -m flexsearch.graph.shipped FOLDER [NAME...]`` makes them anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexsearch.graph.model import OperatorGraph

SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "lenet": {"batch": 64},
    "mlp": {"batch": 64},
    "alexnet": {"batch": 32},
    "vgg16": {"batch": 32},
    "resnet50": {"batch": 32},
    "gpt2": {"batch": 8, "seq": 1024},
    "bert": {"batch": 8, "seq": 128},
}
"""Zoo builder and its arguments, by graph name."""


def make(name: str) -> OperatorGraph:
    """The shipped graph ``name``, made anew from the zoo's model on the meta device."""
    from flexsearch import zoo
    from flexsearch.graph.importer import import_model

    model, inputs, targets, loss = getattr(zoo, name)(device="meta", **SHIPPED[name])
    return import_model(model, inputs, loss, targets=targets, name=name)


def main(arguments: list[str]) -> None:
    """Write all shipped graphs, or those named, to a folder."""
    folder, *names = arguments
    for name in names or SHIPPED:
        make(name).save(Path(folder) / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
