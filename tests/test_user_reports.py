"""Faults that users of attention met elsewhere (each with the number of its public issue thread), as small exact cases.

Most have q = 0, so that every visible key gets the same weight and the answer can be read off. `fronts` states a case
for all three ways in: the operator, scaled_dot_product_attention and the document's module.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mha_ext
from tests import documents
from tests.cases import DTYPES
from tests.checks import plain_attention

attention = torch.ops.mha_ext.attention
sdpa = mha_ext.scaled_dot_product_attention


def call_attention(q, k, v, keep=None, bias=None, **options) -> Tensor:
    return attention(q, k, v, mask=keep, bias=bias, **options)[0]


def call_sdpa(q, k, v, keep=None, bias=None, **options) -> Tensor:
    assert keep is None or bias is None, "one mask only"
    return sdpa(q, k, v, bias if keep is None else keep, **options)


def identity_module(d_model: int, heads: int, dtype=torch.float32, **options) -> mha_ext.MultiHeadAttention:
    """The document's module whose projections change nothing."""
    module = mha_ext.MultiHeadAttention(d_model, heads, dtype=dtype, **options)
    with torch.no_grad():
        for linear in (module.W_q, module.W_k, module.W_v, module.W_o):
            linear.weight.copy_(torch.eye(d_model))
            linear.bias.zero_()
    return module


@functools.cache
def shared_identity_module(d_model: int, heads: int, dtype: torch.dtype) -> mha_ext.MultiHeadAttention:
    """Made once and outside of function transforms, which do not like modules that are created inside."""
    return identity_module(d_model, heads, dtype)


def call_doc(q, k, v, keep=None, bias=None, **options) -> Tensor:
    heads, d_model = q.shape[1], q.shape[1] * q.shape[3]
    module = shared_identity_module(d_model, heads, q.dtype)
    merged = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    output, _ = module(*merged, mask=keep, bias=bias, **options)
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


FRONTS: dict[str, Callable[..., Tensor]] = {"attention": call_attention, "sdpa": call_sdpa, "doc": call_doc}
fronts = pytest.mark.parametrize("front", FRONTS)


def column(*values: float, dtype=torch.float32) -> Tensor:
    """(1, 1, L, 1)"""
    return torch.tensor(values, dtype=dtype).reshape(1, 1, -1, 1)


def rows(*values) -> Tensor:
    """A bool mask."""
    return torch.tensor(values, dtype=torch.bool)


def zeros(length: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(1, 1, length, 1, dtype=dtype)


def equal(found: Tensor, *values: float, dtype=None) -> None:
    expected = torch.tensor(values, dtype=found.dtype if dtype is None else dtype)
    torch.testing.assert_close(found.detach().flatten(), expected)


# --- Masks, NaN, inf ----------------------------------------------------------------------------------------------


@fronts
def test_41508_a_dead_row_ruins_no_gradient(front):
    q, k = zeros(2).requires_grad_(), torch.randn(1, 1, 3, 1).requires_grad_()
    v = column(1, 2, 3).requires_grad_()
    output = FRONTS[front](q, k, v, rows([1, 0, 1], [0, 0, 0]))
    output.sum().backward()
    third = 1 / 3 if front == "doc" else 0.0  # the document's dead rows are uniform
    equal(output, 2, 6 * third)
    equal(v.grad, 0.5 + third, third, 0.5 + third)
    # Row 0 sees keys 0 and 2, of values 1 and 3: d output / d score = (-1/2, 1/2).
    equal(q.grad, ((k[0, 0, 2] - k[0, 0, 0]) / 2).item(), 0)
    assert k.grad.isfinite().all()


@fronts
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_160064_one_head_masked_off_everywhere(front, need_weights, grad):
    options = {} if front == "sdpa" else {"need_weights": need_weights}
    q = torch.zeros(1, 2, 3, 2, requires_grad=grad)
    v = torch.arange(12.0).reshape(1, 2, 3, 2)
    keep = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    keep[:, 0] = False
    output = FRONTS[front](q, q, v, keep, **options)
    mean = v.mean(2, keepdim=True).expand(1, 2, 3, 2)
    torch.testing.assert_close(output[:, 1], mean[:, 1])
    torch.testing.assert_close(output[:, 0], mean[:, 0] if front == "doc" else torch.zeros(1, 3, 2))


@fronts
@pytest.mark.parametrize("block", [16, 64, 256, 1024])
@pytest.mark.parametrize("band", [1, 10, 300])
def test_127055_first_key_blocks_hidden_later_ones_live(front, block, band, set_tile_size):
    set_tile_size(block, block, block, block)
    length = 600
    i, j = torch.arange(length)[:, None], torch.arange(length)
    keep = (i - band < j) & (j <= i)
    q, v = zeros(length).requires_grad_(), column(*range(length)).requires_grad_()
    output = FRONTS[front](q, q, v, keep)
    torch.testing.assert_close(output.flatten()[band - 1 :], torch.arange(band - 1.0, length) - (band - 1) / 2)
    output.sum().backward()
    assert q.grad.isfinite().all()
    expected = (keep / keep.sum(1, keepdim=True)).sum(0)
    torch.testing.assert_close(v.grad.flatten(), expected)


@fronts
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_110213_additive_masks_of_the_lowest_number(front, dtype):
    lowest = torch.finfo(dtype).min
    bias = torch.full((1, 3), lowest, dtype=dtype)
    v = column(1, 2, 6, dtype=dtype)
    equal(FRONTS[front](zeros(1, dtype), zeros(3, dtype), v, bias=bias), 3)
    dead = FRONTS[front](zeros(1, dtype), zeros(3, dtype), v, bias=bias * 2)
    equal(dead, 3 if front == "doc" else 0)
    bias[0, 1] = 0
    equal(FRONTS[front](zeros(1, dtype), zeros(3, dtype), v, bias=bias), 2)


@fronts
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_101967_nothing_leaks_from_a_hidden_slot(front, bad, where):
    q, k = zeros(1).requires_grad_(), column(1, 2, bad if where != "value" else 3).requires_grad_()
    v = column(1, 2, bad if where != "key" else 3).requires_grad_()
    output = FRONTS[front](q, k, v, rows([1, 1, 0]))
    output.sum().backward()
    equal(output, 1.5)
    equal(q.grad, 0.25)
    equal(v.grad, 0.5, 0.5, 0)
    equal(k.grad, 0, 0, 0)


@fronts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_119131_half_precision_scores_do_not_overflow(front, dtype):
    q, k = (torch.full((1, 1, n, 64), 300.0, dtype=dtype) for n in (1, 2))
    v = torch.tensor([1.0, 3.0], dtype=dtype)[:, None].expand(1, 1, 2, 64)
    assert (FRONTS[front](q, k, v) == 2).all()


@fronts
@pytest.mark.parametrize(
    "values, q_len, top_left, bottom_right",
    [
        ((1, 2, 3, 4), 1, (1,), (2.5,)),
        ((1, 2, 3, 4), 2, (1, 1.5), (2, 2.5)),
        ((1, 2), 5, (1, 1.5, 1.5, 1.5, 1.5), (0, 0, 0, 1, 1.5)),
    ],
)
def test_108108_103082_causal_with_unequal_lengths(front, values, q_len, top_left, bottom_right):
    q, k, v = zeros(q_len), zeros(len(values)), column(*values)
    equal(FRONTS[front](q, k, v, is_causal=True), *top_left)
    if front == "doc":  # dead rows are uniform
        bottom_right = tuple(x or sum(values) / len(values) for x in bottom_right)
    if front != "sdpa":  # PyTorch's signature has no such keyword
        equal(FRONTS[front](q, k, v, is_causal=True, causal_bottom_right=True), *bottom_right)


def test_187801_mask_together_with_is_causal():
    q, v, keep = zeros(3), column(1, 2, 4), rows([1, 1, 1], [0, 1, 1], [1, 1, 0])
    for need_weights in (False, True):
        for grad in (False, True):
            q.requires_grad_(grad)
            for front in ("attention", "doc"):
                options = {"is_causal": True, "need_weights": need_weights}
                equal(FRONTS[front](q, zeros(3), v, keep, **options), 1, 2, 1.5)
    with pytest.raises(ValueError, match="scaled_dot_product_attention: expected"):
        sdpa(q, zeros(3), v, keep, is_causal=True)
    with pytest.raises(ValueError, match="scaled_dot_product_attention: expected"):
        sdpa(q, zeros(3), v, torch.zeros(3, 3), is_causal=True)


@fronts
def test_170415_polarity(front):
    keep = rows([1, 0], [1, 1])
    equal(FRONTS[front](zeros(2), zeros(2), column(1, 3), keep), 1, 2)
    if front == "doc":
        for dtype in (torch.int32, torch.uint8, torch.float32, torch.float16):
            equal(FRONTS[front](zeros(2), zeros(2), column(1, 3), keep.to(dtype)), 1, 2)


# --- Shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "front, size",
    [
        *itertools.product(FRONTS, [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]),
        *itertools.product(["attention", "sdpa"], [(2, 0, 3, 4)]),  # the document's module has at least one head
    ],
)
def test_141219_empty_tensors(front, size):
    batch, heads, q_len, kv_len = size
    q = torch.randn(batch, heads, q_len, 4, requires_grad=True)
    k, v = (torch.randn(batch, heads, kv_len, 4, requires_grad=True) for _ in range(2))
    output = FRONTS[front](q, k, v)
    assert output.shape == q.shape and (output == 0).all()
    output.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and (x.grad == 0).all()


@pytest.mark.parametrize("front", ["attention", "sdpa"])
def test_1029_5090_grouped_queries(front):
    options = {"enable_gqa": True} if front == "sdpa" else {}
    q, k = torch.zeros(1, 4, 3, 1), torch.zeros(1, 2, 5, 1)
    v = torch.tensor([1.0, 10.0]).reshape(1, 2, 1, 1).repeat(1, 1, 5, 1).requires_grad_()
    output = FRONTS[front](q, k, v, **options)
    equal(output[0, :, 0, 0], 1, 1, 10, 10)
    output.sum().backward()
    torch.testing.assert_close(v.grad, torch.full_like(v, 2 * 3 / 5))  # both heads of a group, 3 rows each
    keep = torch.ones(1, 4, 1, 5, dtype=torch.bool)
    keep[:, 1] = False
    equal(FRONTS[front](q, k, v, keep, **options)[0, :, 0, 0], 1, 0, 10, 10)
    with pytest.raises(ValueError, match="expected"):
        FRONTS[front](torch.zeros(1, 3, 3, 1), k, v, **options)
    if front == "sdpa":
        with pytest.raises(ValueError, match="enable_gqa"):
            sdpa(q, k, v)


@fronts
@pytest.mark.parametrize("grad", [False, True])
def test_187506_any_strides(front, grad):
    base = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    expected = FRONTS[front](*base)
    transposed = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(grad) for x in base]
    torch.testing.assert_close(FRONTS[front](*transposed), expected)
    narrow = torch.randn(1, 2, 6, 1)
    q = base[0].clone().requires_grad_(grad)
    output = FRONTS[front](q, narrow.expand(1, 2, 6, 8), base[2])
    torch.testing.assert_close(output, FRONTS[front](base[0], narrow.repeat(1, 1, 1, 8), base[2]))
    odd = torch.randn(2 * 6 * 8).as_strided((1, 2, 6, 8), (3, 48, 8, 1))  # a stride no one would step on
    torch.testing.assert_close(FRONTS[front](odd, *base[1:]), FRONTS[front](odd.contiguous(), *base[1:]))
    if grad:
        output.sum().backward()
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"need_weights": True}, {"dropout_p": 0.5}, {"is_causal": True}])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 8), (1, 1, 1, 1, 1), (0, 2, 3, 4, 5)])
def test_136543_153903_merging_heads_is_a_view(options, grad, sizes):
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch, heads, q_len, kv_len, width = sizes

    def run():
        q = torch.randn(batch, heads, q_len, width, requires_grad=grad)
        k, v = (torch.randn(batch, heads, kv_len, width) for _ in range(2))
        output = attention(q, k, v, **options)[0]
        output.transpose(1, 2).view(batch, q_len, heads * width)
        return output.stride()

    real = run()
    with FakeTensorMode():
        assert run() == real


@pytest.mark.parametrize("feature", ["dropout", "learned bias", "value size"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_133458_162592_features_at_every_rank(feature, rank):
    """Same values as the plain 4-D input; (what it costs is the benchmark's business)."""
    batch = (2, 3, 4)[: rank - 2]
    q, k = (torch.randn(*batch, n, 8) for n in (5, 6))
    v = torch.randn(*batch, 6, 3 if feature == "value size" else 8)
    bias = torch.randn(5, 6, requires_grad=True) if feature == "learned bias" else None
    dropout_p = 0.5 if feature == "dropout" else 0.0
    torch.manual_seed(3)
    output = sdpa(q, k, v, bias, dropout_p=dropout_p)
    assert output.shape == (*batch, 5, v.shape[-1])
    heads = batch[-1] if batch else 1
    flat = [x.reshape(-1, heads, *x.shape[-2:]) for x in (q, k, v)]
    torch.manual_seed(3)
    expected = attention(*flat, bias=bias, dropout_p=dropout_p)[0]
    assert torch.equal(output.reshape(expected.shape), expected)
    if bias is not None:
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), bias) for y in (output, expected))
        assert torch.equal(a, b)


# --- Gradients and transforms -------------------------------------------------------------------------------------

LN3 = math.log(3)


def sigmoid_case(q: Tensor, front: str) -> Tensor:
    """Two keys 0 and 1 of values 0 and 1 at scale 1: the output is sigmoid(q)."""
    k = column(0, 1, dtype=q.dtype)
    return FRONTS[front](q.reshape(1, 1, 1, 1), k, k).reshape(())  # D = 1, so the default scale is 1


@fronts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_116350_double_backward(front, dtype):
    q = torch.tensor(LN3, dtype=dtype, requires_grad=True)
    output = sigmoid_case(q, front)
    (first,) = torch.autograd.grad(output, q, create_graph=True)
    (second,) = torch.autograd.grad(first.square(), q)
    for found, expected in ((output, 0.75), (first, 0.1875), (second, -0.03515625)):
        equal(found, expected)


@fronts
def test_76185_third_derivative(front):
    """s''' = s (1 - s) (1 - 6 s + 6 s^2)"""
    q = torch.tensor(LN3, dtype=torch.float64, requires_grad=True)
    derivative = sigmoid_case(q, front)
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative, q, create_graph=True)
    equal(derivative, 0.1875 * (1 - 6 * 0.75 + 6 * 0.75**2))


@fronts
def test_128971_forward_mode_and_hessian(front):
    q = torch.tensor(LN3, dtype=torch.float64)
    sigmoid_case(q, front)  # (makes the document's module)
    value, tangent = torch.func.jvp(lambda x: sigmoid_case(x, front), (q,), (torch.ones_like(q),))
    equal(value, 0.75)
    equal(tangent, 0.1875)
    equal(torch.func.hessian(lambda x: sigmoid_case(x, front))(q), 0.1875 * (1 - 2 * 0.75))
    equal(torch.autograd.functional.hessian(lambda x: sigmoid_case(x, front), q), -0.09375)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        equal(torch.autograd.forward_ad.unpack_dual(sigmoid_case(dual, front)).tangent, 0.1875)


@fronts
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_151558_vmap(front, mapped):
    q, k, v = (torch.randn(3, 1, 2, n, 4) for n in (5, 6, 6))
    keep = torch.rand(3, 5, 6) < 0.7 if mapped else torch.rand(5, 6) < 0.7
    keep[..., 0] = True

    def loss(q, k, v, keep):
        return FRONTS[front](q, k, v, keep).square().sum()

    def loop(f):
        return [f(q[i], k[i], v[i], keep[i] if mapped else keep) for i in range(3)]

    dims = (0, 0, 0, 0 if mapped else None)
    loop(FRONTS[front])  # (makes the document's module)
    found = torch.vmap(FRONTS[front], in_dims=dims)(q, k, v, keep)
    torch.testing.assert_close(found, torch.stack(loop(FRONTS[front])))
    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    mapped_gradients = torch.vmap(gradient, in_dims=dims)(q, k, v, keep)
    for a, b in zip(mapped_gradients, zip(*loop(gradient), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


def test_124464_same_mask_under_activation_checkpointing():
    q = torch.randn(2, 2, 65, 8, requires_grad=True)

    def run(x):
        return attention(x, x, x, dropout_p=0.5)[0]

    gradients = []
    for use in (
        run,
        lambda x: checkpoint(run, x, use_reentrant=False),
        lambda x: checkpoint(run, x, use_reentrant=True),
    ):
        torch.manual_seed(5)
        (gradient,) = torch.autograd.grad(use(q).square().sum(), q) if use is run else (None,)
        if gradient is None:
            q.grad = None
            use(q).square().sum().backward()
            gradient = q.grad
        gradients.append(gradient.clone())
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


# --- Dropout, precision, reproducibility --------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["attention", "doc"])
def test_90842_returned_weights_are_those_used(front):
    """0 and 1 / (1 - p) times the probabilities, and output = weights V."""
    q, v = torch.zeros(1, 2, 5, 4), torch.randn(1, 2, 8, 4)
    if front == "attention":
        output, weights, _ = attention(q, torch.zeros(1, 2, 8, 4), v, dropout_p=0.5, need_weights=True)
    else:
        module = identity_module(8, 2, dropout=0.5).train()
        merged = [x.transpose(1, 2).flatten(2) for x in (q, torch.zeros(1, 2, 8, 4), v)]
        output, weights = module(*merged)
        output = output.unflatten(2, (2, 4)).transpose(1, 2)
    assert set(weights.detach().flatten().tolist()) == {0.0, 0.25}
    torch.testing.assert_close(output, weights @ v)


def test_124464_modules_drop_nothing_in_eval():
    module = identity_module(8, 2, dropout=0.9)
    x = torch.randn(2, 5, 8)
    module.eval()
    expected = documents.MultiHeadAttention(8, 2)
    expected.load_state_dict(module.state_dict())
    for found, right in zip(module(x, x, x), expected(x, x, x), strict=True):
        torch.testing.assert_close(found, right)
    module.train()
    assert not torch.equal(module(x, x, x)[1], module(x, x, x)[1])


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_124464_dropout_outside_of_its_range_is_an_error(p):
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match="attention: expected dropout_p"):
        attention(x, x, x, dropout_p=p)
    with pytest.raises(ValueError, match="expected"):
        sdpa(x, x, x, dropout_p=p)
    with pytest.raises(ValueError, match="expected"):
        mha_ext.MultiHeadAttention(4, 2, dropout=p)


@fronts
def test_124464_dropping_all_gives_zero_and_finite_gradients(front):
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    if front == "doc":
        output = identity_module(8, 2, dropout=1.0).train()(*[x.transpose(1, 2).flatten(2)] * 3)[0]
    else:
        output = FRONTS[front](x, x, x, dropout_p=1.0)
    assert (output == 0).all()
    output.sum().backward()
    assert (x.grad == 0).all()


@fronts
def test_99012_111276_autocast_with_a_float32_mask(front):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    bias = torch.randn(5, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = FRONTS[front](x, x, x, bias=bias)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert x.grad.dtype == bias.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), plain_attention(x, x, x, bias=bias)[0], rtol=0.05, atol=0.05)


@fronts
@pytest.mark.parametrize("shape", [(1, 1, 700), (2, 3, 130)])
def test_123656_backward_twice_gives_equal_bits(front, shape):
    batch, heads, length = shape
    q, k, v, d = (torch.randn(batch, heads, length, 16) for _ in range(4))
    bias = torch.randn(heads, length, length)
    first = None
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        found = torch.autograd.grad(FRONTS[front](*leaves[:3], bias=leaves[3]), leaves, d)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_calls_from_several_threads_at_once():
    inputs = [[torch.randn(2, 2, 130, 16) for _ in range(3)] for _ in range(4)]
    expected = [attention(*x)[0] for x in inputs]
    found: list[Tensor | None] = [None] * 4

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = attention(*inputs[i])[0]

    workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# --- The document's module: hooks, export -------------------------------------------------------------------------


def test_78109_a_hook_on_a_projection_is_called_once():
    for name in ("W_q", "W_k", "W_v", "W_o"):
        module, calls = mha_ext.MultiHeadAttention(8, 2), []
        getattr(module, name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        x = torch.randn(2, 3, 8)
        module(x, x, x)
        assert calls == [1], name


class LowRank(nn.Module):
    """A LoRA adapter around a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["W_q", "W_k", "W_v", "W_o"])
def test_761_an_adapter_is_used_and_trained(name):
    module = mha_ext.MultiHeadAttention(8, 2)
    document = documents.MultiHeadAttention(8, 2)
    document.load_state_dict(module.state_dict())
    adapter = LowRank(getattr(module, name))
    setattr(module, name, adapter)
    setattr(document, name, adapter)
    x = torch.randn(2, 3, 8)
    output = module(x, x, x)[0]
    torch.testing.assert_close(output, document(x, x, x)[0])
    output.square().sum().backward()
    assert adapter.down.weight.grad.abs().sum() > 0 and adapter.up.weight.grad.abs().sum() > 0


def test_761_a_parametrised_projection_is_used_and_trained():
    module = mha_ext.MultiHeadAttention(8, 2)
    torch.nn.utils.parametrizations.weight_norm(module.W_o)
    with torch.no_grad():
        module.W_o.parametrizations.weight.original0.mul_(2)
    document = documents.MultiHeadAttention(8, 2)
    with torch.no_grad():
        for name in ("W_q", "W_k", "W_v", "W_o"):
            getattr(document, name).weight.copy_(getattr(module, name).weight)
            getattr(document, name).bias.copy_(getattr(module, name).bias)
    x = torch.randn(2, 3, 8)
    output = module(x, x, x)[0]
    torch.testing.assert_close(output, document(x, x, x)[0])
    output.square().sum().backward()
    assert module.W_o.parametrizations.weight.original0.grad.abs().sum() > 0


def test_761_a_quantised_projection_is_used():
    module = mha_ext.MultiHeadAttention(8, 2).eval()
    x = torch.randn(2, 3, 8)
    expected = module(x, x, x)[0]

    class Rounded(nn.Linear):  # weights kept as int8
        def forward(self, y: Tensor) -> Tensor:
            scale = self.weight.abs().max() / 127
            return nn.functional.linear(y, (self.weight / scale).round() * scale, self.bias)

    rounded = Rounded(8, 8)
    rounded.load_state_dict(module.W_v.state_dict())
    module.W_v = rounded
    output = module(x, x, x)[0]
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("training", [False, True])
def test_156681_export_with_dynamic_batch_and_length(training):
    module = mha_ext.MultiHeadAttention(8, 2, dropout=0.1 if training else 0.0).train(training)
    x = torch.randn(2, 5, 8)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=512)
    shapes = [{0: batch, 1: length}] * 3
    program = torch.export.export(module, (x, x, x), dynamic_shapes=tuple(shapes))
    y = torch.randn(3, 70, 8)
    torch.manual_seed(1)
    found = program.module()(y, y, y)
    torch.manual_seed(1)
    for a, b in zip(found, module(y, y, y), strict=True):
        assert a.shape == b.shape
        if not training:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("training", [False, True])
def test_156681_compile_with_dynamic_batch_and_length(training):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = mha_ext.MultiHeadAttention(8, 2).train(training)
    compiled, graphs = torch.compile(module, backend=counter, fullgraph=True, dynamic=True), 0
    for batch, length in ((2, 5), (3, 70), (4, 9)):
        x = torch.randn(batch, length, 8, requires_grad=training)
        found, expected = compiled(x, x, x), module(x, x, x)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        if training:
            a, b = (torch.autograd.grad(y[0].sum(), [x, *module.parameters()]) for y in (found, expected))
            assert all(torch.equal(c, d) for c, d in zip(a, b, strict=True))
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs  # nothing is compiled anew for another size


@fronts
def test_195320_compiled_equals_eager_bit_for_bit(front):
    """With K made by a permutation, whose strides a compiler must not change."""
    torch._dynamo.reset()
    q, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 6, 8)
    base = torch.randn(2, 6, 8, 3)

    def run(q, base, v):
        k = base.permute(0, 3, 1, 2)
        return FRONTS[front](q * 1.5, k, v + 1)

    if front == "doc":
        module = identity_module(24, 3)

        def run(q, base, v):
            k = base.permute(0, 3, 1, 2)
            return module(*(x.transpose(1, 2).flatten(2) for x in (q * 1.5, k, v + 1)))[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in (q, base, v)]
    found, expected = compiled(*leaves), run(*leaves)
    assert torch.equal(found, expected)
    a, b = (torch.autograd.grad(y.sum(), leaves) for y in (found, expected))
    assert all(torch.equal(c, d) for c, d in zip(a, b, strict=True))


def test_166378_state_dict_and_random_draw_equal_the_documents():
    for d_model, heads in ((512, 8), (12, 3)):
        torch.manual_seed(4)
        document = documents.MultiHeadAttention(d_model, heads)
        after = torch.get_rng_state()
        torch.manual_seed(4)
        ours = mha_ext.MultiHeadAttention(d_model, heads)
        assert torch.equal(torch.get_rng_state(), after)
        assert list(ours.state_dict()) == list(document.state_dict())
        for a, b in zip(ours.state_dict().values(), document.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        linear = nn.Linear(d_model, d_model)  # nn.Linear's default initialisation: uniform within 1 / sqrt(in)
        assert ours.W_q.weight.abs().max() <= 1 / math.sqrt(d_model) and linear.weight.shape == ours.W_q.weight.shape
