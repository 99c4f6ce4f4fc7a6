"""``hf:NAME``: a training step of a model that Hugging Face's transformers ships, from its configuration alone.

Nothing is downloaded and no code but that of the installed library runs: NAME is a model type (its default
configuration) or a configuration file, and weights are not read.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsearch.errors import ImportModelError

PREFIX = "hf:"
LARGEST = 2**31 - 1
"""Of any size in a configuration."""
MOST_LAYERS = 2048
"""Layers are built one by one, as Python objects."""
LARGEST_FILE = 4 * 2**20
"""Bytes of a configuration file."""
_USAGE = "Write hf:MODEL_TYPE, as hf:gpt2 or hf:llama, or hf:FILE with the config.json of a model."


class Head(NamedTuple):
    """What a model is trained to do. ``table``: transformers' own, from model types to classes. ``batch``: makes a
    batch from (configuration, samples, sequence length or None)."""

    table: str
    batch: Callable[[Any, int, int | None], dict[str, Any]]


def _size(config: Any, *names: str, default: int) -> int:
    """The first of these options that is a whole number."""
    return next((n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)), default)


def _length(config: Any, seq: int | None) -> int:
    longest = _size(config, "max_position_embeddings", "n_positions", "max_target_positions", default=512)
    return seq if seq is not None else min(512, longest if longest > 0 else 512)


def _tokens(config: Any, batch: int, length: int) -> Tensor:
    vocabulary = _size(config.get_text_config(), "vocab_size", default=2)
    return torch.arange(batch * length).reshape(batch, length) % vocabulary


def _text(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    tokens = _tokens(config, batch, _length(config, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _signal(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, prod(shape)).reshape(shape)


def _classes(config: Any, batch: int) -> Tensor:
    return torch.arange(batch) % max(1, _size(config, "num_labels", default=2))


def _text_classes(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    return {"input_ids": _tokens(config, batch, _length(config, seq)), "labels": _classes(config, batch)}


def _image(config: Any, batch: int) -> Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return _signal(batch, _size(config, "num_channels", default=3), height, width)


def _image_classes(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    return {"pixel_values": _image(config, batch), "labels": _classes(config, batch)}


def _segments(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    images = _image(config, batch)
    return {"pixel_values": images, "labels": torch.zeros(batch, *images.shape[2:], dtype=torch.long)}


def _waveform_classes(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    return {"input_values": _signal(batch, seq or 16_000), "labels": _classes(config, batch)}


def _speech(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    """Twice as many frames as positions: the encoder's convolutions halve them."""
    frames = 2 * _size(config, "max_source_positions", default=1500)
    features = _signal(batch, _size(config, "num_mel_bins", default=80), frames)
    return {"input_features": features, "labels": _tokens(config, batch, _length(config, seq))}


def _pairs(config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    text = config.get_text_config()
    tokens = _tokens(config, batch, seq or _size(text, "max_position_embeddings", default=64))
    return {"input_ids": tokens, "pixel_values": _image(config.vision_config, batch), "return_loss": True}


HEADS: dict[str, Head] = {
    "translation": Head("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _text),
    "transcription": Head("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _speech),
    "masked-lm": Head("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _text),
    "causal-lm": Head("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _text),
    "contrastive": Head("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", _pairs),
    "image-classification": Head("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_classes),
    "audio-classification": Head("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _waveform_classes),
    "classification": Head("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _text_classes),
    "segmentation": Head("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _segments),
}
"""Name for ``head=``; without it, a model gets the first that it has."""


def is_huggingface(spec: str) -> bool:
    """Whether a model is named as one of transformers."""
    return spec.startswith(PREFIX)


def graph_name(spec: str) -> str:
    """For a graph file: the model type, or what tells a configuration file from others."""
    path = Path(spec.removeprefix(PREFIX))
    return (path.parent.name if path.stem == "config" and path.parent.name else path.stem) or "model"


def load_huggingface(
    spec: str,
    *,
    batch: int = 8,
    seq: int | None = None,
    head: str | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model that ``spec`` names, in training mode, and a batch (keyword arguments, labels among them).

    ``batch``: samples. ``seq``: tokens of a text (or samples of a waveform); by default as many as the model takes, at
    most 512. ``head``: one of :data:`HEADS`. ``device``: "meta" builds a model of any size without its weights; "cpu"
    draws them at random. ``options``: of the configuration, dicts for its parts.
    Raises ImportModelError if there is no such model or head, or an option is out of bounds.
    """
    for name, count in (("batch", batch), ("seq", seq)):
        if count is not None and (type(count) is not int or not 1 <= count <= LARGEST):
            raise ImportModelError(f"{name}={count!r} is not a whole number from 1 to {LARGEST}")
    if device not in ("meta", "cpu"):
        raise ImportModelError(f"device={device!r} is none of meta, cpu")
    with _offline() as transformers:
        config = _configuration(transformers, spec, options)
        chosen, cls = _class(transformers, spec, config, head)
        try:
            with torch.device(device):
                model = cls(config)
            dtype = getattr(config, "dtype", None) or torch.float32
            with torch.device("meta"):
                _fits(spec, HEADS[chosen].batch(config, batch, seq))
            with torch.device(device):
                inputs = HEADS[chosen].batch(config, batch, seq)
            return model.to(dtype).train(), {name: _as(dtype, x) for name, x in inputs.items()}
        except ImportModelError:
            raise
        except Exception as error:  # whatever a contradictory configuration makes a library raise
            raise ImportModelError(
                f"{spec}: {cls.__name__} cannot be built: {_cause(error)}", "Check the options against each other."
            ) from error


def _as(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _fits(spec: str, inputs: Mapping[str, Any]) -> None:
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.numel() > LARGEST:
            raise ImportModelError(f"{spec}: {name} would have {x.numel():.3g} elements", "Lower batch or seq.")


@contextmanager
def _offline() -> Iterator[ModuleType]:
    """transformers, which may not ask the Hub for anything meanwhile, and is silent."""
    try:
        import transformers
        from huggingface_hub import constants
    except ImportError as error:
        raise ImportModelError(
            f"models named {PREFIX}... need transformers, which cannot be imported ({error})",
            'Install it: pip install "flexsearch[huggingface]".',
        ) from error
    offline, verbosity = constants.HF_HUB_OFFLINE, transformers.logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        yield transformers
    finally:
        constants.HF_HUB_OFFLINE = offline
        transformers.logging.set_verbosity(verbosity)


def _configuration(transformers: ModuleType, spec: str, options: Mapping[str, Any]) -> Any:
    """The configuration: the model type's own, what the file says, and then the options."""
    config_classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    name = spec.removeprefix(PREFIX)
    if not name:
        raise ImportModelError(f"{spec!r} does not name a model", _USAGE)
    fields = {"model_type": name} if name in config_classes or not _is_path(name) else _read(spec, Path(name))
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in config_classes:
        raise _unknown(spec, kind, fields, config_classes)
    try:
        default = config_classes[kind]()
    except Exception as error:  # of those that are made of parts
        raise ImportModelError(f"{spec}: {kind} has no default configuration: {_cause(error)}", _USAGE) from error
    for option in options:
        if not hasattr(default, option) and option not in ("attn_implementation", "experts_implementation"):
            near = difflib.get_close_matches(option, default.to_dict(), 3)
            did = f"Did you mean {' or '.join(near)}?" if near else "--set names fields of its configuration."
            raise ImportModelError(f"{spec}: the configuration of {kind} has no field {option!r}", did)
    aliases: Mapping[str, str] = default.attribute_map
    merged = _merged(fields, {aliases.get(key, key): value for key, value in options.items()})
    _check(spec, merged, default.to_dict(), aliases)
    try:
        config = config_classes[kind].from_dict(merged)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as T5's own files say
        return config
    except Exception as error:  # transformers checks the fields against each other
        raise ImportModelError(f"{spec} is no configuration of {kind}: {_cause(error)}") from error


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name or Path(name).exists()


def _read(spec: str, path: Path) -> dict[str, Any]:
    """The fields of a configuration file, or of the config.json in a folder."""
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ImportModelError(f"{spec}: there is no file {path}; names on the Hub are not looked up", _USAGE) from None
    except OSError as error:
        raise ImportModelError(f"{spec}: {path} cannot be read: {error.strerror}", _USAGE) from error
    if len(data) > LARGEST_FILE:
        raise ImportModelError(f"{spec}: {path} is longer than {LARGEST_FILE} bytes", _USAGE)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImportModelError(f"{spec}: {path} is not JSON: {error}", _USAGE) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ImportModelError(f'{spec}: {path} has no "model_type": it is not the config.json of a model', _USAGE)
    return fields


def _unknown(spec: str, kind: Any, fields: Mapping[str, Any], model_types: Mapping[str, Any]) -> ImportModelError:
    problem = f"{spec}: transformers has no model type {kind!r}"
    if "auto_map" in fields:
        problem += ", and code that comes with a configuration is not run"
    near = difflib.get_close_matches(str(kind), list(model_types), 3)
    return ImportModelError(problem, f"Did you mean {' or '.join(PREFIX + name for name in near)}?" if near else _USAGE)


def _merged(fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the options; parts (dicts) are merged field by field."""
    merged = dict(fields)
    for key, value in options.items():
        part = merged.get(key)
        merged[key] = _merged(part if isinstance(part, dict) else {}, value) if isinstance(value, dict) else value
    return merged


_COUNT = re.compile(r"layers?$|depths?$|blocks$|stages$|experts$")
"""Fields that count what is built one by one."""
_SIGNED = re.compile(r"token|_id$|index|ids$")
"""Fields in which -1 stands for none."""


def _check(spec: str, fields: Mapping[str, Any], default: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
    """Raises ImportModelError for sizes that are negative or that no machine has, and for code from the Hub."""
    for key, value in fields.items():
        usual = default.get(aliases.get(key, key))
        if isinstance(value, dict):
            _check(spec, value, usual if isinstance(usual, dict) else {}, {})
        if "_implementation" in key and isinstance(value, str) and "/" in value:
            raise ImportModelError(
                f"{spec}: {key} names code on the Hub, {value!r}, which is not run", 'Use "sdpa" or "eager".'
            )
        numbers = value if isinstance(value, list) else [value]
        if _COUNT.search(key) and len(numbers) > MOST_LAYERS:
            raise ImportModelError(f"{spec}: {key} has {len(numbers)} items; the limit is {MOST_LAYERS}")
        least = 0 if isinstance(usual, int | list) and not _SIGNED.search(key) else -LARGEST
        most = MOST_LAYERS if _COUNT.search(key) else LARGEST
        for number in numbers:
            if type(number) is int and not least <= number <= most:
                raise ImportModelError(f"{spec}: {key}={number} is not in the range {least} to {most}")


def _class(transformers: ModuleType, spec: str, config: Any, head: str | None) -> tuple[str, Any]:
    """Name of a head and the class of the model that has it: the head asked for, the one that the configuration names,
    or the first of :data:`HEADS`."""
    tables = transformers.models.auto.modeling_auto
    classes = {name: getattr(tables, entry.table).get(config.model_type) for name, entry in HEADS.items()}
    classes = {name: cls for name, cls in classes.items() if cls is not None}
    if not classes:
        raise ImportModelError(
            f"{spec}: transformers has no model of type {config.model_type} that flexsearch knows how to train",
            "Build the model and its batch in a function of your own, and import that as MODULE:CALLABLE.",
        )
    if head is not None and head not in classes:
        raise ImportModelError(f"{spec}: there is no head {head!r}", f"{config.model_type} has {', '.join(classes)}.")
    architectures = config.architectures or []
    saved = next((name for name, cls in classes.items() if cls in architectures), None)
    chosen = head or saved or next(iter(classes))
    return chosen, getattr(transformers, classes[chosen])


def _cause(error: Exception) -> str:
    """Type and message in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
