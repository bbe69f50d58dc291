"""Scores, sizes and dtypes at the far ends: still right, or one clear error."""

from __future__ import annotations

import pytest
import torch

import mha_ext

LOW = torch.finfo(torch.float32).min


@pytest.mark.parametrize("level", [-1e9, LOW, 1e9, 1e4])
@pytest.mark.parametrize("kv_len", [3, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_a_row_of_huge_scores(level, kv_len, dtype):
    """log(sum) is rounded away in a log-sum-exp of 1e9; the gradients must not notice."""
    q = torch.zeros(1, 1, 2, 4, dtype=dtype, requires_grad=True)
    k = torch.zeros(1, 1, kv_len, 4, dtype=dtype, requires_grad=True)
    v = torch.arange(1.0, kv_len + 1).to(dtype).reshape(1, 1, kv_len, 1).requires_grad_()
    bias = torch.zeros(2, kv_len, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bias[0] = level
    output = mha_ext.attention(q, k, v, bias=bias)
    d_q, d_v = torch.autograd.grad(output.sum(), [q, v])
    assert torch.allclose(output.double(), v.double().mean().expand_as(output), rtol=1e-2)
    assert torch.allclose(d_v.double(), torch.full_like(d_v, 2 / kv_len).double(), rtol=1e-2, atol=0)
    assert torch.equal(d_q, torch.zeros_like(d_q))


@pytest.mark.parametrize("dtype, size", [(torch.float32, 3e4), (torch.bfloat16, 3e4), (torch.float64, 1e9)])
@pytest.mark.parametrize(
    "q_len, heads, kv_len", [(1, 1, 1025), (4, 8, 1025), (64, 1, 1025), (65, 1, 1025), (4, 8, 3000)]
)
def test_gradients_of_huge_scores_are_finite(dtype, size, q_len, heads, kv_len):
    """Scores so large that one rounding of them is worth more than e^88."""
    for seed in range(3):
        torch.manual_seed(seed)
        q = (torch.randn(1, heads, q_len, 64, dtype=dtype) * size).requires_grad_()
        k, v = ((torch.randn(1, 1, kv_len, 64, dtype=dtype) * size).requires_grad_() for _ in range(2))
        output = mha_ext.attention(q, k, v)
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.sum(), [q, k, v]):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_engine_and_composite_agree_on_a_padded_sample_of_huge_bias(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (torch.randn(2, 2, 200, 8, requires_grad=True) for _ in range(3))
        bias = torch.zeros(2, 1, 1, 200)
        bias[0] = -1e9
        bias[1, ..., 150:] = -1e9
        upstream = torch.randn(2, 2, 200, 8)
        output = mha_ext.attention(q, k, v, bias=bias)
        first = torch.autograd.grad(output, [q, k, v], upstream, retain_graph=True)
        composite = torch.autograd.grad(output, [q, k, v], upstream, create_graph=True)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(first, composite, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


def test_a_double_bias_of_the_lowest_number_is_low_and_hides_nothing():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    v = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    bias = torch.full((1, 2), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert mha_ext.attention(q, k, v, bias=bias).item() == 2.0


def test_sizes_whose_scratch_would_overflow():
    q, key = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 8).expand(1, 1, 2**56, 8)
    with pytest.raises(ValueError, match="attention: expected"):
        mha_ext.attention(q, key, key)


def test_a_layer_without_input_features():
    x = torch.zeros(2, 3, 0, requires_grad=True)
    w, w_o = torch.zeros(8, 0, requires_grad=True), torch.zeros(8, 8, requires_grad=True)
    output, _ = torch.ops.mha_ext.multi_head_attention(x, x, x, w, w, w, w_o, None, None, None, None, 2)
    output.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


def test_the_layer_backward_does_not_see_autocast():
    x, w = torch.randn(1, 3, 8), torch.randn(8, 8)
    saved = torch.ops.mha_ext.multi_head_attention_forward(x, x, x, w, w, w, w, None, None, None, None, 2)
    output, weights, q, k, v, context, logsumexp = saved
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.ops.mha_ext.multi_head_attention_backward(
            output, None, x, x, x, w, w, w, w, None, None, None, None, q, k, v, context, weights, logsumexp, 2,
            output_mask=[True] * 7 + [False] * 5,
        )  # fmt: skip
    assert all(grad.dtype == torch.float32 for grad in grads)
