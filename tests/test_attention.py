"""The forward of `attention`: values against the oracle, what it returns and how that lies in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import mha_ext
from tests import reference
from tests.cases import BIASES, CAUSAL, DTYPES, LAYOUTS, MASKS, Case, all_pairs, benchmark, make, row_id
from tests.checks import assert_as_good_as_plain, composite, isa_every, plain_attention

attention = torch.ops.mha_ext.attention

FEATURES = {
    "kv_heads": [4, 2, 1],
    "dims": [(8, 8), (16, 24), (5, 3), (64, 64), (1, 40)],
    "mask": list(MASKS),
    "bias": list(BIASES),
    "causal": list(CAUSAL),
    "key_lengths": [False, True],
    "dropout_p": [0.0, 0.25],
    "scale": [None, 0.3],
    "need_weights": [False, True],
    "uniform_dead_rows": [False, True],
    "average_weights": [False, True],
    "weights_before_dropout": [False, True],
    "softcap": [None, 1.5],
}
COMBINATIONS = all_pairs(
    dtype=list(DTYPES),
    layout=list(LAYOUTS),
    threads=[1, 2, 3],
    q_len=[1, 7, 63, 64, 65, 129],
    kv_len=[1, 7, 64, 127, 128, 129, 255, 257],
    **FEATURES,
)


def check(inputs, results, uniform_dead_rows=False):
    """Output, weights and logsumexp against the oracle, with the plain formula as the measure."""
    torch.set_num_threads(1)  # what follows is small
    arguments, options = (inputs.query, inputs.key, inputs.value), inputs.options
    exact = reference.attention(*arguments, **options)
    plain = plain_attention(*arguments, **options)
    output, weights, logsumexp = results
    assert_as_good_as_plain(output, plain[0], exact.output, what="output")
    if options["need_weights"]:
        assert_as_good_as_plain(weights, plain[1], exact.weights, what="weights")
    assert_as_good_as_plain(logsumexp, plain[2], exact.logsumexp, magnitude=score_terms(inputs), what="logsumexp")


def score_terms(inputs):
    """scale |Q| |K|^T: what the scores sum up, and may cancel."""
    query, key = inputs.query.double().abs(), inputs.key.double().abs()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = inputs.options["scale"] or query.shape[-1] ** -0.5
    return scale * query @ key.transpose(-2, -1)


def check_form(inputs, results):
    """Shapes, dtypes and strides as the schema's comment promises them."""
    output, weights, logsumexp = results
    query, value = inputs.query, inputs.value
    batch, heads, q_len, _ = query.shape
    assert output.shape == (batch, heads, q_len, value.shape[3]) and output.dtype == query.dtype
    assert output.transpose(1, 2).is_contiguous()
    output.transpose(1, 2).view(batch, q_len, heads * value.shape[3])
    kv_len = inputs.key.shape[2]
    expected = (batch, q_len, kv_len) if inputs.options["average_weights"] else (batch, heads, q_len, kv_len)
    if not inputs.options["need_weights"]:
        expected = (0,)
    assert weights.shape == expected and weights.dtype == query.dtype and weights.is_contiguous()
    assert logsumexp.shape == (batch, heads, q_len) and logsumexp.is_contiguous()
    assert logsumexp.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)


# Lengths on and around the edges of tiles.
BOUNDARIES = sorted({1, 7, *(edge + step for edge in mha_ext._C.tile_size() for step in (-1, 0, 1))})

# Forward queries and keys, backward queries and keys: many small tiles, odd ones, one that holds all.
TILE_SIZES = [(16, 16, 16, 16), (32, 48, 48, 32), (112, 16, 16, 112), (512, 512, 512, 512)]


def check_row(row, seed):
    torch.set_num_threads(row["threads"])
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=seed)
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    check_form(inputs, results)
    check(inputs, results)


@pytest.mark.parametrize("row", isa_every(5, COMBINATIONS), ids=row_id)
def test_values_of_feature_combinations(row):
    check_row(row, seed=1)


# Few queries for many keys, as in decoding: keys and values are read in place, long ones in parts.
FEW_ROWS = all_pairs(
    dtype=list(DTYPES),
    layout=list(LAYOUTS),
    threads=[1, 2, 3],
    q_len=[1, 2, 5, 6],
    kv_len=[1, 15, 17, 255, 513, 1100],
    **{**FEATURES, "dims": [(64, 64), (128, 32), (40, 24), (8, 16)]},
)


@pytest.mark.parametrize("row", isa_every(5, FEW_ROWS), ids=row_id)
def test_values_of_few_rows(row):
    check_row(row, seed=3)


@pytest.mark.parametrize("kv_len", [512, 513, 1600])
@pytest.mark.parametrize("hidden", ["first part", "last part", "one sequence"])
def test_parts_of_which_nothing_is_seen(kv_len, hidden):
    """A NaN in a part of the keys that a mask hides does not reach what is put together from all parts."""
    inputs = make(Case("parts", q_len=2, kv_len=kv_len, head_dim=64, mask="plane"))
    visible = torch.ones(2, 1, 2, kv_len, dtype=torch.bool)
    where = {"first part": (..., slice(512)), "last part": (..., slice(500, None)), "one sequence": (0,)}[hidden]
    visible[where] = False
    inputs.options["mask"] = visible
    clean = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    check(inputs, clean)
    for x in (inputs.key, inputs.value):
        x.masked_fill_(~visible[:, :, 0, :, None], math.nan)
    found = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    for a, b in zip(found, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", isa_every(4, benchmark("core")), ids=lambda case: case.name)
def test_values_of_the_benchmark(case):
    inputs = make(case, seed=1)
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", isa_every(4, DTYPES))
def test_values_at_tile_boundaries(length, causal, dtype):
    case = Case("boundary", batch=1, heads=1, q_len=length, kv_len=length, causal=causal, need_weights=length % 2 == 0)
    inputs = make(case, DTYPES[dtype])
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("row", COMBINATIONS[::16], ids=row_id)
@pytest.mark.parametrize("tile", TILE_SIZES, ids=str)
def test_values_of_tile_sizes(row, tile, set_tile_size):
    set_tile_size(*tile)
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=1)
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("q_len, kv_len", [(1, 600), (600, 1), (65, 513), (300, 65), (64, 2000), (257, 129)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_values_of_cross_attention(q_len, kv_len, causal):
    inputs = make(Case("cross", batch=1, q_len=q_len, kv_len=kv_len, causal=causal, head_dim=32, need_weights=True))
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 17, 31, 33, 48, 80, 128, 200, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_head_sizes(head_dim, dtype):
    inputs = make(
        Case("size", batch=1, q_len=20, kv_len=70, head_dim=head_dim, value_dim=257 - head_dim), DTYPES[dtype]
    )
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


# --- Plain facts --------------------------------------------------------------------------------------------------


def test_defaults_are_plain_attention():
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 9, 9))
    output, weights, logsumexp = attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output, expected)
    assert weights.shape == (0,)
    torch.testing.assert_close(logsumexp, (q @ k.transpose(-2, -1) / 4).logsumexp(-1))


def test_bits_do_not_depend_on_grad_mode():
    inputs = make(Case("plain", q_len=70, kv_len=90, need_weights=True, mask="plane"))
    arguments = (inputs.query, inputs.key, inputs.value)
    with torch.no_grad():
        expected = attention(*arguments, **inputs.options)
    with torch.inference_mode():
        inferred = attention(*arguments, **inputs.options)
    inputs.requires_grad_()
    tracked = attention(*arguments, **inputs.options)
    for a, b, c in zip(expected, inferred, tracked, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_inputs_are_left_alone():
    inputs = make(Case("plain", mask="plane", bias="full", key_lengths=True, dropout_p=0.3))
    tensors = [inputs.query, inputs.key, inputs.value, *(x for x in inputs.options.values() if torch.is_tensor(x))]
    before = [x.clone() for x in tensors]
    attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("batch, heads, q_len, kv_len", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_sizes(batch, heads, q_len, kv_len, uniform, dtype):
    case = Case("empty", batch, heads, q_len, kv_len, need_weights=True, uniform_dead_rows=uniform)
    inputs = make(case, DTYPES[dtype])
    for results in (
        attention(inputs.query, inputs.key, inputs.value, **inputs.options),
        composite(attention, inputs.query, inputs.key, inputs.value, **inputs.options),
    ):
        check_form(inputs, results)
        assert (results[0] == 0).all() and (results[2] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stride", [1, 2, 0])
def test_key_lengths_of_any_integer_dtype_and_stride(dtype, stride):
    inputs = make(Case("lengths", batch=3, q_len=4, kv_len=9, need_weights=True))
    values = torch.tensor([4, -99, 0, 1000, 9, 7], dtype=dtype)
    lengths = values[:1].expand(3) if stride == 0 else values[::2] if stride == 2 else values[::2].contiguous()
    inputs.options["key_lengths"] = lengths
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


def test_key_lengths_equal_shorter_keys():
    inputs = make(Case("lengths", q_len=65, kv_len=300))
    q, k, v = inputs.query, inputs.key, inputs.value
    for length in (0, 1, 64, 255, 256, 257, 300):
        output, _, logsumexp = attention(q, k, v, key_lengths=torch.tensor([length, length]))
        shorter = attention(q, k[:, :, :length], v[:, :, :length])
        torch.testing.assert_close(output, shorter[0])
        torch.testing.assert_close(logsumexp, shorter[2])


# --- Dead rows, NaN, infinity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kv_len", [5, 300])
def test_dead_rows(hide, uniform, kv_len):
    q_len = kv_len + 3
    inputs = make(Case("dead", heads=1, q_len=q_len, kv_len=kv_len, need_weights=True, uniform_dead_rows=uniform))
    dead = torch.zeros(2, 1, q_len, dtype=torch.bool)
    if hide == "causal":
        inputs.options.update(is_causal=True, causal_bottom_right=True)
        dead[:, :, :3] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.tensor([0, kv_len])
        dead[0] = True
    else:
        dead[:, :, 2] = True
        mask = ~dead[:1, :1, :, None].expand(1, 1, q_len, kv_len)
        inputs.options[hide] = mask if hide == "mask" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    check(inputs, results)
    output, weights, logsumexp = (x.movedim(2, 1)[dead[:, 0]] for x in results)  # (dead rows, H, ...)
    assert (logsumexp == -math.inf).all()
    if not uniform:
        assert (output == 0).all() and (weights == 0).all()
    else:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / kv_len))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("q_len, kv_len", [(5, 6), (5, 300), (70, 161), (70, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "average_weights": True}], ids=["plain", "capped"])
def test_nothing_leaks_from_behind_a_mask(bad, hide, q_len, kv_len, dtype, options):
    inputs = make(Case("hidden", q_len=q_len, kv_len=kv_len, need_weights=True, **options), DTYPES[dtype])
    hidden = torch.zeros(kv_len, dtype=torch.bool)
    hidden[q_len if hide == "causal" else kv_len // 2 :] = True
    if hide == "causal":
        inputs.options["is_causal"] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.full((2,), kv_len // 2)
    elif hide == "mask":
        inputs.options["mask"] = ~hidden
    else:
        inputs.options["bias"] = torch.zeros(kv_len, dtype=DTYPES[dtype]).masked_fill(hidden, -math.inf)
    clean = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    inputs.key[:, :, hidden] = bad
    inputs.value[:, :, hidden] = bad
    if hide == "mask":  # a bias behind a mask is hidden as well
        inputs.options["bias"] = torch.zeros(kv_len, dtype=DTYPES[dtype]).masked_fill(hidden, bad)
    for found, expected in zip(attention(inputs.query, inputs.key, inputs.value, **inputs.options), clean, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(
        composite(attention, inputs.query, inputs.key, inputs.value, **inputs.options), clean, strict=True
    ):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("kv_len", [6, 300])
def test_a_live_nan_stays(where, kv_len):
    inputs = make(Case("live", q_len=70, kv_len=kv_len, need_weights=True, causal="top_left", bias="full"))
    tensor = inputs.leaves()[where]
    tensor[0, 1, 3, 2] = math.nan
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.isa
@pytest.mark.parametrize("kv_heads", [1, 100], ids=["packed", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capped_scores_of_every_size(dtype, kv_heads):
    """With one key the log-sum-exp is its score: c tanh(s / c), exact to a few units where s is tiny or huge."""
    scores = torch.cat([torch.logspace(-12, 4, 400, dtype=torch.float64), torch.linspace(0, 30, 400).double()])
    scores = torch.cat([scores, -scores]).to(dtype)
    q, one = scores.reshape(1, 1, -1, 1), torch.ones(1, 1, 1, 1, dtype=dtype)
    if kv_heads == 100:
        q = scores.reshape(1, 100, -1, 1)
        one = one.expand(1, 100, 1, 1)
    _, _, found = attention(q, one, one, softcap=3.0, scale=1.0)
    expected = 3 * torch.tanh(scores.double() / 3)
    error = (found.flatten().double() - expected).abs() / expected.abs().clamp_min(1e-300)
    assert error[expected != 0].max() < 8 * torch.finfo(dtype).eps


# --- Numbers that are hard on a softmax ---------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "spike"])
def test_scores_of_very_different_size(dtype, order):
    """The running maximum changes in every key tile, or never again after the first."""
    kv_len = 700
    inputs = make(Case("hard", batch=1, q_len=9, kv_len=kv_len, head_dim=4, need_weights=True), DTYPES[dtype])
    slope = torch.linspace(-200, 200, kv_len)
    if order == "falling":
        slope = slope.flip(0)
    elif order == "spike":
        slope = torch.full((kv_len,), -200.0)
        slope[513] = 200
    inputs.options["bias"] = slope
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.5, 100.0])
def test_any_scale(scale):
    inputs = make(Case("scale", q_len=5, kv_len=70, scale=scale, need_weights=True))
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("bias_dtype", DTYPES.values())
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_bias_in_its_own_precision(dtype, bias_dtype):
    inputs = make(Case("bias", q_len=5, kv_len=70, need_weights=True), dtype)
    # 1000 + j / 64 needs more bits than bfloat16 has: rounding it would show in the weights.
    inputs.options["bias"] = (1000 + torch.arange(70) / 64).to(bias_dtype)
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    exact = reference.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    accumulate = torch.promote_types(dtype, torch.float32)
    # In the accumulating dtype a score of 1000 has an absolute error of 1000 eps, a weight that relative error.
    slack = 1e4 * torch.finfo(accumulate).eps + torch.finfo(dtype).eps
    torch.testing.assert_close(results[1].double(), exact.weights, rtol=slack, atol=slack * exact.weights.max().item())


# --- Dropout ------------------------------------------------------------------------------------------------------


def dropped(dropout_p: float, seed: int, batch=2, heads=3, q_len=70, kv_len=130, dtype=torch.float32, **options):
    """Weights (B, H, Lq, Lk) of equal scores under dropout: 0 or 1 / (Lk (1 - p))."""
    q, k, v = (torch.zeros(batch, heads, n, 4, dtype=dtype) for n in (q_len, kv_len, kv_len))
    options = dict(dropout_p=dropout_p, need_weights=True, seed=torch.tensor(seed), **options)
    return attention(q, k, v, **options)[1]


@pytest.mark.parametrize("dropout_p", isa_every(3, [1e-9, 0.1, 0.5, 0.9, 1 - 1e-12]))
@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), 2**32])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_dropout_bits(dropout_p, seed, threads):
    torch.set_num_threads(threads)
    weights = dropped(dropout_p, seed)
    kept = torch.from_numpy(reference.keep_mask(seed, tuple(weights.shape), dropout_p))
    assert torch.equal(weights != 0, kept)
    if kept.any():
        expected = torch.full_like(weights[kept], 1 / (130 * (1 - dropout_p)))
        torch.testing.assert_close(weights[kept], expected)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_dropout_bits_of_every_dtype_and_kernel(dtype):
    kept = torch.from_numpy(reference.keep_mask(5, (2, 3, 70, 130), 0.3))
    assert torch.equal(dropped(0.3, 5, dtype=dtype) != 0, kept)
    q, k, v = (torch.zeros(2, 3, n, 4, dtype=dtype) for n in (70, 130, 130))
    weights = composite(attention, q, k, v, dropout_p=0.3, need_weights=True, seed=torch.tensor(5))[1]
    assert torch.equal(weights != 0, kept)


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.9])
def test_dropout_rate(dropout_p):
    """The share of kept weights is 1 - p, within 5 standard deviations: in all, per head, per row, per column."""
    kept = (dropped(dropout_p, 3, q_len=200, kv_len=300) != 0).double()
    for dims in [(0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2)]:
        count = math.prod(kept.shape[d] for d in dims)
        worst = (kept.mean(dims) - (1 - dropout_p)).abs().max().item()
        assert worst < 5 * math.sqrt(dropout_p * (1 - dropout_p) / count)


def test_dropout_differs_between_seeds_batches_heads_and_rows():
    one, two = (dropped(0.5, seed) != 0 for seed in (1, 2))
    # Independent halves agree in half of the places.
    pairs = [(one, two), (one[0], one[1]), (one[:, 0], one[:, 1]), (one[..., 0, :], one[..., 1, :])]
    pairs += [(one, dropped(0.5, 1 + 2**32) != 0)]  # only the high half of the seed differs
    for a, b in pairs:
        share = (a == b).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


def test_dropout_bits_depend_on_the_place_alone():
    """Not on lengths, the number of heads or batches, masks or what the tensors hold."""
    expected = dropped(0.4, 9) != 0
    assert torch.equal(dropped(0.4, 9, batch=1, heads=2, q_len=65, kv_len=129) != 0, expected[:1, :2, :65, :129])
    masked = dropped(0.4, 9, mask=torch.arange(130) % 2 == 0) != 0
    assert torch.equal(masked[..., ::2], expected[..., ::2])


def test_dropout_of_all_and_of_nothing():
    inputs = make(Case("all", q_len=5, kv_len=70, dropout_p=1.0, need_weights=True, uniform_dead_rows=True))
    output, weights, logsumexp = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    assert (output == 0).all() and (weights == 0).all() and logsumexp.isfinite().all()
    inputs.options.update(dropout_p=0.0)
    check(inputs, attention(inputs.query, inputs.key, inputs.value, **inputs.options))


@pytest.mark.parametrize("track", [False, True])
def test_dropout_seed_comes_from_the_default_generator(track):
    x = torch.randn(1, 2, 8, 4, requires_grad=track)

    def run(dropout_p=0.5):
        return attention(x, x, x, dropout_p=dropout_p)[0].detach()

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first) and torch.equal(run(), second)
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    run(dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn when nothing is dropped


def test_given_seed_draws_nothing():
    x = torch.randn(1, 2, 8, 4)
    before = torch.get_rng_state()
    attention(x, x, x, dropout_p=0.5, seed=torch.tensor(3))
    attention(x, x, x, dropout_p=0.5, seed=torch.tensor([3]))
    assert torch.equal(torch.get_rng_state(), before)


def test_oracle_of_dropout_is_numpy_independent():
    """One row of the operator's bits against plain Python integers."""
    weights = dropped(0.35, -12345)
    expected = [reference.keep_one(-12345, 1, 2, 66, k, 0.35) for k in range(130)]
    assert np.array_equal((weights[1, 2, 66] != 0).numpy(), expected)
