"""mha_ext.attention, mha_ext.scaled_dot_product_attention and the masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


# --- The rich form --------------------------------------------------------------------------------------------------


def test_attention_returns_what_was_asked_for():
    query, key, value = normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 3)
    output, weights, logsumexp = mha_ext.attention(query, key, value, need_weights=True, need_logsumexp=True)
    assert (output.shape, weights.shape, logsumexp.shape) == ((2, 4, 5, 3), (2, 4, 5, 6), (2, 4, 5))
    alone = mha_ext.attention(query, key, value)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(alone, output)
    torch.testing.assert_close(mha_ext.attention(query, key, value, need_weights=True), (output, weights))
    torch.testing.assert_close(mha_ext.attention(query, key, value, need_logsumexp=True), (output, logsumexp))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))


def test_the_typed_operators_call_the_operators():
    query, key, value = (normal(2, 4, 5, 8).detach() for _ in range(3))
    bias = torch.randn(5, 5)
    output, weights, logsumexp = mha_ext.ops.attention(query, key, value, bias=bias, is_causal=True, need_weights=True)
    grads = mha_ext.ops.attention_backward(
        torch.ones_like(output),
        None,
        None,
        query,
        key,
        value,
        output,
        weights,
        logsumexp,
        bias=bias,
        is_causal=True,
        need_bias_grad=True,
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value, bias)]
    expected = mha_ext.attention(*leaves[:3], bias=leaves[3], is_causal=True)
    for found, wanted in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted)

    layer = mha_ext.MultiHeadAttention(8, 2)
    x = torch.randn(2, 5, 8)
    parameters = [*(m.weight for m in layer.children()), *(m.bias for m in layer.children())]
    with torch.no_grad():
        torch.testing.assert_close(mha_ext.ops.multi_head_attention(x, x, x, *parameters, 2), layer(x, x, x))
        output, weights, *saved = mha_ext.ops.multi_head_attention_forward(x, x, x, *parameters, 2)
        q, k, v, context, logsumexp = saved
        grads = mha_ext.ops.multi_head_attention_backward(
            torch.ones_like(output),
            None,
            *(x, x, x, *parameters, q, k, v, context, weights, logsumexp, 2),
            output_mask=[True, False, False, *[True] * 8, False],
            self_attention=True,
        )
    x.requires_grad_()
    expected = torch.autograd.grad(layer(x, x, x)[0].sum(), [x, *parameters])
    for found, wanted in zip([grads[0], *grads[3:11]], expected, strict=True):
        torch.testing.assert_close(found, wanted)


# --- PyTorch's signature --------------------------------------------------------------------------------------------

SHAPES = (  # query, key, value
    ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)),
    ((5, 8), (6, 8), (6, 8)),
    ((4, 5, 8), (4, 6, 8), (4, 6, 8)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    ((2, 3, 2, 4, 5, 8), (2, 1, 2, 4, 6, 8), (1, 3, 2, 1, 6, 8)),
    ((1, 4, 5, 8), (3, 4, 6, 8), (3, 4, 6, 8)),
    ((2, 4, 5, 8), (6, 8), (4, 6, 8)),
    ((4, 5, 8), (2, 1, 6, 8), (2, 4, 6, 8)),
    ((2, 1, 5, 8), (2, 4, 6, 8), (2, 1, 6, 8)),
    ((0, 4, 5, 8), (0, 4, 6, 8), (0, 4, 6, 8)),
)


def compare_with_torch(query: Tensor, key: Tensor, value: Tensor, *args, **options) -> None:
    found = mha_ext.scaled_dot_product_attention(query, key, value, *args, **options)
    expected = F.scaled_dot_product_attention(query, key, value, *args, **options)
    torch.testing.assert_close(found, expected)
    leaves = [query, key, value, *(x for x in args if isinstance(x, Tensor) and x.requires_grad)]
    grad = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"scale": 0.3}), ids=str)
def test_shapes_agree_with_torch(shapes, options):
    compare_with_torch(*(normal(*shape) for shape in shapes), **options)


@pytest.mark.parametrize(
    ("shapes", "mask"),
    (
        (SHAPES[0], (5, 6)),
        (SHAPES[0], (2, 1, 1, 6)),
        (SHAPES[0], (4, 5, 1)),
        (SHAPES[1], (5, 6)),
        (SHAPES[2], (4, 5, 6)),
        (SHAPES[2], (4, 1, 6)),
        (SHAPES[3], (2, 3, 4, 5, 6)),
        (SHAPES[3], (2, 1, 1, 5, 6)),
        (SHAPES[3], (3, 4, 5, 6)),
        (SHAPES[3], (5, 6)),
    ),
    ids=str,
)
@pytest.mark.parametrize("kind", ("bool", "float"))
def test_masks_agree_with_torch(shapes, mask, kind):
    attn_mask = torch.rand(mask) < 0.8 if kind == "bool" else normal(*mask)
    compare_with_torch(*(normal(*shape) for shape in shapes), attn_mask)


def test_grouped_heads_agree_with_torch():
    compare_with_torch(normal(2, 6, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8), enable_gqa=True)
    compare_with_torch(normal(6, 5, 8), normal(3, 6, 8), normal(3, 6, 8), enable_gqa=True)


def test_dropout_is_unbiased():
    query, key = normal(1, 1, 4, 8), normal(1, 1, 6, 8)
    mean = sum(
        mha_ext.scaled_dot_product_attention(query, key, torch.eye(6)[None, None], dropout_p=0.5) for _ in range(2000)
    )
    expected = F.scaled_dot_product_attention(query, key, torch.eye(6)[None, None])
    torch.testing.assert_close(mean / 2000, expected, atol=0.06, rtol=0)


def test_strange_use_is_one_clear_error():
    query = normal(2, 4, 5, 8)
    call = mha_ext.scaled_dot_product_attention
    with pytest.raises(ValueError, match="either attn_mask or is_causal, got both"):
        call(query, query, query, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"\(or enable_gqa=True\), got \[4\] and \[2\]"):
        call(query, query[:, :2], query[:, :2])
    with pytest.raises(TypeError, match="expected attn_mask of dtype bool or floating, got torch.int64"):
        call(query, query, query, torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 2 dimensions, got 1, 4 and 4"):
        call(query[0, 0, 0], query, query)
    with pytest.raises(ValueError, match="expected leading dimensions that broadcast"):
        call(query, normal(3, 4, 5, 8), query)
    with pytest.raises(ValueError, match="expected dropout_p between 0 and 1, got 2"):
        call(query, query, query, dropout_p=2.0)


def test_scaled_dot_product_attention_is_scriptable():
    scripted = torch.jit.script(mha_ext.scaled_dot_product_attention)
    query, key, value = normal(2, 4, 5, 8), normal(2, 4, 6, 8), normal(4, 6, 8)
    for mask in (None, torch.rand(5, 6) < 0.7, torch.randn(5, 6)):
        expected = mha_ext.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(scripted(query, key, value, mask), expected)


# --- Masks ----------------------------------------------------------------------------------------------------------


def test_masks():
    visible = mha_ext.masks.visible(torch.tensor([0.0, 2.0, -1.0, float("nan")]))
    assert visible.tolist() == [False, True, True, True]
    assert mha_ext.masks.causal(2, 3).tolist() == [[True, False, False], [True, True, False]]
    assert mha_ext.masks.causal(2, 3, bottom_right=True).tolist() == [[True, True, False], [True, True, True]]
    padding = mha_ext.masks.padding(torch.tensor([0, 2, 3]), 3)
    assert padding.shape == (3, 1, 1, 3)
    assert padding[:, 0, 0].tolist() == [[False] * 3, [True, True, False], [True] * 3]
