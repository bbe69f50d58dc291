"""In place of torch.nn.functional's multi_head_attention_forward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import _mha_shape_check, linear, pad  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from .. import masks
from ..functional import has_own_meaning
from ..head_mask import check_head_mask, masked_columns, masked_heads, masked_weights
from ..projections import is_plain


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor | None,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    weights_before_dropout: bool = False,
    batch_first: bool = False,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """In place of torch.nn.functional.multi_head_attention_forward, with its arguments.

    query (L, N, E), key (S, N, Ek) and value (S, N, Ev), or without N; in_proj_weight (3 E, E), or q_, k_ and
    v_proj_weight (E, E), (E, Ek) and (E, Ev); in_proj_bias (3 E,); bias_k and bias_v: a key and a value of E features
    that are appended to all sequences, add_zero_attn: one more of zeros; static_k and static_v (N H, S, D): in place of
    the projected keys and values. Returns the output (L, N, E) and, with need_weights, the weights (N, L, S), or
    (N, H, L, S) without average_attn_weights; S counts what was appended.

    key_padding_mask (N, S) and attn_mask (L, S) or (N H, L, S) hide where True if they are bool, and are added to the
    scores if they are floating: any mix of both. Where they differ from torch's:

    - is_causal hides j > i besides what the masks hide, whatever else is asked for, and needs no attn_mask;
    - a query that sees no key gets weights 0 and the output of a context of 0; nothing hidden leaks;
    - attn_mask may also have 4 dimensions, and then broadcasts to (N, H, L, S).

    Beyond torch's:

    weights_before_dropout  return the weights as they were before dropout, not those that multiplied the values
    batch_first             query, key, value and output are (N, L, E), (N, S, Ek), (N, S, Ev) and (N, L, E)
    out_proj_weight=None    return the merged heads instead of the output
    head_mask               floating (H,) or (N, H), differentiable: multiplies what each head hands to the output
                            projection, and its weights (Michel et al. 2019)

    The projections may have fewer rows, and out_proj_weight as many fewer columns, than E: those of whole heads of any
    size. Raises AssertionError and RuntimeError with torch's texts for sizes and masks that do not fit, ValueError or
    TypeError for the rest.
    """
    if not torch.jit.is_scripting():
        inputs = (
            query,
            key,
            value,
            in_proj_weight,
            in_proj_bias,
            bias_k,
            bias_v,
            out_proj_weight,
            out_proj_bias,
        )
        if has_torch_function(inputs) and any(map(has_own_meaning, inputs)):  # modes see the operators
            return handle_torch_function(
                multi_head_attention_forward,
                inputs,
                query,
                key,
                value,
                embed_dim_to_check,
                num_heads,
                in_proj_weight,
                in_proj_bias,
                bias_k,
                bias_v,
                add_zero_attn,
                dropout_p,
                out_proj_weight,
                out_proj_bias,
                training=training,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                use_separate_proj_weight=use_separate_proj_weight,
                q_proj_weight=q_proj_weight,
                k_proj_weight=k_proj_weight,
                v_proj_weight=v_proj_weight,
                static_k=static_k,
                static_v=static_v,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
                weights_before_dropout=weights_before_dropout,
                batch_first=batch_first,
                head_mask=head_mask,
            )
    batched = _check_and_tell_batched(query, key, value, key_padding_mask, attn_mask, num_heads)
    _check_features(query, key, value, embed_dim_to_check, use_separate_proj_weight)
    _check_extra_keys(bias_k, bias_v, static_k, static_v)
    w_q, w_k, w_v, b_q, b_k, b_v = projections(
        in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias, use_separate_proj_weight
    )
    _check_heads(w_q, embed_dim_to_check, num_heads)
    if head_mask is not None:
        batch = 1 if not batched else query.size(0 if batch_first else 1)
        check_head_mask("multi_head_attention_forward", head_mask, batch, num_heads, query.device)

    q_in = _as_batch_first(query, batched, batch_first)
    k_in = q_in if key is query else _as_batch_first(key, batched, batch_first)
    v_in = k_in if value is key else _as_batch_first(value, batched, batch_first)
    kv_len = k_in.size(1) if static_k is None else static_k.size(1)
    padding = _padding_mask(key_padding_mask, q_in.size(0), kv_len)
    pairs = pair_mask(attn_mask, q_in.size(0), num_heads, q_in.size(1), kv_len)
    padding_left: Tensor | None = padding
    key_lengths: Tensor | None = None
    fused = bias_k is None and not add_zero_attn and static_k is None and static_v is None
    fused = fused and (head_mask is None or head_mask.dim() == 1)
    if not torch.jit.is_scripting():
        if padding is not None and _may_be_read(padding):
            padding_left, key_lengths = _as_key_lengths(padding)
        fused = fused and _all_plain([w_q, w_k, w_v, out_proj_weight, b_q, b_k, b_v, out_proj_bias])
    mask, bias = visible_and_added(padding_left, pairs)
    dropout_p = dropout_p if training else 0.0

    if fused and out_proj_weight is not None:
        output, weights = torch.ops.mha_ext.multi_head_attention(
            q_in,
            k_in,
            v_in,
            w_q,
            w_k,
            w_v,
            out_proj_weight if head_mask is None else masked_columns(out_proj_weight, head_mask),
            b_q,
            b_k,
            b_v,
            out_proj_bias,
            num_heads,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            dropout_p=dropout_p,
            need_weights=need_weights,
            key_lengths=key_lengths,
            average_weights=average_attn_weights and head_mask is None,
            weights_before_dropout=weights_before_dropout,
        )
        if head_mask is not None and need_weights:
            weights = masked_weights(weights, head_mask, average_attn_weights)
    else:
        hidden = hidden_keys(padding, pairs, is_causal, q_in.size(1), kv_len, q_in.device)
        q = _project(q_in, w_q, b_q, num_heads)
        if static_k is None:
            k = _project(cleared(k_in, hidden), w_k, b_k, num_heads)
        else:
            k = _static_heads("static_k", static_k, q)
        if static_v is None:
            v = _project(cleared(v_in, hidden), w_v, b_v, num_heads)
        else:
            v = _static_heads("static_v", static_v, q)
        output, weights = attend(
            q,
            with_extra_keys(k, bias_k, add_zero_attn),
            with_extra_keys(v, bias_v, add_zero_attn),
            int(bias_k is not None) + int(add_zero_attn),
            mask,
            bias,
            key_lengths,
            is_causal,
            dropout_p,
            need_weights,
            average_attn_weights,
            weights_before_dropout,
            head_mask,
        )
        if out_proj_weight is not None:
            output = linear(output, out_proj_weight, out_proj_bias)

    if not batched:
        output = output.squeeze(0)
    elif not batch_first:
        output = output.transpose(0, 1).contiguous()
    if not need_weights:
        return output, None
    return output, (weights if batched else weights.squeeze(0))


# --- Checks -------------------------------------------------------------------------------------------------------


def _check_and_tell_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
) -> bool:
    """Dtypes and numbers of dimensions; returns whether there is a batch dimension."""
    if not query.is_floating_point():
        raise TypeError(f"multi_head_attention_forward: expected query of a real floating dtype, got {query.dtype}")
    if key_padding_mask is not None:
        _check_mask_dtype("key_padding_mask", key_padding_mask)
    checked = attn_mask
    if attn_mask is not None:
        _check_mask_dtype("attn_mask", attn_mask)
        if attn_mask.dim() == 4:  # unknown to torch
            checked = None
    return _mha_shape_check(query, key, value, key_padding_mask, checked, num_heads)


def _check_mask_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"only bool and floating types of {name} are supported")


def _check_features(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, separate_weights: bool) -> None:
    if query.size(-1) != embed_dim:
        raise AssertionError(f"was expecting embedding dimension of {embed_dim}, but got {query.size(-1)}")
    if separate_weights:
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"key's sequence and batch dims {key.shape[:-1]} do not match value's {value.shape[:-1]}"
            )
    elif key.shape != value.shape:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")


def _check_heads(w_q: Tensor, embed_dim: int, num_heads: int) -> None:
    """The rows of w_q are those of whole heads: embed_dim, or fewer where heads were pruned."""
    rows = w_q.size(0)
    if rows % num_heads != 0:
        if rows == embed_dim:
            raise AssertionError(f"embed_dim {embed_dim} not divisible by num_heads {num_heads}")
        raise ValueError(
            f"multi_head_attention_forward: expected query's projection of a multiple of {num_heads} rows, got {rows}"
        )


def _check_extra_keys(
    bias_k: Tensor | None, bias_v: Tensor | None, static_k: Tensor | None, static_v: Tensor | None
) -> None:
    if bias_k is None and bias_v is not None:
        raise AssertionError("bias_v is set but bias_k is None")
    if bias_v is None and bias_k is not None:
        raise AssertionError("bias_k is set but bias_v is None")
    if bias_k is not None:
        if static_k is not None:
            raise AssertionError("bias cannot be added to static key.")
        if static_v is not None:
            raise AssertionError("bias cannot be added to static value.")


# --- Projections --------------------------------------------------------------------------------------------------


def _as_batch_first(x: Tensor, batched: bool, batch_first: bool) -> Tensor:
    """(N, L, E) of x as it was given."""
    if not batched:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1).contiguous()  # copied once rather than by each projection


def projections(
    packed: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    bias: Tensor | None,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Weights and biases of query, key and value out of what torch's layer holds."""
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    if bias is not None:
        b_q, b_k, b_v = bias.chunk(3)
    if not separate:
        if packed is None:
            raise AssertionError("use_separate_proj_weight is False but in_proj_weight is None")
        first, second, third = packed.chunk(3)
        return first, second, third, b_q, b_k, b_v
    if w_q is None:
        raise AssertionError("use_separate_proj_weight is True but q_proj_weight is None")
    if w_k is None:
        raise AssertionError("use_separate_proj_weight is True but k_proj_weight is None")
    if w_v is None:
        raise AssertionError("use_separate_proj_weight is True but v_proj_weight is None")
    return w_q, w_k, w_v, b_q, b_k, b_v


@torch.jit.unused
def _all_plain(tensors: list[Tensor | None]) -> bool:
    return all(tensor is None or is_plain(tensor) for tensor in tensors)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """(N, H, L, D) of x (N, L, E)"""
    return linear(x, weight, bias).unflatten(-1, [heads, -1]).transpose(1, 2)


def _static_heads(name: str, static: Tensor, q: Tensor) -> Tensor:
    """(N, H, S, D) of (N H, S, D), where q is (N, H, L, D)."""
    batch, heads, _, head_dim = q.shape
    if static.size(0) != batch * heads:
        raise AssertionError(f"expecting {name}.size(0) of {batch * heads}, but got {static.size(0)}")
    if static.size(2) != head_dim:
        raise AssertionError(f"expecting {name}.size(2) of {head_dim}, but got {static.size(2)}")
    return static.unflatten(0, [batch, heads])


# --- Attention with keys that every query sees ---------------------------------------------------------------------


def with_extra_keys(x: Tensor, learned: Tensor | None, zero: bool) -> Tensor:
    """x (N, H, S, D) after a learned key (of H D elements), one of zeros, or both.

    They stand before the others: then padding still ends the sequences, and is_causal still hides a corner.
    """
    batch, heads, _, head_dim = x.shape
    keys: list[Tensor] = []
    if learned is not None:
        keys.append(learned.to(x.dtype).reshape(1, heads, 1, head_dim).expand(batch, -1, -1, -1))
    if zero:
        keys.append(torch.zeros(batch, heads, 1, head_dim, dtype=x.dtype, device=x.device))
    return x if len(keys) == 0 else torch.cat(keys + [x], dim=2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: int,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    need_weights: bool,
    average_weights: bool,
    weights_before_dropout: bool,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merged heads (N, L, H D) and weights, whose last columns are the first `extra` keys.

    Masks, lengths and is_causal are about the keys after those, which every query sees.
    """
    if extra > 0:
        q_len, kv_len = q.size(2), k.size(2) - extra
        if is_causal and q_len != kv_len:  # no longer a corner
            causal = masks.causal(q_len, kv_len, device=q.device)
            mask = causal if mask is None else mask & causal
            is_causal = False
        mask = None if mask is None else pad(mask, [extra, 0], value=1.0)
        bias = None if bias is None else pad(bias, [extra, 0])
        key_lengths = None if key_lengths is None else key_lengths + extra
    heads, weights, _ = torch.ops.mha_ext.attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        dropout_p=dropout_p,
        need_weights=need_weights,
        key_lengths=key_lengths,
        causal_bottom_right=is_causal and extra > 0,  # the extra keys shift the corner
        average_weights=average_weights and head_mask is None,
        weights_before_dropout=weights_before_dropout,
        need_logsumexp=False,
    )
    if head_mask is not None:
        heads = masked_heads(heads, head_mask)
        if need_weights:
            weights = masked_weights(weights, head_mask, average_weights)
    if need_weights and extra > 0:
        weights = weights.roll(-extra, -1)
    return heads.transpose(1, 2).flatten(2), weights


# --- Masks --------------------------------------------------------------------------------------------------------


def _padding_mask(mask: Tensor | None, batch: int, kv_len: int) -> Tensor | None:
    """key_padding_mask seen as (N, 1, 1, S)."""
    if mask is None:
        return None
    if mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask.size(0) != batch:
        raise AssertionError(f"Expected key_padded_mask.shape[0] to be {batch}, but got {mask.size(0)}")
    if mask.size(1) != kv_len:
        raise AssertionError(f"Expected key_padded_mask.shape[1] to be {kv_len}, but got {mask.size(1)}")
    return mask.unsqueeze(1).unsqueeze(1)


def pair_mask(mask: Tensor | None, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor | None:
    """attn_mask seen with 4 dimensions: (1, 1, L, S) or (N, H, L, S)."""
    if mask is None:
        return None
    if mask.dim() == 2:
        if list(mask.shape) != [q_len, kv_len]:
            raise RuntimeError(f"The shape of the 2D attn_mask is {mask.shape}, but should be {(q_len, kv_len)}.")
        return mask.unsqueeze(0).unsqueeze(0)
    if mask.dim() == 3:
        if list(mask.shape) != [batch * heads, q_len, kv_len]:
            raise RuntimeError(
                f"The shape of the 3D attn_mask is {mask.shape}, but should be {(batch * heads, q_len, kv_len)}."
            )
        return mask.unflatten(0, [batch, heads])
    if list(mask.shape[2:]) != [q_len, kv_len] or mask.size(0) not in (1, batch) or mask.size(1) not in (1, heads):
        raise ValueError(
            f"multi_head_attention_forward: expected 4-D attn_mask that broadcasts to {(batch, heads, q_len, kv_len)}, "
            f"got {mask.shape}"
        )
    return mask


def visible_and_added(padding: Tensor | None, pairs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What the operators take, mask (True = may attend) and bias, of masks that hide where True or are added."""
    hidden: Tensor | None = None
    added: Tensor | None = None
    for mask in (padding, pairs):
        if mask is not None:
            if mask.dtype == torch.bool:
                hidden = mask if hidden is None else hidden | mask
            else:
                added = mask if added is None else added + mask
    return None if hidden is None else hidden.logical_not(), added


@torch.jit.unused
def _may_be_read(x: Tensor) -> bool:
    """Whether decisions may depend on the values of x: no trace of what happens is taken, no gradient flows to it."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(x) not in (Tensor, torch.nn.Parameter)
        or not x.is_cpu
        or x.requires_grad
    )


@torch.jit.unused
def _as_key_lengths(padding: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(mask, None), or (None, key_lengths) if only ends of sequences hide: the engine then leaves out what they hold.

    A floating mask of 0 and -inf alone is as good as a bool one.
    """
    hidden = hides(padding)
    if padding.dtype != torch.bool and not (hidden | (padding == 0)).all():
        return padding, None
    keys = hidden[:, 0, 0]
    if (keys[:, 1:] < keys[:, :-1]).any():
        return hidden, None
    return None, keys.logical_not().sum(1)


def hidden_keys(
    padding: Tensor | None, pairs: Tensor | None, is_causal: bool, q_len: int, kv_len: int, device: torch.device
) -> Tensor | None:
    """Keys that no query sees, (N or 1, S)."""
    hidden: Tensor | None = None
    if pairs is not None:
        unseen = hides(pairs)
        if is_causal:
            unseen = unseen | masks.causal(q_len, kv_len, device=device).logical_not()
        hidden = unseen.flatten(1, 2).all(1)
    elif is_causal:
        hidden = (torch.arange(kv_len, device=device) >= q_len).unsqueeze(0)
    if padding is not None:
        padded = hides(padding)[:, 0, 0]
        hidden = padded if hidden is None else hidden | padded
    return hidden


def hides(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -torch.inf


def cleared(x: Tensor, hidden: Tensor | None) -> Tensor:
    """x (N, S, E) with 0 in hidden positions: a NaN there would reach the gradient of the weights, as 0 NaN = NaN."""
    return x if hidden is None else x.masked_fill(hidden.unsqueeze(-1), 0.0)
