"""Good files to mutate, and the mutations, for test_fuzz.py. Everything follows from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from flexsearch.cost.costed import Costed
from flexsearch.files import to_json
from flexsearch.graph import OperatorGraph
from flexsearch.graph.compact import compact, lines
from flexsearch.graph.files import GraphFile, expand
from flexsearch.strategy import Options, Strategy, make_config
from flexsearch.topology import Topology

Data = dict[str, Any]
Path = tuple[str | int, ...]

EXCERPTS = (
    ("gpt2", 14, 9), ("bert", 3, 12), ("resnet50", 0, 9), ("resnet50", 20, 8), ("nmt", 40, 7), ("nmt", 300, 8),
    ("rnnlm", 5, 8), ("rnntc", 30, 7), ("inception_v3", 60, 12), ("alexnet", 0, 8), ("vgg16", 10, 6),
)  # fmt: skip
"""Graph, first operator and number of operators of pieces of shipped graphs: together most kinds of operators."""


def excerpt(name: str, first: int, count: int) -> Data:
    """Consecutive operators of a shipped graph, with the mean of the last result as loss."""
    graph = OperatorGraph.load(name)
    operators = graph.operators[first : first + count]
    made = {output for op in operators for output in op.outputs}
    used = {tensor for op in operators for tensor in (*op.inputs, *op.outputs)}
    tensors = []
    for tensor in graph.tensors:
        if tensor.name in used:
            outside = tensor.kind == "activation" and tensor.name not in made
            tensors.append(tensor.model_dump(mode="json") | ({"kind": "input"} if outside else {}))
    last = graph.tensor[next(n for op in reversed(operators) for n in op.outputs if graph.tensor[n].floating)]
    axes = [
        {"name": f"m{k}", "size": size, "role": "sample" if k == 0 else "attribute"}
        for k, size in enumerate(last.shape)
    ]
    pattern = " ".join(axis["name"] for axis in axes) + " -> "
    mean = {
        "name": "the.loss", "kind": "mean", "pattern": pattern, "axes": axes, "inputs": [last.name],
        "outputs": ["the.loss"], "attributes": {"dims": list(range(len(axes))), "keepdim": False},
    }  # fmt: skip
    tensors.append({"name": "the.loss", "shape": [], "dtype": last.dtype, "kind": "activation"})
    return {
        "format": "flexsearch.graph/1", "name": f"{name}[{first}]", "tensors": tensors,
        "operators": [*(op.model_dump(mode="json") for op in operators), mean], "loss": "the.loss",
    }  # fmt: skip


CHAIN: Data = {
    "format": "flexsearch.graph/2", "name": "chain", "inputs": [{"name": "x", "shape": [8, 16]}],
    "parameters": [{"repeat": 4, "tensors": [{"name": "l.{0}.weight", "shape": [16, 16]}]}],
    "operators": [
        {"repeat": 4, "first": {"l.{-1}.relu": "x"}, "salts": 3, "operators": [
            {"name": "l.{0}.linear", "kind": "linear", "pattern": "b0 i, o i -> b0 o",
             "inputs": ["l.{-1}.relu", "l.{0}.weight"]},
            {"name": "l.{0}.relu", "kind": "pointwise", "pattern": "a b -> a b", "inputs": ["l.{0}.linear"],
             "attributes": {"target": "aten.relu.default", "args": [{"tensor": 0}], "kwargs": {}, "salt": 2}},
        ]},
        {"name": "loss", "kind": "mean", "pattern": "a b -> ", "inputs": ["l.3.relu"],
         "attributes": {"dims": [0, 1], "keepdim": False}},
    ],
    "loss": "loss",
}  # fmt: skip
"""A graph file with blocks."""


def read_graph(data: Data) -> OperatorGraph:
    """The graph of a document of either format."""
    if data.get("format") == "flexsearch.graph/2":
        return expand(GraphFile.model_validate_json(json.dumps(data)))
    return OperatorGraph.model_validate_json(json.dumps(data))


@cache
def graphs() -> tuple[Data, ...]:
    """Small graphs: two shipped ones and pieces of others, in both formats; one with blocks."""
    whole = [json.loads(to_json(OperatorGraph.load(name))) for name in ("lenet", "mlp")]
    full = [*whole, *(excerpt(*parts) for parts in EXCERPTS)]
    return (*full, *(json.loads(lines(compact(read_graph(data)))) for data in full), CHAIN)


@cache
def topologies() -> tuple[Data, ...]:
    """Explicit and compact files, of equal and of unequal devices."""
    explicit = [
        json.loads(Topology.load(name).model_dump_json(exclude_none=True)) for name in ("ethernet-1g-2", "p100")
    ]
    uneven: Data = {
        "format": "flexsearch.topology/1", "name": "uneven",
        "devices": [
            {"name": f"d{k}", "kind": "cuda", "host": f"h{k // 2}", "model": "a", "memory_bandwidth": 1e11 * (k + 1),
             "flops": {"float32": 1e12 * (k + 1), "float16": 4e12}, "memory_bytes": 8 << 30, "overhead_s": 1e-5,
             **({"processor": "shared"} if k < 2 else {})}
            for k in range(3)
        ],
        "switches": ["bus"],
        "links": [{"a": f"d{k}", "b": "bus", "bandwidth": 1e9 * (k + 1), "latency_s": 1e-5 * k,
                   "duplex": ("full", "half")[k % 2]} for k in range(3)],
        "communication": {"backend": "gloo", "overhead_s": 1e-4, "cpu_s": 1e-4, "cpu_s_per_byte": 1e-9,
                          "cpu_by_form": {"all_reduce": 1e-9}, "factors": {"all_reduce": 1.2}},
    }  # fmt: skip
    compact = {
        "format": "flexsearch.topology/1", "name": "compact", "source": "made up",
        "nodes": {
            "count": 2, "name": "node",
            "devices": [{"name": "gpu{0..1}", "kind": "cuda", "model": "g", "memory_bandwidth": 1e12,
                         "flops": {"float32": 1e13}, "memory_bytes": 16 << 30, "overhead_s": 5e-6}],
            "switches": ["nic"],
            "links": [{"a": "gpu{0..1}", "b": "gpu{0..1}", "bandwidth": 2e10, "latency_s": 1e-6},
                      {"a": "gpu{0..1}", "b": "nic", "bandwidth": 1e10, "latency_s": 1e-6},
                      {"a": "nic", "b": "fabric", "bandwidth": 1e10, "latency_s": 2e-6}],
        },
        "switches": ["fabric"],
        "communication": {"backend": "nccl"},
    }  # fmt: skip
    return (*explicit, uneven, compact)


def build(topology: Data) -> Topology:
    """A topology of the list above, explicit or compact."""
    from flexsearch.topology.topology import _build

    return _build(Topology, json.loads(json.dumps(topology)), "of a test", None)


@cache
def extension() -> Data:
    """A profile of this machine with nothing but the updates, which take a second to measure."""
    from flexsearch.cost.profile import cpu_model

    rates = {name: {"s_per_byte": 1e-10, "s_per_tensor": 1e-6} for name in ("sgd", "momentum", "adam")}
    device = {"kind": "cpu", "model": cpu_model(), "threads": 1}
    return {"format": "flexsearch.profile/2", "device": device, "torch": "2", "updates": rates}


@cache
def profile(graph: int) -> Data:
    """Measurements of the whole operators of a graph, on a device that stands for those of all topologies above."""
    value = read_graph(graphs()[graph])
    entries = {}
    for k, op in enumerate(value.operators):
        costed = Costed.of(value, k)
        work = {"forward": costed.forward(op.sizes).model_dump(), "backward": costed.backward(op.sizes).model_dump()}
        entries[costed.signature(op.sizes)] = {
            "kind": op.kind, "dtype": costed.dtype, "forward_s": 1e-4 * (k + 1), "backward_s": 2e-4 * (k % 3),
            "repeats": 5, **work,
        }  # fmt: skip
    rates = {name: {"s_per_byte": 1e-10, "s_per_tensor": 1e-6} for name in ("sgd", "momentum", "adam")}
    return {
        "format": "flexsearch.profile/2",
        "device": {"kind": "cuda", "model": "P100", "stands_for": ["a", "g", "Tesla P100-SXM2-16GB"]},
        "torch": "2.13.0", "entries": entries, "updates": rates,
    }  # fmt: skip


def strategy(rng: random.Random, graph: Data, topology: Data) -> Data:
    """A random legal plan."""
    value, cluster = read_graph(graph), build(topology)
    count, configs = len(cluster.devices), {}
    for op in value.operators:
        degrees: dict[str, int] = {}
        room = count
        for axis in rng.sample(op.splittable, min(len(op.splittable), rng.randrange(3))):
            degrees[axis] = rng.randint(1, min(room, op.sizes[axis]))
            room //= degrees[axis]
        pieces = count // room if not degrees else 1
        for parts in degrees.values():
            pieces *= parts
        used = pieces * rng.randint(1, max(1, count // pieces))
        configs[op.name] = make_config(op, degrees, rng.sample(range(count), used), rng.random() < 0.3)
    plan = Strategy.make(value, cluster, configs, Options(bucket_bytes=rng.choice([1, 1000, 25 << 20])))
    data: Data = json.loads(plan.to_file().model_dump_json(exclude_none=True))
    data["prediction"] = {"iteration_s": 1.5, "data_parallel_s": 2.0, "peak_bytes": 100}
    data["search"] = {
        "seed": 3, "proposals": 10, "climbs": 2, "start": "random", "pins": ["*: batch=1"], "locally_optimal": False,
        "bound_s": 0.5,
    }  # fmt: skip
    return data


# ---- mutations


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The place of every value in a document, its own first."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*at, key))


def get(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, to: Any) -> None:
    get(value, path[:-1])[path[-1]] = to


NUMBERS = (
    0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, 1.0, 1e-300, 5e-324, 1e300, 1.7e308, 2**31, 2**47, 2**48, 2**53, 2**59, 2**60,
    2**62, 2**63 - 1, 2**63, 2**64, 1e3, 1e6, 1e15, 1e16, 1e21, 1e22, -1e15, 999.0, 1000.0, 10**18, 10**19, True,
)  # fmt: skip
TEXTS = (
    "", "x", "[/x]", "[bold]", "a\nb", "a\x1b[31mb", "a\x00b", "\u202e", "\ud800", "é" * 30, "x" * 600, "x" * 70000,
    "0", "*",
    "../../etc/passwd", "nan", "a b", "a->b", "{0..9}", "gpu{0..99999}", "gpu{0..3}", "((", "a a -> a", "a -> ",
    "n c (2*h+KH-1) -> n c h", "b0 i, o i -> b0 o", "conv3d", "opaque", "pointwise", "cat", "slice", "softmax",
    "view",
    "aten.from_file.default", "aten.save.default", "prims.add.default", "aten.relu.default", "float16", "complex64",
    "int64", "activation", "parameter", "buffer", "constant", "input", "sample", "reduction", "cpu", "cuda", "nccl",
    "half",
)  # fmt: skip


def _wrong_type(rng: random.Random, value: Any) -> Any:
    return rng.choice(
        [v for v in (None, "text", 1, 1.5, True, [], {}, [1], {"a": 1}, [[]]) if type(v) is not type(value)]
    )


def _number(rng: random.Random, value: Any) -> Any:
    """Another number: extreme, or near, or many times as large."""
    choice = rng.randrange(4)
    if choice == 0:
        return rng.choice(NUMBERS)
    if choice == 1:
        return value + rng.choice((-1, 1, 2))
    factor = rng.choice((2, 10, 1000, 2**20, 2**30))
    return value * factor if choice == 2 else type(value)(value / factor)


def _text(rng: random.Random, value: str, document: Data) -> str:
    """Another text: of a list of bad ones, of another field of the document, or a small edit."""
    choice = rng.randrange(4)
    if choice == 0:
        return rng.choice(TEXTS)
    if choice == 1:
        others = [x for p in paths(document) if isinstance(x := get(document, p), str)]
        return rng.choice(others)
    if choice == 2 and value:
        k = rng.randrange(len(value))
        return (
            value[:k] + rng.choice(("", "(", ")", "*", "2", "A", ",", " ", "+", "->")) + value[k + rng.randrange(2) :]
        )
    return value + rng.choice(("x", "[/b]", "_", " "))


def scalar(rng: random.Random, document: Data) -> None:
    """Another value of the same type somewhere."""
    leaves = [p for p in paths(document) if p and not isinstance(get(document, p), dict | list)]
    path = rng.choice(leaves)
    value = get(document, path)
    if isinstance(value, bool) or value is None:
        put(document, path, not value)
    elif isinstance(value, str):
        put(document, path, _text(rng, value, document))
    else:
        put(document, path, _number(rng, value))


def retype(rng: random.Random, document: Data) -> None:
    path = rng.choice([p for p in paths(document) if p])
    put(document, path, _wrong_type(rng, get(document, path)))


def drop(rng: random.Random, document: Data) -> None:
    path = rng.choice([p for p in paths(document) if p])
    del get(document, path[:-1])[path[-1]]


def rename(rng: random.Random, document: Data) -> None:
    path = rng.choice([p for p in paths(document) if p and isinstance(p[-1], str)])
    parent = get(document, path[:-1])
    parent[_text(rng, str(path[-1]), document)] = parent.pop(path[-1])


def duplicate(rng: random.Random, document: Data) -> None:
    """An item of a list twice, or at another place of it."""
    lists = [p for p in paths(document) if isinstance(get(document, p), list) and get(document, p)]
    if lists:
        items = get(document, rng.choice(lists))
        items.insert(rng.randrange(len(items) + 1), json.loads(json.dumps(rng.choice(items))))


def swap(rng: random.Random, document: Data) -> None:
    """Two values of one type change places: each is right in itself."""
    places = [p for p in paths(document) if p]
    first = rng.choice(places)
    value = get(document, first)
    alike = [p for p in places if type(get(document, p)) is type(value) and p[-1] == first[-1] and p != first]
    if alike:
        second = rng.choice(alike)
        if first != second[: len(first)] and second != first[: len(second)]:
            other = get(document, second)
            put(document, second, value)
            put(document, first, other)


def resize(rng: random.Random, document: Data) -> None:
    """A size of a graph becomes another one wherever it stands, so that the graph stays consistent."""
    places = [p for p in paths(document) if isinstance(get(document, p), int) and _is_size(p)]
    sizes = sorted({s for p in places if (s := get(document, p)) > 1})
    if not sizes:
        return scalar(rng, document)
    old = rng.choice(sizes)
    new = rng.choice((1, 2, 3, 7, old + 1, old * 2, old * 2, 1000, 2**20, 2**30, 2**47))
    for place in places:
        if get(document, place) == old:
            put(document, place, new)
    return None


def _is_size(path: Path) -> bool:
    """Whether a place in a graph file holds the size of a dimension or an axis."""
    return path[-2:-1] in (("shape",), ("sizes",)) or (path[-1:] == ("size",) and "axes" in path)


LEGAL: dict[str, tuple[Any, ...]] = {
    "bandwidth": (1.0, 1e15, 1e3), "latency_s": (0.0, 1000.0), "overhead_s": (0.0, 1000.0, 1.0), "memory_bytes": (1,
    2**60 - 1),
    "memory_bandwidth": (1.0, 1e15), "float32": (1.0, 1e21), "cpu_s_per_byte": (0.0, 1.0), "all_reduce": (1e-3, 1e6),
    "duplex": ("full", "half"), "bucket_bytes": (1, 2**60 - 1), "optimizer": ("sgd", "momentum", "adam"),
    "forward_s": (0.0, 1e6), "backward_s": (0.0, 1e6), "s_per_byte": (0.0, 1.0), "flops": (0.0, 1e24),
    "nbytes": (0.0, 1e24),
    "s_per_tensor": (0.0, 1e6), "repeats": (1, 2**53 - 1), "seed": (0, 2**64 - 1), "proposals": (0, 2**53 - 1),
    "iteration_s": (0.0, 1e60), "bound_s": (0.0, 1e60), "count": (1, 7),
    "states": ("whole", "optimizer", "gradients", "weights", "sharded"),
    "microbatches": (1, 2), "prefetch": (0, 3),
    "dtype": ("float64", "float16", "bfloat16"), "busy_neighbours": (0, 9),
    "p": (0.0, 0.5, 1.0), "threads": (1, 64),
}  # fmt: skip
"""Values at the ends of what fields may hold."""


def extreme(rng: random.Random, document: Data) -> None:
    """A legal value at the end of its range, in one place or everywhere."""
    places = [p for p in paths(document) if p and p[-1] in LEGAL and not isinstance(get(document, p), dict | list)]
    places = [p for p in places if p[-1] != "dtype" or str(get(document, p)).startswith("float")]
    if not places:
        return scalar(rng, document)
    path = rng.choice(places)
    value = rng.choice(LEGAL[str(path[-1])])
    for place in places if rng.random() < 0.5 else (path,):
        if place[-1] == path[-1]:
            put(document, place, value)
    return None


STRUCTURAL: tuple[Callable[[random.Random, Data], None], ...] = (
    scalar, scalar, scalar, retype, drop, rename, duplicate, swap, swap, resize, resize, extreme, extreme, extreme,
)  # fmt: skip


def encode(rng: random.Random, document: Data) -> bytes:
    """The document as a file: mostly plain JSON, sometimes cut off, encoded otherwise or with what JSON forbids."""
    text = json.dumps(document)
    choice = rng.randrange(40)
    if choice == 0:
        return text[: rng.randrange(len(text))].encode()
    if choice == 1:
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    if choice == 2:
        return text.encode() + rng.choice((b"\xff", b"\x00", b"}", b"[" * 100000))
    if choice == 3:
        numbers = rng.choice(
            ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-" + "9" * 25, "1" + "0" * 400 + ".5")
        )
        parts = text.split(": ")
        k = rng.randrange(1, len(parts))
        head, _, rest = parts[k].partition(",")
        parts[k] = numbers + ("," + rest if rest else head.lstrip("0123456789.e+-"))
        return ": ".join(parts).encode()
    if choice == 4:
        return text.replace("{", "[" * rng.choice((40, 990, 20000)) + "{", 1).encode()
    if choice == 5:
        key = json.dumps(rng.choice(list(document)))
        return text.replace("{", "{" + key + ": 1, ", 1).encode()
    return text.encode("utf-8", "surrogatepass")
