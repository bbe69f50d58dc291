"""The oracle itself: against autograd of the plain formula in float64, and against the documents' classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import documents, reference
from tests.cases import BIASES, MASKS, Case, all_pairs, make
from tests.checks import (
    assert_as_good_as_plain,
    exact_gradients,
    gradients_of,
    plain_attention,
    plain_gradients,
    plain_multi_head_attention,
)

COMBINATIONS = all_pairs(
    q_len=[1, 7, 12],
    kv_len=[1, 5, 12],
    kv_heads=[4, 2, 1],
    value_dim=[8, 3],
    mask=list(MASKS),
    bias=[kind for kind in BIASES if kind != "float32"],
    causal=["none", "top_left", "bottom_right"],
    key_lengths=[False, True],
    dropout_p=[0.0, 0.3, 1.0],
    scale=[None, 0.7],
    need_weights=[True, False],
    uniform_dead_rows=[False, True],
)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: "-".join(map(str, row.values())))
def test_forward_and_backward_equal_float64_autograd(row):
    inputs = make(Case("row", heads=4, **row), dtype=torch.float64, seed=3).requires_grad_()
    results, gradients = plain_gradients(inputs)
    exact = reference.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    for found, expected in zip((exact.output, exact.weights, exact.logsumexp), results, strict=True):
        close(found, expected)
    for name, expected in exact_gradients(inputs).items():
        close(expected, gradients[name])
    for name, size in exact_gradients(inputs, magnitude=True).items():
        assert (size >= gradients[name].abs() * (1 - 1e-10) - 1e-12).all(), f"magnitude of {name} is too small"


def test_hidden_values_take_no_part():
    inputs = make(Case("plain", q_len=4, kv_len=5), dtype=torch.float64)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 2] = False
    inputs.options["mask"] = mask
    before = reference.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    before_gradients = exact_gradients(inputs)
    inputs.key[:, :, 2] = torch.nan
    inputs.value[:, :, 2] = torch.inf
    after = reference.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    assert torch.equal(before.output, after.output)
    assert torch.equal(before_gradients["key"], exact_gradients(inputs)["key"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("value_dim", [4, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_layer_equals_float64_autograd(bias, value_dim, kv_heads):
    heads, head_dim, width = 4, 4, 6
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim, width]
    weights = [torch.randn(n, width, dtype=torch.float64) for n in sizes[:3]]
    weights.append(torch.randn(width, heads * value_dim, dtype=torch.float64))
    biases = [torch.randn(n, dtype=torch.float64) if bias else None for n in sizes]
    inputs = [torch.randn(2, n, width, dtype=torch.float64) for n in (3, 5, 5)]
    score_bias = torch.randn(3, 5, dtype=torch.float64)
    leaves = dict(zip(reference.LAYER_GRADIENTS, [*inputs, *weights, *biases, score_bias], strict=True))
    leaves = {name: x.requires_grad_() for name, x in leaves.items() if x is not None}
    options = {"bias": score_bias, "is_causal": True}
    output, attention = plain_multi_head_attention(*inputs, *weights, *biases, heads, **options)
    layer = reference.multi_head_attention(*inputs, *weights, *biases, heads, **options)
    close(layer.output, output)
    close(layer.weights, attention)
    d_output, d_weights = torch.randn_like(output), torch.randn_like(attention)
    expected = torch.autograd.grad([output, attention], list(leaves.values()), [d_output, d_weights])
    arguments = (d_output, d_weights, *inputs, *weights, *biases, heads)
    found = reference.multi_head_attention_backward(*arguments, **options)
    sizes = reference.multi_head_attention_backward(*arguments, magnitude=torch.float64, **options)
    for name, gradient in zip(leaves, expected, strict=True):
        close(found[name], gradient)
        assert (sizes[name] >= gradient.abs() * (1 - 1e-10) - 1e-12).all()


@pytest.mark.parametrize("kind", ["none", "random", "dead row"])
def test_documents_pytorch_class(kind):
    layer = documents.MultiHeadAttention(d_model=12, num_heads=3).double()
    x, y = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    mask = None if kind == "none" else torch.rand(2, 1, 4, 5) < 0.6
    if kind == "dead row":
        mask[:, :, 1] = False
    projections = [layer.W_q, layer.W_k, layer.W_v, layer.W_o]
    found = reference.multi_head_attention(
        x, y, y, *(p.weight for p in projections), *(p.bias for p in projections), 3, mask=mask, uniform_dead_rows=True
    )
    output, weights = layer(x, y, y, mask)
    close(found.output, output)
    close(found.weights, weights)


@pytest.mark.parametrize("masked", [False, True])
def test_documents_numpy_class(masked):
    np.random.seed(0)
    layer = documents.NumpyMultiHeadAttention(d_model=12, num_heads=3)
    x, y = np.random.randn(2, 4, 12), np.random.randn(2, 5, 12)
    hidden = np.random.rand(2, 1, 4, 5) < 0.4 if masked else None
    output, weights = layer.call(x, y, y, hidden)
    found = reference.multi_head_attention(
        *(torch.from_numpy(a) for a in (x, y, y)),
        *(torch.from_numpy(w.T.copy()) for w in (layer.W_q, layer.W_k, layer.W_v, layer.W_o)),
        *[None] * 4,
        3,
        mask=None if hidden is None else torch.from_numpy(~hidden),
    )
    close(found.output, torch.from_numpy(output))
    close(found.weights, torch.from_numpy(weights))


@pytest.mark.parametrize("dropout_p", [1e-12, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_dropout_bits_equal_plain_integers(dropout_p, seed):
    shape = (2, 3, 4, 5)
    expected = np.array([reference.keep_one(seed, *index, dropout_p) for index in np.ndindex(shape)]).reshape(shape)
    assert np.array_equal(reference.keep_mask(seed, shape, dropout_p), expected)


def test_tolerance_rule_tells_right_from_wrong():
    exact = torch.randn(100, dtype=torch.float64)
    plain = exact.float()
    assert_as_good_as_plain(exact.float(), plain, exact)
    with pytest.raises(AssertionError, match="error"):
        assert_as_good_as_plain(exact.float() + 1e-5, plain, exact)
    with pytest.raises(AssertionError, match="isnan"):
        assert_as_good_as_plain(exact.float().masked_fill(exact > 1, float("nan")), plain, exact)


def test_plain_formula_is_its_own_measure():
    inputs = make(Case("plain", need_weights=True)).requires_grad_()
    results = plain_attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    exact = reference.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    assert_as_good_as_plain(results[0], results[0], exact.output)
    sizes = exact_gradients(inputs, magnitude=True)
    for name, gradient in gradients_of(results, inputs, inputs.leaves()).items():
        assert_as_good_as_plain(gradient, gradient, exact_gradients(inputs)[name], sizes[name], name)
