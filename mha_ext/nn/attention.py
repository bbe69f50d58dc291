"""In place of torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..modules import load_pruned_heads
from ..projections import modules_are_called_plainly, plain_parameters
from .functional import multi_head_attention_forward
from .nested import forward_nested


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention on the engine: its arguments, parameters, initial values and results.

    What differs is said at `mha_ext.nn.functional.multi_head_attention_forward`: is_causal needs no mask and always
    counts, a query that sees no key gives 0, nothing hidden leaks. Training, evaluation and inference compute the same
    (dropout aside), and padding that stands at the ends of the sequences is not computed with at all.

    Projections are used as they are at each call: parametrised or pruned weights, and an out_proj with hooks or of
    another class (an adapter, say), which is then called once.
    """

    __constants__ = [*nn.MultiheadAttention.__constants__, "_calls_out_proj"]
    _calls_out_proj = False  # which way a scripted module goes, decided when it is scripted

    __jit_unused_properties__ = ["_qkv_same_embed_dim"]

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, once torch's __init__ is through: the fast paths of its Transformer layers ask this, and would use the
        parameters without calling the module."""
        return "add_zero_attn" not in self.__dict__ and self.__dict__["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, same: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = same

    def _reset_parameters(self) -> None:
        """Draws what torch's layer draws, in its order."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        weights_before_dropout: bool = False,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """query (N, L, E), key (N, S, kdim), value (N, S, vdim) with batch_first, else (L, N, E), ...; or without N.

        key_padding_mask        (N, S), bool hides where True, floating is added to the scores
        attn_mask               (L, S), (N H, L, S) or broadcasting to (N, H, L, S): likewise
        need_weights            False: None in place of the weights, and no memory for them
        average_attn_weights    weights (N, L, S), the mean over heads; False: (N, H, L, S)
        is_causal               query i sees keys j <= i, and of these what the masks show
        weights_before_dropout  return the weights as they were before dropout
        head_mask               floating (H,) or (N, H), differentiable: multiplies what each head hands to out_proj,
                                and its weights (Michel et al. 2019)

        Nested tensors (N, L*, E) of either layout need batch_first and no key_padding_mask; the output has the layout
        and lengths of query, the weights are padded with 0. Raises AssertionError and RuntimeError with torch's texts
        for sizes and masks that do not fit, ValueError or TypeError for the rest.
        """
        if not torch.jit.is_scripting():
            if query.is_nested or key.is_nested or value.is_nested:
                return forward_nested(
                    self,
                    query,
                    key,
                    value,
                    key_padding_mask,
                    need_weights,
                    attn_mask,
                    average_attn_weights,
                    is_causal,
                    weights_before_dropout,
                    head_mask,
                )
        out_weight: Tensor | None = None
        out_bias: Tensor | None = None
        if torch.jit.is_scripting():
            if not self._calls_out_proj:
                out_weight, out_bias = self.out_proj.weight, self.out_proj.bias
        else:
            out_weight, out_bias = self._plain_out_proj()
        output, weights = multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            out_weight,
            out_bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=self.in_proj_weight is None,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            batch_first=self.batch_first,
            weights_before_dropout=weights_before_dropout,
            head_mask=head_mask,
        )
        if out_weight is None:
            output = self.out_proj(output)
        return output, weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        """Loses the heads that are missing in what is loaded: see `mha_ext.heads.prune_heads`."""
        if load_pruned_heads(self, state_dict, prefix, errors=options[-1]):
            super()._load_from_state_dict(state_dict, prefix, *options)

    @torch.jit.unused
    def _plain_out_proj(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of out_proj if calling it does nothing else, else (None, None)."""
        parameters = plain_parameters(self._modules.get("out_proj")) if modules_are_called_plainly() else None
        return (None, None) if parameters is None else parameters

    def __prepare_scriptable__(self) -> MultiheadAttention:
        self._calls_out_proj = self._plain_out_proj()[0] is None
        return self
