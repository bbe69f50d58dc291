"""The whole layer as one operator: values and all twelve gradients against the oracle, and the documents' classes."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mha_ext
from tests import cases, documents, reference
from tests.cases import CAUSAL, DTYPES, Case, all_pairs, benchmark, make_bias, make_mask, row_id
from tests.checks import assert_as_good_as_plain, isa_every, plain_multi_head_attention

multi_head_attention = torch.ops.mha_ext.multi_head_attention
multi_head_attention_backward = torch.ops.mha_ext.multi_head_attention_backward

FEATURES = all_pairs(
    dtype=list(DTYPES),
    layout=["contiguous", "length_first", "inner_transposed", "expanded", "odd_strides"],
    weight_layout=["contiguous", "transposed", "odd_strides"],
    threads=[1, 2, 3],
    q_len=[1, 7, 65],
    kv_len=["self", 1, 33, 129],
    heads=[(4, 4), (4, 2), (3, 1), (1, 1)],
    dims=[(8, 8), (5, 3), (16, 24)],
    biases=[True, False],
    mask=["none", "keys", "plane", "full", "blocks"],
    bias=["none", "plane", "plane_per_head", "infinite"],
    causal=list(CAUSAL),
    key_lengths=[False, True],
    dropout_p=[0.0, 0.25],
    scale=[None, 0.2],
    need_weights=[True, False],
    uniform_dead_rows=[False, True],
    average_weights=[False, True],
    weights_before_dropout=[False, True],
    softcap=[None, 1.5],
)


@dataclass
class Layer:
    """The arguments of the operator by name, its options, and gradients for its two results."""

    tensors: dict[str, Tensor | None]
    num_heads: int
    options: dict[str, Any]
    grad_output: Tensor
    grad_weights: Tensor | None

    def arguments(self) -> tuple:
        return (*self.tensors.values(), self.num_heads)

    def leaves(self) -> dict[str, Tensor]:
        """What has a gradient, by name; one tensor only once."""
        named = {**self.tensors, "bias": self.options.get("bias")}
        found: dict[str, Tensor] = {}
        for name, tensor in named.items():
            if tensor is not None and not any(tensor is other for other in found.values()):
                found[name] = tensor
        return found


def lay(x: Tensor, layout: str) -> Tensor:
    """x (B, L, E) or (out, in), otherwise stored."""
    if layout == "length_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout in ("inner_transposed", "transposed"):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "odd_strides":
        buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan)
        view = buffer[..., 3::2][..., : x.shape[-1]]
        return view.copy_(x)
    return x


def make(row: dict[str, Any], seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[row["dtype"]]
    heads, kv_heads = row["heads"]
    head_dim, value_dim = row["dims"]
    batch, width, out_width = 2, 12, 10
    q_len = row["q_len"]
    kv_len = q_len if row["kv_len"] == "self" else row["kv_len"]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    query = lay(normal(batch, q_len, width), row["layout"])
    if row["kv_len"] == "self":
        key = value = query
    else:
        key, value = (lay(normal(batch, kv_len, n), row["layout"]) for n in (width - 1, width + 1))
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * value_dim, "o": out_width}
    inputs = {"q": query.shape[2], "k": key.shape[2], "v": value.shape[2], "o": heads * value_dim}
    weights = {f"w_{x}": lay(normal(sizes[x], inputs[x]) / 3, row["weight_layout"]) for x in sizes}
    biases = {f"b_{x}": normal(sizes[x]) if row["biases"] else None for x in sizes}
    shape = (batch, heads, q_len, kv_len)
    options = {
        "mask": make_mask(row["mask"], shape, generator),
        "bias": make_bias(row["bias"], shape, dtype, generator),
        "is_causal": row["causal"] != "none",
        "causal_bottom_right": row["causal"] == "bottom_right",
        "key_lengths": torch.randint(0, kv_len + 1, (batch,), generator=generator) if row["key_lengths"] else None,
        "dropout_p": row["dropout_p"],
        "seed": torch.tensor(77) if row["dropout_p"] else None,
        "scale": row["scale"],
        "need_weights": row["need_weights"],
        **{name: row[name] for name in ("uniform_dead_rows", "average_weights", "weights_before_dropout", "softcap")},
    }
    tensors = {"query": query, "key": key, "value": value, **weights, **biases}
    weights_shape = (batch, q_len, kv_len) if row["average_weights"] else shape
    grad_weights = normal(*weights_shape) if row["need_weights"] else None
    return Layer(tensors, heads, options, normal(batch, q_len, out_width), grad_weights)


def make_self_attention(case: Case) -> Layer:
    """The layer that has a case inside: heads * head_dim features wide, one tensor as query, key and value."""
    core = cases.make(case)
    width = case.heads * case.head_dim
    x, grad_output = torch.randn(2, case.batch, case.q_len, width)
    weights = {f"w_{name}": torch.randn(width, width) / width**0.5 for name in "qkvo"}
    biases = {f"b_{name}": torch.randn(width) for name in "qkvo"}
    tensors = {"query": x, "key": x, "value": x, **weights, **biases}
    return Layer(tensors, case.heads, core.options, grad_output, core.grad_weights)


def gradients(results, layer: Layer, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = zip(results, (layer.grad_output, layer.grad_weights), strict=True)
    incoming = [(y, dy) for y, dy in pairs if dy is not None and y.requires_grad]
    found = torch.autograd.grad([y for y, _ in incoming], list(leaves.values()), [dy for _, dy in incoming])
    return dict(zip(leaves, found, strict=True))


def exact_gradients(layer: Layer, magnitude: bool = False) -> dict[str, Tensor]:
    """The oracle's by name (those of one input tensor summed up under its first name), or the sizes of their sums."""
    found = reference.multi_head_attention_backward(
        layer.grad_output,
        layer.grad_weights,
        *layer.arguments(),
        magnitude=layer.grad_output.dtype if magnitude else None,
        **layer.options,
    )
    if layer.tensors["query"] is layer.tensors["key"]:
        found["query"] = found["query"] + found["key"] + found["value"]
    return {name: found[name] for name in layer.leaves()}


def check(layer: Layer, results, found: dict[str, Tensor], output_cancels: bool = False) -> None:
    """Results and gradients against the oracle's; `output_cancels` where it has few numbers out of sums of many."""
    torch.set_num_threads(1)  # what follows is small
    exact = reference.multi_head_attention(*layer.arguments(), **layer.options)
    twin = copy.deepcopy(layer)  # one tensor under three names stays one
    twin_leaves = {name: x.requires_grad_() for name, x in twin.leaves().items()}
    plain = plain_multi_head_attention(*twin.arguments(), **twin.options)
    plain_gradients = gradients(plain, twin, twin_leaves)

    output, weights = results
    dtype = layer.grad_output.dtype
    assert output.dtype == weights.dtype == dtype and output.is_contiguous()
    size = None
    if output_cancels:
        w_o, b_o = layer.tensors["w_o"].detach(), layer.tensors["b_o"]
        size = reference.project(exact.context.abs(), w_o.abs(), None if b_o is None else b_o.detach().abs())
    assert_as_good_as_plain(output, plain[0], exact.output, size, "output")
    if layer.options["need_weights"]:
        assert_as_good_as_plain(weights, plain[1], exact.weights, what="weights")
    else:
        assert weights.shape == (0,)
    sizes, expected = exact_gradients(layer, magnitude=True), exact_gradients(layer)
    for name, gradient in found.items():
        assert_as_good_as_plain(gradient, plain_gradients[name], expected[name], sizes[name], f"gradient of {name}")


@pytest.mark.parametrize("row", isa_every(5, FEATURES), ids=row_id)
def test_values_and_gradients_of_feature_combinations(row):
    torch.set_num_threads(row["threads"])
    layer = make(row)
    leaves = {name: x.requires_grad_() for name, x in layer.leaves().items()}
    results = multi_head_attention(*layer.arguments(), **layer.options)
    check(layer, results, gradients(results, layer, leaves))


@pytest.mark.parametrize("case", isa_every(4, benchmark("layer")), ids=lambda case: case.name)
def test_values_and_gradients_of_the_benchmark(case):
    layer = make_self_attention(case)
    leaves = {name: x.requires_grad_() for name, x in layer.leaves().items()}
    results = multi_head_attention(*layer.arguments(), **layer.options)
    check(layer, results, gradients(results, layer, leaves))


PLAIN = dict(
    FEATURES[0],
    dtype="float32",
    layout="contiguous",
    weight_layout="contiguous",
    q_len=7,
    kv_len=33,
    heads=(4, 2),
    dims=(8, 8),
    biases=True,
    mask="none",
    bias="plane",
    causal="none",
    key_lengths=False,
    dropout_p=0.0,
    scale=None,
    need_weights=True,
    uniform_dead_rows=False,
    average_weights=False,
    weights_before_dropout=False,
    softcap=None,
)


def test_one_autograd_node():
    layer = make(PLAIN)
    leaves = {id(x.requires_grad_()) for x in layer.leaves().values()}
    output, weights = multi_head_attention(*layer.arguments(), **layer.options)
    assert output.grad_fn is weights.grad_fn
    accumulators = [node for node, _ in output.grad_fn.next_functions if node is not None]
    assert {id(node.variable) for node in accumulators} == leaves


@pytest.mark.parametrize("wanted", reference.LAYER_GRADIENTS)
def test_each_gradient_alone(wanted):
    layer = make(PLAIN)
    expected = exact_gradients(layer)[wanted]
    size = exact_gradients(layer, magnitude=True)[wanted]
    leaf = layer.leaves()[wanted].requires_grad_()
    results = multi_head_attention(*layer.arguments(), **layer.options)
    found = gradients(results, layer, {wanted: leaf})[wanted]
    assert (found.double() - expected).abs().max() <= 1e-5 * size.max()


@pytest.mark.parametrize("wanted", ["query", "w_v", "b_k", "b_o", "bias"])
def test_backward_operator_computes_what_its_mask_asks_for(wanted):
    layer = make(PLAIN)
    arguments, options = layer.arguments(), dict(layer.options)
    _, weights, *saved = torch.ops.mha_ext.multi_head_attention_forward(*arguments, **options)
    q, k, v, context, logsumexp = saved
    del options["need_weights"]
    mask = [name == wanted for name in reference.LAYER_GRADIENTS]
    found = multi_head_attention_backward(
        layer.grad_output,
        layer.grad_weights,
        *arguments[:11],
        q,
        k,
        v,
        context,
        weights,
        logsumexp,
        layer.num_heads,
        output_mask=mask,
        **options,
    )
    for name, gradient in zip(reference.LAYER_GRADIENTS, found, strict=True):
        if name == wanted:
            expected = exact_gradients(layer)[name]
            size = exact_gradients(layer, magnitude=True)[name]
            assert (gradient.double() - expected).abs().max() <= 1e-5 * size.max()
        else:
            assert gradient.numel() == 0


def test_forward_operator_returns_what_it_promises():
    layer = make(PLAIN)
    output, weights, q, k, v, context, logsumexp = torch.ops.mha_ext.multi_head_attention_forward(
        *layer.arguments(), **layer.options
    )
    exact = reference.multi_head_attention(*layer.arguments(), **layer.options)
    for found, expected in [
        (output, exact.output),
        (weights, exact.weights),
        (q, reference.merge_heads(exact.q)),
        (k, reference.merge_heads(exact.k)),
        (v, reference.merge_heads(exact.v)),
        (context, exact.context),
    ]:
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert logsumexp.shape == (2, 4, 7)


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_sizes(batch, q_len, kv_len):
    width, heads = 8, 2
    x, y = torch.randn(batch, q_len, width, requires_grad=True), torch.randn(batch, kv_len, width, requires_grad=True)
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(4)]
    biases = [torch.randn(width, requires_grad=True) for _ in range(4)]
    output, attention = multi_head_attention(x, y, y, *weights, *biases, heads)
    assert output.shape == (batch, q_len, width) and attention.shape == (batch, heads, q_len, kv_len)
    torch.testing.assert_close(output, biases[3].expand(output.shape))  # an empty context projects to the bias
    output.sum().backward()
    for leaf in (x, y, *weights[:3], *biases[:3]):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and (leaf.grad == 0).all()


def test_key_and_value_may_be_one_tensor():
    x, y = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
    weights = [torch.randn(8, 8) for _ in range(4)]
    output, _ = multi_head_attention(x, y, y, *weights, *[None] * 4, 2)
    found = torch.autograd.grad(output.square().sum(), [x, y])
    expected = torch.autograd.grad(
        plain_multi_head_attention(x, y, y, *weights, *[None] * 4, 2)[0].square().sum(), [x, y]
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


# --- The documents' classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 10, 10, 512, 8), (2, 33, 70, 64, 4), (3, 130, 130, 48, 3), (1, 1, 1, 16, 1)])
@pytest.mark.parametrize("mask", ["none", "bool", "int", "float", "dead row"])
def test_agrees_with_the_documents_pytorch_class(shape, mask):
    """Output, weights and every gradient within twice the document's own float32 error."""
    batch, q_len, kv_len, d_model, heads = shape
    document = documents.MultiHeadAttention(d_model, heads)
    ours = mha_ext.MultiHeadAttention(d_model, heads)
    ours.load_state_dict(document.state_dict())
    exact = copy.deepcopy(document).double()

    x, y = torch.randn(batch, q_len, d_model), torch.randn(batch, kv_len, d_model)
    hide = None
    if mask != "none":
        hide = torch.rand(batch, 1, q_len, kv_len) < 0.7
        if mask == "dead row":
            hide[0, 0, 0] = False
        hide = {"int": hide.int(), "float": hide.float() * 2.5}.get(mask, hide)
    d_output, d_weights = torch.randn(batch, q_len, d_model), torch.randn(batch, heads, q_len, kv_len)

    def run(layer):
        dtype = layer.W_q.weight.dtype
        a, b = (t.detach().to(dtype).requires_grad_() for t in (x, y))
        output, weights = layer(a, b, b, hide)
        found = torch.autograd.grad(
            [output, weights], [a, b, *layer.parameters()], [d_output.to(dtype), d_weights.to(dtype)]
        )
        names = ["query", "key and value", *(name for name, _ in layer.named_parameters())]
        return {"output": output, "weights": weights, **dict(zip(names, found, strict=True))}

    truth, document_results = run(exact), run(document)
    projections = [ours.W_q, ours.W_k, ours.W_v, ours.W_o]
    sizes = reference.multi_head_attention_backward(
        d_output,
        d_weights,
        *(x, y, y),
        *(linear.weight for linear in projections),
        *(linear.bias for linear in projections),
        heads,
        mask=None if hide is None else hide != 0,
        uniform_dead_rows=True,
        magnitude=torch.float32,
    )
    sizes["key and value"] = sizes["key"] + sizes["value"]
    for letter in "qkvo":
        sizes[f"W_{letter}.weight"], sizes[f"W_{letter}.bias"] = sizes[f"w_{letter}"], sizes[f"b_{letter}"]
    for name, result in run(ours).items():
        assert_as_good_as_plain(result, document_results[name], truth[name].detach(), sizes.get(name), name)


@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_the_documents_numpy_class(masked):
    np.random.seed(0)
    document = documents.NumpyMultiHeadAttention(d_model=48, num_heads=3)
    ours = mha_ext.MultiHeadAttention.from_numpy(
        document.W_q, document.W_k, document.W_v, document.W_o, document.num_heads
    )
    x, y = np.random.randn(2, 9, 48), np.random.randn(2, 70, 48)
    mask = (np.random.rand(2, 1, 9, 70) < 0.4).astype(np.int64) if masked else None
    expected = document.call(x, y, y, mask)
    found = ours(*(torch.from_numpy(a) for a in (x, y, y)), None if mask is None else torch.from_numpy(mask))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), torch.from_numpy(b), rtol=1e-10, atol=1e-12)


LAYOUTS_OF_PARAMETERS = """
import os, torch
from mha_ext import _C

# What this machine or torch does not have is BLAS's.
assert set(_C.linear_backends().values()) <= {os.environ["MHA_EXT_LINEAR"], "blas"}

torch.manual_seed(0)
op = torch.ops.mha_ext.multi_head_attention
x = torch.randn(3, 40, 64)
weight, bias = torch.randn(64, 64) / 8, torch.randn(64)
dense = op(x, x, x, weight, weight, weight, weight, bias, bias, bias, bias, 4)[0]
wide, tall = torch.zeros(64, 128), torch.zeros(128)
wide[:, ::2], tall[::2] = weight, bias
layouts = {"strided": (wide[:, ::2], tall[::2]), "transposed": (weight.t().contiguous().t(), bias)}
for name, (w, b) in layouts.items():
    torch.testing.assert_close(op(x, x, x, w, w, w, w, b, b, b, b, 4)[0], dense, rtol=1e-5, atol=1e-5, msg=name)
one = torch.ones(1)
same = op(x, x, x, weight, weight, weight, weight, *[one.expand(64)] * 4, 4)[0]
torch.testing.assert_close(same, op(x, x, x, weight, weight, weight, weight, *[torch.ones(64)] * 4, 4)[0])
"""


@pytest.mark.parametrize("library", ["blas", "onednn", "tiles"])
def test_parameters_of_any_layout(library):
    environment = {**os.environ, "MHA_EXT_LINEAR": library}
    command = [sys.executable, "-c", LAYOUTS_OF_PARAMETERS]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("lengths", [(10, 64, 30), (64, 64, 60), (1, 0, 64)], ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("uniform", [False, True])
def test_padded_keys(lengths, causal, uniform):
    """They need no projection, unless a query that sees no key takes the mean of all values, padding included."""
    layer = make_self_attention(
        Case("padded", batch=3, q_len=64, kv_len=64, causal=causal, key_lengths=lengths, uniform_dead_rows=uniform)
    )
    leaves = {name: x.requires_grad_() for name, x in layer.leaves().items()}
    results = multi_head_attention(*layer.arguments(), **layer.options)
    check(layer, results, gradients(results, layer, leaves))


def test_nothing_leaks_from_padded_keys():
    x, y = torch.randn(2, 9, 16), torch.randn(2, 40, 16)
    weights = [torch.randn(16, 16) for _ in range(4)]

    def run(padding: float) -> list[Tensor]:
        keys = y.clone()
        keys[0, 12:], keys[1, 30:] = padding, padding
        leaves = [t.clone().requires_grad_() for t in (x, keys, *weights)]
        arguments = (leaves[0], leaves[1], leaves[1], *leaves[2:], None, None, None, None, 4)
        output = multi_head_attention(*arguments, key_lengths=torch.tensor([12, 30]))[0]
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    for found, expected in zip(run(math.nan), run(0.0), strict=True):
        assert torch.equal(found, expected)
