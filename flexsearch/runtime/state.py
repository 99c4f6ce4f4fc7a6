"""What a model's state consists of, and how much of a batch a sample is: facts about model and graph, on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.fold import sources
from flexsearch.graph.importer import Imported

_VERSIONS: Final = "_metadata"
"""The attribute of a state_dict in which PyTorch notes them."""


def state_names(model: nn.Module) -> dict[str, str]:
    """Name in ``model.state_dict()`` -> name in the graph (a tied weight has several of the former)."""
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)
    everything: dict[str, Tensor] = {}
    everything.update(model.named_parameters(remove_duplicate=False))
    everything.update(model.named_buffers(remove_duplicate=False))
    return {name: first[id(everything[name])] for name in model.state_dict(keep_vars=True) if name in everything}


def versions_of(state: Mapping[str, Tensor]) -> object:
    """The versions of the modules' states that ``Module.state_dict`` has noted. None: this PyTorch notes none."""
    return getattr(state, _VERSIONS, None)


def with_versions(state: Mapping[str, Tensor], versions: object) -> dict[str, Tensor]:
    """A state with the ``versions_of`` a model's own: some modules load none without (torchvision's MNASNet)."""
    noted = OrderedDict(state)
    if versions is not None:
        setattr(noted, _VERSIONS, versions)
    return noted


def transient(model: nn.Module, persistent: Collection[str]) -> dict[str, Tensor]:
    """The buffers that are in no state_dict: CPU or meta tensors, by name."""
    buffers = {name: tensor.detach() for name, tensor in model.named_buffers() if name not in persistent}
    return {name: tensor if tensor.is_meta else tensor.cpu() for name, tensor in buffers.items()}


def check_meta(imported: Imported, buffers: dict[str, Tensor], initialised: bool) -> None:
    """Raise RuntimeFailure where a value is needed that is on the meta device and that no state can bring.
    ``buffers``: the transient ones. ``initialised``: they are filled with the first weights."""
    graph, derived = imported.graph, imported.derived
    constants = [t.name for t in graph.of_kind("constant") if imported.constants[t.name].is_meta]
    computed = [sources(derived[name]) for name in constants if name in derived]
    needed = {t.name for t in graph.of_kind("buffer")}.union(*computed)
    lost = sorted(name for name in needed & buffers.keys() if buffers[name].is_meta)
    if lost and not initialised:
        raise RuntimeFailure(
            f"buffer {lost[0]!r} is on the meta device and not persistent: no state_dict brings its values",
            "Pass parallelize(initialise=function), which fills each module (of Hugging Face: model._init_weights), "
            "also if a state is loaded then. Or register it again with its values before parallelize, or build the "
            "model on the CPU.",
        )
    if lost := [name for name in constants if name not in derived]:
        raise RuntimeFailure(
            f"{lost[0]!r} is computed from a tensor of the model that is on the meta device and is no buffer",
            "Register that tensor as a buffer, or build the model on the CPU.",
        )
