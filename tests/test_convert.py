"""mha_ext.convert: every layout there and back, bit for bit, and what it must refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import mha_ext
from mha_ext import convert
from tests.documents import MultiHeadAttention as Document

E, H, B, LQ, LK = 16, 4, 2, 3, 5


def layer_of(kv_heads: int = H, **options) -> mha_ext.MultiHeadAttention:
    layer = mha_ext.MultiHeadAttention(E, H, **options)
    if kv_heads != H:
        rows = E // H * kv_heads
        layer.W_k, layer.W_v = nn.Linear(E, rows), nn.Linear(E, rows)
    return layer


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    """Equal bits and equal requires_grad, in memory of its own."""
    found, wanted = (dict(module.named_parameters(remove_duplicate=False)) for module in (actual, expected))
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter), name
        assert (found[name].dtype, found[name].requires_grad) == (parameter.dtype, parameter.requires_grad), name
        assert found[name].data_ptr() != parameter.data_ptr(), name
    assert actual.training == expected.training


# --- One tensor -----------------------------------------------------------------------------------------------------

FUSED = list(itertools.product((1, 2, 4), ("stacked", "interleaved"), (False, True)))


@pytest.mark.parametrize("kv_heads, layout, transposed", FUSED)
@pytest.mark.parametrize("dim", (1, 2))
def test_split_and_fuse_are_inverse(kv_heads, layout, transposed, dim):
    head_dim = 3
    q, k, v = (torch.randn(heads * head_dim, *[7] * (dim - 1)) for heads in (H, kv_heads, kv_heads))
    fused = convert.fuse_qkv(q, k, v, H, layout=layout, transposed=transposed)
    found = convert.split_qkv(fused, H, kv_heads, layout=layout, transposed=transposed)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, (q, k, v), strict=True))
    assert fused.is_contiguous() and fused.shape == ((7, fused.size(-1)) if transposed and dim == 2 else fused.shape)
    for part in found:
        part.zero_()
    assert fused.count_nonzero() == fused.numel()


@pytest.mark.parametrize("layout", ("stacked", "interleaved"))
def test_rows_lie_where_models_read_them(layout):
    """Against what such models do with the fused projection's result."""
    q, k, v = (torch.randn(H * 3, E) for _ in range(3))
    x = torch.randn(B, LQ, E)
    fused = F.linear(x, convert.fuse_qkv(q, k, v, H, layout=layout))
    if layout == "stacked":
        found = fused.reshape(B, LQ, 3, H, 3).permute(2, 0, 3, 1, 4)
    else:
        found = fused.view(B, LQ, H, 3, 3).permute(3, 0, 2, 1, 4)
    for part, weight in zip(found, (q, k, v), strict=True):
        expected = F.linear(x, weight).view(B, LQ, H, 3).transpose(1, 2)
        torch.testing.assert_close(part, expected)


def test_groups_lie_in_the_order_of_the_heads():
    """2 key heads for 4 query heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = torch.arange(4.0), torch.arange(10.0, 12.0), torch.arange(20.0, 22.0)
    fused = convert.fuse_qkv(q, k, v, 4, layout="interleaved")
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


# --- Layers ---------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("training", (True, False))
def test_to_torch_and_back(dtype, bias, training):
    layer = layer_of(bias=bias, dropout=0.25, dtype=dtype).train(training)
    layer.W_o.requires_grad_(False)
    module = convert.to_torch(layer)
    assert type(module) is nn.MultiheadAttention and module.batch_first and module.dropout == 0.25
    back = convert.from_torch(module)
    assert_same_state(back, layer)
    assert back.dropout == 0.25 and back.num_heads == H and back.d_model == E


@pytest.mark.parametrize("dims", ({}, {"kdim": 6}, {"vdim": 10}, {"kdim": 6, "vdim": 10}))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("batch_first", (True, False))
def test_from_torch_and_back(dims, bias, batch_first):
    module = nn.MultiheadAttention(E, H, bias=bias, batch_first=batch_first, **dims)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    back = convert.to_torch(convert.from_torch(module), batch_first=batch_first)
    assert_same_state(back, module)
    assert vars(back).keys() == vars(module).keys()
    assert repr(back) == repr(module)


@pytest.mark.parametrize("dims", ({}, {"kdim": 6, "vdim": 10}))
@pytest.mark.parametrize("hidden", ("none", "causal", "padding"))
def test_the_layers_compute_the_same(dims, hidden):
    """With the mask inverted, as the documentation says."""
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **dims)
    layer = convert.from_torch(module)
    query = torch.randn(B, LQ, E, dtype=torch.float64)
    key, value = (torch.randn(B, LK, dims.get(name, E), dtype=torch.float64) for name in ("kdim", "vdim"))
    causal, padding = torch.ones(LQ, LK, dtype=torch.bool).triu(1), torch.rand(B, LK) < 0.4
    theirs = {"causal": {"attn_mask": causal}, "padding": {"key_padding_mask": padding}}.get(hidden, {})
    ours = {"causal": ~causal, "padding": ~padding[:, None, None]}.get(hidden)
    expected = module(query, key, value, average_attn_weights=False, **theirs)
    for actual, wanted in zip(layer(query, key, value, ours), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kv_heads, layout", list(itertools.product((1, 2, 4), ("stacked", "interleaved"))))
@pytest.mark.parametrize("bias", (True, False))
def test_to_fused_and_back(kv_heads, layout, bias):
    layer = layer_of(bias=bias) if kv_heads == H else layer_of(kv_heads)
    layer.eval()
    qkv, out = convert.to_fused(layer, layout=layout)
    assert_same_state(convert.from_fused(qkv, out, H, kv_heads, layout=layout, dropout=0.0), layer)


def test_the_documents_class_converts():
    document = Document(E, H)
    back = convert.from_torch(convert.to_torch(document))
    assert_same_state(back, document)
    assert_same_state(convert.from_fused(*convert.to_fused(document), H), document)


def test_no_random_number_is_drawn_and_meta_stays_meta():
    layer = layer_of()
    state = torch.get_rng_state()
    convert.from_torch(convert.to_torch(layer))
    assert torch.equal(state, torch.get_rng_state())
    with torch.device("meta"):
        layer = layer_of()
    assert convert.to_torch(layer).in_proj_weight.is_meta
    assert convert.from_torch(convert.to_torch(layer)).W_q.weight.is_meta


@pytest.mark.parametrize("grad", (torch.no_grad, torch.inference_mode))
def test_requires_grad_comes_along_in_every_mode(grad):
    layer = layer_of()
    with grad():
        module = convert.to_torch(layer)
    assert all(parameter.requires_grad for parameter in module.parameters())


# --- State dicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ({}, {"kdim": 6, "vdim": 10}))
@pytest.mark.parametrize("bias", (True, False))
def test_state_of_torch_there_and_back(dims, bias):
    state = nn.MultiheadAttention(E, H, bias=bias, **dims).state_dict()
    back = convert.document_to_torch(convert.torch_to_document(state))
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("kv_heads, layout, transposed", FUSED)
def test_state_of_fused_there_and_back(kv_heads, layout, transposed):
    state = layer_of(kv_heads).state_dict()
    options = {"layout": layout, "transposed": transposed, "names": ("c_attn", "c_proj")}
    fused = convert.document_to_fused(state, H, **options)
    back = convert.fused_to_document(fused, H, kv_heads, **options)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


# --- What cannot be converted ---------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def changed(change) -> mha_ext.MultiHeadAttention:
    layer = layer_of()
    change(layer)
    return layer


REFUSED_LAYERS = {
    "a hook": (TypeError, "W_q", lambda layer: layer.W_q.register_forward_hook(lambda *_: None)),
    "a wrapper": (TypeError, "W_v", lambda layer: setattr(layer, "W_v", nn.Sequential(layer.W_v))),
    "a parametrisation": (
        TypeError,
        "W_k",
        lambda layer: parametrize.register_parametrization(layer.W_k, "weight", Halved()),
    ),
    "another module": (TypeError, "dropout", lambda layer: layer.add_module("_dropout", nn.Dropout(0.1))),
    "one frozen": (TypeError, "requires_grad", lambda layer: layer.W_k.requires_grad_(False)),
    "two dtypes": (TypeError, "dtype", lambda layer: layer.W_k.double()),
    "one bias missing": (ValueError, "biases", lambda layer: layer.W_k.register_parameter("bias", None)),
    "another parameter": (
        ValueError,
        "unknown",
        lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(1))),
    ),
}


@pytest.mark.parametrize("conversion", (convert.to_torch, convert.to_fused))
@pytest.mark.parametrize("name", REFUSED_LAYERS)
def test_layers_that_are_refused(name, conversion):
    error, text, change = REFUSED_LAYERS[name]
    with pytest.raises(error, match=rf"(to_torch|to_fused|document_to_\w+|fuse_qkv): expected .*{text}"):
        conversion(changed(change))


def test_grouped_heads_have_no_place_in_torch():
    with pytest.raises(ValueError, match="W_k of shape"):
        convert.to_torch(layer_of(2))


@pytest.mark.parametrize(
    "module, error, text",
    (
        (nn.MultiheadAttention(E, H, add_bias_kv=True), ValueError, "add_bias_kv"),
        (nn.MultiheadAttention(E, H, add_zero_attn=True), ValueError, "add_zero_attn"),
        (torch.ao.nn.quantizable.MultiheadAttention(E, H), TypeError, "MultiheadAttention"),
        (nn.Linear(E, E), TypeError, "Linear"),
    ),
)
def test_modules_that_are_refused(module, error, text):
    with pytest.raises(error, match=f"from_torch|torch_to_document.*{text}"):
        convert.from_torch(module)


def test_layers_without_some_heads_are_refused():
    """What is made of them would not know which ones."""
    module = mha_ext.nn.MultiheadAttention(E, H)
    mha_ext.heads.prune_heads(module, {"": [1]})
    with pytest.raises(ValueError, match="from_torch: expected a layer with all its heads, got one without some"):
        convert.from_torch(module)


@pytest.mark.parametrize(
    "call, error, text",
    (
        (lambda: convert.split_qkv(torch.ones(10, 4), 4), ValueError, "multiple of H . 2 Hkv = 12"),
        (lambda: convert.split_qkv(torch.ones(12, 4), 4, 3), ValueError, "multiple of kv_heads"),
        (lambda: convert.split_qkv(torch.ones(12, 4), 4, layout="mixed"), ValueError, "mixed"),
        (lambda: convert.split_qkv(torch.ones(()), 4), ValueError, "shape"),
        (lambda: convert.fuse_qkv(*torch.ones(3, 6, 4), 4), ValueError, "multiple of 4 rows"),
        (lambda: convert.fuse_qkv(*torch.ones(3, 8, 4), 0), ValueError, "num_heads"),
        (lambda: convert.fuse_qkv(torch.ones(8, 4), torch.ones(8, 4), torch.ones(4, 4), 4), ValueError, "one shape"),
        (lambda: convert.torch_to_document({}), ValueError, "expected keys .*, got missing"),
        (lambda: convert.document_to_torch({"W_q.weight": torch.ones(1)}), ValueError, "expected keys .*, got missing"),
        (lambda: convert.from_fused(nn.Identity(), nn.Linear(4, 4), 2), TypeError, "Identity"),
    ),
)
def test_arguments_that_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
