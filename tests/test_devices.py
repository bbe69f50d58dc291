"""What other devices run, on the CPU: the composite kernels over every case, and PyTorch's fused kernels inside them.

Devices that are not here are fake tensors of theirs: shapes, devices and graphs, no values.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

import mha_ext
from mha_ext import _C
from mha_ext.integrations.transformers import attend as transformers_attend
from mha_ext.train.model import Decoder
from tests import test_attention, test_attention_gradients, test_multi_head_attention
from tests.cases import DTYPES, Case, benchmark, make, row_id
from tests.checks import composite, gradients_of

ROOT = Path(__file__).resolve().parent.parent

ops = torch.ops.mha_ext
attention = ops.attention

ROWS = {
    "combination": test_attention.COMBINATIONS,
    "gradient combination": test_attention_gradients.COMBINATIONS,
    "few": test_attention.FEW_ROWS,
}
CORES = {f"{kind}-{row_id(row)}": row for kind, rows in ROWS.items() for row in rows}
LAYERS = {row_id(row): row for row in test_multi_head_attention.FEATURES}
BENCHMARK = {kind: benchmark(kind, length=40) for kind in ("core", "layer")}  # nothing here has tiles


def named(cases: dict) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", cases.values(), ids=cases)


@pytest.fixture
def fused() -> Iterator[None]:
    """Lets the composite kernels use PyTorch's fused attention on the CPU as they do elsewhere."""
    _C.set_fused_on_cpu(True)
    yield
    _C.set_fused_on_cpu(False)


def without_what_forbids_fusing(row: dict) -> dict:
    return {**row, "need_weights": False, "dropout_p": 0.0, "softcap": None}


# --- Every case, in ATen calls ------------------------------------------------------------------------------------


def check_core(inputs) -> None:
    """Values and, by autograd and by the backward operator, gradients of the composite kernels against the oracle."""
    torch.set_num_threads(1)
    inputs.requires_grad_()
    results = composite(attention, inputs.query, inputs.key, inputs.value, **inputs.options)
    test_attention.check_form(inputs, results)
    test_attention.check(inputs, results)
    by_autograd = gradients_of(results, inputs, inputs.leaves())
    by_operator = test_attention_gradients.call_backward(inputs, test_attention_gradients.composite_backward)
    test_attention_gradients.check(inputs, by_autograd, dict(zip(inputs.leaves(), by_operator, strict=False)))


@named(CORES)
def test_core(row):
    check_core(make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2))


@pytest.mark.parametrize("case", BENCHMARK["core"], ids=lambda case: case.name)
def test_core_of_the_benchmark(case):
    check_core(make(case, seed=2))


def check_layer(layer) -> None:
    torch.set_num_threads(1)
    leaves = {name: x.requires_grad_() for name, x in layer.leaves().items()}
    results = composite(ops.multi_head_attention, *layer.arguments(), **layer.options)
    found = test_multi_head_attention.gradients(results, layer, leaves)
    test_multi_head_attention.check(layer, results, found)


@named(LAYERS)
def test_layer(row):
    check_layer(test_multi_head_attention.make(row))


@pytest.mark.parametrize("case", BENCHMARK["layer"], ids=lambda case: case.name)
def test_layer_of_the_benchmark(case):
    check_layer(test_multi_head_attention.make_self_attention(case))


# --- The same in PyTorch's fused kernels --------------------------------------------------------------------------


def fuse(inputs, **options) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` on another device, without what needs the scores."""
    options = {**inputs.options, "need_logsumexp": False, **options}
    return composite(attention, inputs.query, inputs.key, inputs.value, **options)


def check_fused_core(inputs) -> None:
    torch.set_num_threads(1)
    inputs.requires_grad_()
    output, weights, none = fuse(inputs)
    assert weights.shape == none.shape == (0,) and none.dtype == inputs.grad_logsumexp.dtype
    with torch.no_grad():
        logsumexp = attention(inputs.query, inputs.key, inputs.value, **inputs.options)[2]
    test_attention.check_form(inputs, (output, weights, logsumexp))
    test_attention.check(inputs, (output, weights, logsumexp))
    inputs.grad_logsumexp = torch.zeros_like(inputs.grad_logsumexp)
    found = torch.autograd.grad(output, list(inputs.leaves().values()), inputs.grad_output)
    test_attention_gradients.check(inputs, dict(zip(inputs.leaves(), found, strict=True)))


@named({name: row for name, row in CORES.items() if not name.startswith("gradient")})
def test_fused_core(row, fused):
    row = without_what_forbids_fusing(row)
    check_fused_core(make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2))


@named(LAYERS)
def test_fused_layer(row, fused):
    check_layer(test_multi_head_attention.make(without_what_forbids_fusing(row)))


@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_dead_rows(hide, uniform, kv_heads, fused):
    """And no NaN of a query that sees no key reaches the gradients."""
    inputs = make(Case("dead", heads=4, q_len=9, kv_len=6, kv_heads=kv_heads, uniform_dead_rows=uniform))
    dead = torch.zeros(2, 4, 9, dtype=torch.bool)
    if hide == "causal":
        inputs.options.update(is_causal=True, causal_bottom_right=True)
        dead[:, :, :3] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.tensor([0, 6])
        dead[0] = True
    else:
        dead[:, 1, 2] = True
        mask = ~dead[..., None].expand(2, 4, 9, 6)
        inputs.options[hide] = mask if hide == "mask" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    check_fused_core(inputs)
    inputs = copy.deepcopy(inputs)
    inputs.query = inputs.query.detach().masked_fill(dead[..., None], math.nan).requires_grad_()
    check_fused_core(inputs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hide", ["mask", "mask of groups", "bias", "key_lengths", "causal"])
@pytest.mark.parametrize("uniform", [False, True])
def test_fused_nothing_leaks_from_keys_that_no_query_sees(bad, hide, uniform, fused):
    inputs = make(Case("hidden", heads=4, q_len=5, kv_len=9, kv_heads=2, uniform_dead_rows=uniform))
    hidden = torch.zeros(2, 2, 9, dtype=torch.bool)
    hidden[..., 5:] = True
    if hide == "causal":
        inputs.options["is_causal"] = True
    elif hide == "key_lengths":
        inputs.options["key_lengths"] = torch.tensor([5, 5])
    elif hide == "bias":
        inputs.options["bias"] = torch.zeros(9).masked_fill(hidden[0, 0], -math.inf)
    else:
        hidden[:, 1] = hide == "mask"  # the other key head's are seen
        hidden[..., :5] = False
        inputs.options["mask"] = ~hidden.repeat_interleave(2, 1).unsqueeze(2)
        inputs.options["bias"] = torch.zeros(2, 4, 1, 9).masked_fill(~inputs.options["mask"], bad)
    for x in (inputs.key, inputs.value):
        x.masked_fill_(hidden.unsqueeze(-1), bad)
    check_fused_core(inputs)


SERVED = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_bottom_right": True},
    "mask": {"mask": torch.rand(5, 6) < 0.8},
    "bias": {"bias": torch.randn(2, 1, 6)},
    "lengths": {"key_lengths": torch.tensor([2, 0]), "uniform_dead_rows": True},
    "scale": {"scale": 0.3},
}
FORBIDDEN = {
    "logsumexp": {"need_logsumexp": True},
    "weights": {"need_weights": True},
    "dropout": {"dropout_p": 0.5},
    "softcap": {"softcap": 1.0},
    "negative scale": {"scale": -0.5, "is_causal": True},
    "wider bias": {"bias": torch.randn(5, 6).double()},
}


def calls_of(function: Callable[[], object]) -> set[str]:
    """The operators that a function reaches, those that PyTorch composes of others among them."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


def is_fused(function: Callable[[], object]) -> bool:
    return "aten::scaled_dot_product_attention" in calls_of(function)


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_what_is_fused(options, fused):
    inputs = make(Case("sdpa", q_len=5, kv_len=6))
    assert is_fused(lambda: fuse(inputs, **options))


@pytest.mark.parametrize("options", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_forbids_fusing(options, fused):
    inputs = make(Case("scores", q_len=5, kv_len=6))
    assert not is_fused(lambda: fuse(inputs, **options))


def test_square_causal_attention_needs_no_mask(fused):
    """From either corner, so that the fastest of the kernels can serve."""
    inputs = make(Case("square", q_len=6, kv_len=6))
    options = {"is_causal": True, "causal_bottom_right": True}
    assert not {"aten::logical_or", "aten::masked_fill"} & calls_of(lambda: fuse(inputs, **options))


def test_the_cpu_is_served_by_the_engine():
    inputs = make(Case("cpu"))
    assert not is_fused(lambda: attention(inputs.query, inputs.key, inputs.value, need_logsumexp=False))
    assert not is_fused(lambda: fuse(inputs))


def test_transforms_are_not_fused(fused):
    """The fused kernels have first derivatives in reverse only."""
    inputs = make(Case("transforms", q_len=5, kv_len=6))

    def output(query: Tensor) -> Tensor:
        return composite(attention, query, inputs.key, inputs.value, need_logsumexp=False)[0]

    tangent = torch.randn_like(inputs.query)
    for function in (
        lambda: torch.func.jvp(output, (inputs.query,), (tangent,)),
        lambda: torch.func.grad(lambda query: output(query).sum())(inputs.query),
    ):
        assert not is_fused(function)


# --- Without the logsumexp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["engine", "composite"])
@pytest.mark.parametrize("case", [Case("plain"), Case("all", need_weights=True, bias="full", mask="keys", softcap=2.0)])
def test_need_logsumexp_changes_no_other_result(kernel, case):
    inputs = make(case).requires_grad_()
    tensors, leaves = (inputs.query, inputs.key, inputs.value), inputs.leaves()

    def run(**options) -> tuple[Tensor, Tensor, Tensor]:
        if kernel == "engine":
            return attention(*tensors, **inputs.options, **options)
        return composite(attention, *tensors, **inputs.options, **options)

    results, expected = run(need_logsumexp=False), run()
    assert results[2].shape == (0,) and results[2].dtype == torch.float32 and not results[2].requires_grad
    incoming = [x for x in (inputs.grad_output, inputs.grad_weights) if x is not None]
    found, wanted = (
        torch.autograd.grad(x[: len(incoming)], list(leaves.values()), incoming) for x in (results, expected)
    )
    for a, b in zip((*results[:2], *found), (*expected[:2], *wanted), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        for a, b in zip(run(need_logsumexp=False), results, strict=True):
            assert torch.equal(a, b)


# --- Devices that are not here ------------------------------------------------------------------------------------


def forms(results) -> list[tuple]:
    """Shapes, dtypes and those strides that count: along dimensions of more than one element."""
    return [(x.shape, x.dtype, [x.stride(i) for i in range(x.dim()) if x.size(i) != 1]) for x in results]


def core_calls(row: dict) -> list[tuple]:
    """Operator, arguments and options of a row of CORES, also of what may be fused."""
    inputs = make(Case.of(row), DTYPES[row["dtype"]], row["layout"], seed=2)
    fusible = make(Case.of(without_what_forbids_fusing(row)), DTYPES[row["dtype"]], row["layout"], seed=2).options
    arguments = (inputs.query, inputs.key, inputs.value)
    return [(attention, arguments, inputs.options), (attention, arguments, {**fusible, "need_logsumexp": False})]


def layer_calls(row: dict) -> list[tuple]:
    layers = [test_multi_head_attention.make(row), test_multi_head_attention.make(without_what_forbids_fusing(row))]
    return [(ops.multi_head_attention, layer.arguments(), layer.options) for layer in layers]


def check_forms(device: str, step: int, mode: FakeTensorMode | None = None) -> None:
    """One case in `step` has results of the shapes, dtypes and strides that it has on the CPU, and on the device."""

    def there(x: Tensor) -> Tensor:
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return x if mode is None else FakeTensor(mode, x, torch.device(device))

    calls = [call for row in [*CORES.values()][::step] for call in core_calls(row)]
    calls += [call for row in [*LAYERS.values()][::step] for call in layer_calls(row)]
    for op, arguments, options in calls:
        expected = forms(op(*arguments, **options))
        seed = options.pop("seed", None)  # stays on the CPU
        arguments, options = tree_map_only(Tensor, there, (arguments, options))
        with nullcontext() if mode is None else mode:
            found = op(*arguments, **options, seed=seed if mode is None or seed is None else mode.from_tensor(seed))
        assert forms(found) == expected and {x.device.type for x in found} == {device}, options


def test_results_on_meta_have_the_form_of_those_of_the_cpu():
    check_forms("meta", step=1)


@pytest.mark.parametrize("name", ["key", "value", "mask", "bias", "key_lengths"])
def test_tensors_of_another_device_are_refused(name):
    with FakeTensorMode():
        tensors = {x: torch.randn(2, 2, 4, 8, device="cuda") for x in ("query", "key", "value")}
        options = {"mask": torch.ones(4, 4).bool(), "bias": torch.ones(4, 4), "key_lengths": torch.tensor([1, 2])}
        tensors[name] = options[name] if name in options else torch.randn(2, 2, 4, 8)
        with pytest.raises(ValueError, match=f"attention: expected {name} on cuda:0 as query is, got cpu"):
            attention(**tensors)


def test_parameters_on_another_device_are_refused():
    with FakeTensorMode():
        x, w = torch.randn(2, 5, 16, device="cuda"), torch.randn(16, 16)
        with pytest.raises(ValueError, match="multi_head_attention: expected w_q on cuda:0 as query is, got cpu"):
            ops.multi_head_attention(x, x, x, w, w, w, w, None, None, None, None, 2)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_autocast(device):
    with FakeTensorMode():
        q, k, v = (torch.randn(2, 2, 4, 8, device=device) for _ in range(3))
        x, w = torch.randn(2, 5, 16, device=device), torch.randn(16, 16, device=device)
        torch.set_autocast_enabled(device, True)  # torch.autocast declines where there is no such device
        try:
            output, _, logsumexp = attention(q, k, v)
            layer_output, weights = ops.multi_head_attention(x, x, x, w, w, w, w, None, None, None, None, 2)
        finally:
            torch.set_autocast_enabled(device, False)
    assert logsumexp.dtype == torch.float32
    assert output.dtype == layer_output.dtype == weights.dtype == torch.get_autocast_dtype(device) != torch.float32


def on(x: Tensor, module: nn.Module) -> nn.Module:
    """The module with parameters, of no values, on x's device."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(parameter.shape, device=x.device)))
    return module


def called(x: Tensor) -> nn.Module:
    """A layer of which one projection has to be called."""
    layer = on(x, mha_ext.MultiHeadAttention(16, 2))
    layer.W_q.register_forward_hook(lambda module, arguments, output: output)
    return layer


def through_the_operator(x: Tensor) -> Tensor:
    w = torch.randn(16, 16, device=x.device)
    return ops.multi_head_attention(x, x, x, w, w, w, w, None, None, None, None, 2, need_weights=False)[0]


def through_the_decoder(x: Tensor) -> Tensor:
    model = Decoder("abc", attention="mha_ext", context=8, d_model=16, heads=2, layers=2, dropout=0.0)
    return on(x, model)(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)) * x.mean()


# Functions of x (B, L, 16).
FRONTS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: mha_ext.attention(*[x.unsqueeze(1)] * 3, is_causal=True),
    "scaled_dot_product_attention": lambda x: mha_ext.scaled_dot_product_attention(x, x, x),
    "transformers": lambda x: transformers_attend(nn.Module().eval(), *[x.unsqueeze(1)] * 3, None, is_causal=True)[0],
    "multi_head_attention": through_the_operator,
    "MultiHeadAttention": lambda x: on(x, mha_ext.MultiHeadAttention(16, 2))(x, x, x, need_weights=False)[0],
    "called projections": lambda x: called(x)(x, x, x, need_weights=False)[0],
    "nn.MultiheadAttention": lambda x: on(x, mha_ext.nn.MultiheadAttention(16, 2, batch_first=True))(
        x, x, x, need_weights=False
    )[0],
    "Decoder": through_the_decoder,
}


@pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS)
def test_fronts_are_fused(front):
    with FakeTensorMode(), torch.no_grad():
        x, results = torch.randn(2, 5, 16, device="cuda"), []
        assert is_fused(lambda: results.append(front(x)))
    assert results[0].device.type == "cuda" and results[0].shape[:2] == (2, 5) or results[0].dim() == 4


# Without the library of a device autograd touches none of its tensors. PyTorch lets a process make up one device; it
# gets a process of its own.
ELSEWHERE = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend(rename="elsewhere")
from tests import test_devices
"""

TRAINING = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

def train(x):
    return torch.autograd.grad(front(x).square().sum(), x)

for name, front in test_devices.FRONTS.items():
    graphs = []
    mode = FakeTensorMode(shape_env=ShapeEnv())
    shape = mode.from_tensor(torch.empty(3, 7, 16)).shape  # symbols
    with mode:
        x = torch.randn(shape, device="elsewhere", requires_grad=True)
        calls = test_devices.calls_of(lambda: graphs.append(make_fx(train, tracing_mode="symbolic")(x)))
    nodes = graphs[0].graph.nodes
    used = list(nodes)[-1:]  # not what set the modules up
    for n in used:
        used += [x for x in n.all_input_nodes if x not in used]
    values = [n.meta["val"] for n in used if isinstance(n.meta.get("val"), torch.Tensor)]
    gradient = used[1].meta["val"]
    assert "aten::scaled_dot_product_attention" in calls, name
    assert not [n for n in nodes if "local_scalar" in str(n.target)], name
    assert {x.device.type for x in values if x.dim() > 0} == {"elsewhere"}, name
    assert all(isinstance(n, torch.SymInt) and not n.node.is_constant() for n in gradient.shape[:2]), name
    print(name)
"""


def run_elsewhere(script: str) -> str:
    """What a script prints in a process that has the device "elsewhere"."""
    command = [sys.executable, "-c", ELSEWHERE + script]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_results_elsewhere_have_the_form_of_those_of_the_cpu():
    run_elsewhere('test_devices.check_forms("elsewhere", 8, test_devices.FakeTensorMode())')


def test_training_is_traced_with_dynamic_shapes():
    assert run_elsewhere(TRAINING).splitlines() == list(FRONTS)
