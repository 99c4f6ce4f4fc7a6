"""Whatever a user gets wrong ends with exit code 2 and a message that names it: no traceback, no file left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexsearch.files import to_json
from flexsearch.graph import OperatorGraph
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.conftest import Cli, Ran

Data = dict[str, Any]
Change = Callable[[Data], None]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good file of each kind in the current folder; the graph spelled out, as in format 1 (format 2: see
    test_graph_files.py)."""
    monkeypatch.chdir(tmp_path)
    graph, topology = OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2")
    Path("graph.json").write_text(to_json(graph))
    topology.save("topology.json")
    baseline("data-parallel", graph, topology).save("strategy.json")
    entry = {
        "kind": "view", "dtype": "float32", "forward_s": 1e-6, "backward_s": 0.0, "repeats": 3,
        "forward": {"flops": 0.0, "nbytes": 0.0}, "backward": {"flops": 0.0, "nbytes": 0.0},
    }  # fmt: skip
    profile = {
        "format": "flexsearch.profile/2", "device": {"kind": "cpu", "model": "one server core", "threads": 1},
        "torch": "2.13.0", "entries": {"some piece": entry},
    }  # fmt: skip
    Path("profile.json").write_text(json.dumps(profile))


COMMANDS: dict[str, tuple[str, ...]] = {
    "graph": ("optimize", "graph.json", "-t", "topology.json", "--budget", "5", "-o", "out.json"),
    "topology": ("optimize", "graph.json", "-t", "topology.json", "--budget", "5", "-o", "out.json"),
    "profile": ("optimize", "graph.json", "-t", "topology.json", "-p", "profile.json", "--budget=5", "-o", "out.json"),
    "strategy": ("simulate", "graph.json", "-t", "topology.json", "-s", "strategy.json", "--trace", "out.json"),
}
"""A command that reads a file of each kind, and writes out.json."""

KINDS = tuple(COMMANDS)


def refused(ran: Ran, *words: str) -> None:
    """The promise of this file."""
    assert ran.code == 2, (ran.out, ran.err)
    assert not ran.out or set(ran.json) == {"error"}
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err
    left = {p.name for p in Path().iterdir()} - {"graph.json", "topology.json", "strategy.json", "profile.json"}
    assert not {name for name in left - {"__pycache__"} if not name.endswith(".py")}, left


def edit(name: str, change: Change) -> None:
    """Rewrite a JSON file."""
    data = json.loads(Path(name).read_text())
    change(data)
    Path(name).write_text(json.dumps(data))


# ---- every format


def test_the_good_files_are_good(cli: Cli) -> None:
    for kind in KINDS:
        assert cli(*COMMANDS[kind], "--json").code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file(cli: Cli, kind: str) -> None:
    Path(f"{kind}.json").unlink()
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "not JSON at all", "[1, 2]", '"text"', "\x00\x01"])
def test_a_file_that_is_no_json_object(cli: Cli, kind: str, text: str) -> None:
    Path(f"{kind}.json").write_text(text)
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_text(cli: Cli, kind: str) -> None:
    Path(f"{kind}.json").write_bytes(b"\xff\xfe\x00garbage")
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", "UTF-8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file(cli: Cli, kind: str, share: float) -> None:
    text = Path(f"{kind}.json").read_text()
    Path(f"{kind}.json").write_text(text[: int(share * len(text))])
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", "not valid JSON", "line")


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_too_many(cli: Cli, kind: str) -> None:
    edit(f"{kind}.json", lambda data: data.update(surprise=1))
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", "surprise")


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_another_format(cli: Cli, kind: str) -> None:
    edit(f"{kind}.json", lambda data: data.update(format="flexsearch.recipe/9"))
    newest = 1 if kind == "topology" else 2
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", "flexsearch.recipe/9", f"flexsearch.{kind}/{newest}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind(cli: Cli, kind: str) -> None:
    other = KINDS[KINDS.index(kind) - 1]
    Path(f"{kind}.json").write_bytes(Path(f"{other}.json").read_bytes())
    if kind != "strategy" or other != "strategy":
        version = 2 if other in ("strategy", "profile") else 1
        refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", f"flexsearch.{other}/{version}")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("graph", "operators"), ("graph", "loss"), ("graph", "tensors"),
        ("topology", "devices"), ("topology", "communication"), ("topology", "name"),
        ("profile", "device"), ("profile", "torch"),
        ("strategy", "operators"), ("strategy", "graph"), ("strategy", "topology"), ("strategy", "cluster"),
    ],
)  # fmt: skip
def test_a_missing_field(cli: Cli, kind: str, field: str) -> None:
    edit(f"{kind}.json", lambda data: data.pop(field))
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", field)


def _set(*path: str | int, to: Any) -> Change:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("kind", "field", "change"),
    [
        ("graph", "tensors.0.shape", _set("tensors", 0, "shape", to="wide")),
        ("graph", "tensors.0", _set("tensors", 0, "dtype", to="float7")),
        ("graph", "operators.0.axes.0.size", _set("operators", 0, "axes", 0, "size", to=2.5)),
        ("graph", "operators.0.axes.0.role", _set("operators", 0, "axes", 0, "role", to="hero")),
        ("topology", "devices.0.memory_bytes", _set("devices", 0, "memory_bytes", to="8 GB")),
        ("topology", "links.0.bandwidth", _set("links", 0, "bandwidth", to=-1.0)),
        ("topology", "links.0.bandwidth", _set("links", 0, "bandwidth", to=float("inf"))),
        ("topology", "devices.0.flops", _set("devices", 0, "flops", "float33", to=1e9)),
        ("topology", "communication.backend", _set("communication", "backend", to="pigeons")),
        ("profile", "device.threads", _set("device", "threads", to="one")),
        ("profile", "entries.some piece.forward_s", _set("entries", "some piece", "forward_s", to=float("nan"))),
        ("profile", "entries.some piece.repeats", _set("entries", "some piece", "repeats", to=0)),
        ("strategy", "operators.loss", _set("operators", "loss", to=[0, 1])),
        ("strategy", "graph.hash", _set("graph", "hash", to=7)),
        ("strategy", "synchronisation.bucket_bytes", _set("synchronisation", "bucket_bytes", to=0)),
        ("strategy", "optimizer", _set("optimizer", to="lion")),
    ],
)
def test_a_mistyped_field(cli: Cli, kind: str, field: str, change: Change) -> None:
    edit(f"{kind}.json", change)
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", field)


# ---- contradictions


def _first(data: Data, kind: str) -> Any:
    return next(op for op in data["operators"] if op["kind"] == kind)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (("two operators",), lambda g: g["operators"].append(g["operators"][0])),
        (("two tensors",), lambda g: g["tensors"].append(g["tensors"][0])),
        (("nowhere", "not in the graph"), lambda g: _first(g, "conv2d")["inputs"].__setitem__(0, "nowhere")),
        (("order the operators",), lambda g: g["operators"].reverse()),
        (("loss", "scalar"), lambda g: g.update(loss=g["tensors"][0]["name"])),
        (("pattern", "b.. i ->"), lambda g: _first(g, "linear").update(pattern="b.. i ->")),
        (("pattern",), lambda g: _first(g, "linear").update(pattern="((")),
        (("axes",), lambda g: _first(g, "linear")["axes"].pop()),
    ],
)
def test_a_graph_that_contradicts_itself(cli: Cli, words: tuple[str, ...], change: Change) -> None:
    edit("graph.json", change)
    refused(cli(*COMMANDS["graph"], "--json"), "graph.json", *words)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (("already the name",), lambda t: t["devices"].append(t["devices"][0])),
        (("no device or switch", "moon"), lambda t: t["links"][0].update(a="moon")),
        (("no route",), lambda t: t["links"].pop()),
        (("at least one device",), lambda t: t.update(devices=[])),
        (("nccl", "gloo"), lambda t: t["communication"].update(backend="nccl")),
        (("with itself",), lambda t: t["links"][0].update(a="switch", b="switch")),
    ],
)
def test_a_topology_that_contradicts_itself(cli: Cli, words: tuple[str, ...], change: Change) -> None:
    edit("topology.json", change)
    refused(cli(*COMMANDS["topology"], "--json"), "topology.json", *words)


def test_a_profile_of_another_device(cli: Cli) -> None:
    edit("profile.json", _set("device", to={"kind": "cpu", "model": "Abacus 3000", "threads": 7}))
    refused(cli(*COMMANDS["profile"], "--json"), "Abacus 3000", "one server core")


def test_a_profile_cannot_be_extended_by_another_device(cli: Cli) -> None:
    edit("profile.json", _set("device", "model", to="Abacus 3000"))
    refused(cli("profile", "graph.json", "-o", "out.json", "--extend", "profile.json", "--json"), "Abacus 3000")


def test_a_strategy_for_another_graph(cli: Cli) -> None:
    refused(
        cli("simulate", "mlp", "-t", "topology.json", "-s", "strategy.json", "--trace", "out.json", "--json"),
        "strategy.json", "'lenet'", "'mlp'", "flexsearch optimize",
    )  # fmt: skip


def test_a_strategy_for_another_topology(cli: Cli) -> None:
    for command in (
        ("simulate", "graph.json", "-t", "ethernet-10g-2", "-s", "strategy.json", "--trace", "out.json"),
        ("compare", "graph.json", "-t", "ethernet-10g-2", "-s", "strategy.json"),
        ("optimize", "graph.json", "-t", "ethernet-10g-2", "--resume", "strategy.json", "-o", "out.json"),
    ):
        refused(cli(*command, "--json"), "strategy.json", "ethernet-1g", "ethernet-10g", "topology")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pin", "conv9: batch=2"), ("conv9", "conv1")),
        (("--pin", "conv1 batch=2"), ("cannot be read", "PATTERN: KEY=VALUE")),
        (("--pin", "conv1: batch=3, channels=2"), ("channels", "can be split")),
        (("--pin", "conv1: devices=0-7"), ("devices are 0 to 1",)),
        (("--exhaustive", "long"), ("long", "30s")),
        (("--plot", "chains.txt"), ("chains.txt", ".png")),
        (("-j", "0"), ("--processes",)),
        (("--precision", "bf17"), ("--precision': 'bf17' is not one of 'as-is'",)),
        (("--resume", "nothing.json"), ("nothing.json",)),
    ],
)
def test_options_of_a_search_that_make_no_sense(cli: Cli, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(cli("optimize", "graph.json", "-t", "topology.json", "--budget", "5", "-o", "out.json", *arguments), *words)


def _config(name: str, **fields: Any) -> Change:
    def change(data: Data) -> None:
        data["operators"][name].update(fields)

    return change


def _loss() -> str:
    return OperatorGraph.load("lenet").operators[-1].name


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (("position 9", "0 to "), {"positions": [0, 9]}),
        (("device twice",), {"positions": [1, 1]}),
        (("2 devices are given",), {"replicas": 3}),
        (("degree 1000 on axis", "impossible"), {"degrees": {"AXIS": 1000}}),
        (("has no axis 'luck'",), {"degrees": {"luck": 2}}),
    ],
)
def test_a_strategy_with_an_impossible_config(cli: Cli, words: tuple[str, ...], fields: Data) -> None:
    name, axis = _loss(), OperatorGraph.load("lenet").operators[-1].axes[0].name
    if "degrees" in fields:
        fields = {"degrees": {axis if key == "AXIS" else key: n for key, n in fields["degrees"].items()}}
    edit("strategy.json", _config(name, **fields))
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", name, *words)


def test_a_strategy_that_forgets_or_invents_an_operator(cli: Cli) -> None:
    edit("strategy.json", lambda data: data["operators"].pop(_loss()))
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", repr(_loss()))
    edit(
        "strategy.json",
        lambda data: data["operators"].update({_loss(): {"positions": [0]}, "ghost": {"positions": [0]}}),
    )
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", "ghost")


def test_a_strategy_whose_cluster_was_edited(cli: Cli) -> None:
    edit("strategy.json", _set("cluster", "links", 0, "bandwidth", to=1e12))
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", "edited")


# ---- names and options


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("alexnett", "alexnet", "flexsearch import"), ("optimize", "alexnett", "-o", "out.json")),
        (("etherned-1g", "ethernet-1g"), ("optimize", "lenet", "-t", "etherned-1g", "-o", "out.json")),
        (("number of nodes", "ethernet-1g:0"), ("optimize", "lenet", "-t", "ethernet-1g:0", "-o", "out.json")),
        (("magic", "data-parallel"), ("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "magic")),
        (("one-weird-trick", "convolut"), ("simulate", "mlp", "-t", "ethernet-1g-2", "--baseline", "one-weird-trick")),
        (("fortnight",), ("optimize", "lenet", "--budget", "1fortnight", "-o", "out.json")),
        (("budget", "0s"), ("optimize", "lenet", "--budget", "0s", "-o", "out.json")),
        (("--seed",), ("optimize", "lenet", "--seed", "-4", "-o", "out.json")),
        (("--seed", "integer"), ("optimize", "lenet", "--seed", "lucky", "-o", "out.json")),
        (("--optimizer", "lion"), ("optimize", "lenet", "--optimizer", "lion", "-o", "out.json")),
        (("--strategy", "--baseline"), ("simulate", "lenet", "-t", "ethernet-1g-2")),
        (("--topology",), ("simulate", "lenet", "--baseline", "single")),
        (("--frobnicate",), ("optimize", "--frobnicate")),
        (("polish",), ("polish",)),
        (("no_such_module",), ("import", "no_such_module:build", "-o", "out.json")),
        (("alexnett", "alexnet"), ("import", "flexsearch.zoo:alexnett", "-o", "out.json")),
        (("MODULE:CALLABLE",), ("import", "flexsearch.zoo", "-o", "out.json")),
        (("no file", "gone.py"), ("import", "gone.py:build", "-o", "out.json")),
        (("wings",), ("import", "flexsearch.zoo:mlp", "--set", "wings=2", "-o", "out.json")),
        (("--set", "key=value"), ("import", "flexsearch.zoo:mlp", "--set", "width", "-o", "out.json")),
        (("--output",), ("import", "flexsearch.zoo:mlp")),
        (("abacus",), ("profile", "lenet", "--device", "abacus", "-o", "out.json")),
        (("--max-parts",), ("profile", "lenet", "--max-parts", "0", "-o", "out.json")),
        (("probe", "-n", "torchrun"), ("probe", "-o", "out.json")),
    ],
)
def test_an_unknown_name_or_a_wrong_option(cli: Cli, words: tuple[str, ...], command: tuple[str, ...]) -> None:
    refused(cli(*command), *words)


def test_a_place_that_cannot_be_written_to_is_said_before_the_work(cli: Cli) -> None:
    Path("mine.py").write_text("")  # a file where a folder is asked for
    for command in (
        ("optimize", "lenet", "--budget", "10m", "-o", "mine.py/out.json"),
        ("optimize", "lenet", "--budget", "10m", "-o", "."),
        ("import", "flexsearch.zoo:llama7b", "-o", "mine.py/out.json"),
        ("profile", "vgg16", "-o", "mine.py/out.json"),
    ):
        refused(cli(*command), "cannot write")


def test_a_callable_that_raises_or_returns_something_else(cli: Cli) -> None:
    Path("mine.py").write_text(
        "import torch\n"
        "def broken():\n    raise KeyError('oops')\n"
        "def number():\n    return 7\n"
        "def vector():\n    return torch.nn.Linear(2, 2), (torch.ones(2, 2),)\n"
        "constant = 3\n"
    )
    for name, words in (
        ("broken", ("KeyError", "oops")), ("number", ("int", "model, inputs, targets, loss")),
        ("vector", ("scalar", "loss")), ("constant", ("not a callable",)),
    ):  # fmt: skip
        refused(cli("import", f"mine.py:{name}", "-o", "out.json"), *words)


# ---- what JSON can spell and no file may hold


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("words", "change"),
    [
        (("twice", '"format"'), lambda text: text.replace("{", '{"format": 1, ', 1)),
        (("NaN",), lambda text: text.replace("{", '{"surprise": NaN, ', 1)),
        (("surprise", "too large"), lambda text: text.replace("{", '{"surprise": 1e999, ', 1)),
        (("surprise", "5000 digits"), lambda text: text.replace("{", f'{{"surprise": {"9" * 5000}, ', 1)),
        (("nested",), lambda text: text.replace("{", '{"surprise": ' + "[" * 100 + "]" * 100 + ", ", 1)),
        (("nested",), lambda text: text.replace("{", '{"surprise": ' + "[" * 100000 + "]" * 100000 + ", ", 1)),
        (("characters",), lambda text: text.replace("{", '{"surprise": "' + "x" * 100000 + '", ', 1)),
        (("surrogate",), lambda text: text.replace("{", '{"surprise": "\\ud800", ', 1)),
    ],
)
def test_json_that_means_nothing(cli: Cli, kind: str, words: tuple[str, ...], change: Callable[[str], str]) -> None:
    path = Path(f"{kind}.json")
    path.write_text(change(path.read_text()))
    ran = cli(*COMMANDS[kind], "--json")
    refused(ran, f"{kind}.json", *words)
    assert len(ran.out + ran.err) < 2000


def test_a_byte_order_mark_is_no_mistake(cli: Cli) -> None:
    for kind in KINDS:
        Path(f"{kind}.json").write_bytes(b"\xef\xbb\xbf" + Path(f"{kind}.json").read_bytes())
        assert cli(*COMMANDS[kind], "--json").code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(cli: Cli, kind: str) -> None:
    os.mkfifo("pipe")  # nobody writes to it
    Path("folder").mkdir()
    for place, word in (("/dev/zero", "device"), ("pipe", "pipe"), ("folder", "folder")):
        command = [place if part == f"{kind}.json" else part for part in COMMANDS[kind]]
        ran = cli(*command, "--json")
        assert (ran.code, word in ran.out + ran.err) == (2, True), ran
    Path("pipe").unlink()
    Path("folder").rmdir()


@pytest.mark.parametrize(
    ("kind", "field", "to"),
    [
        ("topology", "devices.0.overhead_s", 1e300), ("topology", "devices.0.memory_bandwidth", 1e16),
        ("topology", "devices.0.flops.float32", 1e22), ("topology", "devices.0.flops.float32", 1e-300),
        ("topology", "devices.0.memory_bytes", 2**60), ("topology", "links.0.bandwidth", 0.5),
        ("topology", "links.0.latency_s", 1001.0), ("topology", "communication.overhead_s", 1e300),
        ("topology", "devices.0.name", "a\x1b[31m"), ("topology", "name", "a\nb"), ("topology", "name", "x" * 5000),
        ("graph", "tensors.0.shape.0", 2**48), ("graph", "tensors.0.shape.0", 2**47), ("graph", "operators.0.name", ""),
        ("graph", "operators.0.axes.0.size", 2**62), ("graph", "operators.0.name", "x" * 600),
        ("profile", "entries.some piece.forward_s", 1e300), ("profile", "entries.some piece.forward.flops", 1e30),
        ("strategy", "cluster.links.0.bandwidth", 1e300), ("strategy", "cluster.devices.0.name", ""),
        ("strategy", "operators.loss.positions", [-1]), ("strategy", "operators.loss.replicas", 0),
        ("strategy", "synchronisation.bucket_bytes", 2**60), ("strategy", "graph.hash", "x"),
    ],
)  # fmt: skip
def test_a_quantity_beyond_physical_reason(cli: Cli, kind: str, field: str, to: Any) -> None:
    path: list[str | int] = [int(part) if part.isdigit() else part for part in field.split(".")]
    edit(f"{kind}.json", _set(*path, to=to))
    place = field if to != 2**47 else "tensors.0"  # one size is legal, the bytes of the tensor are not
    refused(cli(*COMMANDS[kind], "--json"), f"{kind}.json", place)


# ---- contradictions inside an operator, a cluster, a search


def _of(kind: str, /, **fields: Any) -> Change:
    return lambda graph: _first(graph, kind).update(fields)


def _attributes(kind: str, /, **attributes: Any) -> Change:
    return lambda graph: _first(graph, kind)["attributes"].update(attributes)


def _role(kind: str, axis: str, role: str) -> Change:
    def change(graph: Data) -> None:
        next(a for a in _first(graph, kind)["axes"] if a["name"] == axis)["role"] = role

    return change


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (("conv4d", "kind"), _of("conv2d", kind="conv4d")),
        (("attributes.stride", "number"), _attributes("conv2d", stride="fast")),
        (("windows", "stride [2, 2]"), _attributes("conv2d", stride=[2, 2])),
        (("groups",), _attributes("conv2d", groups=5)),
        (("attributes.dilation",), _attributes("conv2d", dilation=[0, 1])),
        (("attributes.reduction",), _attributes("cross_entropy", reduction="most")),
        (("is a parameter axis",), _role("linear", "o", "attribute")),
        (("attributes.target", "aten.from_file"), _attributes("pointwise", target="aten.from_file.default")),
        (("attributes.target", "LIBRARY.OPERATOR"), _attributes("pointwise", target="aten.relu")),
        (("attributes.args", "OPERAND"), _attributes("pointwise", args=[{"tensor": 7}])),
        (("no dtype",), _attributes("pointwise", args=[{"tensor": 0}, "torch.load"])),
        (("view", "in one operand"), _of("view", pattern="n C H W -> n D")),
        (("output", "windows"), _of("linear", pattern="b0 i, o i, +o -> (b0) o")),
        (("lies wholly outside",), _of("pointwise", pattern="a b (c+99) d -> a b c d")),
        (("requires a gradient",), lambda g: g["tensors"][0].update(requires_grad=True)),
        (("counters.0",), lambda g: g.update(counters=["conv1.weight"])),
        (("buffer_updates",), lambda g: g.update(buffer_updates={"conv1.weight": "conv1"})),
        (("'loss' is made by no operator",), lambda g: g["operators"].pop()),
    ],
)
def test_an_operator_that_contradicts_itself(cli: Cli, words: tuple[str, ...], change: Change) -> None:
    edit("graph.json", change)
    refused(cli(*COMMANDS["graph"], "--json"), "graph.json", *words)


def test_a_graph_cannot_make_torch_open_files(cli: Cli) -> None:
    """``aten.from_file`` creates the file it is asked for; so might any operator that is looked up by name."""
    Path("victim").unlink(missing_ok=True)
    arguments = ["victim", True, 4096, {"dtype": "float32"}]
    edit("graph.json", _attributes("pointwise", target="aten.from_file.default", args=arguments))
    ran = cli("profile", "graph.json", "-o", "out.json", "--budget", "1s", "--json")
    assert ran.code == 2
    assert "graph.json" in ran.out + ran.err
    assert not Path("victim").exists()


def test_a_contradiction_in_the_cluster_of_a_strategy_names_the_cluster(cli: Cli) -> None:
    edit("strategy.json", _set("cluster", "links", 0, "a", to="moon"))
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", "cluster.links.0.a", "moon")


@pytest.mark.parametrize(
    ("field", "value"),
    [("proposals", -1), ("seed", -4), ("climbs", 1.5), ("pins", ["conv1 batch"]), ("bound_s", -1.0)],
)
def test_a_search_section_that_makes_no_sense(cli: Cli, field: str, value: Any) -> None:
    edit("strategy.json", lambda data: data.update(search={"seed": 0, "proposals": 5} | {field: value}))
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", f"search.{field}")


def test_inputs_that_are_not_those_of_the_graph(cli: Cli) -> None:
    edit("strategy.json", lambda data: data["inputs"].pop())
    refused(cli(*COMMANDS["strategy"], "--json"), "strategy.json", "inputs")


# ---- too large to be planned: said at once


@pytest.mark.parametrize("value", ["0-99999999999", "0-" + "9" * 5000, "9" * 5000, "1-0"])
def test_a_pin_of_endless_devices(cli: Cli, value: str) -> None:
    pin = f"*: devices={value}"
    refused(cli("optimize", "graph.json", "-t", "topology.json", "-o", "out.json", "--pin", pin), "devices are 0 to 1")


def test_five_thousand_hosts_are_too_many(cli: Cli) -> None:
    for name in ("ethernet-1g-5000", "ethernet-1g:" + "9" * 5000):
        refused(cli("simulate", "lenet", "-t", name, "--baseline", "single"), "4,096")


def test_turns_on_a_shared_processor_that_would_never_end(cli: Cli) -> None:
    def slow(data: Data) -> None:
        for device in data["devices"]:
            device.update(processor="core", flops={"float32": 1.0})

    edit("topology.json", slow)
    refused(cli(*COMMANDS["topology"], "--json"), "shares its processor", "flops")


def test_a_graph_on_more_devices_than_can_be_searched(cli: Cli) -> None:
    ran = cli("optimize", "resnet101", "-t", "ethernet-1g-1024", "--budget", "5s", "-o", "out.json")
    refused(ran, "too large", "operators x devices")
