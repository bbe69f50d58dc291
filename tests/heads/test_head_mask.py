"""head_mask: against the formula written down, on every way in which a layer is called."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mha_ext
from mha_ext.integrations import transformers as integration
from mha_ext.nn.functional import multi_head_attention_forward
from tests.cases import all_pairs, row_id
from tests.documents import MultiHeadAttention as Document

E, HEADS, BATCH, LENGTH, KEYS = 12, 3, 2, 5, 7
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def mask_of(shape: str, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """Factors, 0 among them."""
    if shape == "none":
        return None
    mask = torch.tensor([[0.5, 0.0, -2.0], [1.0, 3.0, 0.25]], dtype=dtype)
    return mask if shape == "(B, H)" else mask[0].clone()


def heads_of(x: Tensor) -> Tensor:
    """(B, L, H D) -> (B, H, L, D)"""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def factors(mask: Tensor) -> Tensor:
    return mask[..., None, None]


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(BATCH, length, E, dtype=dtype) for length in (LENGTH, KEYS, KEYS)]


def gradients(results: tuple[Tensor | None, ...], leaves: list[Tensor]) -> list[Tensor]:
    loss = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results if x is not None)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# --- mha_ext.MultiHeadAttention -------------------------------------------------------------------------------------


def written_down(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seen: Tensor) -> tuple:
    """W_o (m_h softmax(Q K^T / sqrt(d_k)) V, heads side by side) and m_h times the weights."""
    q, k, v = heads_of(layer.W_q(query)), heads_of(layer.W_k(key)), heads_of(layer.W_v(value))
    scores = (q @ k.mT / math.sqrt(E // HEADS)).masked_fill(~seen, -1e9)
    weights = scores.softmax(-1) * factors(mask)
    return layer.W_o((weights @ v).transpose(1, 2).flatten(2)), weights


def hook(layer: nn.Module) -> None:
    layer.W_k.register_forward_hook(lambda module, args, output: 2 * output)


def adapt(layer: nn.Module) -> None:
    layer.W_o = nn.Sequential(layer.W_o, nn.Linear(E, 4, dtype=torch.float64))


LENGTHS = torch.tensor([3, KEYS])
OPTIONS = {
    "all": ({}, torch.ones(KEYS, dtype=torch.bool)),
    "mask": ({"mask": torch.arange(KEYS) % 3 != 1}, torch.arange(KEYS) % 3 != 1),
    "causal": ({"is_causal": True}, torch.ones(LENGTH, KEYS, dtype=torch.bool).tril()),
    "padding": ({"key_lengths": LENGTHS}, (torch.arange(KEYS) < LENGTHS[:, None])[:, None, None]),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("change", [None, hook, adapt], ids=["plain", "hook", "adapter"])
@pytest.mark.parametrize("shape", ["(H,)", "(B, H)"])
def test_layer_as_written_down(shape, change, option, need_weights):
    layer = mha_ext.MultiHeadAttention(E, HEADS).double()
    if change:
        change(layer)
    mask, tensors = mask_of(shape).requires_grad_(), [x.requires_grad_() for x in inputs()]
    keywords, seen = OPTIONS[option]
    found = layer(*tensors, **keywords, need_weights=need_weights, head_mask=mask)
    expected = written_down(layer, *tensors, mask, seen)
    expected = expected if need_weights else (expected[0], None)
    assert_same(found, expected)
    leaves = [mask, *tensors, *layer.parameters()]
    assert_same(gradients(found, leaves), gradients(expected, leaves))
    assert not torch.allclose(found[0], layer(*tensors, **keywords)[0])


def test_known_values():
    """Each head hands on the one value there is; W_o is the identity."""
    layer = mha_ext.MultiHeadAttention(4, 2, bias=False)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.eye(4))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    output, weights = layer(x, x, x, head_mask=torch.tensor([0.0, 10.0]))
    assert output.tolist() == [[[0.0, 0.0, 30.0, 40.0]]]
    assert weights.tolist() == [[[[0.0]], [[10.0]]]]


def test_the_bias_of_the_output_is_not_scaled():
    layer, (query, key, value) = mha_ext.MultiHeadAttention(E, HEADS), inputs(torch.float32)
    for mask in (torch.zeros(HEADS), torch.zeros(BATCH, HEADS)):
        output, weights = layer(query, key, value, head_mask=mask)
        torch.testing.assert_close(output, layer.W_o.bias.expand_as(output))
        assert (weights == 0).all()


@pytest.mark.parametrize("front", [mha_ext.MultiHeadAttention, mha_ext.nn.MultiheadAttention])
def test_what_runs(front):
    """Nothing more without a mask; one operator, and nothing of the size of the heads, with (H,)."""
    layer, x = front(E, HEADS), torch.randn(BATCH, BATCH, E)
    ran = {}
    with torch.no_grad():
        for shape in ("none", "(H,)", "(B, H)"):
            options = {} if shape == "none" else {"head_mask": mask_of(shape, torch.float32)}
            with Operators() as operators:
                layer(x, x, x, need_weights=False, **options)
            ran[shape] = operators.names
        with Operators() as operators:
            layer(x, x, x, need_weights=False, head_mask=None)
    fused = "mha_ext.multi_head_attention.default"
    assert operators.names == ran["none"]
    assert ran["none"].count(fused) == ran["(H,)"].count(fused) == 1
    assert [name for name in ran["(H,)"] if name not in ran["none"]].count("aten.mul.Tensor") == 1
    assert not any("mha_ext.attention" in name for name in ran["(H,)"])
    assert ran["(B, H)"].count("mha_ext.attention.default") == 1 and fused not in ran["(B, H)"]


@pytest.mark.parametrize("shape", ["(H,)", "(B, H)"])
@pytest.mark.parametrize("front", ["MultiHeadAttention", "MultiheadAttention", "called"])
def test_ones_drop_the_same(front, shape):
    if front == "MultiheadAttention":
        layer = mha_ext.nn.MultiheadAttention(E, HEADS, 0.5, batch_first=True)
    else:
        layer = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5)
    if front == "called":
        hook(layer)
    results = []
    for mask in (None, torch.ones_like(mask_of(shape, torch.float32))):
        torch.manual_seed(1)
        results.append(layer(*inputs(torch.float32), head_mask=mask))
    assert_same(*results)
    assert (results[0][1] == 0).any() or front == "MultiheadAttention"


@pytest.mark.parametrize("shape", ["(H,)", "(B, H)"])
def test_weights_are_those_that_multiplied_the_values(shape):
    """With dropout too: the merged heads are the returned weights times the values."""
    layer, (query, key, value) = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5).double(), inputs()
    output, weights = layer(query, key, value, head_mask=mask_of(shape))
    v = heads_of(layer.W_v(value))
    torch.testing.assert_close(output, layer.W_o((weights @ v).transpose(1, 2).flatten(2)))


# --- mha_ext.nn -----------------------------------------------------------------------------------------------------

GRID = all_pairs(
    shape=["(H,)", "(B, H)"],
    layout=["batch_first", "length_first", "unbatched"],
    weights=["mean", "heads", "none"],
    extra=["none", "bias_kv", "zero", "both", "static_k", "static"],
    padding=["none", "bool", "added"],
    is_causal=[False, True],
    separate=[False, True],
    out=["plain", "none", "no bias"],
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_function_as_its_own_heads(row):
    """The merged heads that it returns without a mask, each times its factor, through the output projection."""
    batch = 1 if row["layout"] == "unbatched" else BATCH
    static = "static" in row["extra"]
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, *shape: int) -> Tensor:
        leaves[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        return leaves[name]

    def laid(name: str, length: int) -> Tensor:
        x = leaf(name, batch, length, E)
        return {"batch_first": x, "length_first": x.transpose(0, 1), "unbatched": x[0]}[row["layout"]]

    mask = mask_of(row["shape"])[:batch] if row["shape"] == "(B, H)" else mask_of(row["shape"])
    leaves["mask"] = mask = mask.clone().requires_grad_()
    query, key, value = laid("query", LENGTH), laid("key", KEYS), laid("value", KEYS)
    packed = None if row["separate"] else leaf("packed", 3 * E, E)
    extra = {
        name: leaf(name, 1, 1, E) if row["extra"] in ("bias_kv", "both") else None for name in ("bias_k", "bias_v")
    }
    options: dict[str, Any] = {
        "is_causal": row["is_causal"],
        "batch_first": row["layout"] == "batch_first",
        "use_separate_proj_weight": row["separate"],
    }
    if row["separate"]:
        options |= {f"{name}_proj_weight": leaf(name, E, E) for name in "qkv"}
    if static:
        names = ("static_k",) if row["extra"] == "static_k" else ("static_k", "static_v")
        options |= {name: leaf(name, batch * HEADS, KEYS, E // HEADS) for name in names}
    if row["padding"] != "none":
        hidden = torch.arange(KEYS) >= torch.tensor([[4], [KEYS]])[:batch]
        hidden = hidden if row["padding"] == "bool" else torch.zeros(batch, KEYS).double().masked_fill(hidden, -1.0)
        options["key_padding_mask"] = hidden[0] if row["layout"] == "unbatched" else hidden
    bias, w_o, b_o = leaf("bias", 3 * E), leaf("w_o", E, E), leaf("b_o", E)

    def run(out: tuple[Tensor | None, Tensor | None], **more: Any) -> tuple[Tensor, Tensor | None]:
        return multi_head_attention_forward(
            query,
            key,
            value,
            E,
            HEADS,
            packed,
            bias,
            extra["bias_k"],
            extra["bias_v"],
            row["extra"] in ("zero", "both"),
            0.0,
            *out,
            **options,
            **more,
        )

    out = {"plain": (w_o, b_o), "no bias": (w_o, None), "none": (None, None)}[row["out"]]
    found = run(
        out, head_mask=mask, need_weights=row["weights"] != "none", average_attn_weights=row["weights"] == "mean"
    )
    merged, weights = run((None, None), average_attn_weights=False)
    if row["layout"] == "length_first":
        merged = merged.transpose(0, 1)
    if row["layout"] == "unbatched":
        merged, weights = merged[None], weights[None]
    merged = (heads_of(merged) * factors(mask)).transpose(1, 2).flatten(2)
    output = merged if out[0] is None else F.linear(merged, *out)
    weights = weights * factors(mask)
    weights = {"mean": weights.mean(1), "heads": weights, "none": None}[row["weights"]]
    if row["layout"] == "length_first":
        output = output.transpose(0, 1)
    if row["layout"] == "unbatched":
        output, weights = output[0], weights if weights is None else weights[0]
    assert_same(found, (output, weights))
    everything = list(leaves.values())
    assert_same(gradients(found, everything), gradients((output, weights), everything))


@pytest.mark.parametrize("shape", ["(H,)", "(B, H)"])
@pytest.mark.parametrize("out", ["plain", "hook"])
def test_torchs_layer(out, shape):
    """Against torch's own weights and values."""
    layer = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    nn.init.normal_(layer.in_proj_bias)
    plain = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    if out == "hook":
        layer.out_proj.register_forward_hook(lambda module, args, output: output + 1)
    (query, key, value), mask = inputs(), mask_of(shape)
    _, weights = plain(query, key, value, average_attn_weights=False)
    weights = weights * factors(mask)
    v = heads_of(F.linear(value, plain.in_proj_weight[2 * E :], plain.in_proj_bias[2 * E :]))
    output = plain.out_proj((weights @ v).transpose(1, 2).flatten(2)) + (out == "hook")
    for average in (True, False):
        found = layer(query, key, value, head_mask=mask, average_attn_weights=average)
        assert_same(found, (output, weights.mean(1) if average else weights))
    assert_same(layer(query, key, value, head_mask=mask, need_weights=False), (output, None))


def test_weights_before_dropout():
    layer, x = mha_ext.nn.MultiheadAttention(E, HEADS, 0.5, batch_first=True).double(), inputs()
    _, dropped = layer(*x, weights_before_dropout=True, head_mask=mask_of("(H,)"), average_attn_weights=False)
    _, whole = layer.eval()(*x, head_mask=mask_of("(H,)"), average_attn_weights=False)
    torch.testing.assert_close(dropped, whole)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("shape", ["(H,)", "(B, H)"])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
def test_nested(options, shape, layout):
    """Sequence by sequence."""
    layer = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64, **options)
    rows, mask = [torch.randn(n, E, dtype=torch.float64) for n in (3, 5)], mask_of(shape)
    x = torch.nested.nested_tensor(rows, layout=layout)
    output, weights = layer(x, x, x, head_mask=mask)
    for i, row in enumerate(rows):
        single, of_single = layer(row, row, row, head_mask=mask if mask.dim() == 1 else mask[i : i + 1])
        torch.testing.assert_close(output[i], single)
        torch.testing.assert_close(weights[i, : len(row), : len(row)], of_single[:, : len(row)])
        if options:  # the extra key is the last column
            torch.testing.assert_close(weights[i, : len(row), -1], of_single[:, -1])


# --- Derivatives, transforms, other ways to run ---------------------------------------------------------------------

FRONTS = {
    "MultiHeadAttention": lambda: mha_ext.MultiHeadAttention(4, 2).double(),
    "MultiheadAttention": lambda: mha_ext.nn.MultiheadAttention(4, 2, batch_first=True).double(),
}
MASKS = {"(H,)": (2,), "(B, H)": (2, 2)}
both = pytest.mark.parametrize("front, shape", list(itertools.product(FRONTS, MASKS)))


@both
def test_gradcheck(front, shape):
    layer = FRONTS[front]()
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, mask: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x, x, x), {"head_mask": mask})

    tensors = [torch.randn(2, 3, 4), torch.randn(MASKS[shape]), *layer.parameters()]
    tensors = [x.detach().double().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@both
def test_vmap_and_grad_of_the_mask(front, shape):
    """Many masks at once, and the gradient of each: as one after the other."""
    layer = FRONTS[front]()
    x, masks = torch.randn(2, 3, 4).double(), torch.randn(5, *MASKS[shape]).double()

    def loss(mask: Tensor, x: Tensor) -> Tensor:
        output, weights = layer(x, x, x, head_mask=mask)
        return output.square().sum() + weights.square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(masks, x)
    for i, mask in enumerate(masks):
        torch.testing.assert_close(found[i], torch.func.grad(loss)(mask, x))
        leaf = mask.clone().requires_grad_()
        torch.testing.assert_close(found[i], torch.autograd.grad(loss(leaf, x), leaf)[0])


def test_importance_is_the_gradient_of_the_gates():
    """d loss / d m_h at m = 1 is the derivative of the loss in the direction of what head h adds (linear in m)."""
    layer, x = FRONTS["MultiHeadAttention"](), torch.randn(2, 3, 4).double()
    mask = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(layer(x, x, x, head_mask=mask)[0].sum(), mask)
    for head in range(2):
        without = torch.ones(2, dtype=torch.float64)
        without[head] = 0
        adds = layer(x, x, x)[0].sum() - layer(x, x, x, head_mask=without)[0].sum()
        torch.testing.assert_close(found[head], adds)


@both
@pytest.mark.parametrize("change", [None, "called"])
def test_scripted(front, shape, change):
    layer = FRONTS[front]()
    if change:
        name = "W_o" if front == "MultiHeadAttention" else "out_proj"
        setattr(layer, name, nn.Sequential(getattr(layer, name)))
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), buffer)
    buffer.seek(0)
    scripted, x = torch.jit.load(buffer), torch.randn(2, 3, 4).double()
    for _ in range(3):  # the profiling executor changes the graph after the first runs
        for options in ({}, {"head_mask": torch.randn(MASKS[shape])}):
            for need_weights in (True, False):
                options["need_weights"] = need_weights
                assert_same(scripted(x, x, x, **options), layer(x, x, x, **options))
    with pytest.raises(Exception, match=r"expected head_mask of shape \[2\] or \[2, 2\], got \[3\]"):
        scripted(x, x, x, head_mask=torch.ones(3))


@both
def test_compiled(front, shape):
    torch._dynamo.reset()
    layer = FRONTS[front]()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = 0
    for batch in (3, 5, 7):  # none of H or E: PyTorch takes equal sizes to stay equal
        x = torch.randn(batch, 6, 4).double()
        mask = torch.randn((2,) if shape == "(H,)" else (batch, 2)).double()
        mask.requires_grad_()
        leaves = [mask, *layer.parameters()]
        found, expected = compiled(x, x, x, head_mask=mask), layer(x, x, x, head_mask=mask)
        assert_same(found, expected)
        assert_same(gradients(found, leaves), gradients(expected, leaves))
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs
    torch._dynamo.reset()


@both
def test_exported(front, shape):
    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = FRONTS[front]()

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x, x, x, head_mask=mask)

    module, batch = Call(), torch.export.Dim("batch")

    def arguments(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, 4).double(), torch.randn((2,) if shape == "(H,)" else (n, 2)).double()

    shapes = ({0: batch}, None if shape == "(H,)" else {0: batch})
    program = torch.export.export(module, arguments(3), dynamic_shapes=shapes)
    for n in (3, 5):
        given = arguments(n)
        assert_same(program.module()(*given), module(*given))


def test_replaced_models():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.document = Document(E, HEADS)
            self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True)

    model = Model().double()
    original = copy.deepcopy(model)
    assert len(mha_ext.replace_attention(model)) == 2
    (query, key, value), mask = inputs(), mask_of("(B, H)")
    everything = torch.ones(KEYS, dtype=torch.bool)
    expected = written_down(original.document, query, key, value, mask, everything)
    assert_same(model.document(query, key, value, head_mask=mask), expected)
    _, weights = original.attention(query, key, value, average_attn_weights=False)
    found = model.attention(query, key, value, head_mask=mask)[1]
    torch.testing.assert_close(found, (weights * factors(mask)).mean(1))


@both
def test_autocast(front, shape):
    layer = FRONTS[front]().float()
    x, mask = torch.randn(2, 3, 4), torch.rand(MASKS[shape])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = layer(x, x, x, head_mask=mask)
    assert output.dtype == weights.dtype == torch.bfloat16
    expected = layer(x, x, x, head_mask=mask)
    torch.testing.assert_close((output.float(), weights.float()), expected, atol=0.02, rtol=0.02)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_mask_of_another_dtype(front, shape, dtype):
    """The results keep the dtype of the layer, the gradient has that of the mask."""
    layer, x = FRONTS[front]().float(), torch.randn(2, 3, 4)
    mask = torch.tensor([0.5, 2.0], dtype=dtype).expand(MASKS[shape]).clone().requires_grad_()
    output, weights = layer(x, x, x, head_mask=mask)
    assert output.dtype == weights.dtype == torch.float32
    assert_same((output, weights), layer(x, x, x, head_mask=mask.float()))
    assert torch.autograd.grad(output.sum(), mask)[0].dtype == dtype


# --- Errors ---------------------------------------------------------------------------------------------------------

WRONG = {
    "int64": (torch.ones(HEADS, dtype=torch.int64), TypeError, "head_mask of a floating dtype, got torch.int64"),
    "bool": (torch.ones(HEADS, dtype=torch.bool), TypeError, "head_mask of a floating dtype, got torch.bool"),
    "complex": (torch.ones(HEADS, dtype=torch.complex64), TypeError, "floating dtype, got torch.complex64"),
    "a list": ([1.0, 1.0, 1.0], TypeError, "expected head_mask to be a tensor, got list"),
    "another H": (torch.ones(HEADS + 1), ValueError, r"head_mask of shape \[3\] or \[2, 3\], got \[4\]"),
    "another B": (torch.ones(BATCH + 1, HEADS), ValueError, r"head_mask of shape \[3\] or \[2, 3\], got \[3, 3\]"),
    "(1, H)": (torch.ones(1, HEADS), ValueError, r"got \[1, 3\]"),
    "(H, B)": (torch.ones(HEADS, BATCH), ValueError, r"got \[3, 2\]"),
    "a number": (torch.ones(()), ValueError, r"got \[\]"),
    "(B, H, 1)": (torch.ones(BATCH, HEADS, 1), ValueError, r"got \[2, 3, 1\]"),
    "device": (torch.ones(HEADS, device="meta"), ValueError, "head_mask on the device of query, cpu, got meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("front", ["MultiHeadAttention", "called", "MultiheadAttention"])
def test_errors(front, wrong):
    head_mask, error, text = WRONG[wrong]
    if front == "MultiheadAttention":
        layer = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True)
    else:
        layer = mha_ext.MultiHeadAttention(E, HEADS)
    if front == "called":
        hook(layer)
    with pytest.raises(error, match=text):
        layer(*inputs(torch.float32), head_mask=head_mask)


def test_errors_of_unbatched_and_nested():
    layer, x = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True), torch.randn(LENGTH, E)
    assert_same(layer(x, x, x, head_mask=torch.ones(1, HEADS)), layer(x, x, x))
    with pytest.raises(ValueError, match=r"head_mask of shape \[3\] or \[1, 3\], got \[2, 3\]"):
        layer(x, x, x, head_mask=torch.ones(2, HEADS))
    nested = torch.nested.nested_tensor([x, x, x], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"head_mask of shape \[3\] or \[3, 3\], got \[2, 3\]"):
        layer(nested, nested, nested, head_mask=torch.ones(2, HEADS))


def test_wrong_inputs_are_the_operators_error():
    layer, mask = mha_ext.MultiHeadAttention(E, HEADS), torch.ones(HEADS)
    for query in (torch.randn(LENGTH, E), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="multi_head_attention: expected query"):
            layer(query, query, query, head_mask=mask)


# --- Hugging Face's attention function ------------------------------------------------------------------------------


def test_hugging_faces_attention_function():
    module = nn.Module()
    module.is_causal = False
    query, key, value = (torch.randn(BATCH, HEADS, n, 4).double() for n in (LENGTH, KEYS, KEYS))
    plain, weights = integration.attend(module, query, key, value, output_attentions=True)
    for mask in (mask_of("(H,)"), mask_of("(B, H)"), mask_of("(H,)").view(1, HEADS, 1, 1)):
        output, masked = integration.attend(module, query, key, value, output_attentions=True, head_mask=mask)
        factor = mask.view(-1, HEADS)
        torch.testing.assert_close(output, plain * factor[:, None, :, None])
        torch.testing.assert_close(masked, weights * factor[:, :, None, None])
    with pytest.raises(ValueError, match="one factor for each of 3 heads, got"):
        integration.attend(module, query, key, value, head_mask=torch.ones(HEADS, BATCH))
