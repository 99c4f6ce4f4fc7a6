"""``hf:NAME``: models of transformers by model type or configuration file, without weights and without network."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexsearch.errors import ImportModelError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.huggingface import HEADS, load_huggingface
from tests.conftest import Cli

pytest.importorskip("transformers")

SMALL = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=64", "seq=16")


def _set(*fields: str) -> list[str]:
    return [part for field in fields for part in ("--set", field)]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for an address fails the test."""

    def refuse(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"asked for the address of {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_model_type_is_imported_on_the_meta_device(cli: Cli, tmp_path: Path) -> None:
    ran = cli("import", "hf:gpt2", "--batch", 4, "-o", "g.json", *_set(*SMALL), "--json")
    assert ran.code == 0, ran.err
    assert ran.json["graph"] == "gpt2" and ran.json["batch"] == 4 and not ran.json["opaque_operators"]
    graph = OperatorGraph.load(str(tmp_path / "g.json"))
    assert {t.shape for t in graph.of_kind("input")} == {(4, 16)}
    assert ran.json["parameters"] == 64 * 32 + 1024 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32


def test_a_configuration_file_says_which_head_and_dtype(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
        "intermediate_size": 48, "architectures": ["LlamaForSequenceClassification"], "torch_dtype": "bfloat16",
        "auto_map": {"AutoModelForCausalLM": "somebody/else--modeling.Other"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for name in (f"hf:{tmp_path / 'config.json'}", f"hf:{tmp_path}"):
        model, batch = load_huggingface(name, batch=2, seq=8, device="meta")
        assert type(model).__name__ == "LlamaForSequenceClassification"
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(p.is_meta for p in model.parameters()) and batch["labels"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "head", "inputs"),
    [
        ("hf:llama", "causal-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("hf:bert", "masked-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("hf:bert", "classification", {"input_ids": (2, 8), "labels": (2,)}),
        ("hf:t5", "translation", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("hf:whisper", "transcription", {"input_features": (2, 80, 3000), "labels": (2, 8)}),
        ("hf:vit", "image-classification", {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
        ("hf:wav2vec2", "audio-classification", {"input_values": (2, 8), "labels": (2,)}),
        ("hf:clip", "contrastive", {"input_ids": (2, 8), "pixel_values": (2, 3, 224, 224), "return_loss": ()}),
        ("hf:segformer", "segmentation", {"pixel_values": (2, 3, 224, 224), "labels": (2, 224, 224)}),
    ],
)
def test_each_head_has_the_batch_that_its_model_takes(name: str, head: str, inputs: dict[str, Any]) -> None:
    model, batch = load_huggingface(name, batch=2, seq=8, head=head, device="meta")
    assert model.training and head in HEADS
    assert {key: tuple(getattr(x, "shape", ())) for key, x in batch.items()} == inputs


def test_translation_starts_with_padding_where_the_type_does_not_say(cli: Cli) -> None:
    sizes = _set("d_model=16", "d_kv=4", "d_ff=24", "num_layers=1", "num_heads=4", "vocab_size=64", "seq=8")
    assert cli("import", "hf:t5", "--batch", 2, "-o", "g.json", *sizes).code == 0


def test_inputs_have_the_dtype_of_the_weights() -> None:
    model, batch = load_huggingface("hf:vit", batch=2, device="meta", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {batch["pixel_values"].dtype} == {torch.bfloat16}


def test_options_reach_into_the_parts_of_a_configuration() -> None:
    model, _ = load_huggingface("hf:clip", device="meta", text_config={"num_hidden_layers": 1})
    assert len(model.text_model.encoder.layers) == 1 and len(model.vision_model.encoder.layers) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf:gpt3"], "Did you mean hf:gptj or hf:gpt2"),
        (["hf:"], "'hf:' does not name a model"),
        (["hf:meta-llama/Llama-2-7b"], "names on the Hub are not looked up"),
        (["hf:encoder.json"], "there is no file encoder.json"),
        (["hf:sam"], "transformers has no model of type sam that flexsearch knows how to train"),
        (["hf:gpt2", *_set("hidden_layers=4")], "no field 'hidden_layers'. Did you mean n_layer?"),
        (["hf:gpt2", *_set("n_layer=1000000000")], "n_layer=1000000000 is not in the range 0 to 2048"),
        (["hf:gpt2", *_set("vocab_size=-4")], "vocab_size=-4 is not in the range 0 to 2147483647"),
        (["hf:gpt2", *_set(f"vocab_size={10**18}")], f"vocab_size={10**18} is not in the range"),
        (["hf:gpt2", *_set("n_embd=7")], "GPT2LMHeadModel cannot be built: ValueError"),
        (["hf:gpt2", *_set("n_embd=wide")], "Field 'n_embd' expected int, got str"),
        (["hf:gpt2", *_set("seq=0")], "seq=0 is not a whole number from 1"),
        (["hf:gpt2", *_set("seq=1000000000")], "Lower batch or seq"),
        (["hf:gpt2", *_set("device=cuda")], "device='cuda' is none of meta, cpu"),
        (["hf:bert", *_set("head=poetry")], "bert has masked-lm, causal-lm, classification."),
        (["hf:swin", *_set("depths=" + str([1] * 3000))], "depths has 3000 items; the limit is 2048"),
        (["hf:llama", *_set("attn_implementation=some/kernel")], "names code on the Hub, 'some/kernel'"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(cli: Cli, arguments: list[str], message: str, tmp_path: Path) -> None:
    ran = cli("import", *arguments, "-o", "g.json")
    assert ran.code == 2 and not (tmp_path / "g.json").exists()
    assert message in " ".join(ran.err.split()) and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", 'has no "model_type"'),
        ('{"a": 1}', 'has no "model_type"'),
        ('{"model_type": 3}', "no model type 3"),
        ('{"model_type": "mine", "auto_map": {"AutoModel": "x.y"}}', "code that comes with a configuration is not run"),
        ('{"model_type": "llama", "rope_scaling": 5}', "is no configuration of llama"),
        ('{"model_type": "llama", "text_config": {"attn_implementation": "a/b"}}', "names code on the Hub"),
        ('{"model_type": "llama", "x": "' + "y" * 2**22 + '"}', "is longer than"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ImportModelError) as error:
        load_huggingface(f"hf:{tmp_path / 'c.json'}", device="meta")
    assert message in str(error.value)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportModelError) as error:
        load_huggingface("hf:gpt2")
    assert error.value.remedy == 'Install it: pip install "flexsearch[huggingface]".'


def test_a_graph_does_not_overwrite_the_configuration_that_it_is_made_from(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert cli("import", "hf:config.json", "-o", "config.json").code == 2
    assert (tmp_path / "config.json").read_text() == '{"model_type": "gpt2"}'


def test_a_model_by_name_is_planned_and_trained(cli: Cli) -> None:
    options = ["--batch", 4, *_set(*SMALL)]
    assert cli("import", "hf:llama", "-o", "g.json", *options).code == 0
    assert cli("optimize", "g.json", "-t", "ethernet-1g:2", "-b", 100, "-o", "s.json").code == 0
    ran = cli("run", "-n", 2, "s.json", "--model", "hf:llama", "--steps", 2, *options)
    assert ran.code == 0, ran.err
