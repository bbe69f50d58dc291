"""The operators as PyTorch sees them: schemas, fakes, autograd of any order, TorchScript, autocast, compilers."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mha_ext  # noqa: F401  (loads the operators)
from tests.cases import DTYPES, LAYOUTS, Case, benchmark, make, row_id
from tests.checks import gradients_of
from tests.test_attention import COMBINATIONS, FEW_ROWS
from tests.test_multi_head_attention import FEATURES as LAYERS
from tests.test_multi_head_attention import make as make_layer
from tests.test_multi_head_attention import make_self_attention

ops = torch.ops.mha_ext
attention = ops.attention
NAMES = {"attention": "Attention", "multi_head_attention": "MultiHeadAttention"}

SAMPLES = [
    Case("plain"),
    Case("weights", need_weights=True),
    Case("causal", q_len=5, causal="top_left"),
    Case("bottom_right", kv_len=20, causal="bottom_right", need_weights=True),
    Case("mask", mask="plane", uniform_dead_rows=True),
    Case("key mask", mask="keys", need_weights=True),
    Case("bias", bias="plane"),
    Case("shared bias", bias="heads", need_weights=True),
    Case("infinite bias", bias="infinite"),
    Case("lengths", key_lengths=True),
    Case("dropout", dropout_p=0.3),
    Case("dropout with weights", dropout_p=0.3, need_weights=True, mask="full", bias="full"),
    Case("groups", heads=4, kv_heads=2, value_dim=5, scale=0.3),
    Case("long", batch=1, q_len=70, kv_len=270, causal="top_left", bias="keys"),
    Case("no batch", batch=0, need_weights=True),
    Case("no queries", q_len=0, bias="plane"),
    Case("no keys", kv_len=0, need_weights=True),
    Case("mean weights", need_weights=True, average_weights=True, dropout_p=0.3, weights_before_dropout=True),
    Case("no heads", heads=0, need_weights=True, average_weights=True),
    Case("softcap", softcap=2.0, bias="plane", causal="top_left"),
]
samples = pytest.mark.parametrize("case", SAMPLES, ids=lambda case: case.name)


def backward_arguments(inputs):
    """Positional and keyword arguments of attention_backward for the inputs of a case."""
    with torch.no_grad():
        results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    incoming = (inputs.grad_output, inputs.grad_weights, inputs.grad_logsumexp)
    options = {name: value for name, value in inputs.options.items() if name != "need_weights"}
    options["need_bias_grad"] = inputs.options["bias"] is not None
    return (*incoming, inputs.query, inputs.key, inputs.value, *results), options


LAYER_OPTIONS = [
    {},
    {"need_weights": False},
    {"is_causal": True, "scale": 0.3, "uniform_dead_rows": True},
    {"mask": torch.rand(3, 4) < 0.7},
    {"bias": torch.randn(2, 1, 4)},
    {"key_lengths": torch.tensor([2, 0])},
    {"dropout_p": 0.4, "seed": torch.tensor(5)},
    {"average_weights": True, "weights_before_dropout": True, "dropout_p": 0.4, "seed": torch.tensor(5)},
    {"softcap": 1.5},
]


layer_options = pytest.mark.parametrize("options", LAYER_OPTIONS, ids=lambda options: "-".join(options) or "plain")


def layer_arguments(dtype=torch.float32, self_attention=False, biases=True, requires_grad=False):
    """Positional arguments of multi_head_attention: 2 sequences of 3 and 4, width 4, 2 heads."""
    query = torch.randn(2, 3, 4, dtype=dtype)
    key = query if self_attention else torch.randn(2, 4, 4, dtype=dtype)
    value = query if self_attention else torch.randn(2, 4, 4, dtype=dtype)
    weights = [torch.randn(4, 4, dtype=dtype) / 2 for _ in range(4)]
    offsets = [torch.randn(4, dtype=dtype) if biases else None for _ in range(4)]
    tensors = [query, key, value, *weights, *offsets]
    for tensor in tensors:
        if tensor is not None and requires_grad:
            tensor.requires_grad_()
    return (*tensors, 2)


def layer_backward_arguments(**options):
    """Positional and keyword arguments of multi_head_attention_backward."""
    arguments = layer_arguments()
    with torch.no_grad():
        output, weights, *saved, logsumexp = ops.multi_head_attention_forward(*arguments, **options)
    grad_weights = torch.randn_like(weights) if options.pop("need_weights", True) else None
    positional = (torch.randn_like(output), grad_weights, *arguments[:11], *saved, weights, logsumexp, arguments[11])
    mask = [True] * 11 + [options.get("bias") is not None]
    return positional, {**options, "output_mask": mask}


# --- opcheck ------------------------------------------------------------------------------------------------------


@samples
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_opcheck_attention(case, dtype):
    inputs = make(case, DTYPES[dtype]).requires_grad_()
    torch.library.opcheck(attention.default, (inputs.query, inputs.key, inputs.value), inputs.options)


@samples
def test_opcheck_attention_backward(case):
    arguments, options = backward_arguments(make(case))
    torch.library.opcheck(ops.attention_backward.default, arguments, options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_without_logsumexp(requires_grad):
    inputs = make(Case("output alone", q_len=5, kv_len=6, bias="plane"))
    if requires_grad:
        inputs.requires_grad_()
    options = {**inputs.options, "need_logsumexp": False}
    torch.library.opcheck(attention.default, (inputs.query, inputs.key, inputs.value), options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_any_layout(layout):
    inputs = make(Case("layout", q_len=5, kv_len=6, need_weights=True), layout=layout).requires_grad_()
    torch.library.opcheck(attention.default, (inputs.query, inputs.key, inputs.value), inputs.options)
    arguments, options = backward_arguments(make(Case("layout", q_len=5, kv_len=6), layout=layout))
    torch.library.opcheck(ops.attention_backward.default, arguments, options)


@layer_options
def test_opcheck_layer(options):
    torch.library.opcheck(ops.multi_head_attention.default, layer_arguments(requires_grad=True), options)


@pytest.mark.parametrize("biases", [False, True])
def test_opcheck_layer_of_one_tensor(biases):
    arguments = layer_arguments(self_attention=True, biases=biases, requires_grad=True)
    torch.library.opcheck(ops.multi_head_attention.default, arguments)
    torch.library.opcheck(ops.multi_head_attention_forward.default, arguments)


@layer_options
def test_opcheck_layer_backward(options):
    arguments, options = layer_backward_arguments(**options)
    torch.library.opcheck(ops.multi_head_attention_backward.default, arguments, options)


# What needs no compiler, and takes milliseconds.
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
EVERY = (*CHEAP, "test_aot_dispatch_dynamic")


def opcheck_attention(inputs, test_utils):
    arguments, options = backward_arguments(inputs)
    torch.library.opcheck(ops.attention_backward.default, arguments, options, test_utils=test_utils)
    inputs.requires_grad_()
    tensors = (inputs.query, inputs.key, inputs.value)
    torch.library.opcheck(attention.default, tensors, inputs.options, test_utils=test_utils)


def opcheck_layer(layer, test_utils):
    with torch.no_grad():
        forward = ops.multi_head_attention_forward(*layer.arguments(), **layer.options)
    output, weights, *saved, logsumexp = forward
    options = {name: value for name, value in layer.options.items() if name != "need_weights"}
    options["output_mask"] = [x is not None for x in (*layer.tensors.values(), layer.options["bias"])]
    backward = (layer.grad_output, layer.grad_weights, *layer.tensors.values(), *saved, weights, logsumexp)
    checks = [
        (ops.multi_head_attention_backward, (*backward, layer.num_heads), options),
        (ops.multi_head_attention_forward, layer.arguments(), layer.options),
    ]
    for op, arguments, options in checks:
        torch.library.opcheck(op.default, arguments, options, test_utils=test_utils)
    for leaf in layer.leaves().values():
        leaf.requires_grad_()
    torch.library.opcheck(ops.multi_head_attention.default, layer.arguments(), layer.options, test_utils=test_utils)


@pytest.mark.parametrize("row", [*COMBINATIONS, *FEW_ROWS], ids=row_id)
def test_opcheck_of_feature_combinations(row):
    opcheck_attention(make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=1), CHEAP)


@pytest.mark.parametrize("row", LAYERS, ids=row_id)
def test_opcheck_of_layer_combinations(row):
    opcheck_layer(make_layer(row, seed=1), CHEAP)


@pytest.mark.parametrize("row", [*COMBINATIONS, *FEW_ROWS][::45], ids=row_id)
def test_opcheck_compiles_feature_combinations(row):
    opcheck_attention(make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=1), EVERY)


@pytest.mark.parametrize("row", LAYERS[::45], ids=row_id)
def test_opcheck_compiles_layer_combinations(row):
    opcheck_layer(make_layer(row, seed=1), EVERY)


@pytest.mark.parametrize("case", benchmark("core"), ids=lambda case: case.name)
def test_opcheck_of_the_benchmark(case):
    opcheck_attention(make(case), CHEAP)


@pytest.mark.parametrize("case", benchmark("layer"), ids=lambda case: case.name)
def test_opcheck_of_the_benchmarks_layers(case):
    opcheck_layer(make_self_attention(case), CHEAP)


# --- Fake and meta kernels ----------------------------------------------------------------------------------------


def forms(results) -> list[tuple]:
    return [(x.shape, x.stride(), x.dtype) for x in results]


@samples
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_fake_and_meta_results_have_the_real_form(case, layout, grad):
    inputs = make(case, layout=layout)
    if grad:
        inputs.requires_grad_()
    tensors = (inputs.query, inputs.key, inputs.value)
    real = forms(attention(*tensors, **inputs.options))
    with FakeTensorMode() as mode:

        def fake(x):
            return mode.from_tensor(x) if torch.is_tensor(x) else x

        options = {name: fake(x) for name, x in inputs.options.items()}
        assert forms(attention(*map(fake, tensors), **options)) == real

    def meta(x):
        return x.to("meta") if torch.is_tensor(x) else x

    options = {name: x if name == "seed" else meta(x) for name, x in inputs.options.items()}
    found = attention(*map(meta, tensors), **options)
    assert [x.shape for x in found] == [shape for shape, _, _ in real]
    assert all(x.device.type == "meta" for x in found)


@samples
def test_fake_backward_results_have_the_real_form(case):
    arguments, options = backward_arguments(make(case))
    real = forms(ops.attention_backward(*arguments, **options))
    with FakeTensorMode() as mode:
        arguments, options = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (arguments, options))
        assert forms(ops.attention_backward(*arguments, **options)) == real


@layer_options
def test_fake_layer_results_have_the_real_form(options):
    arguments = layer_arguments()
    backward, backward_options = layer_backward_arguments(**options)
    calls = [
        (ops.multi_head_attention, arguments, options),
        (ops.multi_head_attention_forward, arguments, options),
        (ops.multi_head_attention_backward, backward, backward_options),
    ]
    for op, positional, keywords in calls:
        real = forms(op(*positional, **keywords))
        with FakeTensorMode() as mode:
            positional, keywords = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (positional, keywords))
            assert forms(op(*positional, **keywords)) == real


# --- Derivatives of every order -----------------------------------------------------------------------------------

DIFFERENTIABLE = [
    Case("plain", batch=1, q_len=3, kv_len=4, head_dim=2, need_weights=True),
    Case("causal", batch=1, q_len=4, kv_len=3, head_dim=2, causal="bottom_right", need_weights=True),
    Case("mask and bias", batch=2, q_len=3, kv_len=4, head_dim=2, mask="plane", bias="full", uniform_dead_rows=True),
    Case("shared bias", batch=2, q_len=2, kv_len=3, head_dim=2, bias="heads", scale=0.7, need_weights=True),
    Case("groups", batch=1, heads=4, kv_heads=2, q_len=2, kv_len=3, head_dim=2, value_dim=3, key_lengths=True),
    Case("dropout", batch=1, q_len=3, kv_len=4, head_dim=2, dropout_p=0.4, need_weights=True, bias="plane"),
    Case("mean", batch=1, q_len=3, kv_len=4, head_dim=2, dropout_p=0.4, need_weights=True, average_weights=True),
    Case("softcap", batch=1, q_len=3, kv_len=4, head_dim=2, softcap=0.8, bias="plane", mask="keys"),
]
differentiable = pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)


def as_function(case: Case, op=attention):
    """The operator as a function of its differentiable tensors to its finite results, and the tensors."""
    inputs = make(case, torch.float64, seed=1).requires_grad_()
    leaves = inputs.leaves()

    def function(*tensors: Tensor):
        named = dict(zip(leaves, tensors, strict=True))
        options = {**inputs.options, **({"bias": named["bias"]} if "bias" in named else {})}
        output, weights, logsumexp = op(named["query"], named["key"], named["value"], **options)
        finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)
        return (output, weights, finite) if case.need_weights else (output, finite)

    return function, tuple(leaves.values())


@differentiable
def test_gradcheck(case):
    function, tensors = as_function(case)
    assert torch.autograd.gradcheck(function, tensors)


@differentiable
def test_gradcheck_scripted(case):
    @torch.jit.script
    def scripted(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
        need_weights: bool,
        key_lengths: Tensor | None,
        causal_bottom_right: bool,
        uniform_dead_rows: bool,
        seed: Tensor | None,
        average_weights: bool,
        weights_before_dropout: bool,
        softcap: float | None,
        need_logsumexp: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.mha_ext.attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            need_weights=need_weights,
            key_lengths=key_lengths,
            causal_bottom_right=causal_bottom_right,
            uniform_dead_rows=uniform_dead_rows,
            seed=seed,
            average_weights=average_weights,
            weights_before_dropout=weights_before_dropout,
            softcap=softcap,
            need_logsumexp=need_logsumexp,
        )

    def op(query, key, value, **options):
        options = {"key_lengths": None, "seed": None, **options}
        return scripted(query, key, value, **options)

    function, tensors = as_function(case, op)
    assert torch.autograd.gradcheck(function, tensors)


@differentiable
def test_gradgradcheck(case):
    function, tensors = as_function(case)
    assert torch.autograd.gradgradcheck(function, tensors)


@differentiable
def test_forward_mode(case):
    function, tensors = as_function(case)
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False)


@differentiable
def test_forward_over_reverse(case):
    function, tensors = as_function(case)
    assert torch.autograd.gradgradcheck(
        function, tensors, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


@differentiable
def test_functorch_gradient_equals_autograd(case):
    function, tensors = as_function(case)

    def loss(*arguments):
        return sum(y.square().sum() for y in function(*arguments))

    expected = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.func.grad(loss, argnums=tuple(range(len(tensors))))(*(x.detach() for x in tensors))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@layer_options
@pytest.mark.parametrize("order", [1, 2])
def test_gradcheck_layer(options, order):
    arguments = layer_arguments(torch.float64, requires_grad=True)
    if "bias" in options:
        options = {"bias": options["bias"].double().requires_grad_()}
    tensors = tuple(x for x in (*arguments[:11], options.get("bias")) if x is not None)

    def function(*tensors: Tensor):
        bias = {"bias": tensors[11]} if "bias" in options else {}
        output, weights = ops.multi_head_attention(*tensors[:11], 2, **{**options, **bias})
        return (output, weights) if options.get("need_weights", True) else output

    if order == 1:
        assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    else:
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_gradcheck_layer_of_one_tensor():
    x, *rest = layer_arguments(torch.float64, self_attention=True, requires_grad=True)
    weights = rest[2:10]

    def function(x, *weights):
        return ops.multi_head_attention(x, x, x, *weights, 2)

    assert torch.autograd.gradcheck(function, (x, *weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, *weights), fast_mode=True)


def test_drawn_dropout_is_the_same_in_first_and_second_derivatives():
    """Without an explicit seed, the seed is drawn once and kept."""
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    output, weights, _ = attention(x, x, x, dropout_p=0.5, need_weights=True)
    kept = (weights != 0).detach()
    scores = (x @ x.transpose(-2, -1) / 2).softmax(-1)
    expected = (scores * kept * 2) @ x
    torch.testing.assert_close(output, expected)
    first, first_expected = (torch.autograd.grad(y.square().sum(), x, create_graph=True)[0] for y in (output, expected))
    torch.testing.assert_close(first, first_expected)
    second, second_expected = (torch.autograd.grad(y.square().sum(), x)[0] for y in (first, first_expected))
    torch.testing.assert_close(second, second_expected)


# --- Autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_attention(dtype):
    inputs = make(Case("autocast", q_len=5, kv_len=6, need_weights=True, bias="plane", mask="keys")).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        results = attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    output, weights, logsumexp = results
    assert output.dtype == weights.dtype == dtype and logsumexp.dtype == torch.float32
    cast = [x.to(dtype) for x in (inputs.query, inputs.key, inputs.value)]
    assert torch.equal(output, attention(*cast, **inputs.options)[0])
    leaves = inputs.leaves()
    found = torch.autograd.grad(output.float().sum(), list(leaves.values()))
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found)


def test_autocast_mixes_dtypes_and_leaves_float64_alone():
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4).bfloat16(), torch.randn(1, 1, 3, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v)[0].dtype == torch.bfloat16
        assert attention(q.double(), k.double(), v.double())[0].dtype == torch.float64
    with pytest.raises(TypeError, match="attention: expected key of dtype"):
        attention(q, k, v)


def test_autocast_layer():
    arguments = layer_arguments(requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = ops.multi_head_attention(*arguments)
    assert output.dtype == weights.dtype == torch.bfloat16
    found = torch.autograd.grad(output.float().sum(), arguments[:11])
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found)
    expected = ops.multi_head_attention(*(x.bfloat16() for x in arguments[:11]), arguments[11])
    assert torch.equal(output, expected[0])


# --- TorchScript, compilation, serialisation ----------------------------------------------------------------------


def test_trace_and_script_agree_with_eager(tmp_path):
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 6, 6))
    mask = torch.rand(5, 6) < 0.8

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.mha_ext.attention(q, k, v, mask=mask)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for compiled in (torch.jit.script(run), torch.jit.trace(run, (q, k, v, mask))):
            assert torch.equal(compiled(q, k, v, mask), run(q, k, v, mask))
            torch.jit.save(compiled, str(tmp_path / "function.pt"))
            assert torch.equal(torch.jit.load(str(tmp_path / "function.pt"))(q, k, v, mask), run(q, k, v, mask))


COMPILED = [
    Case("plain", q_len=5, kv_len=6),
    Case("everything", q_len=5, kv_len=6, need_weights=True, mask="plane", bias="full", causal="bottom_right"),
    Case("dropout", q_len=5, kv_len=6, dropout_p=0.3, need_weights=True, key_lengths=True),
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager_bit_for_bit(case, dynamic):
    torch._dynamo.reset()
    inputs = make(case).requires_grad_()
    leaves = inputs.leaves()

    def run(query, key, value, options):
        output, weights, logsumexp = torch.ops.mha_ext.attention(query * 2, key, value, **options)
        return output + 1, weights, logsumexp

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    arguments = (inputs.query, inputs.key, inputs.value, inputs.options)
    found, expected = compiled(*arguments), run(*arguments)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    found, expected = (gradients_of(results, inputs, leaves) for results in (found, expected))
    assert all(torch.equal(found[name], expected[name]) for name in leaves)


def test_compiled_dropout_without_a_seed_draws_anew():
    torch._dynamo.reset()
    x = torch.randn(1, 2, 16, 4, requires_grad=True)
    compiled = torch.compile(lambda x: attention(x, x, x, dropout_p=0.5)[0], backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    again = compiled(x)
    assert torch.equal(first, again)
    # The backward drops what the forward dropped.
    torch.manual_seed(1)
    expected = attention(x, x, x, dropout_p=0.5)[0]
    if torch.equal(expected, first):
        a, b = (torch.autograd.grad(y.sum(), x)[0] for y in (first, expected))
        assert torch.equal(a, b)


def test_inductor():
    torch._dynamo.reset()
    inputs = make(Case("inductor", q_len=5, kv_len=6, need_weights=True, bias="plane")).requires_grad_()

    def run(query, key, value, bias):
        output, weights, logsumexp = torch.ops.mha_ext.attention(query * 2, key, value, bias=bias, need_weights=True)
        return output + 1, weights, logsumexp

    arguments = tuple(inputs.leaves().values())
    found, expected = torch.compile(run, fullgraph=True)(*arguments), run(*arguments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    found, expected = (gradients_of(results, inputs, inputs.leaves()) for results in (found, expected))
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


def test_names_in_graphs_and_profiles():
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    with torch.profiler.profile() as profile:
        core, layer = attention(x, x, x)[0], ops.multi_head_attention(*layer_arguments(requires_grad=True))[0]
        (core.sum() + layer.sum()).backward()
    found = {event.key for event in profile.key_averages()}
    assert {f"mha_ext::{name}{suffix}" for name in NAMES for suffix in ("", "_backward")} <= found
    nodes = {f"torch::autograd::CppNode<mha_ext::autograd::{node}Backward>" for node in NAMES.values()}
    assert nodes <= found and nodes == {core.grad_fn.name(), layer.grad_fn.name()}


def test_every_operator_has_a_backward_of_its_own():
    for name in NAMES:
        assert hasattr(ops, name) and hasattr(ops, f"{name}_backward")


@pytest.mark.parametrize("mapped", list(itertools.product([False, True], repeat=4))[1:])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_any_subset(mapped):
    """Query, key, value and mask, each mapped or not."""
    tensors = [torch.randn(2, 2, 5, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4), torch.rand(5, 6) < 0.7]
    stacked = [
        torch.stack([x, x.roll(1, -1), x.roll(2, -1)]) if use else x for x, use in zip(tensors, mapped, strict=True)
    ]

    def run(q, k, v, mask):
        return attention(q, k, v, mask=mask)[0]

    found = torch.vmap(run, in_dims=tuple(0 if use else None for use in mapped))(*stacked)
    expected = [run(*(x[i] if use else x for x, use in zip(stacked, mapped, strict=True))) for i in range(3)]
    torch.testing.assert_close(found, torch.stack(expected))
