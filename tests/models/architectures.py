"""Tiny random models of Hugging Face Transformers, and inputs for them: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 40
LENGTH = 11


class Count(TorchDispatchMode):
    """Counts the calls of our attention."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.mha_ext.attention.default
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Architecture:
    """A model class with a tiny configuration.

    `layers` counts the calls of attention in one forward, `inputs` makes the arguments out of a padding mask (B, L) in
    which 1 is a token, `padded` says whether the inputs have padding at all.
    """

    model: str
    config: Callable[..., Any]
    layers: int
    inputs: Callable[[Tensor], dict[str, Tensor]]
    padded: bool = True
    generates: bool = False
    since: int = 4  # the version of transformers in which it goes through the attention interface,
    weights_since: int = 4  # and in which its attention can know that weights are wanted

    def build(self, attention: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
        """The model with the same random weights each time, in eval mode; `changes` are of its configuration."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)._from_config(self.config(**changes), attn_implementation=attention)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():  # large enough for attention to prefer some keys, biases and sinks too
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.15, generator=generator))
        return model.to(dtype).eval()


def tokens(mask: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": mask}


def pixels(mask: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(len(mask), 3, 8, 8, generator=torch.Generator().manual_seed(2))}


def tokens_and_pixels(mask: Tensor) -> dict[str, Tensor]:
    return {**tokens(mask), **pixels(mask)}


def two_sides(mask: Tensor) -> dict[str, Tensor]:
    """A padded source of another length than the target."""
    source = mask.repeat_interleave(2, dim=1)[:, : mask.shape[1] + 4]
    return {
        **tokens(source),
        "decoder_input_ids": tokens(mask)["input_ids"].flip(0),
        "decoder_attention_mask": mask,
    }


def speech(mask: Tensor) -> dict[str, Tensor]:
    features = torch.randn(len(mask), 4, 32, generator=torch.Generator().manual_seed(2))
    return {"input_features": features, "decoder_input_ids": tokens(mask)["input_ids"], "decoder_attention_mask": mask}


NO_DROPOUT = dict.fromkeys(
    [
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout_prob",
        "mlp_dropout",
        "resid_pdrop",
    ],
    0.0,
)


def configured(name: str, **changes: Any) -> Callable[..., Any]:
    """Makes a configuration, without dropout; the names are those of most models."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return lambda **more: getattr(transformers, name)(**{**settings, **NO_DROPOUT, **changes, **more})


def of_clip(**more: Any) -> Any:
    side = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "projection_dim": 8,
    }
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1}
    pictures = {"image_size": 8, "patch_size": 4}
    return transformers.CLIPConfig(
        text_config={**side, **words}, vision_config={**side, **pictures}, projection_dim=8, **more
    )


OF_T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}
OF_BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES = {
    "bert": Architecture("BertModel", configured("BertConfig"), 2, tokens, since=5),
    "distilbert": Architecture(
        "DistilBertModel",
        configured("DistilBertConfig", dim=16, hidden_dim=24, n_layers=2, n_heads=4),
        2,
        tokens,
        since=5,
    ),
    "roberta": Architecture("RobertaModel", configured("RobertaConfig"), 2, tokens, since=5),
    "modernbert": Architecture(
        "ModernBertModel",
        configured("ModernBertConfig", local_attention=6, global_attn_every_n_layers=2),
        2,
        tokens,
        since=5,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        configured("GPT2Config", n_embd=16, n_layer=2, n_head=4),
        2,
        tokens,
        generates=True,
        weights_since=5,
    ),
    "llama": Architecture("LlamaForCausalLM", configured("LlamaConfig", **GROUPED), 2, tokens, generates=True),
    "mistral": Architecture(
        "MistralForCausalLM", configured("MistralConfig", sliding_window=4, **GROUPED), 2, tokens, generates=True
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        configured("Gemma2Config", head_dim=4, attn_logit_softcapping=2.0, **GROUPED, **WINDOWED),
        2,
        tokens,
        generates=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        configured("Gemma3TextConfig", head_dim=4, **GROUPED, **WINDOWED),
        2,
        tokens,
        generates=True,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", configured("Qwen3Config", head_dim=8, **GROUPED), 2, tokens, generates=True
    ),
    "phi3": Architecture("Phi3ForCausalLM", configured("Phi3Config", **GROUPED), 2, tokens, generates=True),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        configured(
            "GptOssConfig",
            head_dim=4,
            num_local_experts=2,
            num_experts_per_tok=1,
            experts_implementation="eager",
            **GROUPED,
            **WINDOWED,
        ),
        2,
        tokens,
        generates=True,
    ),
    "vit": Architecture(
        "ViTModel", configured("ViTConfig", image_size=8, patch_size=4), 2, pixels, padded=False, weights_since=5
    ),
    "clip": Architecture("CLIPModel", of_clip, 4, tokens_and_pixels, padded=False, since=5),
    "t5": Architecture("T5ForConditionalGeneration", configured("T5Config", **OF_T5), 6, two_sides, since=5),
    "umt5": Architecture("UMT5ForConditionalGeneration", configured("UMT5Config", **OF_T5), 6, two_sides, since=5),
    "bart": Architecture("BartForConditionalGeneration", configured("BartConfig", **OF_BART), 6, two_sides),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        configured(
            "WhisperConfig",
            num_mel_bins=4,
            max_source_positions=16,
            max_target_positions=64,
            **OF_BART,
        ),
        6,
        speech,
    ),
}
