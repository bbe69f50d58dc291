"""Where the projections of an attention layer are: ours, torch.nn's, Hugging Face's, hand-written ones.

Sizes: H query heads, Hkv heads of keys and values, D and Dv their sizes; E, Ek and Ev input features, Eo of the output.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, jit, nn
from torch.nn.utils import parametrize

from .. import modules, probe
from .. import nn as ours
from ..nn.functional import projections
from ..projections import is_conv1d

# Names of Hugging Face's modules: of separate projections; of fused ones (rows of all query heads, keys, then values)
# and the output's; of classes in which each head has its query, key and value together.
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
STACKED = (("c_attn", "c_proj"), ("qkv_proj", "o_proj"), ("Wqkv", "Wo"), ("qkv", "proj"), ("qkv", "projection"))
INTERLEAVED = {"GPTNeoXAttention": ("query_key_value", "dense")}
# Classes whose names do not tell: together or not, as the configuration says; two heads of weights for each of outputs.
UNTOLD = ("GPTBigCodeAttention", "DiffLlamaAttention")
OUTPUTS = ("o_proj", "out_proj", "out_lin", "dense", "o", "Wo", "proj", "output")
OUTPUT_OF_PARENT = "output.dense"  # as in BERT
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class HeadParameters:
    """The weights of an attention layer by head, without a graph; views of its parameters where these are dense.

    Query head h uses the keys and values of head h // (H / Hkv).
    """

    w_q: Tensor  # (H, D, E)
    w_k: Tensor  # (Hkv, D, Ek)
    w_v: Tensor  # (Hkv, Dv, Ev)
    w_o: Tensor  # (Eo, H, Dv)


@dataclass(frozen=True)
class Share:
    """A parameter of a layer: index i along `dim` belongs to head heads[i] of keys and values, or to a query on it."""

    owner: nn.Module
    name: str
    dim: int
    heads: Tensor


@dataclass(frozen=True)
class Layout:
    """All parameters of a layer that belong to its heads; `root` is the smallest module that holds them all."""

    module: nn.Module
    root: nn.Module
    parameters: HeadParameters
    shares: list[Share]

    @property
    def heads(self) -> int:
        return self.parameters.w_q.size(0)

    @property
    def kv_heads(self) -> int:
        return self.parameters.w_k.size(0)


def head_parameters(model: nn.Module, layer_name: str) -> HeadParameters | None:
    """The weights of W_q, W_k, W_v and W_o of a layer, by head; None where they cannot be told.

    The name is that of the module whose forward attends, as `record` gives it; "" is the model itself. Told are

    - mha_ext.MultiHeadAttention, torch.nn.MultiheadAttention, mha_ext.nn.MultiheadAttention, replaced ones;
    - modules of Hugging Face's Transformers by the names of their projections, BERT's output beside the layer too;
    - others with such names, or W_q, W_k, W_v, W_o and num_heads, if a trial on a copy shows that they compute
      softmax(Q K^T / sqrt(D)) V, causal or not, with them.

    Parametrised weights are those of this moment. None for adapters and other modules in the place of a projection, and
    wherever the sizes do not fit. Raises TypeError if the model is no nn.Module, ValueError for a name that it does not
    have.
    """
    layout = layout_of("head_parameters", model, layer_name)
    return None if layout is None else layout.parameters


def layout_of(op: str, model: nn.Module, name: str) -> Layout | None:
    """The layout of a layer of a model; errors as `head_parameters` has them, in the name of `op`."""
    module, parent = submodule(op, model, name), None
    if isinstance(module, jit.ScriptModule) or "forward" in module.__dict__:
        return None
    if name:
        parent = model.get_submodule(name.rpartition(".")[0])
    layout = layout_in(module, parent)
    return layout if layout is None or is_known(module) or _computes(module) else None


def submodule(op: str, model: nn.Module, name: str) -> nn.Module:
    """The module of that name. Raises TypeError if the model is no nn.Module, ValueError if it has no such module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"{op}: expected names of modules, got {type(name).__name__}")
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{op}: expected names of modules of the model, got {name!r}") from None


def is_ours(module: nn.Module) -> bool:
    """Whether the forward is that of one of our layers."""
    return type(module).forward in (modules.MultiHeadAttention.forward, ours.MultiheadAttention.forward)


def is_known(module: nn.Module) -> bool:
    """Whether the names of the projections say how they are used."""
    cls = type(module)
    return is_ours(module) or cls.forward is nn.MultiheadAttention.forward or _is_transformers(cls)


def _is_transformers(cls: type) -> bool:
    return cls.__module__.startswith("transformers.models.")


def layout_in(module: nn.Module, parent: nn.Module | None = None) -> Layout | None:
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(module)
    if all(isinstance(getattr(module, name, None), nn.Module) for name in probe.PROJECTIONS):
        return _of_separate(module, module, [getattr(module, name) for name in probe.PROJECTIONS])
    return _of_names(module, parent)


# --- torch.nn.MultiheadAttention ------------------------------------------------------------------------------------


def _of_torch(module: Any) -> Layout | None:
    if type(module).forward not in (nn.MultiheadAttention.forward, ours.MultiheadAttention.forward):
        return None
    out = _linear(module.out_proj)
    packed = module.in_proj_weight is not None
    names = ["in_proj_weight"] if packed else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    if out is None or not all(_has(module, name) for name in names):
        return None
    w_q, w_k, w_v, *_ = projections(
        module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight, None, not packed
    )
    parameters = _by_head(w_q, w_k, w_v, out, module.num_heads, None)
    if parameters is None:
        return None
    q, k, v = _owners(parameters)
    together = torch.cat([q, k, v])
    shares = [
        *(Share(module, name, 0, x) for name, x in zip(names, [together] if packed else [q, k, v], strict=True)),
        Share(module, "in_proj_bias", 0, together),
        Share(module, "bias_k", 2, k),
        Share(module, "bias_v", 2, v),
        *_of_output(module.out_proj, parameters),
    ]
    return Layout(module, module, parameters, _existing(shares))


# --- Modules with a module for each projection ----------------------------------------------------------------------


def _of_names(module: nn.Module, parent: nn.Module | None) -> Layout | None:
    if type(module).__name__ in UNTOLD or "q_attn" in module._modules:  # which GPT-2 has for cross-attention
        return None
    together = INTERLEAVED.get(type(module).__name__)
    if together is not None:
        return _of_interleaved(module, *(_child(module, name) for name in together))
    for names in STACKED:
        fused = list(_children(module, names))
        if len(fused) == 2:
            return _of_stacked(module, *fused)
    root, output = module, next((x for x in _children(module, OUTPUTS) if _linear(x) is not None), None)
    if output is None and parent is not None:
        root, output = parent, _child(parent, OUTPUT_OF_PARENT)
    for of_three in SEPARATE:
        linears = [*_children(module, of_three), output]
        if len(linears) == 4:
            return _of_separate(module, root, linears)
    return None


def _of_separate(module: nn.Module, root: nn.Module, linears: list[Any]) -> Layout | None:
    weights = [_linear(linear) for linear in linears]
    w_q, w_k, w_v, w_o = weights
    if w_q is None or w_k is None or w_v is None or w_o is None:
        return None
    parameters = _by_head(w_q, w_k, w_v, w_o, _count(module), _head_dim(module))
    if parameters is None:
        return None
    of_q, of_k, of_v = map(_of_rows, linears, _owners(parameters))
    return Layout(module, root, parameters, _existing([*of_q, *of_k, *of_v, *_of_output(linears[3], parameters)]))


def _of_stacked(module: nn.Module, fused: Any, out: Any) -> Layout | None:
    """One projection for query, key and value, whose heads all have one size."""
    weight, w_o = _linear(fused), _linear(out)
    if weight is None or w_o is None:
        return None
    width = w_o.size(1)
    of_keys = (weight.size(0) - width) // 2
    if of_keys < 1 or weight.size(0) != width + 2 * of_keys:
        return None
    w_q, w_k, w_v = weight.split([width, of_keys, of_keys])
    parameters = _by_head(w_q, w_k, w_v, w_o, _count(module), _head_dim(module))
    if parameters is None:
        return None
    rows = _of_rows(fused, torch.cat(_owners(parameters)))
    return Layout(module, module, parameters, _existing([*rows, *_of_output(out, parameters)]))


def _of_interleaved(module: nn.Module, fused: Any, out: Any) -> Layout | None:
    """One projection for the query, key and value of the first head, then those of the next, ..."""
    weight, w_o, head_dim = _linear(fused), _linear(out), _head_dim(module)
    if weight is None or w_o is None or head_dim is None or head_dim < 1:
        return None
    heads = w_o.size(1) // head_dim
    if heads < 1 or w_o.size(1) != heads * head_dim or weight.size(0) != 3 * w_o.size(1):
        return None
    w_q, w_k, w_v = weight.detach().unflatten(0, (heads, 3, head_dim)).unbind(1)
    parameters = HeadParameters(w_q, w_k, w_v, w_o.detach().unflatten(1, (heads, -1)))
    rows = _of_rows(fused, torch.arange(heads).repeat_interleave(3 * head_dim))
    return Layout(module, module, parameters, _existing([*rows, *_of_output(out, parameters)]))


def _by_head(
    w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int | None, head_dim: int | None
) -> HeadParameters | None:
    """The weights by head, given the number of heads, their size or both; None unless all sizes fit."""
    if heads is None and head_dim is None:
        return None
    rows = w_q.size(0)
    heads = rows // max(head_dim or 1, 1) if heads is None else heads
    if heads < 1 or rows % heads != 0 or (head_dim is not None and rows != heads * head_dim):
        return None
    head_dim = rows // heads
    kv_heads = w_k.size(0) // max(head_dim, 1)
    if kv_heads < 1 or heads % kv_heads != 0 or w_k.size(0) != kv_heads * head_dim or w_v.size(0) % kv_heads != 0:
        return None
    if w_o.size(1) != heads * (w_v.size(0) // kv_heads):
        return None
    return HeadParameters(
        w_q.detach().unflatten(0, (heads, -1)),
        w_k.detach().unflatten(0, (kv_heads, -1)),
        w_v.detach().unflatten(0, (kv_heads, -1)),
        w_o.detach().unflatten(1, (heads, -1)),
    )


# --- Pieces ---------------------------------------------------------------------------------------------------------


def _child(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return None
        module = child
    return module


def _children(module: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    return (child for child in (_child(module, name) for name in names) if child is not None)


def _linear(module: Any) -> Tensor | None:
    """The weight (out, in) of a linear layer; None for anything else."""
    if module is None or "forward" in module.__dict__ or not _has(module, "weight"):
        return None
    if is_conv1d(module):
        return module.weight.t()
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return module.weight if is_linear else None


def _has(module: nn.Module, name: str) -> bool:
    """Whether it has the parameter, or a parametrised one in its place: no attribute that a hook sets."""
    return module._parameters.get(name) is not None or parametrize.is_parametrized(module, name)


def _count(module: nn.Module) -> int | None:
    """The number of heads by the module's own attributes; -1 if these contradict each other."""
    return _agreed(module, COUNTS)


def _head_dim(module: nn.Module) -> int | None:
    return _agreed(module, SIZES)


def _agreed(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = {getattr(module, name) for name in names if type(getattr(module, name, None)) is int}
    return None if not found else found.pop() if len(found) == 1 else -1


def _owners(parameters: HeadParameters) -> tuple[Tensor, Tensor, Tensor]:
    """To which head of keys and values the rows of w_q, w_k and w_v belong."""
    heads, head_dim, _ = parameters.w_q.shape
    kv_heads, value_dim, _ = parameters.w_v.shape
    of_kv = torch.arange(kv_heads)
    return (
        of_kv.repeat_interleave(heads // kv_heads * head_dim),
        of_kv.repeat_interleave(head_dim),
        of_kv.repeat_interleave(value_dim),
    )


def _of_rows(linear: nn.Module, heads: Tensor) -> list[Share]:
    return [Share(linear, "weight", 1 if is_conv1d(linear) else 0, heads), Share(linear, "bias", 0, heads)]


def _of_output(linear: nn.Module, parameters: HeadParameters) -> list[Share]:
    """The columns of W_o."""
    heads, kv_heads = parameters.w_q.size(0), parameters.w_k.size(0)
    columns = torch.arange(kv_heads).repeat_interleave(heads // kv_heads * parameters.w_o.size(2))
    return [Share(linear, "weight", 0 if is_conv1d(linear) else 1, columns)]


def _existing(shares: list[Share]) -> list[Share]:
    return [share for share in shares if getattr(share.owner, share.name, None) is not None]


# --- Trials ---------------------------------------------------------------------------------------------------------


def trial_copy(module: nn.Module) -> Any:
    """A copy to try things out on: float64 on the CPU, in eval mode, without hooks."""
    hooks = [value for part in module.modules() for name, value in vars(part).items() if "_hooks" in name]
    return copy.deepcopy(module, {id(value): type(value)() for value in hooks}).to("cpu", torch.float64).eval()


def _computes(module: nn.Module) -> bool:
    """Whether a copy of the module, without biases, computes W_o softmax(Q K^T / sqrt(D)) V with these heads."""
    try:
        with probe._undisturbed(), torch.no_grad():
            duplicate = trial_copy(module)
            layout = layout_in(duplicate)
            if layout is None:
                return False
            generator = torch.Generator().manual_seed(0)
            for name, parameter in duplicate.named_parameters():
                parameter.zero_() if name.endswith("bias") else parameter.normal_(generator=generator)
            p = layout.parameters
            x = torch.randn(2, 5, p.w_q.size(2), generator=generator, dtype=torch.float64) / math.sqrt(p.w_q.size(2))
            expected = [_attend(p, x, is_causal) for is_causal in (False, True)]
            return any(_gives(duplicate, inputs, y) for inputs in ((x, x, x), (x,)) for y in expected)
    except Exception:  # of code that is not ours: anything may happen
        return False


def _attend(p: HeadParameters, x: Tensor, is_causal: bool) -> Tensor:
    """Self-attention of x (B, L, E) with the weights p, (B, L, Eo)."""
    group = p.w_q.size(0) // p.w_k.size(0)
    q, k, v = (torch.einsum("ble,hde->bhld", x, w) for w in (p.w_q, p.w_k, p.w_v))
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.size(-1))
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) & is_causal
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhld,ehd->ble", weights @ v.repeat_interleave(group, 1), p.w_o)


def _gives(module: Any, inputs: tuple[Tensor, ...], expected: Tensor) -> bool:
    try:
        result = type(module).forward(module, *inputs)
    except Exception:  # it has other arguments
        return False
    output = result[0] if isinstance(result, tuple) else result
    return (
        isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected, 1e-4, 1e-6)
    )
