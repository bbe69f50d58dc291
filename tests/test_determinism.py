"""Equal bits, whatever the number of threads, the rest of the batch, and how often it is run."""

from __future__ import annotations

import math

import pytest
import torch

import mha_ext
from tests.cases import DTYPES, Case, make
from tests.checks import gradients_of

attention = torch.ops.mha_ext.attention

# Few heads and long rows (work is split inside of a head), many heads, grouped heads, a bias whose gradient is summed.
SHAPES = [
    Case("one head", batch=1, heads=1, q_len=700, kv_len=900, head_dim=16),
    Case("one query", batch=1, heads=2, q_len=1, kv_len=2000, head_dim=16),
    Case("one key block", batch=1, heads=2, q_len=1000, kv_len=20, head_dim=16),
    Case("decoding", batch=2, heads=4, kv_heads=1, q_len=1, kv_len=1600, head_dim=64, key_lengths=True),
    Case("many heads", batch=3, heads=5, q_len=70, kv_len=130, head_dim=8),
    Case("groups", batch=2, heads=6, kv_heads=2, q_len=130, kv_len=260, head_dim=8, value_dim=24, causal="top_left"),
    Case("dropout", batch=2, heads=3, q_len=150, kv_len=300, dropout_p=0.2, need_weights=True, mask="blocks"),
    Case("shared bias", batch=3, heads=4, q_len=130, kv_len=270, bias="plane", causal="bottom_right"),
    Case("bias row", batch=3, heads=4, q_len=130, kv_len=270, bias="keys", key_lengths=True, uniform_dead_rows=True),
    Case("mean weights", batch=2, heads=6, kv_heads=2, q_len=150, kv_len=300, need_weights=True, average_weights=True),
    Case("softcap", batch=1, heads=2, q_len=150, kv_len=300, softcap=1.0, causal="top_left"),
    Case("scalar bias", batch=3, heads=4, q_len=130, kv_len=270, bias="scalar"),
]
shapes = pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)


def run(inputs) -> dict[str, torch.Tensor]:
    """Results and gradients by name."""
    inputs.requires_grad_()
    results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    found = gradients_of(results, inputs, inputs.leaves())
    named = dict(zip(("output", "weights", "logsumexp"), (x.detach() for x in results), strict=True))
    return {**named, **{f"gradient of {name}": x for name, x in found.items()}}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert same_bits(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max():.3g}"


@shapes
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads(case, dtype):
    expected = None
    for threads in (1, 2, 3, 5, 2):
        torch.set_num_threads(threads)
        found = run(make(case, DTYPES[dtype]))
        expected = expected or found
        assert_same_bits(expected, found)


def test_small_tiles_of_few_rows_in_parts(set_tile_size):
    """However small the tile, the rows that share parts of the keys are put together once."""
    set_tile_size(16, 16, 64, 128)
    case = Case("few rows", batch=1, heads=1, q_len=24, kv_len=8192, head_dim=16)
    torch.set_num_threads(1)
    expected = run(make(case))
    torch.set_num_threads(2)
    for _ in range(10):
        assert_same_bits(expected, run(make(case)))


@shapes
def test_runs_after_one_another(case):
    torch.set_num_threads(2)
    expected = run(make(case))
    for _ in range(5):
        assert_same_bits(expected, run(make(case)))


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, length", [(1, 700), (4, 70), (4, 13)])
def test_a_batch_equals_its_members_alone(causal, dtype, heads, length):
    torch.set_num_threads(2)
    case = Case("batch", batch=3, heads=heads, q_len=length, kv_len=length, causal=causal, need_weights=True)
    together = run(make(case, DTYPES[dtype]))
    for i in range(3):
        inputs = make(case, DTYPES[dtype])
        for name in ("query", "key", "value", "grad_output", "grad_weights", "grad_logsumexp"):
            setattr(inputs, name, getattr(inputs, name)[i : i + 1].clone())
        assert_same_bits(run(inputs), {name: x[i : i + 1] for name, x in together.items()})


@pytest.mark.parametrize("case", [case for case in SHAPES if case.batch > 1], ids=lambda case: case.name)
def test_batch_mates_do_not_matter(case):
    """NaN everywhere else in the batch changes nothing (but in the gradient of a bias that all share)."""
    torch.set_num_threads(2)
    expected = run(make(case))
    inputs = make(case)
    for name in ("query", "key", "value", "grad_output"):
        getattr(inputs, name)[1:] = math.nan
    found = run(inputs)
    for name in ("output", "weights", "logsumexp", "gradient of query", "gradient of key", "gradient of value"):
        if expected[name].numel():
            assert same_bits(found[name][:1], expected[name][:1]), name


@pytest.mark.parametrize("later", [0.0, 1e4, math.nan])
def test_rows_do_not_depend_on_later_ones_under_a_causal_mask(later):
    """What comes later cannot be seen: numbers there change no bit of what is before, a NaN nothing that matters."""
    case = Case("causal", batch=1, q_len=300, kv_len=300, causal="top_left")
    expected = run(make(case))["output"]
    for cut in (1, 63, 64, 65, 128, 255, 256, 257, 299):
        inputs = make(case)
        for name in ("query", "key", "value"):
            getattr(inputs, name)[:, :, cut:] = later
        found = attention(inputs.query, inputs.key, inputs.value, **inputs.options)[0]
        if math.isnan(later):
            torch.testing.assert_close(found[:, :, :cut], expected[:, :, :cut])
        else:
            assert same_bits(found[:, :, :cut], expected[:, :, :cut])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("self_attention", [False, True])
def test_layer_with_any_number_of_threads(dtype, self_attention):
    module = mha_ext.MultiHeadAttention(64, 4).to(DTYPES[dtype])
    x, y = torch.randn(3, 70, 64).to(DTYPES[dtype]), torch.randn(3, 130, 64).to(DTYPES[dtype])
    y = x if self_attention else y
    expected = None
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        a = x.clone().requires_grad_()
        b = a if self_attention else y.clone().requires_grad_()
        output, weights = module(a, b, b)
        leaves = [a, *module.parameters()] if self_attention else [a, b, *module.parameters()]
        found = [output, weights, *torch.autograd.grad(output.sum() + weights.square().sum(), leaves)]
        expected = expected or found
        assert all(same_bits(p.detach(), q.detach()) for p, q in zip(found, expected, strict=True))
