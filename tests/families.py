"""Model families of Hugging Face's transformers as data: a tiny configuration each, and the batch that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
Options = Mapping[str, Any]
BATCH, LENGTH, VOCABULARY, CLASSES = 4, 8, 50, 3


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _padded(**more: Tensor) -> Batch:
    """Token numbers and the mask of a collator that padded the second sample."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": _tokens().masked_fill(mask == 0, 0), "attention_mask": mask, **more}


def causal() -> Batch:
    """As DataCollatorForLanguageModeling(mlm=False) gives it: padding is no target."""
    batch = _padded()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked() -> Batch:
    """As DataCollatorForLanguageModeling gives it: targets are the tokens that were masked out."""
    batch = _padded()
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[:, ::3] = True
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, 3),
        "labels": batch["input_ids"].masked_fill(~hidden | (batch["attention_mask"] == 0), -100),
    }


def classes() -> Batch:
    """Sequence classification."""
    return _padded(labels=torch.randint(CLASSES, (BATCH,)))


def translation() -> Batch:
    """As DataCollatorForSeq2Seq gives it."""
    labels = _tokens(6)
    labels[2, 4:] = -100
    return _padded(labels=labels)


def images(size: int = 16) -> Callable[[], Batch]:
    """Image classification."""
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(CLASSES, (BATCH,))}


def segmentation() -> Batch:
    """Segment maps, with pixels that do not count."""
    labels = torch.randint(CLASSES, (BATCH, 32, 32))
    labels[0, :3] = 255
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": labels}


def transcription() -> Batch:
    """Mel spectrograms and the tokens that are said."""
    labels = _tokens(6)
    labels[2, 4:] = -100
    return {"input_features": torch.randn(BATCH, 8, 32), "labels": labels}


def waveforms() -> Batch:
    """Waveforms, padded, with their class."""
    mask = torch.ones(BATCH, 400, dtype=torch.long)
    mask[1, 300:] = 0
    return {"input_values": torch.randn(BATCH, 400), "attention_mask": mask, "labels": torch.randint(CLASSES, (BATCH,))}


def pairs() -> Batch:
    """Captions and images, for contrastive training."""
    batch = {**_padded(pixel_values=torch.randn(BATCH, 3, 16, 16)), "return_loss": True}
    batch["input_ids"][:, 4] = 2
    return batch


_TEXT: Options = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTH: Options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_DECODER: Options = {**_TEXT, **_WIDTH, "max_position_embeddings": 32}
_GROUPED: Options = {**_DECODER, "num_attention_heads": 4, "num_key_value_heads": 2}
_HEADS: Options = {**_GROUPED, "head_dim": 8}
_ENCODER: Options = {**_DECODER, "num_labels": CLASSES}
_IMAGE: Options = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
_PATCHES: Options = {**_WIDTH, **_IMAGE}


@dataclass(frozen=True)
class Family:
    """``config``, ``model``: names in transformers. ``options``: of the tiny configuration. ``static``: options without
    which the shipped model is no static graph, whatever the batch. ``cheap``: in the sample that CI proves."""

    config: str
    model: str
    options: Options
    batch: Callable[[], Batch]
    static: Options = field(default_factory=dict)
    cheap: bool = False


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2Config", "GPT2LMHeadModel", {**_TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, causal,
        cheap=True,
    ),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _GROUPED, causal, cheap=True),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, causal),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", _GROUPED, causal),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _HEADS, causal),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", {**_HEADS, "sliding_window": 4}, causal),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", {**_HEADS, "sliding_window": 4}, causal),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", _GROUPED, causal),
    "opt": Family(
        "OPTConfig", "OPTForCausalLM",
        {**_DECODER, "ffn_dim": 24, "word_embed_proj_dim": 16}, causal,
    ),
    "bloom": Family("BloomConfig", "BloomForCausalLM", {**_TEXT, "hidden_size": 16, "n_layer": 2, "n_head": 2}, causal),
    "falcon": Family("FalconConfig", "FalconForCausalLM", _DECODER, causal),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER, causal),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", _GROUPED, causal),
    "mixtral": Family(
        "MixtralConfig", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, causal,
        cheap=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
         "shared_expert_intermediate_size": 24}, causal,
    ),
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM",
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}, causal,
    ),
    "bert": Family("BertConfig", "BertForMaskedLM", _ENCODER, masked),
    "bert_classifier": Family("BertConfig", "BertForSequenceClassification", _ENCODER, classes, cheap=True),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", _ENCODER, masked),
    "distilbert": Family(
        "DistilBertConfig", "DistilBertForSequenceClassification",
        {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32,
         "num_labels": CLASSES}, classes,
    ),
    "albert": Family(
        "AlbertConfig", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 8}, masked,
    ),
    "electra": Family(
        "ElectraConfig", "ElectraForSequenceClassification", {**_ENCODER, "embedding_size": 8}, classes,
    ),
    "deberta_v2": Family(
        "DebertaV2Config", "DebertaV2ForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"],
         "share_att_key": True, "norm_rel_ebd": "layer_norm"}, classes,
        static={"problem_type": "single_label_classification"},
    ),
    "t5": Family(
        "T5Config", "T5ForConditionalGeneration",
        {**_TEXT, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        translation, cheap=True,
    ),
    "bart": Family(
        "BartConfig", "BartForConditionalGeneration",
        {**_TEXT, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
         "decoder_start_token_id": 2, "forced_eos_token_id": 2}, translation,
    ),
    "whisper": Family(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**_TEXT, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8,
         "max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1}, transcription,
    ),
    "clip": Family(
        "CLIPConfig", "CLIPModel",
        {"text_config": {**_DECODER}, "vision_config": {**_WIDTH, "image_size": 16, "patch_size": 4},
         "projection_dim": 8}, pairs,
        cheap=True,
    ),
    "vit": Family("ViTConfig", "ViTForImageClassification", _PATCHES, images(), cheap=True),
    "dinov2": Family("Dinov2Config", "Dinov2ForImageClassification", _PATCHES, images()),
    "swin": Family(
        "SwinConfig", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
         "num_labels": CLASSES}, images(32),
    ),
    "convnext": Family(
        "ConvNextConfig", "ConvNextForImageClassification",
        {"hidden_sizes": [4, 8, 12, 16], "depths": [1, 1, 2, 1], "num_labels": CLASSES}, images(32),
    ),
    "convnextv2": Family(
        "ConvNextV2Config", "ConvNextV2ForImageClassification",
        {"hidden_sizes": [4, 8, 12, 16], "depths": [1, 1, 2, 1], "num_labels": CLASSES}, images(32),
    ),
    "segformer": Family(
        "SegformerConfig", "SegformerForSemanticSegmentation",
        {"hidden_sizes": [4, 8, 8, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2],
         "decoder_hidden_size": 8, "num_labels": CLASSES}, segmentation,
    ),
    "beit": Family("BeitConfig", "BeitForImageClassification", _PATCHES, images()),
    "resnet": Family(
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2], "num_labels": CLASSES}, images(32),
    ),
    "mobilenet_v2": Family(
        "MobileNetV2Config", "MobileNetV2ForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4, "num_labels": CLASSES},
        images(32),
    ),
    "efficientnet": Family(
        "EfficientNetConfig", "EfficientNetForImageClassification",
        {"image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.2, "depth_divisor": 4, "hidden_dim": 128,
         "num_labels": CLASSES}, images(32),
    ),
    "mamba2": Family(
        "Mamba2Config", "Mamba2ForCausalLM",
        {**_TEXT, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8,
         "n_groups": 2, "chunk_size": 4}, causal,
        cheap=True,
    ),
    "wav2vec2": Family(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification",
        {**_WIDTH, "intermediate_size": 64, "vocab_size": VOCABULARY, "conv_dim": [8, 8], "conv_stride": [5, 2],
         "conv_kernel": [10, 3],
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "num_labels": CLASSES, "classifier_proj_size": 8}, waveforms,
        static={"apply_spec_augment": False, "layerdrop": 0.0},
    ),
}  # fmt: skip


def configuration(name: str, **more: Any) -> Any:
    """The tiny configuration of a family, with ``more`` options; drop rates are those that the library ships."""
    family = FAMILIES[name]
    return getattr(transformers, family.config)(**{**family.options, **family.static, **more})


def without_draws(config: Any) -> Any:
    """The configuration with every drop rate at 0, those of its parts too: plain PyTorch draws other masks."""
    for part in _parts(config):
        for key, value in list(vars(part).items()):
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from _parts(value)


def build(name: str, *, draws: bool = True, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[nn.Module, Batch]:
    """A family's model in training mode, with the same weights each time, and its batch.

    ``draws``: with the drop rates that the library ships. ``more``: further options of the configuration.
    """
    torch.manual_seed(0)
    config = configuration(name, **more)
    model = getattr(transformers, FAMILIES[name].model)(config if draws else without_draws(config))
    batch = FAMILIES[name].batch()
    return model.to(dtype).train(), {
        key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in batch.items()
    }
