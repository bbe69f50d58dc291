"""Attention for Hugging Face Transformers: after `register()`, `attn_implementation="mha_ext"` selects it.

    import mha_ext.integrations.transformers
    mha_ext.integrations.transformers.register()
    model = AutoModel.from_pretrained(folder, attn_implementation="mha_ext")
    model.set_attn_implementation("mha_ext")  # or so, later

What a model asks of its attention is honoured, or refused with an error that names it. For transformers 4.57 and 5; in
4.57 BERT and T5 have no choice of attention yet, and GPT-2 and ViT return None for weights (`output_attentions`), which
their attention is not told about.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops

NAME = "mha_ext"

# What models hand down to attention although it is done with, or is not about attention.
IGNORED = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)

# What a model says of itself if its attention is made to be exchanged.
OTHER_THAN_EAGER = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")

READS_MASKS = ("nllb-moe",)  # its routers read the masks too, as floating numbers

# Configurations of models that are written for eager attention only: their modules may be causal without saying so.
_needs_every_mask: set[type] = set()


def register() -> None:
    """Makes "mha_ext" an attention implementation of Transformers: the attention and the mask that goes with it.

    A model that does not reach its attention through Transformers' table of attention functions then raises ValueError
    when it is made with "mha_ext". May be called again. Raises ImportError if transformers is missing or older than
    4.57.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("register: expected transformers >= 4.57, found none; `pip install transformers`") from None
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 57):
        raise ImportError(
            f"register: expected transformers >= 4.57, got {transformers.__version__}; `pip install -U transformers`"
        )
    if NAME not in transformers.AttentionInterface():
        _patch_choice_of_attention(transformers.PreTrainedModel)
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, make_mask)


def _patch_choice_of_attention(model_class: Any) -> None:
    """Lets every model be checked where Transformers checks that it may have the implementation that it asks for.

    Transformers asks models about its own implementations only. A model with an attention of its own would take our
    masks and add them to its scores.
    """
    check = model_class.get_correct_attn_implementation

    @functools.wraps(check)
    def check_and_ask_model(self: Any, requested_attention: str | None, *arguments: Any, **options: Any) -> str:
        if requested_attention == NAME:
            _admit_model(type(self), type(self.config))
        return check(self, requested_attention, *arguments, **options)

    model_class.get_correct_attn_implementation = check_and_ask_model


def _admit_model(model: Any, config: Any) -> None:
    uses_the_table = hasattr(sys.modules.get(model.__module__), "ALL_ATTENTION_FUNCTIONS")
    if not (uses_the_table or model._can_set_attn_implementation()):
        raise ValueError(
            "mha_ext: expected a model that uses ALL_ATTENTION_FUNCTIONS (more do in transformers 5), "
            f"got {model.__name__}; mha_ext.patch_sdpa may serve it"
        )
    if config.model_type in READS_MASKS:
        raise ValueError(f"mha_ext: expected a model that needs masks for attention only, got {model.__name__}")
    if not any(getattr(model, name, False) for name in OTHER_THAN_EAGER):
        raise ValueError(
            f"mha_ext: expected a model that Transformers gives another attention than eager, got {model.__name__}, "
            "parts of which may add masks to their scores themselves"
        )
    if not model._supports_sdpa:
        _needs_every_mask.add(config)


def make_mask(*, config: Any = None, **arguments: Any) -> Tensor | None:
    """The mask function: bool (B, 1, Lq, Lk), True = may attend, or None if the module's own is_causal says it all.

    Takes the keyword arguments of `transformers.masking_utils.sdpa_mask` and returns what it returns, but less often
    None: not for more keys than queries (unless there is one query), which a static cache has when it is first filled
    and a model that continues has too, and not for models that may be causal without saying so.
    """
    from transformers.masking_utils import sdpa_mask

    q_length = arguments.get("q_length")  # absent before version 5, which never returns None for more keys
    always = type(config) in _needs_every_mask
    if always or q_length not in (None, 1, arguments["kv_length"]):
        arguments["allow_is_causal_skip"] = False
    if always:
        arguments["allow_is_bidirectional_skip"] = False
    return sdpa_mask(config=config, **arguments)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    head_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> output (B, Lq, H, Dv)
    and the weights (B, H, Lq, Lk), as they multiplied the values, if they are wanted.

    attention_mask      bool (True = may attend) or floating (added), broadcasts to (B, H, Lq, Lk); longer ones are cut
    is_causal           without a mask: query i sees keys j <= i + Lk - Lq. The module's own is_causal when absent
    sliding_window      part of attention_mask, which must be there if the window hides anything
    dropout             applies while the module trains
    position_bias       floating, broadcasts to (B, H, Lq, Lk); added to the scores, with a gradient
    softcap             c: the scores become c tanh(scores / c) before anything is added
    s_aux, sinks        (H,) or (B, H, Lq, 1): scores of one more key whose value is 0, with a gradient
    head_mask           (H,) or (B, H): a factor for each head
    cu_seq_lens_q, _k   where packed sequences begin and end: queries see keys of their own sequence
    output_attentions   the weights are wanted; they also are if the config says so or the model collects attentions

    A query that sees no key gets 0. Raises ValueError or TypeError for what does not fit or cannot be honoured.
    """
    _refuse_what_is_not_honoured(module, scaling, others)
    q_len, kv_len = query.size(2), key.size(2)
    causal = False
    if attention_mask is None:
        causal = _is_causal(module, is_causal, q_len, kv_len)
        if sliding_window is not None and kv_len > sliding_window:
            raise ValueError(f"mha_ext: expected attention_mask with sliding_window {sliding_window}, got none")
    mask, bias = _mask_and_bias(attention_mask, position_bias, kv_len)
    if cu_seq_lens_q is not None:
        if causal and q_len != kv_len:
            raise ValueError(f"mha_ext: expected as many queries as keys with cu_seq_lens_q, got {q_len} and {kv_len}")
        together = _same_sequence(cu_seq_lens_q, cu_seq_lens_k, q_len, kv_len)
        mask = together if mask is None else mask & together
    need_weights = _weights_are_wanted(module, output_attentions)
    if s_aux is not None and sinks is not None:
        raise ValueError("mha_ext: expected either s_aux or sinks, got both")
    sink = sinks if s_aux is None else s_aux
    output, weights, logsumexp = ops.attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        is_causal=causal,
        causal_bottom_right=causal,
        dropout_p=dropout if module.training else 0.0,
        scale=scaling,
        need_weights=need_weights,
        softcap=softcap,
        need_logsumexp=sink is not None,
    )
    factors = [] if sink is None else [_share_of_the_keys(logsumexp, sink)]
    factors += [] if head_mask is None else [_head_factors(head_mask, query.size(0), query.size(1))]
    for factor in factors:
        output = (output * factor).to(query.dtype)
        weights = (weights * factor).to(query.dtype) if need_weights else weights
    return output.transpose(1, 2).contiguous(), weights if need_weights else None


def _refuse_what_is_not_honoured(module: nn.Module, scaling: float | None, others: dict[str, Any]) -> None:
    for name, argument in others.items():
        if argument is not None and name not in IGNORED:
            raise ValueError(
                f"mha_ext: expected no argument {name}, which it cannot honour, got {type(argument).__name__}"
            )
    # Before version 5 some models tell these to their own eager attention only.
    if scaling is None and not getattr(module, "scale_attn_weights", True):
        raise ValueError("mha_ext: expected scaling with scale_attn_weights=False, got none")
    if scaling is None and getattr(module, "scale_attn_by_inverse_layer_idx", False):
        raise ValueError("mha_ext: expected scaling with scale_attn_by_inverse_layer_idx=True, got none")
    if getattr(module, "position_embedding_type", None) in ("relative_key", "relative_key_query"):
        raise ValueError(f"mha_ext: expected absolute or rotary positions, got {module.position_embedding_type}")


def _is_causal(module: nn.Module, is_causal: bool | None, q_len: int, kv_len: int) -> bool:
    """Whether no mask means a causal one."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError("mha_ext: expected an attention_mask or is_causal, got neither")
    if is_causal and q_len > kv_len:
        raise ValueError(f"mha_ext: expected no more queries than keys with is_causal, got {q_len} and {kv_len}")
    return is_causal


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, kv_len: int
) -> tuple[Tensor | None, Tensor | None]:
    """What the operator takes for the mask and the bias that a model gives."""
    if attention_mask is None:
        return None, position_bias
    if attention_mask.size(-1) < kv_len:
        raise ValueError(f"mha_ext: expected attention_mask for {kv_len} keys, got {tuple(attention_mask.shape)}")
    attention_mask = attention_mask[..., :kv_len]
    if attention_mask.dtype == torch.bool:
        return attention_mask, position_bias
    if not attention_mask.is_floating_point():
        raise TypeError(f"mha_ext: expected attention_mask of dtype bool or floating, got {attention_mask.dtype}")
    return None, attention_mask if position_bias is None else attention_mask + position_bias


def _same_sequence(cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, q_len: int, kv_len: int) -> Tensor:
    """(Lq, Lk): whether a query and a key are of one sequence; cu_seq_lens are (0, n_1, n_1 + n_2, ...)."""
    query, key = (
        torch.bucketize(torch.arange(length, device=bounds.device), bounds, right=True)
        for length, bounds in (
            (q_len, cu_seq_lens_q),
            (kv_len, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k),
        )
    )
    return query[:, None] == key


def _weights_are_wanted(module: nn.Module, output_attentions: bool | None) -> bool:
    """By the argument, by the config, or because the model collects them without telling its attention."""
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(output_attentions) or any("attentions" in name for name in _collected_outputs())


def _collected_outputs() -> Iterable[str]:
    """What version 5 is collecting from hooks in this forward."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return ()
    collector = capturing._active_collector  # a context variable, which the compiler does not trace
    return (collector.global_var if torch.compiler.is_compiling() else collector.get()) or ()


def _share_of_the_keys(logsumexp: Tensor, sink: Tensor) -> Tensor:
    """(B, H, Lq, 1): what a sink of score s leaves for the keys, sum exp(scores) / (sum exp(scores) + exp(s))."""
    sink = sink.reshape(-1, 1) if sink.dim() == 1 else sink.squeeze(-1)
    return torch.sigmoid(logsumexp - sink).unsqueeze(-1)


def _head_factors(head_mask: Tensor, batch: int, heads: int) -> Tensor:
    """(H, 1, 1) or (B, H, 1, 1) of one factor for each head."""
    if head_mask.dim() == 2 and head_mask.shape == (batch, heads):
        return head_mask[..., None, None]
    if head_mask.numel() != heads:
        raise ValueError(
            f"mha_ext: expected head_mask of one factor for each of {heads} heads, got {tuple(head_mask.shape)}"
        )
    return head_mask.reshape(heads, 1, 1)
