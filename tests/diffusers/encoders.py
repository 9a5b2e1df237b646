"""Tiny text and image encoders of the real Transformers classes, with tokenizers that read letters."""

from __future__ import annotations

import string
from typing import Any

import tokenizers
import transformers

TEXT = 16
"""Width of all of them."""
IMAGE = 12
"""Width of an image's embeddings."""
_SIZES: dict[str, Any] = {
    "hidden_size": TEXT,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}


def t5(kind: str = "T5", width: int = TEXT) -> dict[str, Any]:
    """A text encoder that reads letters, and its tokenizer."""
    letters = [("▁", -2.0), *((letter, -3.0) for letter in string.ascii_lowercase)]
    words = transformers.T5Tokenizer(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters], extra_ids=0, model_max_length=64
    )
    sizes: dict[str, Any] = {"vocab_size": 32, "d_model": width, "d_kv": 8, "d_ff": 24}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_heads=2, num_layers=1)
    return {"tokenizer": words, "text_encoder": getattr(transformers, f"{kind}EncoderModel")(config).eval()}


def clip(*, projected: bool) -> dict[str, Any]:
    marks = ["<|startoftext|>", "<|endoftext|>"]
    letters = [letter + end for end in ("", "</w>") for letter in string.ascii_lowercase]
    words = transformers.CLIPTokenizer(
        vocab={token: number for number, token in enumerate([*marks, *letters])},
        merges=[],
        model_max_length=77,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=54, hidden_size=TEXT, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=TEXT, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return {"tokenizer": words, "text_encoder": model(config).eval()}


def numbered(parts: dict[str, Any], number: int) -> dict[str, Any]:
    return {f"{name}_{number}": part for name, part in parts.items()}


def _letters() -> Any:
    """A tokenizer of letters, for models that do not mind whose it is."""
    words = ["<pad>", "<unk>", *string.ascii_lowercase, " "]
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", model_max_length=64
    )


def llama() -> dict[str, Any]:
    config = transformers.LlamaConfig(**_SIZES, vocab_size=32, pad_token_id=0)
    return {"tokenizer": _letters(), "text_encoder": transformers.LlamaModel(config).eval()}


def qwen() -> dict[str, Any]:
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    ends: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_SIZES, "rope_parameters": rope, **ends},
        vision_config={"depth": 1, "hidden_size": TEXT, "num_heads": 2, "out_hidden_size": TEXT},
        **ends,
    )  # fmt: skip
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return {"tokenizer": _letters(), "text_encoder": model.eval()}


def vision() -> dict[str, Any]:
    """The encoder of a first image."""
    config = transformers.CLIPVisionConfig(
        hidden_size=IMAGE, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=IMAGE,
    )  # fmt: skip
    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return {
        "image_processor": transformers.CLIPImageProcessor(**sizes),
        "image_encoder": transformers.CLIPVisionModel(config).eval(),
    }
