"""Hostile input: any argument wrong gets a ValueError or TypeError `op: expected RULE, got VALUE`, no crash."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mha_ext
from tests.checks import composite

ops = torch.ops.mha_ext
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, VALUE_DIM = 2, 4, 2, 3, 5, 8, 6


def attention_arguments() -> dict[str, Any]:
    return {
        "query": torch.randn(BATCH, HEADS, Q_LEN, DIM),
        "key": torch.randn(BATCH, KV_HEADS, KV_LEN, DIM),
        "value": torch.randn(BATCH, KV_HEADS, KV_LEN, VALUE_DIM),
        "mask": torch.ones(Q_LEN, KV_LEN, dtype=torch.bool),
        "bias": torch.randn(HEADS, 1, KV_LEN),
        "key_lengths": torch.tensor([2, 5]),
        "seed": torch.tensor(1),
        "dropout_p": 0.5,
        "need_weights": True,
    }


def attention_backward_arguments() -> dict[str, Any]:
    arguments = attention_arguments()
    output, weights, logsumexp = ops.attention(**arguments)
    del arguments["need_weights"]
    results = {"output": output, "weights": weights, "logsumexp": logsumexp}
    incoming = {f"grad_{name}": torch.randn_like(result) for name, result in results.items()}
    return {**arguments, **results, **incoming, "need_bias_grad": True}


EMBED, KEY_EMBED, VALUE_EMBED, OUT = 7, 9, 11, 10


def layer_arguments() -> dict[str, Any]:
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * VALUE_DIM, "o": OUT}
    inputs = {"q": EMBED, "k": KEY_EMBED, "v": VALUE_EMBED, "o": HEADS * VALUE_DIM}
    shared = attention_arguments()
    return {
        **{name: shared[name] for name in ("mask", "bias", "key_lengths", "seed", "dropout_p")},
        "query": torch.randn(BATCH, Q_LEN, EMBED),
        "key": torch.randn(BATCH, KV_LEN, KEY_EMBED),
        "value": torch.randn(BATCH, KV_LEN, VALUE_EMBED),
        **{f"w_{x}": torch.randn(sizes[x], inputs[x]) for x in sizes},
        **{f"b_{x}": torch.randn(sizes[x]) for x in sizes},
        "num_heads": HEADS,
    }


def layer_backward_arguments() -> dict[str, Any]:
    arguments = layer_arguments()
    output, weights, q, k, v, context, logsumexp = ops.multi_head_attention_forward(**arguments)
    saved = {"q": q, "k": k, "v": v, "context": context, "weights": weights, "logsumexp": logsumexp}
    incoming = {"grad_output": torch.randn_like(output), "grad_weights": torch.randn_like(weights)}
    return {**arguments, **saved, **incoming, "output_mask": [True] * 12}


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": attention_arguments,
    "attention_backward": attention_backward_arguments,
    "multi_head_attention": layer_arguments,
    "multi_head_attention_forward": layer_arguments,
    "multi_head_attention_backward": layer_backward_arguments,
}


# The name that an operator's errors begin with: the layer's forward is part of multi_head_attention, which calls it.
SPEAKS_AS = {op: op.removesuffix("_forward") for op in ARGUMENTS}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_arguments_as_they_are_are_right(op):
    getattr(ops, op)(**ARGUMENTS[op]())


# --- One tensor wrong in one way ----------------------------------------------------------------------------------

# Ways to spoil a tensor; those that fail are none for the tensor in question.
WRONG_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "one dimension more": lambda x: x.expand(2, *x.shape),
    "five dimensions": lambda x: x.reshape((1,) * (5 - x.dim()) + x.shape),
    "one dimension less": lambda x: x[0],
    "scalar": lambda x: x.flatten()[0],
    "first size": lambda x: torch.cat([x, x, x]),
    "second size": lambda x: torch.cat([x, x, x], 1),
    "last size": lambda x: torch.cat([x, x, x], -1),
    "last size off by one": lambda x: torch.cat([x, x[..., :1]], -1),
    "last size empty": lambda x: x[..., :0],
    "float": lambda x: x.float() if x.dtype == torch.float16 else x.half(),
    "integer": lambda x: x.to(torch.int16),
    "bool": lambda x: x != 0,
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: torch.eye(3).to_sparse_csr(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "jagged": lambda x: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "oneDNN": lambda x: x.float().to_mkldnn(),
    "other device": lambda x: x.to("meta"),
}
WRONG_DTYPES = {"float", "integer", "bool", "complex", "float8"}

# What is right all the same.
ALLOWED = {
    ("mask", "bool"),
    ("mask", "one dimension less"),
    ("mask", "scalar"),
    ("bias", "float"),
    ("bias", "one dimension more"),
    ("bias", "second size"),  # by chance Lq
    ("bias", "one dimension less"),
    ("bias", "scalar"),
    ("seed", "scalar"),
    ("seed", "five dimensions"),
    ("attention", "value", "last size"),
    ("attention", "value", "last size off by one"),
}

TENSOR_ARGUMENTS = {
    op: [name for name, value in make().items() if torch.is_tensor(value)]
    for op, make in {"attention": attention_arguments, "multi_head_attention": layer_arguments}.items()
}
TENSOR_ARGUMENTS["attention_backward"] = TENSOR_ARGUMENTS["attention"] + [
    "output",
    "weights",
    "logsumexp",
    "grad_output",
    "grad_weights",
    "grad_logsumexp",
]
TENSOR_ARGUMENTS["multi_head_attention_forward"] = TENSOR_ARGUMENTS["multi_head_attention"]
TENSOR_ARGUMENTS["multi_head_attention_backward"] = TENSOR_ARGUMENTS["multi_head_attention"] + [
    "q",
    "k",
    "v",
    "context",
    "weights",
    "logsumexp",
    "grad_output",
    "grad_weights",
]


@pytest.mark.parametrize("op, name", [(op, name) for op, names in TENSOR_ARGUMENTS.items() for name in names])
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_tensor(op, name):
    for way, spoil in WRONG_TENSORS.items():
        arguments = ARGUMENTS[op]()
        if (name, way) in ALLOWED or (op, name, way) in ALLOWED:
            continue
        try:
            arguments[name] = spoil(arguments[name])
        except (RuntimeError, IndexError):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"{SPEAKS_AS[op]}: expected ") as caught:
            getattr(ops, op)(**arguments)
        text = str(caught.value)
        assert ", got " in text and "\n" not in text, (way, text)
        if way in WRONG_DTYPES:
            assert caught.type is TypeError, (way, text)
        elif "size" in way or "dimension" in way:
            assert caught.type is ValueError, (way, text)


@pytest.mark.parametrize(
    "op", ["attention", "multi_head_attention", "attention_backward", "multi_head_attention_backward"]
)
@pytest.mark.parametrize(
    "name, value, error",
    [
        ("dropout_p", -0.1, ValueError),
        ("dropout_p", 1.5, ValueError),
        ("dropout_p", math.nan, ValueError),
        ("dropout_p", math.inf, ValueError),
        ("softcap", 0.0, ValueError),
        ("softcap", -1.0, ValueError),
        ("softcap", math.nan, ValueError),
        ("softcap", math.inf, ValueError),
        ("softcap", 1e-40, ValueError),
        ("softcap", 1e39, ValueError),
        ("mask", torch.ones(2, Q_LEN, KV_LEN, dtype=torch.bool), ValueError),
        ("mask", torch.ones(KV_LEN, Q_LEN, dtype=torch.bool), ValueError),
        ("mask", torch.ones(0, dtype=torch.bool), ValueError),
        ("bias", torch.ones(1, BATCH, 1, 1), ValueError),
        ("bias", torch.ones(Q_LEN + 1, KV_LEN), ValueError),
        ("seed", torch.tensor([1, 2]), ValueError),
        ("seed", torch.zeros(0, dtype=torch.int64), ValueError),
        ("key_lengths", torch.tensor([1, KV_LEN + 1]), ValueError),
        ("key_lengths", torch.tensor([-1, 1]), ValueError),
        ("key_lengths", torch.tensor([-(2**63), 2**63 - 1]), ValueError),
        ("key_lengths", torch.tensor([2**31 - 1, 1], dtype=torch.int32), ValueError),
        ("key_lengths", torch.tensor([[1, 1]]), ValueError),
        ("key_lengths", torch.tensor([1]), ValueError),
        ("key_lengths", torch.tensor(1), ValueError),
        ("causal_bottom_right", True, ValueError),
    ],
)
def test_a_wrong_option(op, name, value, error):
    arguments = {**ARGUMENTS[op](), name: value}
    with pytest.raises(error, match=rf"{SPEAKS_AS[op]}: expected .*{name}.*, got "):
        getattr(ops, op)(**arguments)


@pytest.mark.parametrize("length", [-1, KV_LEN + 1])
def test_a_wrong_length_is_named(length):
    arguments = {**attention_arguments(), "key_lengths": torch.tensor([2, length])}
    for run in (ops.attention, lambda **options: composite(ops.attention, **options)):
        with pytest.raises(ValueError, match=rf"key_lengths .*{length}"):
            run(**arguments)


@pytest.mark.parametrize("heads, kv_heads", [(3, 2), (2, 4), (4, 3), (4, 0), (1, 2)], ids=lambda heads: str(heads))
def test_heads_that_do_not_divide(heads, kv_heads):
    q, k = torch.randn(1, heads, 3, 4), torch.randn(1, kv_heads, 3, 4)
    with pytest.raises(ValueError, match="attention: expected .*multiple"):
        ops.attention(q, k, k)


@pytest.mark.parametrize("num_heads", [0, -1, -(2**63), 3, 5, 64, 2**62])
@pytest.mark.parametrize(
    "op", ["multi_head_attention", "multi_head_attention_forward", "multi_head_attention_backward"]
)
def test_a_wrong_number_of_heads(op, num_heads):
    with pytest.raises(ValueError, match=rf"{SPEAKS_AS[op]}: expected "):
        getattr(ops, op)(**{**ARGUMENTS[op](), "num_heads": num_heads})


@pytest.mark.parametrize("size", [0, -16, 8, 17, 2**62 + 1])
@pytest.mark.parametrize("which", range(4))
def test_a_wrong_tile_size(size, which):
    before = mha_ext._C.tile_size()
    sizes = list(before)
    sizes[which] = size
    with pytest.raises(ValueError, match="expected"):
        mha_ext._C.set_tile_size(*sizes)
    assert mha_ext._C.tile_size() == before


def test_head_size_zero():
    x = torch.randn(1, 2, 3, 0)
    with pytest.raises(ValueError, match="attention: expected head size >= 1"):
        ops.attention(x, x, x)


def test_backward_needs_the_seed_of_the_forward():
    for op in ("attention_backward", "multi_head_attention_backward"):
        arguments = ARGUMENTS[op]()
        arguments["seed"] = None
        with pytest.raises(ValueError, match=rf"{SPEAKS_AS[op]}: expected .*seed"):
            getattr(ops, op)(**arguments)


def test_backward_needs_a_bias_for_its_gradient():
    arguments = attention_backward_arguments()
    arguments["bias"] = None
    with pytest.raises(ValueError, match="attention_backward: expected .*bias"):
        ops.attention_backward(**arguments)
    arguments = layer_backward_arguments()
    arguments["b_q"] = None
    with pytest.raises(ValueError, match="multi_head_attention_backward: expected "):
        ops.multi_head_attention_backward(**arguments)


def test_self_attention_needs_one_shape():
    with pytest.raises(ValueError, match="multi_head_attention_backward: expected .*self_attention"):
        ops.multi_head_attention_backward(**layer_backward_arguments(), self_attention=True)


@pytest.mark.parametrize("length", [0, 11, 13])
def test_a_wrong_output_mask(length):
    with pytest.raises((ValueError, RuntimeError)):
        ops.multi_head_attention_backward(**{**layer_backward_arguments(), "output_mask": [True] * length})


def test_weights_that_do_not_belong_to_a_gradient():
    """A gradient for weights that the forward did not return is used all the same, or refused."""
    arguments = attention_backward_arguments()
    arguments["weights"] = torch.empty(0)
    try:
        results = ops.attention_backward(**arguments)
        assert all(x.isfinite().all() for x in results)
    except ValueError as error:
        assert "attention_backward: expected" in str(error)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_missing_arguments_are_type_errors_or_schema_errors(name):
    arguments = {**attention_arguments(), name: None}
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        ops.attention(**arguments)


def test_the_same_words_from_every_kernel():
    """CPU, fake, meta, composite; with and without autograd."""
    arguments = attention_arguments()
    arguments["key"] = torch.randn(BATCH, KV_HEADS, KV_LEN, DIM + 1)

    def message(call) -> str:
        with pytest.raises(ValueError, match="attention: expected ") as caught:
            call()
        return str(caught.value)

    expected = message(lambda: ops.attention(**arguments))
    assert message(lambda: composite(ops.attention, **arguments)) == expected
    tracked = {**arguments, "query": arguments["query"].requires_grad_()}
    assert message(lambda: ops.attention(**tracked)) == expected
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if torch.is_tensor(x) else x for name, x in arguments.items()}
        assert message(lambda: ops.attention(**fake)) == expected
    meta = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in arguments.items()}
    assert message(lambda: ops.attention(**meta)) == expected


# --- Anything at all ----------------------------------------------------------------------------------------------


def fits(query, key, value, mask, bias, key_lengths) -> bool:
    """Whether shapes are right, by the rules of the documentation."""
    if not (query.dim() == key.dim() == value.dim() == 4):
        return False
    batch, heads, q_len, head_dim = query.shape
    _, kv_heads, kv_len, value_dim = value.shape
    if key.shape != (batch, kv_heads, kv_len, head_dim) or value.shape[0] != batch:
        return False
    if head_dim < 1 or value_dim < 1 or (heads > 0 and (kv_heads == 0 or heads % kv_heads)):
        return False
    shape = (batch, heads, q_len, kv_len)
    for x in (mask, bias):
        if x is None:
            continue
        if x.dim() > 4 or any(n not in (1, m) for n, m in zip(reversed(x.shape), reversed(shape), strict=False)):
            return False
    return key_lengths is None or key_lengths.shape == (batch,)


def test_random_shapes_are_right_or_refused():
    """No crash, no silence: what fits gives finite results, what does not fit a clear error."""
    choice = random.Random(0)
    accepted = refused = 0
    for _ in range(3000):
        right = [choice.choice([0, 1, 2, 3]) for _ in range(3)]
        batch, kv_heads, q_len = right
        heads, kv_len = kv_heads * choice.choice([1, 2]), choice.choice([0, 1, 4])
        width, value_width = choice.choice([1, 4]), choice.choice([1, 3])
        shapes = {
            "query": [batch, heads, q_len, width],
            "key": [batch, kv_heads, kv_len, width],
            "value": [batch, kv_heads, kv_len, value_width],
            "mask": choice.choice([None, [q_len, kv_len], [batch, 1, 1, kv_len], [1]]),
            "bias": choice.choice([None, [heads, 1, kv_len], [q_len, 1], []]),
            "key_lengths": choice.choice([None, [batch]]),
        }
        if choice.random() < 0.6:  # spoil one number, or the number of dimensions
            shape = shapes[choice.choice([name for name in shapes if shapes[name] is not None])]
            if shape and choice.random() < 0.8:
                shape[choice.randrange(len(shape))] = choice.choice([0, 1, 2, 3, 5])
            else:
                shape.insert(0, choice.choice([0, 1, 2]))
        tensors = {name: None if shape is None else torch.randn(shape) for name, shape in shapes.items()}
        if tensors["mask"] is not None:
            tensors["mask"] = tensors["mask"] > 0
        if tensors["key_lengths"] is not None:
            tensors["key_lengths"] = torch.zeros(shapes["key_lengths"], dtype=torch.int64)
        if fits(**tensors):
            output, _, _ = ops.attention(**tensors)
            assert output.isfinite().all()
            accepted += 1
        else:
            with pytest.raises(ValueError, match="attention: expected .*, got "):
                ops.attention(**tensors)
            refused += 1
    assert accepted > 500 and refused > 500


@pytest.mark.parametrize("name", ["MHA_EXT_LINEAR", "MHA_EXT_TILE_PRODUCTS"])
def test_a_wrong_environment_variable(name):
    script = """
import torch, mha_ext
layer = mha_ext.MultiHeadAttention(64, 2)
x = torch.randn(1, 100, 64)
try:
    layer(x, x, x)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env={**os.environ, name: "foo"}, capture_output=True, text=True, timeout=300)
    assert ran.stdout.startswith(f"{name}: expected ") and "onednn" in ran.stdout and ", got foo" in ran.stdout, (
        ran.stderr
    )
    told = subprocess.run(
        [sys.executable, "-m", "mha_ext", "info"],
        env={**os.environ, name: "foo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 2 and told.stderr.count("\n") == 1 and f"{name}: expected " in told.stderr
