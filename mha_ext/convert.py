"""The parameters of attention in another layout, and back, bit for bit.

Three layouts hold the same numbers:

    document    W_q, W_k, W_v, W_o: mha_ext.MultiHeadAttention and hand-written classes like it
    torch       in_proj_weight (or q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias, out_proj:
                torch.nn.MultiheadAttention
    fused       one linear layer for query, key and value together, and one for the output

                            of a layer              of its state_dict
    document and torch      to_torch, from_torch    document_to_torch, torch_to_document
    document and fused      to_fused, from_fused    document_to_fused, fused_to_document

`split_qkv` and `fuse_qkv` do it with one tensor. All results are copies, nothing shares memory.

The numbers stay, the meaning of a mask does not: mha_ext.MultiHeadAttention hides where `mask == 0`,
torch.nn.MultiheadAttention where `key_padding_mask` or `attn_mask` is True, and scaled_dot_product_attention, which
layers with fused projections mostly call, where it is False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .modules import MultiHeadAttention
from .nn import MultiheadAttention
from .probe import PROJECTIONS
from .projections import has_hooks, is_conv1d, plain_parameters

Layout = Literal["stacked", "interleaved"]
State = Mapping[str, Tensor]

_QKV = PROJECTIONS[:3]
_TORCH_QKV = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
# In whatever mode the caller is, gradients are on here, so a copy requires them where the parameter does.
_outside_inference_mode = torch.inference_mode(False)


# --- One tensor -----------------------------------------------------------------------------------------------------


def split_qkv(
    fused: Tensor,
    num_heads: int,
    kv_heads: int | None = None,
    *,
    layout: Layout = "stacked",
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (H * D, E), k (Hkv * D, E), v (Hkv * D, E) of a fused weight ((H + 2 Hkv) * D, E); likewise of its bias.

    num_heads, kv_heads     H and Hkv, which divides H; Hkv = H when absent
    layout "stacked"        the rows are all of q, all of k, all of v (timm, nanoGPT, GPT-2)
    layout "interleaved"    the rows are Hkv groups: H / Hkv heads of q, one of k, one of v. With Hkv = H this is
                            (H, 3, D), as in GPT-NeoX
    transposed              a weight is (E, (H + 2 Hkv) * D), as Conv1D of GPT-2 stores it; the results are not

    Raises ValueError for sizes that do not fit.
    """
    kv_heads = num_heads if kv_heads is None else kv_heads
    _check_layout("split_qkv", num_heads, kv_heads, layout)
    heads, group = num_heads + 2 * kv_heads, num_heads // kv_heads
    rows = _transposed_if(fused, transposed)
    if rows.dim() not in (1, 2) or rows.size(0) % heads != 0:
        raise ValueError(f"split_qkv: expected a multiple of H + 2 Hkv = {heads} rows, got shape {tuple(rows.shape)}")
    if layout == "stacked":
        q, k, v = rows.unflatten(0, (heads, -1)).split((num_heads, kv_heads, kv_heads))
    else:
        q, k, v = rows.unflatten(0, (kv_heads, heads // kv_heads, -1)).split((group, 1, 1), 1)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return _copy(q.flatten(0, 1)), _copy(k.flatten(0, 1)), _copy(v.flatten(0, 1))


def fuse_qkv(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, *, layout: Layout = "stacked", transposed: bool = False
) -> Tensor:
    """The fused weight or bias of q (H * D, E), k (Hkv * D, E) and v (Hkv * D, E): the reverse of `split_qkv`.

    Raises ValueError for sizes that do not fit, TypeError for unlike dtypes, devices or requires_grad.
    """
    _check_alike("fuse_qkv", q, k, v)
    if q.dim() not in (1, 2) or q.size(0) == 0 or q.size(0) % max(num_heads, 1) != 0:
        raise ValueError(f"fuse_qkv: expected q of a multiple of {num_heads} rows, got shape {tuple(q.shape)}")
    if k.shape != v.shape or k.shape[1:] != q.shape[1:]:
        raise ValueError(
            "fuse_qkv: expected k and v of one shape, as wide as q, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.size(0) * num_heads % q.size(0) != 0:
        raise ValueError(
            f"fuse_qkv: expected k of whole heads of q's {q.size(0) // num_heads} rows, got shape {tuple(k.shape)}"
        )
    kv_heads = k.size(0) * num_heads // q.size(0)
    _check_layout("fuse_qkv", num_heads, kv_heads, layout)
    if layout == "stacked":
        fused = torch.cat((q, k, v))
    else:
        fused = torch.cat([x.unflatten(0, (kv_heads, -1)) for x in (q, k, v)], 1).flatten(0, 1)
    return _copy(_transposed_if(fused, transposed))


def _check_layout(op: str, num_heads: int, kv_heads: int, layout: str) -> None:
    if layout not in ("stacked", "interleaved"):
        raise ValueError(f'{op}: expected layout "stacked" or "interleaved", got {layout!r}')
    if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads != 0:
        raise ValueError(f"{op}: expected num_heads to be a multiple of kv_heads, got {num_heads} and {kv_heads}")


def _check_alike(op: str, *tensors: Tensor) -> None:
    """Tensors that become one must agree in what a tensor has only one of."""
    for what in ("dtype", "device", "requires_grad"):
        found = [getattr(tensor, what) for tensor in tensors]
        if len(set(found)) > 1:
            raise TypeError(f"{op}: expected q, k and v of one {what}, got {', '.join(map(str, found))}")


def _transposed_if(x: Tensor, transposed: bool) -> Tensor:
    return x.t() if transposed and x.dim() == 2 else x


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# --- The state_dict of a layer --------------------------------------------------------------------------------------


def document_to_torch(state: State) -> dict[str, Tensor]:
    """The state_dict of torch.nn.MultiheadAttention from that of a document's layer.

    in_proj_weight if W_q, W_k and W_v have the same input features, else q_proj_weight, k_proj_weight, v_proj_weight.
    Raises ValueError for keys that are missing or unknown, and for what torch's layer cannot hold: grouped heads,
    W_q or W_o that are not (E, E), biases of some of W_q, W_k and W_v only.
    """
    op = "document_to_torch"
    weights, biases = _document_qkv(op, state)
    features = weights[0].size(0)
    for name, weight in zip(PROJECTIONS, [*weights, state["W_o.weight"]], strict=True):
        expected = (features, features if name in ("W_q", "W_o") else weight.size(1))
        if weight.shape != expected:
            raise ValueError(f"{op}: expected {name} of shape {expected}, got {tuple(weight.shape)}")
    converted = _renamed(state, "W_o", "out_proj")
    if all(weight.size(1) == features for weight in weights):
        _check_alike(op, *weights)
        converted["in_proj_weight"] = torch.cat(weights)
    else:
        converted |= {name: _copy(weight) for name, weight in zip(_TORCH_QKV, weights, strict=True)}
    if biases:
        _check_alike(op, *biases)
        converted["in_proj_bias"] = torch.cat(biases)
    return converted


def torch_to_document(state: State) -> dict[str, Tensor]:
    """The state_dict of a document's layer from that of torch.nn.MultiheadAttention.

    Raises ValueError for keys that are missing or unknown, and for bias_k and bias_v (add_bias_kv), for which a
    document's layer has no place.
    """
    op = "torch_to_document"
    if "bias_k" in state or "bias_v" in state:
        raise ValueError(f"{op}: expected no bias_k and bias_v (add_bias_kv), got them")
    packed = "in_proj_weight" in state
    names = ("in_proj_weight",) if packed else _TORCH_QKV
    _check_keys(op, state, {*names, "out_proj.weight"}, {"in_proj_bias", "out_proj.bias"})
    parts = {"weight": state["in_proj_weight"].chunk(3) if packed else [state[name] for name in names]}
    if "in_proj_bias" in state:
        parts["bias"] = state["in_proj_bias"].chunk(3)
    converted = _renamed(state, "out_proj", "W_o")
    for kind in parts:
        converted |= {f"{name}.{kind}": _copy(part) for name, part in zip(_QKV, parts[kind], strict=True)}
    return converted


def document_to_fused(
    state: State,
    num_heads: int,
    *,
    layout: Layout = "stacked",
    transposed: bool = False,
    names: tuple[str, str] = ("qkv", "proj"),
) -> dict[str, Tensor]:
    """The state_dict of a layer with fused projections from that of a document's layer; options as `split_qkv`'s.

    names       of the fused and the output projection: ("qkv", "proj") in timm, ("c_attn", "c_proj") in GPT-2

    Raises ValueError for keys that are missing or unknown, biases of some of W_q, W_k and W_v only, and sizes that
    cannot be fused, TypeError for unlike dtypes or devices.
    """
    op = "document_to_fused"
    weights, biases = _document_qkv(op, state)
    converted = _renamed(state, "W_o", names[1], transposed)
    for kind, parts in (("weight", weights), ("bias", biases)):
        if parts:
            q, k, v = parts
            converted[f"{names[0]}.{kind}"] = fuse_qkv(q, k, v, num_heads, layout=layout, transposed=transposed)
    return converted


def fused_to_document(
    state: State,
    num_heads: int,
    kv_heads: int | None = None,
    *,
    layout: Layout = "stacked",
    transposed: bool = False,
    names: tuple[str, str] = ("qkv", "proj"),
) -> dict[str, Tensor]:
    """The state_dict of a document's layer from that of a layer with fused projections: see `document_to_fused`.

    Raises ValueError for keys that are missing or unknown and for sizes that do not fit.
    """
    qkv, out = names
    _check_keys("fused_to_document", state, {f"{qkv}.weight", f"{out}.weight"}, {f"{qkv}.bias", f"{out}.bias"})
    converted = _renamed(state, out, "W_o", transposed)
    for kind in ("weight", "bias"):
        if f"{qkv}.{kind}" in state:
            parts = split_qkv(state[f"{qkv}.{kind}"], num_heads, kv_heads, layout=layout, transposed=transposed)
            converted |= {f"{name}.{kind}": part for name, part in zip(_QKV, parts, strict=True)}
    return converted


def _document_qkv(op: str, state: State) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of W_q, W_k and W_v, and their biases or none."""
    _check_keys(op, state, {f"{name}.weight" for name in PROJECTIONS}, {f"{name}.bias" for name in PROJECTIONS})
    biases = [state[f"{name}.bias"] for name in _QKV if f"{name}.bias" in state]
    if len(biases) not in (0, 3):
        raise ValueError(f"{op}: expected biases of all of W_q, W_k and W_v or of none, got {len(biases)}")
    return [state[f"{name}.weight"] for name in _QKV], biases


def _check_keys(op: str, state: State, required: set[str], optional: set[str]) -> None:
    missing, unknown = required - state.keys(), state.keys() - required - optional
    if missing or unknown:
        raise ValueError(
            f"{op}: expected keys {sorted(required)}, got missing {sorted(missing)} and unknown {sorted(unknown)}"
        )


def _renamed(state: State, old: str, new: str, transposed: bool = False) -> dict[str, Tensor]:
    """Weight and bias of one projection, under another name."""
    found = {kind: state[f"{old}.{kind}"] for kind in ("weight", "bias") if f"{old}.{kind}" in state}
    return {f"{new}.{kind}": _copy(_transposed_if(tensor, transposed)) for kind, tensor in found.items()}


# --- Layers ---------------------------------------------------------------------------------------------------------


@_outside_inference_mode
def to_torch(layer: nn.Module, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """A torch.nn.MultiheadAttention of a document's layer: its parameters, dropout and training mode, no hooks.

    A mask goes over inverted: what `mask == 0` hid, `attn_mask` or `key_padding_mask` hides where True. The layer
    returns the mean of the weights unless average_attn_weights=False, and takes (B, L, E) with batch_first only.

    Raises TypeError if a projection is no plain nn.Linear or if W_q, W_k and W_v differ in dtype, device or
    requires_grad, ValueError for what `document_to_torch` refuses.
    """
    state, num_heads = _document_state("to_torch", layer)
    converted = document_to_torch(state)
    embed_dim, kdim, vdim = (state[f"{name}.weight"].size(1) for name in _QKV)
    module = nn.MultiheadAttention(
        embed_dim,
        num_heads,
        getattr(layer, "dropout", 0.0),  # the documents' class has none
        kdim=kdim,
        vdim=vdim,
        batch_first=batch_first,
        device="meta",
    )
    module.register_parameter("in_proj_bias", None)
    module.out_proj.register_parameter("bias", None)
    for name, tensor in converted.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, _parameter(tensor))
    return module.train(layer.training)


@_outside_inference_mode
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The mha_ext.MultiHeadAttention of a torch.nn.MultiheadAttention: parameters, dropout, training mode, no hooks.

    It always takes (B, L, E), whatever batch_first was, returns the weights of each head, and its mask is inverted:
    `mask == 0` hides.

    Raises TypeError for a subclass and for parametrised or adapted projections, ValueError for add_bias_kv and
    add_zero_attn, for which it has no place, and for a layer that has lost heads.
    """
    if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        raise TypeError(f"from_torch: expected a torch.nn.MultiheadAttention, got {type(module).__name__}")
    if module.add_zero_attn:
        raise ValueError("from_torch: expected add_zero_attn=False, got True")
    if "pruned_heads" in module._buffers:
        raise ValueError("from_torch: expected a layer with all its heads, got one without some")
    _parameters_of("from_torch", "out_proj", module.out_proj)
    state = torch_to_document(dict(module.named_parameters(remove_duplicate=False)))
    return _document_layer(state, module.num_heads, module.dropout).train(module.training)


@_outside_inference_mode
def to_fused(layer: nn.Module, *, layout: Layout = "stacked") -> tuple[nn.Linear, nn.Linear]:
    """The fused projection and the output projection of a document's layer, as two nn.Linear; layout of `split_qkv`.

    Raises TypeError if a projection is no plain nn.Linear or if W_q, W_k and W_v differ in dtype, device or
    requires_grad, ValueError for what `document_to_fused` refuses.
    """
    converted = document_to_fused(*_document_state("to_fused", layer), layout=layout)
    return _linear(converted, "qkv").train(layer.training), _linear(converted, "proj").train(layer.training)


@_outside_inference_mode
def from_fused(
    qkv: nn.Module,
    out: nn.Module,
    num_heads: int,
    kv_heads: int | None = None,
    *,
    layout: Layout = "stacked",
    dropout: float = 0.0,
) -> MultiHeadAttention:
    """The mha_ext.MultiHeadAttention of a fused projection and an output projection; options as `split_qkv`'s.

    qkv and out are nn.Linear or transformers' Conv1D, whose weights are transposed. The training mode is qkv's, no
    hooks come along. Raises TypeError for other projections, ValueError for sizes that do not fit.
    """
    state: dict[str, Tensor] = {}
    for name, projection in (("qkv", qkv), ("proj", out)):
        weight, bias = _parameters_of("from_fused", name, projection)
        state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    state = fused_to_document(state, num_heads, kv_heads, layout=layout)
    return _document_layer(state, num_heads, dropout).train(qkv.training)


def _parameters_of(op: str, name: str, projection: Any) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of a projection that does nothing but x W^T + b."""
    if is_conv1d(projection) and not has_hooks(projection):
        return projection.weight.t(), projection.bias
    parameters = plain_parameters(projection)
    if parameters is None:
        raise TypeError(
            f"{op}: expected {name} to be an nn.Linear without hooks or adapters, got {type(projection).__name__}"
        )
    return parameters


def _document_state(op: str, layer: Any) -> tuple[dict[str, Tensor], int]:
    """The parameters of a document's layer, and its number of heads."""
    for name in PROJECTIONS:
        _parameters_of(op, name, getattr(layer, name, None))
    others = [name for name, _ in layer.named_children() if name not in PROJECTIONS]
    if others:
        raise TypeError(f"{op}: expected no modules beside W_q, W_k, W_v and W_o, got {', '.join(others)}")
    return dict(layer.named_parameters(remove_duplicate=False)), layer.num_heads


def _document_layer(state: State, num_heads: int, dropout: float) -> MultiHeadAttention:
    layer = MultiHeadAttention(state["W_q.weight"].size(0), num_heads, dropout=dropout, device="meta")
    for name in PROJECTIONS:
        setattr(layer, name, _linear(state, name))
    return layer


def _linear(state: State, name: str) -> nn.Linear:
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
    linear.weight = _parameter(weight)
    if bias is not None:
        linear.bias = _parameter(bias)
    return linear


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
