"""The backward of `attention`: every gradient against the oracle's, alone and combined."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

import mha_ext  # noqa: F401  (loads the operators)
from tests.cases import CAUSAL, DTYPES, LAYOUTS, Case, all_pairs, benchmark, make, row_id
from tests.checks import (
    assert_as_good_as_plain,
    composite,
    exact_gradients,
    gradients_of,
    isa_every,
    plain_gradients,
)
from tests.test_attention import BOUNDARIES, FEATURES, FEW_ROWS, TILE_SIZES

attention = torch.ops.mha_ext.attention
attention_backward = torch.ops.mha_ext.attention_backward

COMBINATIONS = all_pairs(
    dtype=list(DTYPES),
    layout=list(LAYOUTS),
    threads=[1, 2, 3],
    q_len=[1, 7, 63, 64, 65, 129],
    kv_len=[1, 7, 64, 127, 128, 129, 257],
    **FEATURES,
)


def check(inputs, *found, score_size=1.0, measure=None):
    """Gradients by name, found in one way or several, against the oracle.

    The measure is autograd of the plain formula (of `measure`).

    exp(score) has an error of eps times the score: score_size, where scores are large.
    """
    torch.set_num_threads(1)  # what follows is small
    _, plain = plain_gradients(measure or inputs)
    exact, sizes = exact_gradients(inputs), exact_gradients(inputs, magnitude=True)
    for gradients in found:
        assert gradients.keys() == exact.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == inputs.leaves()[name].dtype, name
            what, size = f"gradient of {name}", sizes[name] * score_size
            assert_as_good_as_plain(gradient, plain[name], exact[name], size, what, inputs.query.dtype)


def differentiate(inputs):
    """Our gradients of everything the inputs have incoming gradients for, by name."""
    inputs.requires_grad_()
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    return gradients_of(results, inputs, inputs.leaves())


@pytest.mark.parametrize("row", isa_every(5, COMBINATIONS), ids=row_id)
def test_gradients_of_feature_combinations(row):
    torch.set_num_threads(row["threads"])
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2)
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("row", isa_every(5, FEW_ROWS), ids=row_id)
def test_gradients_of_few_rows(row):
    torch.set_num_threads(row["threads"])
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=4)
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("q_len, kv_len", [(1, 1025), (4, 1024), (4, 1600), (65, 1025)])
@pytest.mark.parametrize("size", [4.0, 8.0])
def test_gradients_of_peaked_weights(q_len, kv_len, size):
    """Forward and backward find the same scores, in parts or not: otherwise e^(S - LSE) misses the one weight of 1."""
    inputs = make(Case("peaked", batch=1, q_len=q_len, kv_len=kv_len, head_dim=64))
    inputs.query *= size
    inputs.key *= size
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("case", isa_every(4, benchmark("core")), ids=lambda case: case.name)
def test_gradients_of_the_benchmark(case):
    inputs = make(case, seed=2)
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", isa_every(2, ["float32", "bfloat16"]))
def test_gradients_at_tile_boundaries(length, causal, dtype):
    torch.set_num_threads(2)
    case = Case("boundary", batch=1, heads=1, q_len=length, kv_len=length, causal=causal)
    inputs = make(case, DTYPES[dtype])
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("row", COMBINATIONS[::16], ids=row_id)
@pytest.mark.parametrize("tile", TILE_SIZES, ids=str)
def test_gradients_of_tile_sizes(row, tile, set_tile_size):
    set_tile_size(*tile)
    torch.set_num_threads(row["threads"])
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2)
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("q_len, kv_len", [(1, 600), (600, 1), (65, 513), (300, 65), (10, 1500), (257, 129)])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_of_cross_attention(q_len, kv_len, causal, threads):
    torch.set_num_threads(threads)
    case = Case("cross", batch=1, heads=1, q_len=q_len, kv_len=kv_len, causal=causal, head_dim=24, bias="plane")
    inputs = make(case)
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 17, 31, 33, 48, 80, 128, 200, 256])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_gradients_of_head_sizes(head_dim, dtype):
    case = Case("size", batch=1, q_len=20, kv_len=70, head_dim=head_dim, value_dim=257 - head_dim)
    inputs = make(case, DTYPES[dtype])
    check(inputs, differentiate(inputs))


# --- Other ways in ------------------------------------------------------------------------------------------------


def call_backward(inputs, backward=attention_backward):
    """The results of the backward operator, or of another implementation of it."""
    with torch.no_grad():
        results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    options = {name: value for name, value in inputs.options.items() if name != "need_weights"}
    options["need_bias_grad"] = "bias" in inputs.leaves()
    incoming = (inputs.grad_output, inputs.grad_weights, inputs.grad_logsumexp)
    return backward(*incoming, inputs.query, inputs.key, inputs.value, *results, **options)


def composite_backward(*arguments, **options):
    return composite(attention_backward, *arguments, **options)


@pytest.mark.parametrize("row", COMBINATIONS[1::6], ids=row_id)
def test_backward_operator_equals_autograd(row):
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2)
    direct = call_backward(inputs)
    if "bias" not in inputs.leaves():
        assert direct[3].numel() == 0
    for name, gradient in differentiate(inputs).items():
        assert torch.equal(gradient, direct[list(inputs.leaves()).index(name)])


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias"])
def test_each_gradient_alone(wanted):
    inputs = make(Case("alone", q_len=65, kv_len=129, bias="full"))
    expected = call_backward(inputs)[list(inputs.leaves()).index(wanted)]
    leaf = inputs.leaves()[wanted].requires_grad_()
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    found = gradients_of(results, inputs, {wanted: leaf})[wanted]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("used", ["output", "weights", "logsumexp"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_loss_on_one_result_alone(used, dropout_p):
    inputs = make(Case("one", q_len=65, kv_len=129, need_weights=True, bias="plane", mask="keys", dropout_p=dropout_p))
    if used != "output":
        inputs.grad_output = torch.zeros_like(inputs.grad_output)
    if used != "weights":
        inputs.grad_weights = torch.zeros_like(inputs.grad_weights)
    if used != "logsumexp":
        inputs.grad_logsumexp = torch.zeros_like(inputs.grad_logsumexp)
    leaves = inputs.requires_grad_().leaves()
    results = dict(
        zip(
            ("output", "weights", "logsumexp"),
            attention(inputs.query, inputs.key, inputs.value, **inputs.options),
            strict=True,
        )
    )
    incoming = getattr(inputs, f"grad_{used}")
    found = torch.autograd.grad(results[used], list(leaves.values()), incoming, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), found, strict=True)]
    check(inputs, dict(zip(leaves, found, strict=True)))


@pytest.mark.parametrize("kernel", ["engine", "composite"])
def test_gradients_lie_as_their_tensors(kernel):
    """Else autograd would copy them: contiguous as contiguous tensors, by length as heads split from features."""
    query, value = torch.randn(2, 3, 70, 8), torch.randn(2, 3, 90, 8)
    key = torch.randn(2, 90, 3, 8).transpose(1, 2)
    results = attention(query, key, value)
    arguments = (torch.ones_like(results[0]), None, None, query, key, value, *results)
    found = attention_backward(*arguments) if kernel == "engine" else composite(attention_backward, *arguments)
    assert [x.stride() for x in found[:3]] == [query.stride(), key.stride(), value.stride()]


@pytest.mark.parametrize("layout", ["expanded", "inner_transposed", "odd_strides"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_incoming_gradients_of_any_stride(layout, dtype):
    """Sums and broadcasts upstream hand over gradients with strides of 0."""
    case = Case("strides", q_len=65, kv_len=70, need_weights=True)
    inputs = make(case, DTYPES[dtype])
    inputs.grad_output = LAYOUTS[layout](inputs.grad_output)
    inputs.grad_weights = LAYOUTS[layout](inputs.grad_weights)
    inputs.grad_logsumexp = inputs.grad_logsumexp[:1, :1, :1].expand(2, 2, 65)
    check(inputs, differentiate(inputs))


def test_gradient_of_a_sum():
    inputs = make(Case("sum", q_len=65, kv_len=70)).requires_grad_()
    attention(inputs.query, inputs.key, inputs.value)[0].sum().backward()
    inputs.grad_output, inputs.grad_logsumexp = torch.ones(2, 2, 65, 8), torch.zeros(2, 2, 65)
    check(inputs, {name: leaf.grad for name, leaf in inputs.leaves().items()})


def test_one_tensor_as_query_key_and_value():
    x = torch.randn(2, 2, 65, 8, requires_grad=True)
    inputs = make(Case("self", q_len=65, kv_len=65))
    inputs.query = inputs.key = inputs.value = x.detach()
    inputs.grad_logsumexp = torch.zeros_like(inputs.grad_logsumexp)
    exact, (_, plain) = exact_gradients(inputs), plain_gradients(inputs)
    sizes = exact_gradients(inputs, magnitude=True)
    (found,) = torch.autograd.grad(attention(x, x, x)[0], x, inputs.grad_output)
    total = [sum(gradients.values()) for gradients in (plain, exact, sizes)]
    assert_as_good_as_plain(found, *total)


@pytest.mark.parametrize(
    "size", [size for size in itertools.product((2, 0), (2, 0), (3, 0), (4, 0)) if 0 in size], ids=str
)
@pytest.mark.parametrize("uniform", [False, True])
def test_empty_sizes_have_zero_gradients(size, uniform):
    case = Case("empty", *size, need_weights=True, bias="full", uniform_dead_rows=uniform)
    inputs = make(case)
    for name, gradient in differentiate(inputs).items():
        assert gradient.shape == inputs.leaves()[name].shape and (gradient == 0).all()


def test_backward_through_a_retained_graph():
    inputs = make(Case("twice", q_len=65, kv_len=70)).requires_grad_()
    output = attention(inputs.query, inputs.key, inputs.value)[0]
    leaves = list(inputs.leaves().values())
    first = torch.autograd.grad(output, leaves, inputs.grad_output, retain_graph=True)
    second = torch.autograd.grad(output, leaves, inputs.grad_output)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, leaves, inputs.grad_output)


def test_changing_an_input_before_backward_is_an_error():
    inputs = make(Case("stale")).requires_grad_()
    q = inputs.query * 1
    output = attention(q, inputs.key, inputs.value)[0]
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- Dead rows, NaN, dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kv_len", [5, 140])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_dead_rows(hide, uniform, kv_len, dropout_p):
    q_len = kv_len + 3
    case = Case(
        "dead", heads=1, q_len=q_len, kv_len=kv_len, need_weights=True, uniform_dead_rows=uniform, dropout_p=dropout_p
    )
    inputs = make(case)
    dead = torch.zeros(2, q_len, dtype=torch.bool)
    if hide == "causal":
        inputs.options.update(is_causal=True, causal_bottom_right=True)
        dead[:, :3] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.tensor([0, kv_len])
        dead[0] = True
    else:
        dead[:, 2] = True
        mask = ~dead[:1, :, None].expand(1, q_len, kv_len)
        inputs.options[hide] = mask if hide == "mask" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    gradients = differentiate(inputs)
    check(inputs, gradients)
    assert (gradients["query"].transpose(1, 2)[dead] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("q_len, kv_len", [(5, 6), (5, 300), (70, 161), (70, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "average_weights": True}], ids=["plain", "capped"])
def test_nothing_leaks_from_behind_a_mask(bad, hide, q_len, kv_len, dtype, options):
    case = Case("hidden", q_len=q_len, kv_len=kv_len, need_weights=True, dropout_p=0.2, **options)
    inputs = make(case, DTYPES[dtype])
    hidden = torch.zeros(kv_len, dtype=torch.bool)
    hidden[q_len if hide == "causal" else kv_len // 2 :] = True
    bias = torch.zeros(kv_len, dtype=DTYPES[dtype])
    if hide == "causal":
        inputs.options["is_causal"] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.full((2,), kv_len // 2)
    elif hide == "mask":
        inputs.options["mask"] = ~hidden
    else:
        bias.masked_fill_(hidden, -math.inf)
    inputs.options["bias"] = bias
    clean = copy.deepcopy(inputs)
    inputs.key[:, :, hidden] = bad
    inputs.value[:, :, hidden] = bad
    inputs.grad_weights[..., hidden] = bad
    if hide != "bias":  # a bias behind a mask is hidden as well
        bias.masked_fill_(hidden, bad)
    for backward in (attention_backward, composite_backward):
        check(inputs, dict(zip(inputs.leaves(), call_backward(inputs, backward), strict=True)), measure=clean)


@pytest.mark.parametrize("where", ["query", "key", "value", "grad_output"])
def test_a_live_nan_stays(where):
    """And goes nowhere else: the gradients that do not depend on it stay finite and right."""
    inputs = make(Case("live", q_len=70, kv_len=140, causal="top_left"))
    tensor = getattr(inputs, where)
    tensor[0, 1, 3, 2] = math.nan
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("bias", ["none", "plane"])
def test_dropout_of_everything_has_finite_gradients(bias):
    inputs = make(Case("all", q_len=65, kv_len=70, dropout_p=1.0, need_weights=True, bias=bias))
    check(inputs, differentiate(inputs))


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_very_different_size(order, dtype):
    kv_len = 300
    inputs = make(Case("hard", batch=1, q_len=9, kv_len=kv_len, head_dim=4, need_weights=True), DTYPES[dtype])
    slope = torch.linspace(-200, 200, kv_len)
    inputs.options["bias"] = slope if order == "rising" else slope.flip(0)
    check(inputs, differentiate(inputs), score_size=200)


# --- A learned bias -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (1,), (70,), (65, 1), (65, 70), (2, 65, 70), (2, 1, 1), (3, 1, 65, 70), (3, 2, 1, 1)]
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "dtype, bias_dtype", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_gradient_of_a_bias_of_any_shape(shape, threads, dtype, bias_dtype):
    torch.set_num_threads(threads)
    inputs = make(Case("bias", batch=3, q_len=65, kv_len=70, mask="keys"), DTYPES[dtype])
    inputs.options["bias"] = torch.randn(shape).to(DTYPES[bias_dtype])
    gradients = differentiate(inputs)
    assert gradients["bias"].shape == shape
    check(inputs, gradients)


@pytest.mark.parametrize("layout", ["inner_transposed", "expanded", "odd_strides"])
def test_gradient_of_a_bias_of_any_stride(layout):
    inputs = make(Case("bias", q_len=65, kv_len=70))
    inputs.options["bias"] = LAYOUTS[layout](torch.randn(2, 2, 65, 70))
    check(inputs, differentiate(inputs))


def test_a_learned_bias_table():
    """A relative-position bias gathered from a small table, as T5 has it."""
    inputs = make(Case("table", q_len=65, kv_len=70))
    table = torch.randn(2, 200, requires_grad=True)
    distance = torch.arange(65)[:, None] - torch.arange(70) + 70
    output = attention(inputs.query, inputs.key, inputs.value, bias=table[:, distance])[0]
    (found,) = torch.autograd.grad(output, table, inputs.grad_output)
    inputs.options["bias"] = table.detach()[:, distance]
    inputs.grad_logsumexp = torch.zeros_like(inputs.grad_logsumexp)
    expected = torch.zeros(2, 200, dtype=torch.float64)
    expected.index_put_((torch.arange(2)[:, None, None], distance), exact_gradients(inputs)["bias"], accumulate=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
