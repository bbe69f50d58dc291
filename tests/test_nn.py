"""mha_ext.nn against torch's math path and the plain formula in float64; what it never bypasses; compilers."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch.fx.experimental.proxy_tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import prune as pruning
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mha_ext.nn
from mha_ext.nn.functional import multi_head_attention_forward
from tests import reference
from tests.cases import all_pairs, row_id
from tests.checks import assert_as_good_as_plain, plain_attention

E, HEADS, BATCH, LENGTH = 12, 3, 3, 7
INF = torch.inf


def plain_layer(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """What a layer means in ATen calls: all masks hide together, and a query that sees no key gets nothing."""
    batched, heads = query.dim() == 3, layer.num_heads

    def batch_first(x: Tensor) -> Tensor:
        return x.unsqueeze(0) if not batched else x if layer.batch_first else x.transpose(0, 1)

    packed = layer.in_proj_weight is not None
    matrices = (
        layer.in_proj_weight.chunk(3) if packed else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    )
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (F.linear(batch_first(x), w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True))
    batch, q_len, kv_len = q.size(0), q.size(1), k.size(1)

    hidden = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    added = torch.zeros(batch, heads, q_len, kv_len, dtype=q.dtype)
    if is_causal:
        hidden |= torch.ones(q_len, kv_len, dtype=torch.bool).triu(1)
    masks = []
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(batch, 1, 1, kv_len))
    if attn_mask is not None:
        masks.append(attn_mask.reshape(batch, heads, q_len, kv_len) if attn_mask.dim() == 3 else attn_mask)
    for mask in masks:
        if mask.dtype == torch.bool:
            hidden = hidden | mask
        else:
            added = added + mask
    for k_row, v_row in ((layer.bias_k, layer.bias_v), *([(torch.zeros(1, 1, E),) * 2] if layer.add_zero_attn else [])):
        if k_row is not None:
            k = torch.cat([k, k_row.to(k.dtype).expand(batch, 1, E)], 1)
            v = torch.cat([v, v_row.to(v.dtype).expand(batch, 1, E)], 1)
            hidden, added = F.pad(hidden, (0, 1)), F.pad(added, (0, 1))

    attended, weights, _ = plain_attention(
        *(reference.split_heads(x, heads) for x in (q, k, v)), mask=~hidden, bias=added
    )
    output = F.linear(reference.merge_heads(attended), layer.out_proj.weight, layer.out_proj.bias)
    weights = weights.mean(1) if average_attn_weights else weights
    if not batched:
        return output.squeeze(0), weights.squeeze(0)
    return (output if layer.batch_first else output.transpose(0, 1)), weights


def pair(*args, **options) -> tuple[mha_ext.nn.MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's layer with the same parameters, none of them 0."""
    ours, theirs = (module(*args, **options) for module in (mha_ext.nn.MultiheadAttention, nn.MultiheadAttention))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def results_and_gradients(
    run: Callable, layer: nn.Module, leaves: dict[str, Tensor], grads, **options
) -> dict[str, Tensor]:
    """Output, weights and the gradients of inputs, masks and parameters, by name, in the layer's dtype."""
    dtype = next(layer.parameters()).dtype
    tensors = {
        name: x.to(dtype).detach().requires_grad_() if x.is_floating_point() else x for name, x in leaves.items()
    }
    query = tensors["query"]
    key = tensors.get("key", query)
    masks = {name: x for name, x in tensors.items() if name.endswith("mask")}
    results = [y for y in run(query, key, tensors.get("value", key), **masks, **options) if y is not None]
    wanted = {**{n: x for n, x in tensors.items() if x.requires_grad}, **dict(layer.named_parameters())}
    grads = [grad.to(dtype) for grad in grads][: len(results)]
    found = torch.autograd.grad(results, list(wanted.values()), grads, allow_unused=True, materialize_grads=True)
    return dict(zip(["output", "weights"][: len(results)] + list(wanted), [*results, *found], strict=True))


# --- Against torch and the plain formula --------------------------------------------------------------------------


def padding_of(kind: str, batch: int, kv_len: int) -> Tensor | None:
    hidden = torch.rand(batch, kv_len) < 0.4
    hidden[:, 1] = False
    ends = torch.arange(kv_len) >= torch.tensor([[kv_len - 2], [kv_len], [kv_len // 2]])[:batch]
    masks = {
        "none": lambda: None,
        "right": lambda: ends,
        "left": lambda: ends.flip(1),
        "scattered": lambda: hidden,
        "everything": lambda: hidden | (torch.arange(batch) == batch - 1).unsqueeze(1),
        "added": lambda: torch.randn(batch, kv_len),
        "added right": lambda: torch.zeros(batch, kv_len).masked_fill(ends, -INF),
        "added scattered": lambda: torch.zeros(batch, kv_len).masked_fill(hidden, -INF),
    }
    return masks[kind]()


def pairs_of(kind: str, batch: int, q_len: int, kv_len: int) -> Tensor | None:
    full = (batch * HEADS, q_len, kv_len)
    hidden = torch.rand(full) < 0.4
    hidden[:, torch.arange(q_len), torch.arange(q_len) % 2] = False
    masks = {
        "none": lambda: None,
        "2-D": lambda: hidden[0],
        "3-D": lambda: hidden,
        "2-D added": lambda: torch.randn(q_len, kv_len),
        "3-D added": lambda: torch.randn(full).masked_fill(hidden, -INF),
        "dead rows": lambda: hidden[0] | (torch.arange(q_len) % 3 == 1).unsqueeze(1),
        "dead heads": lambda: hidden | (torch.arange(batch * HEADS) % 3 == 1)[:, None, None],
    }
    return masks[kind]()


GRID = all_pairs(
    dtype=[torch.float32, torch.float64],
    layout=["batch_first", "length_first", "unbatched"],
    inputs=["self", "memory", "distinct"],
    sizes=[None, (5, 8)],
    bias=[True, False],
    add_bias_kv=[False, True],
    add_zero_attn=[False, True],
    padding=["none", "right", "left", "scattered", "everything", "added", "added right", "added scattered"],
    pairs=["none", "2-D", "3-D", "2-D added", "3-D added", "dead rows", "dead heads"],
    is_causal=[False, True],
    weights=["mean", "heads", "none"],
    training=[True, False],
)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_as_good_as_the_plain_formula(row):
    """Values and gradients; where every query sees a key, the exact result is torch's own in float64."""
    inputs, sizes = row["inputs"], row["sizes"] or (None, None)
    if inputs != "distinct" and row["sizes"]:
        inputs = "distinct"
    batch, q_len = 1 if row["layout"] == "unbatched" else BATCH, LENGTH
    kv_len = q_len if inputs == "self" else q_len + 2
    names = ("add_bias_kv", "add_zero_attn", "bias")
    options = {**{name: row[name] for name in names}, "kdim": sizes[0], "vdim": sizes[1]}
    ours, theirs = pair(E, HEADS, batch_first=row["layout"] == "batch_first", dtype=row["dtype"], **options)
    for layer in (ours, theirs):
        layer.train(row["training"])

    def lay(x: Tensor) -> Tensor:
        return {"batch_first": x, "length_first": x.transpose(0, 1), "unbatched": x[0]}[row["layout"]]

    leaves = {"query": lay(torch.randn(batch, q_len, E))}
    if inputs != "self":
        leaves["key"] = lay(torch.randn(batch, kv_len, sizes[0] or E))
    if inputs == "distinct":
        leaves["value"] = lay(torch.randn(batch, kv_len, sizes[1] or E))
    padding, pairs = padding_of(row["padding"], batch, kv_len), pairs_of(row["pairs"], batch, q_len, kv_len)
    if padding is not None:
        leaves["key_padding_mask"] = padding[0] if row["layout"] == "unbatched" else padding
    if pairs is not None:
        leaves["attn_mask"] = pairs

    keywords = {"average_attn_weights": row["weights"] != "heads", "is_causal": row["is_causal"]}
    columns = kv_len + row["add_bias_kv"] + row["add_zero_attn"]
    weight_shape = (batch, HEADS, q_len, columns) if row["weights"] == "heads" else (batch, q_len, columns)
    grads = [lay(torch.randn(batch, q_len, E)), torch.randn(weight_shape)[0 if row["layout"] == "unbatched" else ...]]
    if row["weights"] == "none":
        grads[1].zero_()

    layer64 = copy.deepcopy(theirs).double()
    exact = results_and_gradients(lambda *a, **k: plain_layer(layer64, *a, **k), layer64, leaves, grads, **keywords)
    plain = results_and_gradients(lambda *a, **k: plain_layer(theirs, *a, **k), theirs, leaves, grads, **keywords)
    found = results_and_gradients(ours, ours, leaves, grads, need_weights=row["weights"] != "none", **keywords)
    assert found.keys() | {"weights"} == exact.keys()
    for name in found:
        if row["dtype"] == torch.float64:  # the plain formula's own
            torch.testing.assert_close(found[name], exact[name], rtol=1e-10, atol=1e-10)
        else:
            assert_as_good_as_plain(found[name], plain[name], exact[name], what=name)
    if (exact["weights"].sum(-1) > 1e-9).all() and row["pairs"] != "dead heads":
        assert_exact_is_torchs(exact, layer64, leaves, grads, keywords)


def assert_exact_is_torchs(
    exact: dict, layer: nn.MultiheadAttention, leaves: dict, grads: list, keywords: dict
) -> None:
    """torch's layer takes is_causal as a remark about attn_mask, so it gets one that says the same."""
    leaves, keywords = dict(leaves), dict(keywords)
    if keywords.pop("is_causal"):
        query, key = leaves["query"], leaves.get("key", leaves["query"])
        lengths = [x.size(1 if layer.batch_first and x.dim() == 3 else 0) for x in (query, key)]
        causal = torch.ones(*lengths, dtype=torch.bool).triu(1)
        mask = leaves.get("attn_mask", torch.zeros(lengths, dtype=torch.bool))
        leaves["attn_mask"] = mask | causal if mask.dtype == torch.bool else mask.masked_fill(causal, -INF)
    theirs = results_and_gradients(layer, layer, leaves, grads, **keywords)
    for name in exact.keys() & theirs.keys():
        torch.testing.assert_close(exact[name], theirs[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("static, kv_len", [(("k",), 4), (("v",), 4), (("k", "v"), 4), (("k", "v"), 6)], ids=str)
@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_static_keys_and_values(static, kv_len, add_zero_attn, padded):
    _, layer = pair(E, HEADS, dtype=torch.float64)
    q, k = (torch.randn(n, BATCH, E, dtype=torch.float64, requires_grad=True) for n in (LENGTH, 4))
    rows = {f"static_{x}": torch.randn(BATCH * HEADS, kv_len, E // HEADS).double().requires_grad_() for x in static}
    padding = torch.arange(kv_len) >= torch.tensor([[2], [4], [3]]) if padded else None

    def run(function):
        parameters = (layer.in_proj_weight, layer.in_proj_bias, None, None, add_zero_attn, 0.0)
        out_proj = (layer.out_proj.weight, layer.out_proj.bias)
        output, weights = function(q, k, k, E, HEADS, *parameters, *out_proj, key_padding_mask=padding, **rows)
        leaves = [q, k, *rows.values(), *layer.parameters()]
        loss = output.square().sum() + weights.square().sum()
        return output, weights, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    for ours, theirs in zip(run(multi_head_attention_forward), run(F.multi_head_attention_forward), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_masks_of_four_dimensions():
    layer, _ = pair(E, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, E)
    for shape in ((BATCH, 1, LENGTH, LENGTH), (1, HEADS, LENGTH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)):
        hidden = torch.rand(shape) < 0.5
        for mask in (hidden, torch.randn(shape).masked_fill(hidden, -INF)):
            full = mask.expand(BATCH, HEADS, LENGTH, LENGTH).reshape(-1, LENGTH, LENGTH)
            for a, b in zip(layer(x, x, x, attn_mask=mask), layer(x, x, x, attn_mask=full), strict=True):
                assert torch.equal(a, b)


class Results(TorchDispatchMode):
    """Notes which operators ran, and the number of elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.append(func)
        self.largest = max(self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0)
        return result


@pytest.mark.parametrize("options", [{}, {"need_weights": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("pairs", ["none", "2-D", "2-D added"])
@pytest.mark.parametrize("padding", ["right", "scattered", "added"])
def test_masks_are_not_repeated_for_each_head(padding, pairs, options):
    batch, heads, length = 3, 8, 40
    options = {"need_weights": False, **options}
    layer = mha_ext.nn.MultiheadAttention(8, heads, add_zero_attn=options.pop("add_zero_attn", False))
    x = torch.randn(length, batch, 8)
    masks = {
        "key_padding_mask": padding_of(padding, batch, length),
        "attn_mask": pairs_of(pairs, batch, length, length),
    }
    with torch.no_grad(), Results() as results:
        layer(x, x, x, **masks, **options)
    assert results.largest <= batch * length * (length + 1)


@pytest.mark.parametrize("add_zero_attn", [False, True])
def test_is_causal_takes_no_mask(add_zero_attn):
    length = 100
    layer = mha_ext.nn.MultiheadAttention(4, 2, add_zero_attn=add_zero_attn)
    x = torch.randn(length, 1, 4)
    with torch.no_grad(), Results() as results:
        layer(x, x, x, torch.arange(length).unsqueeze(0) > 50, is_causal=True, need_weights=False)
    assert results.largest < length * length / 4


def test_self_attention_copies_its_input_once():
    layer, x = mha_ext.nn.MultiheadAttention(4, 2), torch.randn(3, 2, 4)
    with torch.no_grad(), Results() as results:
        layer(x, x, x)
    assert results.operators.count(torch.ops.aten.clone.default) == 2  # the input and the output
    assert results.operators.count(torch.ops.mha_ext.multi_head_attention.default) == 1


@pytest.mark.parametrize("kind", ["right", "left", "scattered", "added", "added right", "added scattered"])
def test_padding_at_the_ends_becomes_lengths(kind):
    padding = padding_of(kind, BATCH, LENGTH)
    mask, lengths = mha_ext.nn.functional._as_key_lengths(padding[:, None, None])
    if kind.endswith("right"):
        assert mask is None and lengths.tolist() == (padding == 0).sum(1).tolist()
    else:
        assert lengths is None and mask.dtype == (torch.float32 if kind == "added" else torch.bool)


@pytest.mark.parametrize("kind", ["right", "added right", "added scattered"])
def test_the_values_of_masks_decide_about_speed_only(kind):
    """Where they may not be read, inside a dispatch mode among others, nothing else comes out."""
    layer, _ = pair(E, HEADS)
    x, padding = torch.randn(LENGTH, BATCH, E), padding_of(kind, BATCH, LENGTH)
    expected = layer(x, x, x, padding)
    with Results():
        torch.testing.assert_close(layer(x, x, x, padding), expected)


def test_signatures_begin_as_torchs():
    for ours, theirs in (
        (multi_head_attention_forward, F.multi_head_attention_forward),
        (mha_ext.nn.MultiheadAttention.forward, nn.MultiheadAttention.forward),
        (mha_ext.nn.MultiheadAttention.__init__, nn.MultiheadAttention.__init__),
    ):
        ours, theirs = (
            [(p.name, p.default, p.kind) for p in inspect.signature(f).parameters.values()] for f in (ours, theirs)
        )
        assert ours[: len(theirs)] == theirs


class Overriding(Tensor):
    """A tensor subclass that sees each function called with it."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append((function, dict(kwargs or {})))
        return super().__torch_function__(function, types, args, kwargs)


def test_torch_function_is_honoured():
    layer, _ = pair(E, HEADS)
    x = torch.randn(LENGTH, BATCH, E)
    expected = layer(x, x, x, need_weights=False)[0]
    Overriding.seen.clear()
    output, _ = layer(x.as_subclass(Overriding), x, x, need_weights=False)
    assert isinstance(output, Overriding) and torch.equal(output.as_subclass(Tensor), expected)
    calls = [kwargs for function, kwargs in Overriding.seen if function is multi_head_attention_forward]
    assert len(calls) == 1 and calls[0]["need_weights"] is False


# --- Exact small cases --------------------------------------------------------------------------------------------


def identity(width: int, heads: int, **options) -> mha_ext.nn.MultiheadAttention:
    """A layer without biases that attends to all keys alike: queries and keys are 0, values and output the input."""
    layer = mha_ext.nn.MultiheadAttention(width, heads, bias=False, **options)
    with torch.no_grad():
        layer.in_proj_weight.zero_()[2 * width :] = torch.eye(width)
        layer.out_proj.weight.copy_(torch.eye(width))
    return layer


def test_a_dead_row_ruins_no_gradient():
    layer = mha_ext.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4, requires_grad=True)
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]], dtype=torch.bool)
    output, weights = layer(x, x, x, attn_mask=mask, need_weights=True)
    output[:, :2].sum().backward()
    assert torch.equal(weights[0, 2], torch.zeros(3)) and torch.equal(output[0, 2], layer.out_proj.bias)
    for y in (x, *layer.parameters()):
        assert y.grad.isfinite().all()


MODES = pytest.mark.parametrize(
    "training, context",
    [
        (True, contextlib.nullcontext),
        (False, contextlib.nullcontext),
        (False, torch.no_grad),
        (False, torch.inference_mode),
    ],
    ids=["training", "eval", "no_grad", "inference_mode"],
)
need_weights = pytest.mark.parametrize("need_weights", [False, True])


@MODES
@need_weights
def test_a_head_that_sees_nothing_adds_nothing(training, context, need_weights):
    layer = identity(4, 2, batch_first=True).train(training)
    x = torch.arange(12.0).reshape(1, 3, 4)
    mask = torch.tensor([True, False])[:, None, None].expand(2, 3, 3)
    with context():
        output, weights = layer(x, x, x, attn_mask=mask, need_weights=need_weights, average_attn_weights=False)
    torch.testing.assert_close(output, torch.tensor([0.0, 0.0, 6.0, 7.0]).expand(1, 3, 4))
    if need_weights:
        torch.testing.assert_close(weights, torch.tensor([0.0, 1 / 3])[:, None, None].expand(1, 2, 3, 3))


@need_weights
@pytest.mark.parametrize("batched", [False, True])
def test_is_causal_needs_no_mask(need_weights, batched):
    layer = identity(1, 1)
    x = torch.tensor([1.0, 2.0, 6.0]).reshape(3, *[1] * batched, 1)
    output, weights = layer(x, x, x, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(output.flatten(), torch.tensor([1.0, 1.5, 3.0]))
    if need_weights:
        rows = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
        torch.testing.assert_close(weights, rows.unsqueeze(0) if batched else rows)


@MODES
@need_weights
@pytest.mark.parametrize("added", [False, True])
def test_is_causal_and_a_mask_hide_together(training, context, need_weights, added):
    layer = identity(1, 1, batch_first=True).train(training)
    x = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1)
    mask = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.bool)
    mask = torch.zeros(3, 3).masked_fill(mask, -INF) if added else mask
    with context():
        output, _ = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(output.flatten(), torch.tensor([1.0, 2.0, 1.5]))


def test_true_hides():
    layer = identity(1, 1)
    x = torch.tensor([1.0, 3.0]).reshape(2, 1)
    output, _ = layer(x, x, x, attn_mask=torch.tensor([[True, False], [True, True]]))
    assert output.flatten().tolist() == [3, 0]


def test_floating_padding_is_added():
    layer = identity(1, 1)
    x = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1)
    output, weights = layer(x, x, x, key_padding_mask=torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(weights, torch.tensor([0.21194, 0.21194, 0.57612]).expand(3, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(output, torch.full((3, 1), 2.36418), rtol=0, atol=1e-5)
    padding = torch.tensor([False, False, True])
    for options in ({}, {"attn_mask": torch.zeros(3, 3)}, {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}):
        output, weights = layer(x, x, x, key_padding_mask=padding, **options)
        torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 0]).expand(3, 3))
        torch.testing.assert_close(output, torch.full((3, 1), 1.5))


def test_masks_of_three_dimensions_are_batch_major():
    layer = identity(2, 2, batch_first=True)
    x = torch.tensor([[[1.0, 1], [3, 3]], [[10, 10], [30, 30]]])
    mask = torch.zeros(2, 2, 2, 2, dtype=torch.bool)
    mask[0, :, :, 1] = True  # (sample, head, query, key)
    for shaped in (mask.flatten(0, 1), mask, mask[:, :1]):
        output, _ = layer(x, x, x, attn_mask=shaped)
        torch.testing.assert_close(output[:, 0], torch.tensor([[1.0, 1], [20, 20]]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("padding", ["none", "right", "scattered", "everything"])
def test_training_evaluation_and_inference_compute_the_same(bias, heads, padding):
    layer, _ = pair(E, heads, bias=bias, batch_first=True)
    dropping = mha_ext.nn.MultiheadAttention(E, heads, bias=bias, batch_first=True, dropout=0.7).eval()
    dropping.load_state_dict(layer.state_dict())
    x, mask = torch.randn(BATCH, LENGTH, E), padding_of(padding, BATCH, LENGTH)
    expected = layer(x, x, x, key_padding_mask=mask)
    for run in (layer, layer.eval(), dropping):
        for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with context():
                output, weights = run(x, x, x, key_padding_mask=mask)
                alone, _ = run(x, x, x, key_padding_mask=mask, need_weights=False)
            assert torch.equal(output, expected[0]) and torch.equal(weights, expected[1])
            assert torch.equal(alone, expected[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("appended", [False, True])
def test_empty_tensors(training, size, appended):
    layer = mha_ext.nn.MultiheadAttention(4, 2, batch_first=True, add_zero_attn=appended).train(training)
    x = torch.zeros(*size, 4, requires_grad=True)
    output, weights = layer(x, x, x)
    assert output.shape == x.shape and weights.shape == (*size, size[1] + appended)
    output.sum().backward()
    assert x.grad.shape == x.shape
    memory = torch.zeros(2, 0, 4)
    output, weights = layer(torch.randn(2, 3, 4), memory, memory)
    assert weights.shape == (2, 3, int(appended))
    assert torch.equal(output, layer.out_proj.bias.expand(2, 3, 4))


def test_appended_keys_are_seen_when_all_others_are_padded():
    layer, _ = pair(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    hidden = torch.ones(2, 3, dtype=torch.bool)
    for padding in (hidden, torch.zeros(2, 3).masked_fill(hidden, -INF)):
        for is_causal in (False, True):
            output, weights = layer(x, x, x, key_padding_mask=padding, is_causal=is_causal)
            assert weights.shape == (2, 3, 5) and (weights[..., :3] == 0).all()
            torch.testing.assert_close(weights[..., 3:].sum(-1), torch.ones(2, 3))
            (grad,) = torch.autograd.grad(output.sum(), x)
            assert output.isfinite().all() and grad.isfinite().all()
    _, weights = layer(x, x, x, is_causal=True)
    assert (weights[..., :3].triu(1) == 0).all() and (weights[..., :3].tril() > 0).sum() == 2 * 6
    assert (weights[..., 3:] > 0).all()


# --- What is hidden does not leak, what is not stays --------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, INF])
@pytest.mark.parametrize(
    "hide", ["right", "left", "added right", "pairs", "pairs added", "causal", "pairs and causal", "pairs and right"]
)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"hook": True}], ids=str)
def test_nothing_hidden_leaks(bad, hide, options):
    options = dict(options)
    hooked = options.pop("hook", False)
    layer, _ = pair(E, HEADS, batch_first=True, **options)
    if hooked:
        layer.out_proj.register_forward_hook(lambda *_: None)
    query, memory = torch.randn(2, 4, E), torch.randn(2, 6, E)
    keys = torch.arange(6)
    ends = {"left": keys < 2, "pairs and causal": keys == 2}.get(hide, keys >= 4)
    floating = torch.zeros(6).masked_fill(ends, -INF)
    masks = {
        "pairs": {"attn_mask": ends.expand(4, 6)},
        "pairs added": {"attn_mask": floating.expand(4, 6)},
        "causal": {"is_causal": True},
        "pairs and causal": {"is_causal": True, "attn_mask": ends & (torch.arange(4) >= 2).unsqueeze(1)},
        "pairs and right": {"key_padding_mask": (keys == 5).expand(2, 6), "attn_mask": (keys == 4).expand(4, 6)},
        "added right": {"key_padding_mask": floating.expand(2, 6)},
    }.get(hide, {"key_padding_mask": ends.expand(2, 6)})

    def run(memory):
        query_leaf, leaf = query.clone().requires_grad_(), memory.clone().requires_grad_()
        results = layer(query_leaf, leaf, leaf, **masks)
        loss = sum(y.square().sum() for y in results)
        return *results, *torch.autograd.grad(loss, [query_leaf, leaf, *layer.parameters()])

    expected = run(memory.masked_fill(ends.unsqueeze(-1), 0.0))
    for found, right in zip(run(memory.masked_fill(ends.unsqueeze(-1), bad)), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_nan_in_a_live_input_stays():
    layer, _ = pair(E, HEADS, batch_first=True)
    x = torch.randn(2, 4, E)
    x[0, 1] = torch.nan
    output, weights = layer(x, x, x, key_padding_mask=torch.tensor([[False, False, True, True]] * 2))
    assert output[0].isnan().all() and weights[0, :, :2].isnan().all() and output[1].isfinite().all()


# --- Dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("appended", [False, True])
def test_returned_weights_are_those_used(appended):
    layer = identity(4, 2, batch_first=True, dropout=0.5, add_zero_attn=appended)
    value = torch.randn(1, 7 + (not appended), 4)
    output, weights = layer(torch.randn(1, 5, 4), value, value, average_attn_weights=False)
    assert set(weights.detach().flatten().tolist()) == {0.0, 0.25}
    rows = F.pad(value, (0, 0, 0, int(appended)))
    torch.testing.assert_close(output, reference.merge_heads(weights @ reference.split_heads(rows, 2)))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("appended", [False, True])
def test_weights_before_dropout(average, appended):
    layer, _ = pair(E, HEADS, dropout=0.5, add_bias_kv=appended)
    x = torch.randn(LENGTH, BATCH, E, requires_grad=True)
    options = {"average_attn_weights": average, "is_causal": True}
    layer.eval()
    _, expected = layer(x, x, x, **options)
    layer.train()
    torch.manual_seed(2)
    output, weights = layer(x, x, x, weights_before_dropout=True, **options)
    torch.testing.assert_close(weights, expected)
    torch.manual_seed(2)
    used, _ = layer(x, x, x, **options)
    torch.testing.assert_close(output, used)
    found, right = (torch.autograd.grad(y.square().sum(), x)[0] for y in (weights, expected))
    torch.testing.assert_close(found, right)


def test_dropout_follows_the_seed_under_checkpointing_and_threads():
    layer, _ = pair(E, HEADS, dropout=0.5)
    x = torch.randn(40, 2, E, requires_grad=True)

    def run(y: Tensor) -> Tensor:
        return layer(y, y, y, need_weights=False)[0]

    found = []
    for threads, use in ((1, run), (2, run), (2, lambda y: checkpoint(run, y, use_reentrant=False))):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        found.append(torch.autograd.grad(use(x).square().sum(), x)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(run(x), run(x))


def test_dropping_everything_gives_the_bias():
    layer, _ = pair(E, HEADS, dropout=1.0)
    x = torch.randn(LENGTH, BATCH, E, requires_grad=True)
    output, weights = layer(x, x, x)
    assert (weights == 0).all() and torch.equal(output, layer.out_proj.bias.expand_as(output))
    output.sum().backward()
    assert (x.grad == 0).all()


# --- State --------------------------------------------------------------------------------------------------------

CONSTRUCTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 5, "vdim": 8, "dropout": 0.1, "batch_first": True},
    {"dtype": torch.float64},
]
constructions = pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)


@constructions
def test_parameters_initial_values_and_random_draw_are_torchs(options):
    def build(module):
        torch.manual_seed(4)
        return module(E, HEADS, **options), torch.get_rng_state()

    (ours, after_ours), (theirs, after_theirs) = build(mha_ext.nn.MultiheadAttention), build(nn.MultiheadAttention)
    assert torch.equal(after_ours, after_theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert ours.__dict__.keys() == theirs.__dict__.keys() and repr(ours) == repr(theirs)


@constructions
def test_copies(options):
    layer = mha_ext.nn.MultiheadAttention(E, HEADS, **options).eval()
    dtype = options.get("dtype", torch.float32)
    x = [torch.randn(LENGTH, BATCH, options.get(n, E), dtype=dtype) for n in ("query", "kdim", "vdim")]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is mha_ext.nn.MultiheadAttention
        for a, b in zip(other(*x), layer(*x), strict=True):
            assert torch.equal(a, b)


def test_becomes_ours_by_its_class():
    ours, theirs = pair(E, HEADS)
    theirs.__class__ = mha_ext.nn.MultiheadAttention
    x = torch.randn(LENGTH, BATCH, E)
    assert torch.equal(theirs(x, x, x, is_causal=True)[0], ours(x, x, x, is_causal=True)[0])


def test_meta_device():
    layer = mha_ext.nn.MultiheadAttention(E, HEADS, device="meta")
    x = torch.randn(LENGTH, BATCH, E, device="meta")
    output, weights = layer(x, x, x, key_padding_mask=torch.zeros(BATCH, LENGTH, dtype=torch.bool, device="meta"))
    assert output.is_meta and output.shape == x.shape and weights.shape == (BATCH, LENGTH, LENGTH)
    ours = layer.to_empty(device="cpu")
    ours.load_state_dict(pair(E, HEADS)[1].state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    ours, theirs = pair(E, HEADS)
    x = torch.randn(LENGTH, BATCH, E).to(dtype)
    output, weights = ours.to(dtype)(x, x, x)
    assert output.dtype == weights.dtype == dtype
    exact = plain_layer(ours.double(), *[x.double()] * 3)
    plain = theirs.to(dtype)(x, x, x)
    for a, b, c in zip((output, weights), plain, exact, strict=True):
        assert_as_good_as_plain(a, b, c)


@pytest.mark.parametrize("appended", [False, True])
def test_autocast_with_a_float32_mask(appended):
    layer, _ = pair(E, HEADS, add_bias_kv=appended, batch_first=True)
    x, mask = torch.randn(BATCH, LENGTH, E, requires_grad=True), torch.randn(LENGTH, LENGTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = layer(x, x, x, attn_mask=mask)
    assert output.dtype == weights.dtype == torch.bfloat16
    output.float().sum().backward()
    assert x.grad.dtype == mask.grad.dtype == layer.in_proj_weight.grad.dtype == torch.float32
    expected = layer(x, x, x, attn_mask=mask)
    torch.testing.assert_close(output.float(), expected[0], atol=0.1, rtol=0.1)


# --- Nested tensors -----------------------------------------------------------------------------------------------

layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
SIZES = (3, 5, 1)


@layouts
@MODES
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_is_each_sequence_alone(layout, training, context, average):
    layer = pair(E, HEADS, batch_first=True)[0].train(training)
    sequences = [torch.randn(n, E) for n in SIZES]
    x = torch.nested.nested_tensor(sequences, layout=layout)
    with context():
        output, weights = layer(x, x, x, is_causal=True, average_attn_weights=average)
        summed = output + x  # what a residual connection needs: the very same lengths
        expected = [layer(y, y, y, is_causal=True, average_attn_weights=average) for y in sequences]
    assert output.is_nested and output.layout == layout and summed.is_nested
    for i, (right, right_weights) in enumerate(expected):
        torch.testing.assert_close(output.unbind()[i], right)
        padded = F.pad(right_weights, (0, max(SIZES) - SIZES[i], 0, max(SIZES) - SIZES[i]))
        torch.testing.assert_close(weights[i], padded)


@layouts
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_nested_with_extra_keys(layout, masked, average):
    layer = pair(E, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True)[0]
    sequences = [torch.randn(n, E) for n in SIZES]
    x = torch.nested.nested_tensor(sequences, layout=layout)
    mask = (torch.rand(max(SIZES), max(SIZES)) < 0.4) if masked else None
    output, weights = layer(x, x, x, attn_mask=mask, average_attn_weights=average)
    for i, y in enumerate(sequences):
        part = None if mask is None else mask[: len(y), : len(y)]
        expected, _ = layer(y, y, y, attn_mask=part)
        torch.testing.assert_close(output.unbind()[i], expected)
        assert (weights[i][..., len(y) :, :] == 0).all()
        torch.testing.assert_close(weights[i][..., : len(y), :].sum(-1), torch.ones(weights[i].shape[:-2] + (len(y),)))


@layouts
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_cross_attention_trains_and_calls_hooks_once(layout):
    layer, calls = pair(E, HEADS, batch_first=True)[0], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    queries, keys = ([torch.randn(n, E, requires_grad=True) for n in sizes] for sizes in (SIZES, (2, 4, 6)))
    output, _ = layer(*(torch.nested.as_nested_tensor(x, layout=layout) for x in (queries, keys, keys)))
    assert calls == [1]
    leaves = [*queries, *keys, *layer.parameters()]
    found = torch.autograd.grad(sum(y.square().sum() for y in output.unbind()), leaves)
    alone = sum(layer(q, k, k)[0].square().sum() for q, k in zip(queries, keys, strict=True))
    for a, b in zip(found, torch.autograd.grad(alone, leaves), strict=True):
        torch.testing.assert_close(a, b)


@layouts
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.ones(3, 5).triu(1).bool()}], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nan_in_keys_of_a_nested_tensor_that_no_query_sees(layout, options):
    layer = pair(E, HEADS, batch_first=True)[0]
    keys = [torch.randn(5, E), torch.randn(4, E)]
    keys[0][2:] = keys[1][3:] = torch.nan  # the first two and three queries see keys 0 and 1, and 0 to 2
    q = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)], layout=layout)
    k = torch.nested.nested_tensor(keys, layout=layout)
    output, _ = layer(q, k, k, **options)
    sum(y.sum() for y in output.unbind()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_errors():
    layer = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(2, E)])
    dense = torch.randn(1, 2, E)
    with pytest.raises(ValueError, match="MultiheadAttention: expected query, key and value all nested or none"):
        layer(x, dense, dense)
    with pytest.raises(ValueError, match="MultiheadAttention: expected no key_padding_mask with nested"):
        layer(x, x, x, key_padding_mask=torch.zeros(1, 2, dtype=torch.bool))
    for other in ([torch.randn(3, E)], [torch.randn(2, E)] * 2):
        longer = torch.nested.nested_tensor(other)
        with pytest.raises(ValueError, match="MultiheadAttention: expected .*, got .*[12]"):
            layer(longer if len(other) == 2 else x, x, x if len(other) == 2 else longer)
    narrow = torch.nested.nested_tensor([torch.randn(2, E - 1)])
    with pytest.raises(ValueError, match=f"MultiheadAttention: expected key of {E} features, got {E - 1}"):
        layer(x, narrow, x)
    with pytest.raises(TypeError, match="MultiheadAttention: expected query of dtype torch.float32, got torch.float64"):
        layer(x.double(), x, x)
    layer.batch_first = False
    with pytest.raises(ValueError, match="MultiheadAttention: expected batch_first=True with nested"):
        layer(x, x, x)


# --- Inside torch's Transformer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
def test_encoder_computes_the_same_in_training_and_evaluation(nested, batch_first):
    block = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=batch_first)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=nested)
    calls = []
    for layer in encoder.layers:
        layer.self_attn.__class__ = mha_ext.nn.MultiheadAttention
    padding = padding_of("right", BATCH, LENGTH)
    x = torch.randn(BATCH, LENGTH, E) if batch_first else torch.randn(LENGTH, BATCH, E)
    live = (~padding if batch_first else ~padding.T).unsqueeze(-1)
    expected = encoder(x, src_key_padding_mask=padding)
    forward = mha_ext.nn.MultiheadAttention.forward

    def counted(*args, **kwargs):
        calls.append(args[1].is_nested)
        return forward(*args, **kwargs)

    encoder.eval()
    with torch.no_grad(), mock.patch.object(mha_ext.nn.MultiheadAttention, "forward", counted):
        found = encoder(x, src_key_padding_mask=padding)
    assert found.shape == expected.shape
    assert calls == [nested and batch_first] * 2
    torch.testing.assert_close(found * live, expected * live)


# --- Nothing is bypassed ------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Rounded(nn.Module):
    """A linear layer whose weight is kept in int8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class LowRank(nn.Module):
    """A LoRA adapter around a linear layer; its weight is that of the layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def bias(self) -> Tensor:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def as_subclass(layer: nn.MultiheadAttention) -> None:
    linear = Doubled(E, E)
    linear.load_state_dict(layer.out_proj.state_dict())
    layer.out_proj = linear


def as_adapter(layer: nn.MultiheadAttention) -> None:
    layer.out_proj = LowRank(layer.out_proj)


def as_rounded(layer: nn.MultiheadAttention) -> None:
    layer.out_proj = Rounded(layer.out_proj)


def with_hook(layer: nn.MultiheadAttention) -> None:
    layer.out_proj.register_forward_hook(lambda module, args, output: 2 * output)


def parametrized(layer: nn.MultiheadAttention) -> None:
    nn.utils.parametrize.register_parametrization(layer.out_proj, "weight", Twice())


def normalized(layer: nn.MultiheadAttention) -> None:
    nn.utils.parametrizations.weight_norm(layer.out_proj)


CHANGES = (as_subclass, as_adapter, as_rounded, with_hook, parametrized, normalized)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padding", ["none", "right", "scattered"])
def test_out_proj_that_is_not_plain_is_called_once_and_trained(change, batch_first, padding):
    """The output is out_proj of the merged heads, which a layer with an out_proj of nn.Identity returns."""
    layer, _ = pair(E, HEADS, batch_first=batch_first)
    change(layer)
    bare = copy.deepcopy(layer)
    bare.out_proj = nn.Identity()
    calls = []
    layer.out_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    x, mask = torch.randn(BATCH, BATCH, E), padding_of(padding, BATCH, BATCH)
    output, weights = layer(x, x, x, key_padding_mask=mask)
    assert calls == [1]
    context, bare_weights = bare(x, x, x, key_padding_mask=mask)
    torch.testing.assert_close(output, layer.out_proj(context))
    torch.testing.assert_close(weights, bare_weights)
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.out_proj.parameters())


def test_a_hook_for_all_modules_sees_out_proj():
    layer, seen = pair(E, HEADS)[0], []
    x = torch.randn(LENGTH, BATCH, E)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        layer(x, x, x)
    finally:
        handle.remove()
    assert seen == [layer.out_proj, layer]


def test_nn_identity_returns_the_merged_heads():
    layer, _ = pair(E, HEADS)
    x = torch.randn(LENGTH, BATCH, E)
    expected, _ = layer(x, x, x)
    weight, bias = layer.out_proj.weight, layer.out_proj.bias
    layer.out_proj = nn.Identity()
    torch.testing.assert_close(F.linear(layer(x, x, x)[0], weight, bias), expected)


def test_plain_layer_is_one_node():
    layer, _ = pair(E, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, E, requires_grad=True)
    output, weights = layer(x, x, x, average_attn_weights=False)
    assert output.grad_fn is weights.grad_fn


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "bias_k", "q_proj_weight"])
def test_parametrized_parameters_are_used_and_trained(name):
    sizes = {"kdim": 5, "vdim": 8} if name == "q_proj_weight" else {}
    ours, theirs = pair(E, HEADS, add_bias_kv=name == "bias_k", **sizes)
    x = [torch.randn(LENGTH, BATCH, n) for n in (E, sizes.get("kdim", E), sizes.get("vdim", E))]
    before = ours(*x)[0]
    results = []
    for layer in (ours, theirs):
        nn.utils.parametrize.register_parametrization(layer, name, Twice())
        results.append(
            results_and_gradients(
                layer,
                layer,
                dict(zip(("query", "key", "value"), x, strict=True)),
                (torch.ones(LENGTH, BATCH, E), torch.zeros(BATCH, LENGTH, LENGTH + (name == "bias_k"))),
            )
        )
    for key, expected in results[1].items():
        torch.testing.assert_close(results[0][key], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(results[0]["output"], before)
    assert results[0][f"parametrizations.{name}.original"].abs().sum() > 0


def test_pruned_in_proj():
    ours, theirs = pair(E, HEADS)
    keep = torch.arange(3 * E * E).view(3 * E, E) % 2
    x = torch.randn(LENGTH, BATCH, E)
    before = ours(x, x, x)[0]
    for layer in (ours, theirs):
        pruning.custom_from_mask(layer, "in_proj_weight", keep)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
    assert not torch.allclose(ours(x, x, x)[0], before)


class Halved(Tensor):
    """Weights that are kept doubled, and known by what linear makes of them."""

    @staticmethod
    def __new__(cls, base: Tensor):
        return Tensor._make_wrapper_subclass(cls, base.shape, dtype=base.dtype)

    def __init__(self, base: Tensor) -> None:
        self.base = base

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.split.Tensor):
            result = func(args[0].base, *args[1:])
            return [cls(x) for x in result] if isinstance(result, list | tuple) else cls(result)
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} of halved weights")
        return func(*(x.base / 2 if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def test_weights_of_a_tensor_subclass_go_through_linear():
    layer, _ = pair(E, HEADS)
    x = torch.randn(LENGTH, BATCH, E)
    expected = layer(x, x, x)
    with torch.no_grad():
        layer.in_proj_weight = nn.Parameter(Halved(2 * layer.in_proj_weight), requires_grad=False)
        torch.testing.assert_close(layer(x, x, x), expected)


# --- TorchScript, tracing, the compiler, export -------------------------------------------------------------------


def reloaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


CALLS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"key_padding_mask": "right"},
    {"key_padding_mask": "scattered", "attn_mask": "3-D added", "average_attn_weights": False},
    {"attn_mask": "2-D", "is_causal": True},
]
BUILDS = [
    {},
    {"batch_first": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 5, "vdim": 8, "change": as_adapter},
]
builds = pytest.mark.parametrize("build", BUILDS, ids=str)


def built(change: Callable | None = None, **options) -> tuple[nn.Module, list[Tensor]]:
    layer = pair(E, HEADS, **options)[0]
    if change:
        change(layer)
    widths = (E, options.get("kdim", E), options.get("vdim", E))
    return layer, [torch.randn(BATCH, BATCH, width, requires_grad=True) for width in widths]


def call(**options) -> dict[str, Any]:
    """Options with masks for three sequences of three in the place of their names."""
    if "key_padding_mask" in options:
        options["key_padding_mask"] = padding_of(options["key_padding_mask"], BATCH, BATCH)
    if "attn_mask" in options:
        options["attn_mask"] = pairs_of(options["attn_mask"], BATCH, BATCH, BATCH)
    return options


@builds
def test_script_saves_loads_and_trains(build):
    layer, x = built(**build)
    scripted = reloaded(torch.jit.script(layer))
    parameters = dict(layer.named_parameters())
    for options in CALLS:
        options = call(**options)
        for _ in range(3):  # the profiling executor changes the graph after the first runs
            found, expected = scripted(*x, **options), layer(*x, **options)
            torch.testing.assert_close(found, expected)
        scripted.zero_grad()
        layer.zero_grad()
        for output, _ in (found, expected):
            output.square().sum().backward()
        for name, parameter in scripted.named_parameters():
            torch.testing.assert_close(parameter.grad, parameters[name].grad)


@builds
def test_trace_serves_other_sizes(build):
    layer, x = built(**build)
    mask = padding_of("right", BATCH, BATCH)
    traced = reloaded(torch.jit.trace(layer, (*x, mask), check_trace=False))
    batch, length = 2, 6
    size = (batch, length) if layer.batch_first else (length, batch)
    others = [torch.randn(*size, y.size(-1)) for y in x]
    mask = padding_of("scattered", batch, length)
    torch.testing.assert_close(traced(*others, mask), layer(*others, mask))


@builds
@pytest.mark.parametrize("training", [True, False])
def test_compiles_as_one_graph_for_any_size(build, training):
    torch._dynamo.reset()
    layer, _ = built(**build)
    layer.train(training)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = 0
    for batch, length in ((2, 6), (3, 9)):  # (none of them a width: equal sizes are taken to stay equal)
        size = (batch, length) if layer.batch_first else (length, batch)
        x = [torch.randn(*size, width, requires_grad=True) for width in (E, layer.kdim, layer.vdim)]
        mask = padding_of("right", batch, length)
        found, expected = (m(*x, key_padding_mask=mask, is_causal=True) for m in (compiled, layer))
        torch.testing.assert_close(found, expected)
        leaves = [*x, *layer.parameters()]
        gradients = [torch.autograd.grad(y[0].square().sum(), leaves, allow_unused=True) for y in (found, expected)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs  # nothing is compiled anew for another size


@builds
@pytest.mark.parametrize("training", [True, False])
def test_export_with_dynamic_batch_and_length(build, training):
    layer, _ = built(**build)
    layer.train(training)
    first, second = (0, 1) if layer.batch_first else (1, 0)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    shape = {first: batch, second: length}

    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        size = (batch, length) if layer.batch_first else (length, batch)
        rows = (torch.randn(*size, width) for width in (E, layer.kdim, layer.vdim))
        return *rows, padding_of("right", batch, length)

    shapes = (shape, shape, shape, {0: batch, 1: length}, *[None] * 5)
    shapes = dict(zip(("query", "key", "value", "key_padding_mask"), shapes, strict=False))
    program = torch.export.export(layer, inputs(2, 6), dynamic_shapes=shapes)
    others = inputs(3, 9)
    torch.testing.assert_close(program.module()(*others), layer(*others))


def test_make_fx_serves_other_masks():
    layer, _ = pair(E, HEADS)
    x = torch.randn(LENGTH, BATCH, E)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, mask: layer(x, x, x, mask))(
        x, padding_of("right", BATCH, LENGTH)
    )
    mask = padding_of("scattered", BATCH, LENGTH)
    torch.testing.assert_close(traced(x, mask), layer(x, x, x, mask))


def test_fake_tensors():
    with FakeTensorMode():
        layer, x = mha_ext.nn.MultiheadAttention(E, HEADS), torch.randn(LENGTH, BATCH, E)
        padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    output, weights = layer(x, x, x, padding)
    assert output.shape == x.shape and weights.shape == (BATCH, LENGTH, LENGTH)


def test_functorch_transforms():
    layer, _ = pair(E, HEADS, batch_first=True)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    samples = torch.randn(3, 1, LENGTH, E)
    padding = padding_of("right", 3, LENGTH).unsqueeze(1)

    def loss(parameters: dict[str, Tensor], x: Tensor, padding: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x, x, x, padding))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, samples, padding)
    for i in range(3):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), samples[i], padding[i]).backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(each[name][i], parameter.grad, atol=1e-4, rtol=1e-4)


# --- Errors -------------------------------------------------------------------------------------------------------

ROWS = torch.zeros(LENGTH, BATCH, E)
ERRORS = [
    (AssertionError, "query should be unbatched 2D or batched 3D tensor but received 4-D", {"query": ROWS[None]}),
    (AssertionError, "expected `key` and `value` to be 3-D but found 2-D and 3-D", {"key": ROWS[0]}),
    (AssertionError, "expected `key_padding_mask` to be `None` or 2-D", {"key_padding_mask": torch.zeros(1)}),
    (AssertionError, "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D", {"attn_mask": torch.zeros(1)}),
    (AssertionError, "was expecting embedding dimension of 12, but got 5", {"query": ROWS[..., :5]}),
    (AssertionError, "key shape .* does not match value shape", {"key": ROWS[:3]}),
    (AssertionError, "only bool and floating types of attn_mask", {"attn_mask": torch.zeros(LENGTH, LENGTH).int()}),
    (AssertionError, "only bool and floating types of key_padding", {"key_padding_mask": torch.zeros(3, LENGTH).int()}),
    (AssertionError, "key_padded_mask.shape.0. to be 3, but got 2", {"key_padding_mask": torch.zeros(2, LENGTH)}),
    (AssertionError, "key_padded_mask.shape.1. to be 7, but got 2", {"key_padding_mask": torch.zeros(3, 2)}),
    (RuntimeError, r"2D attn_mask is torch.Size\(\[7, 6\]\), but should be \(7, 7\)", {"attn_mask": torch.zeros(7, 6)}),
    (RuntimeError, r"3D attn_mask is .*\[3, 7, 7\]\), but should be \(9, 7, 7\)", {"attn_mask": torch.zeros(3, 7, 7)}),
]


@pytest.mark.parametrize("kind, text, wrong", ERRORS, ids=[text for _, text, _ in ERRORS])
def test_errors_are_torchs(kind, text, wrong):
    for layer in pair(E, HEADS):
        with pytest.raises(kind, match=text), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer(**{"query": ROWS, "key": ROWS, "value": ROWS, **wrong})


@pytest.mark.parametrize("change", [None, as_adapter])
def test_errors_of_our_own(change):
    layer, _ = pair(E, HEADS)
    if change:
        change(layer)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match="multi_head_attention_forward: expected query of a real floating dtype"):
            layer(*[ROWS.to(dtype)] * 3)
    with pytest.raises(ValueError, match="multi_head_attention_forward: expected 4-D attn_mask that broadcasts"):
        layer(ROWS, ROWS, ROWS, attn_mask=torch.zeros(2, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="expected key of query's batch size 3, got 2"):
        layer(ROWS, ROWS[:, :2], ROWS[:, :2])
    layer.dropout = 1.5
    with pytest.raises(ValueError, match="expected dropout_p between 0 and 1, got 1.5"):
        layer(ROWS, ROWS, ROWS)


def test_constructor_errors_are_torchs():
    for module in (mha_ext.nn.MultiheadAttention, nn.MultiheadAttention):
        with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
            module(10, 3)
        with pytest.raises(ValueError, match="embed_dim and num_heads must be greater than 0"):
            module(0, 3)


FUNCTIONAL_ERRORS = [
    ("bias_k is set but bias_v is None", {"bias_k": torch.zeros(1, 1, E)}),
    ("bias_v is set but bias_k is None", {"bias_v": torch.zeros(1, 1, E)}),
    ("in_proj_weight is None", {"in_proj_weight": None}),
    ("q_proj_weight is None", {"use_separate_proj_weight": True}),
    ("not divisible by num_heads", {"num_heads": 5}),
    ("static_k.size.0. of 9, but got 4", {"static_k": torch.zeros(4, LENGTH, 4)}),
    ("static_v.size.2. of 4, but got 5", {"static_v": torch.zeros(9, LENGTH, 5)}),
    (
        "bias cannot be added to static key",
        {"bias_k": torch.zeros(1, 1, E), "bias_v": torch.zeros(1, 1, E), "static_k": torch.zeros(9, LENGTH, 4)},
    ),
]


@pytest.mark.parametrize("text, wrong", FUNCTIONAL_ERRORS, ids=[text for text, _ in FUNCTIONAL_ERRORS])
def test_errors_of_the_function_are_torchs(text, wrong):
    arguments = {
        "query": ROWS,
        "key": ROWS,
        "value": ROWS,
        "embed_dim_to_check": E,
        "num_heads": HEADS,
        "in_proj_weight": torch.zeros(3 * E, E),
        "in_proj_bias": None,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": torch.zeros(E, E),
        "out_proj_bias": None,
    }
    for function in (multi_head_attention_forward, F.multi_head_attention_forward):
        with pytest.raises(AssertionError, match=text):
            function(**{**arguments, **wrong})


def test_torchs_encoder_layer_calls_it_in_every_mode():
    """The layer's fast path would use its parameters without calling it."""
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = mha_ext.nn.MultiheadAttention(E, 2, batch_first=True)
    x, padding = torch.randn(2, 3, E), torch.tensor([[False] * 3, [True] * 3])
    expected = layer(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = layer.eval()(x, src_key_padding_mask=padding)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)
