"""flexsearch finds, explains and runs the fastest way to split one PyTorch training step over a set of devices.

    plan = flexsearch.optimize(model, example_batch, "ethernet-1g-4", loss=loss_fn)
    step = flexsearch.parallelize(model, plan)
    optimizer = torch.optim.AdamW(step.parameters())
    loss = step(batch).loss

Names are imported on first use: working with saved graphs never imports torch. (``flexsearch.simulate`` is the package
of that floor; the function is ``flexsearch.api.simulate``.)
"""

# Nothing is imported here, not even from the standard library: of `python -m flexsearch.cli` this is what runs first,
# while the current folder is still on the path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from flexsearch.api import compare, optimize
    from flexsearch.converging import converge
    from flexsearch.cost import Profile
    from flexsearch.errors import FlexsearchError
    from flexsearch.graph import OperatorGraph
    from flexsearch.graph.importer import import_model
    from flexsearch.graph.ops import OperatorKind, register
    from flexsearch.grids import grid_plans
    from flexsearch.measure.profiler import profile_graph
    from flexsearch.runtime.parallel import Parallel, parallelize
    from flexsearch.search.recipes import exchange_seconds, with_recipe
    from flexsearch.strategy import Strategy
    from flexsearch.topology import Topology
    from flexsearch.tracing import save_trace

__version__ = "0.1.0"

__all__ = [
    "FlexsearchError", "OperatorGraph", "OperatorKind", "Parallel", "Profile", "Strategy", "Topology", "__version__",
    "compare", "converge", "exchange_seconds", "grid_plans", "import_model", "optimize", "parallelize",
    "profile_graph", "register", "save_trace", "with_recipe",
]  # fmt: skip

_HOME = {
    "FlexsearchError": "errors", "OperatorGraph": "graph", "Parallel": "runtime.parallel", "Profile": "cost",
    "Strategy": "strategy", "Topology": "topology", "compare": "api", "converge": "converging",
    "exchange_seconds": "search.recipes", "grid_plans": "grids",
    "import_model": "graph.importer", "optimize": "api", "parallelize": "runtime.parallel",
    "profile_graph": "measure.profiler", "register": "graph.ops", "OperatorKind": "graph.ops", "save_trace": "tracing",
    "with_recipe": "search.recipes",
}  # fmt: skip


def __getattr__(name: str) -> "Any":
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
