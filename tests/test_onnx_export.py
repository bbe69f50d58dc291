"""Models with our attention as ONNX graphs: the same results in onnxruntime, the standard operator where it will do."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import mha_ext
import mha_ext.integrations.onnx as mha_onnx
import mha_ext.integrations.transformers
from mha_ext.train.model import Decoder
from mha_ext.train.seq2seq import Seq2Seq
from tests import documents, reference
from tests.cases import Case, make
from tests.checks import assert_as_good_as_plain, plain_attention
from tests.models.architectures import ARCHITECTURES, tokens

TENSOR_OPTIONS = ("mask", "bias", "key_lengths")
B, L, S = (Dim(name, min=1, max=12) for name in ("batch", "length", "source"))

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:# :UserWarning")  # torch's own exporter's


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def exported(model: nn.Module, *args: Any, options: dict[str, Any] | None = None, **arguments: Any) -> onnx.ModelProto:
    """The graph of a call `model(*args, **arguments)`, checked; `options` are the exporter's."""
    program = mha_onnx.export(model.eval(), args, kwargs=arguments, verbose=False, **(options or {}))
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def run(graph: onnx.ModelProto, *inputs: Tensor) -> list[Tensor]:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def assert_same(graph: onnx.ModelProto, model: nn.Module, *args: Any, **arguments: Any) -> None:
    """onnxruntime computes what the model does."""
    with torch.no_grad():
        expected = tensors(model(*args, **arguments))
    for actual, wanted in zip(run(graph, *tensors((args, arguments))), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def operators(graph: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.node)


class Attend(nn.Module):
    """The operator with options that do not change; returns the first of its results."""

    def __init__(self, results: int = 3, **options: Any) -> None:
        super().__init__()
        self.results, self.options = results, options

    def forward(self, query, key, value, mask=None, bias=None, key_lengths=None):
        given = {"mask": mask, "bias": bias, "key_lengths": key_lengths}
        return torch.ops.mha_ext.attention(query, key, value, **given, **self.options)[: self.results]


class Calls(nn.Module):
    """Many calls in one graph, which is exported much sooner than many graphs."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, calls):
        return [model(*call) for model, call in zip(self.models, calls, strict=True)]


def call_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, ...]:
    inputs = make(case, dtype)
    return (inputs.query, inputs.key, inputs.value, *(inputs.options.get(name) for name in TENSOR_OPTIONS))


def model_of(case: Case, results: int) -> Attend:
    return Attend(results, **{name: x for name, x in make(case).options.items() if name not in TENSOR_OPTIONS})


# --- The operator against the oracle -------------------------------------------------------------------------------

SIZES = {"heads": 4, "q_len": 5, "kv_len": 7, "value_dim": 6, "need_weights": True}
CASES = (
    Case("plain", **SIZES),
    Case("scale", **SIZES, scale=0.3),
    Case("negative scale", **SIZES, scale=-0.3),
    Case("no scale", **SIZES, scale=0.0),
    Case("grouped", **SIZES, kv_heads=2),
    Case("causal", **SIZES, causal="top_left"),
    Case("causal, more queries", **{**SIZES, "q_len": 9}, causal="top_left"),
    Case("bottom right", **SIZES, causal="bottom_right"),
    Case("bottom right, more queries", **{**SIZES, "q_len": 9}, causal="bottom_right"),
    Case("mask of no dimensions", **SIZES, mask="scalar"),
    Case("mask of keys", **SIZES, mask="keys"),
    Case("mask of rows", **SIZES, mask="rows"),
    Case("mask of heads", **SIZES, mask="heads", kv_heads=1),
    Case("mask", **SIZES, mask="plane"),
    Case("mask, uniform", **SIZES, mask="full", uniform_dead_rows=True, kv_heads=2),
    Case("bias of heads", **SIZES, bias="heads"),
    Case("bias", **SIZES, bias="plane_per_head"),
    Case("infinite bias", **SIZES, bias="infinite"),
    Case("mask, infinite bias, causal", **SIZES, mask="plane_per_batch", bias="infinite", causal="top_left"),
    Case("lengths", **SIZES, key_lengths=(7, 0)),
    Case("only lengths", **{**SIZES, "need_weights": False}, key_lengths=(7, 0)),
    Case("lengths, uniform", **SIZES, key_lengths=(0, 3), uniform_dead_rows=True),
    Case("lengths, causal", **SIZES, key_lengths=(0, 3), causal="bottom_right"),
    Case("averaged", **SIZES, average_weights=True, mask="plane"),
    Case("softcap", **SIZES, softcap=0.7),
    Case("softcap, mask, bias", **SIZES, softcap=0.7, mask="plane", bias="plane", kv_heads=2),
    Case("softcap, causal", **SIZES, softcap=0.7, causal="top_left"),
    Case("no queries", **{**SIZES, "q_len": 0}, mask="keys"),
    Case("no keys", **{**SIZES, "kv_len": 0}, uniform_dead_rows=True),
)
NAMED = {case.name: case for case in CASES}
ALL = tuple(NAMED)
IN_DOUBLE = ("plain", "scale", "softcap", "softcap, mask, bias", "mask, infinite bias, causal")
LATER = ("causal", "mask of rows", "lengths", "only lengths", "lengths, causal")
RUNS = {"float32": (torch.float32, 23, ALL), "float64": (torch.float64, 23, IN_DOUBLE)}
RUNS |= {f"opset {opset}": (torch.float32, opset, LATER) for opset in (24, 25)}


@functools.cache
def results_of_run(name: str) -> dict[str, list[Tensor]]:
    dtype, opset, cases = RUNS[name]
    calls = [call_of(NAMED[case], dtype) for case in cases]
    graph = exported(Calls(model_of(NAMED[case], 3) for case in cases), calls, options={"opset_version": opset})
    found = iter(run(graph, *tensors(calls)))
    return {case: [next(found) for _ in range(3)] for case in cases}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (_, _, cases) in RUNS.items() for case in cases])
def test_operator(name, case):
    """In double, too, in which the operator's own scale and softcap are not."""
    inputs = make(NAMED[case], RUNS[name][0])
    qkv = (inputs.query, inputs.key, inputs.value)
    plain, exact = plain_attention(*qkv, **inputs.options), reference.attention(*qkv, **inputs.options)
    for what, actual, other in zip(("output", "weights", "logsumexp"), results_of_run(name)[case], plain, strict=True):
        if what == "weights" and not NAMED[case].need_weights:
            assert actual.shape == (0,)
        else:
            assert_as_good_as_plain(actual, other, getattr(exact, what), what=what)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype):
    """Inputs and results in float32, as NumPy has no bfloat16."""

    class Rounded(nn.Module):
        def forward(self, query, key, value, bias):
            query, key, value = (x.to(dtype) for x in (query, key, value))
            return tuple(
                x.float() for x in torch.ops.mha_ext.attention(query, key, value, bias=bias, need_weights=True)
            )

    inputs = make(Case("half", **SIZES, bias="infinite"))
    arguments = (inputs.query, inputs.key, inputs.value, inputs.options["bias"])
    graph = exported(Rounded(), *arguments)
    assert operators(graph)["Attention"] == 1
    for actual, expected in zip(run(graph, *arguments), Rounded()(*arguments), strict=True):
        eps = torch.finfo(dtype).eps  # a sum at the edge may be rounded to the neighbour
        torch.testing.assert_close(actual, expected, rtol=eps, atol=1e-6)


# --- The graph ----------------------------------------------------------------------------------------------------

MASKED = {"inputs": "QKV mask"}
NODES = {  # opset, case: attributes and inputs beside the usual
    (23, Case("grouped", heads=4, kv_heads=2)): {},
    (23, Case("scale", scale=0.25)): {"scale": 0.25},
    (23, Case("causal", causal="top_left", kv_len=20)): {"is_causal": 1},
    (23, Case("square, bottom right", causal="bottom_right")): {"is_causal": 1},
    (23, Case("bottom right", causal="bottom_right", kv_len=20)): MASKED,
    (23, Case("mask", mask="keys")): MASKED,
    (23, Case("bias, causal", bias="plane", causal="top_left")): MASKED,
    (23, Case("lengths", key_lengths=True)): MASKED,
    (23, Case("softcap", softcap=2.0)): {"softcap": 2.0},
    (23, Case("weights", need_weights=True)): {"qk_matmul_output_mode": 3},
    (24, Case("lengths", key_lengths=True)): {"inputs": "QKV lengths"},
    (24, Case("lengths, causal", key_lengths=True, causal="top_left")): MASKED,
}
INPUTS = {"QKV": [True] * 3, "QKV mask": [True] * 4, "QKV lengths": [True] * 3 + [False] * 3 + [True]}


@pytest.mark.parametrize("opset", (23, 24))
def test_standard_operator_is_used(opset):
    cases = [case for version, case in NODES if version == opset]
    models = [model_of(case, 2 if case.need_weights else 1) for case in cases]
    graph = exported(Calls(models), [call_of(case) for case in cases], options={"opset_version": opset})
    nodes = [node for node in graph.graph.node if node.op_type == "Attention"]
    for case, node in zip(cases, nodes, strict=True):
        expected = {"is_causal": 0, "scale": np.float32(8**-0.5), "inputs": "QKV", **NODES[opset, case]}
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert [bool(name) for name in node.input] == INPUTS[expected.pop("inputs")], case.name
        assert found == expected, case.name
    assert not {"MatMul", "Softmax", "ReduceLogSumExp"} & set(operators(graph))


def test_another_reader():
    """The reference implementation of ONNX computes the same."""
    case = Case("mask, lengths", **SIZES, mask="plane", key_lengths=(7, 3), uniform_dead_rows=True)
    call, model = call_of(case), model_of(case, 2)
    graph = exported(model, *call)
    feeds = {x.name: y.numpy() for x, y in zip(graph.graph.input, tensors(call), strict=True)}
    for actual, expected in zip(ReferenceEvaluator(graph).run(None, feeds), model(*call), strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), expected)


# --- Layers and models --------------------------------------------------------------------------------------------


def features(batch: int = 2, length: int = 5, width: int = 16) -> Tensor:
    return torch.randn(batch, length, width)


@pytest.mark.parametrize("weights", [False, True])
def test_layer_of_any_size(weights):
    layer = mha_ext.MultiHeadAttention(16, 4).eval()
    sizes = {"query": {0: B, 1: L}, "key": {0: B, 1: S}, "value": {0: B, 1: S}, "key_lengths": {0: B}}
    x, lengths = features(), torch.tensor([5, 2])
    sizes["need_weights"] = None
    graph = exported(layer, x, x, x, options={"dynamic_shapes": sizes}, key_lengths=lengths, need_weights=weights)
    assert operators(graph)["Attention"] == (0 if weights else 1)
    assert_same(graph, layer, x, x, x, key_lengths=lengths, need_weights=weights)
    y, lengths = features(3, 7), torch.tensor([7, 0, 1])
    assert_same(graph, layer, features(3, 4), y, y, key_lengths=lengths, need_weights=weights)


def test_padding_may_hold_anything():
    layer = mha_ext.MultiHeadAttention(16, 4).eval()
    x, y, lengths = features(), features(), torch.tensor([5, 2])
    y[1, 2:] = float("nan")
    assert_same(exported(layer, x, y, y, key_lengths=lengths), layer, x, y, y, key_lengths=lengths)


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_any_length_are_computed_with(average):
    """ONNX's shape inference gives the weights of its Attention a last size of 0 where it is dynamic."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = mha_ext.nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.attention(x, x, x, average_attn_weights=average)[1]
            return weights[..., 1:], torch.cat([weights, weights], -1)

    model = Model().eval()
    graph = exported(model, torch.randn(2, 6, 16), options={"dynamic_shapes": ({1: L},)})
    assert_same(graph, model, torch.randn(2, 9, 16))


def test_no_file_of_an_opset_that_is_not_reached(tmp_path):
    with pytest.raises(ValueError, match="onnx.export: expected opset_version that torch and onnxscript reach"):
        mha_onnx.export(
            mha_ext.MultiHeadAttention(16, 4).eval(), (features(),) * 3, tmp_path / "x.onnx", opset_version=99
        )
    assert not list(tmp_path.iterdir())


def test_numpy_class():
    theirs = documents.NumpyMultiHeadAttention(16, 4)
    matrices = (theirs.W_q, theirs.W_k, theirs.W_v, theirs.W_o)
    layer = mha_ext.MultiHeadAttention.from_numpy(*matrices, num_heads=4).eval()
    x, mask = features().double(), torch.rand(2, 1, 5, 5) < 0.5
    mask[0, 0, 1] = True  # hides everything
    mask = mask.double()
    expected = theirs.call(x.numpy(), x.numpy(), x.numpy(), mask.numpy())
    for actual, wanted in zip(run(exported(layer, x, x, x, mask), x, x, x, mask), expected, strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(wanted))


def with_hook(layer: mha_ext.MultiHeadAttention) -> None:
    layer.W_q.register_forward_hook(lambda module, args, output: 2 * output)


def with_adapter(layer: mha_ext.MultiHeadAttention) -> None:
    layer.W_v = nn.Sequential(layer.W_v, nn.Linear(16, 2), nn.Linear(2, 16))


@pytest.mark.parametrize("change", (with_hook, with_adapter))
def test_called_projections(change):
    layer = mha_ext.MultiHeadAttention(16, 4).eval()
    x = features()
    before = layer(x, x, x)[0]
    change(layer)
    assert not torch.allclose(layer(x, x, x)[0], before)
    assert_same(exported(layer, x, x, x), layer, x, x, x)


def test_torch_layer():
    layer = mha_ext.nn.MultiheadAttention(16, 4, kdim=12, vdim=10, add_bias_kv=True, batch_first=True).eval()
    x, key, value = features(), features(2, 7, 12), features(2, 7, 10)
    padding = torch.arange(7) >= torch.tensor([[7], [3]])
    arguments = {"key_padding_mask": padding, "attn_mask": torch.randn(5, 7), "average_attn_weights": False}
    assert_same(exported(layer, x, key, value, **arguments), layer, x, key, value, **arguments)


class Functional(nn.Module):
    """Called as a function, a layer is one operator in the exported program too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 4)

    def forward(self, query, key, value):
        p = self.layer
        return mha_ext.nn.functional.multi_head_attention_forward(
            query, key, value, 16, 4, p.in_proj_weight, p.in_proj_bias, None, None, False, 0.0,
            p.out_proj.weight, p.out_proj.bias, training=False, need_weights=False,
        )  # fmt: skip


def test_whole_layer_operator():
    model = Functional().eval()
    query, key = features(5, 2), features(7, 2)
    sizes = ({0: L, 1: B}, {0: S, 1: B}, {0: S, 1: B})
    graph = exported(model, query, key, key, options={"dynamic_shapes": sizes})
    assert operators(graph)["Attention"] == 1
    assert_same(graph, model, query, key, key)
    query, key = features(4, 3), features(6, 3)
    assert_same(graph, model, query, key, key)


class Sdpa(nn.Module):
    def forward(self, query, key, value, mask):
        return mha_ext.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_sdpa_of_other_ranks():
    key, mask = torch.randn(7, 8), torch.rand(5, 7) < 0.5
    calls = [(torch.randn(*leading, 5, 8), key, key, mask) for leading in ((), (2,), (2, 3, 4))]
    model = Calls(Sdpa() for _ in calls)
    assert_same(exported(model, calls), model, calls)


MODEL = {"attention": "mha_ext", "context": 12, "d_model": 16, "heads": 4, "layers": 1, "dropout": 0.1}


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 8, (batch, length))


def test_decoder():
    model = Decoder("abcdefgh", **MODEL).eval()
    graph = exported(model, ids(2, 6), options={"dynamic_shapes": ({0: B, 1: L},)})
    assert_same(graph, model, ids(3, 11))
    assert operators(graph)["Attention"] == 1


def test_encoder_and_decoder():
    model = Seq2Seq("abcdefgh", **MODEL).eval()
    sizes = ({0: B, 1: S}, {0: B}, {0: B, 1: L})
    graph = exported(model, ids(2, 6), torch.tensor([6, 3]), ids(2, 5), options={"dynamic_shapes": sizes})
    assert operators(graph)["Attention"] == 3
    assert_same(graph, model, ids(3, 8), torch.tensor([8, 1, 4]), ids(3, 9))


def test_replaced_attention():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    model.eval()
    mha_ext.replace_attention(model)
    x, padding = features(), torch.arange(5) >= torch.tensor([[5], [2]])
    sizes = {"src": {0: B, 1: L}, "src_key_padding_mask": {0: B, 1: L}}
    graph = exported(model, x, src_key_padding_mask=padding, options={"dynamic_shapes": sizes})
    assert operators(graph)["Attention"] == 2
    padding = torch.arange(7) >= torch.tensor([[7], [2], [4]])
    assert_same(graph, model, features(3, 7), src_key_padding_mask=padding)


@pytest.mark.parametrize(("name", "standard"), (("llama", 2), ("gemma2", 0)))
def test_transformers(name, standard):
    """Grouped heads under a causal mask with padding; softcap with masks, which is written out."""

    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits

    mha_ext.integrations.transformers.register()
    model = Logits(ARCHITECTURES[name].build("mha_ext", torch.float32))
    mask = (torch.arange(11) < torch.tensor([[11], [7]])).long()
    inputs = tuple(tokens(mask).values())
    graph = exported(model, *inputs)
    assert operators(graph)["Attention"] == standard
    with torch.no_grad():
        (found,), expected = run(graph, *inputs), model(*inputs)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


# --- The fronts ---------------------------------------------------------------------------------------------------


def test_one_tensor_given_twice_becomes_two_inputs():
    layer, x = mha_ext.MultiHeadAttention(16, 4).eval(), features()
    graph = exported(layer, x, x, x)
    assert_same(graph, layer, features(), features(), features())


def test_written_file_and_names(tmp_path):
    layer, x = mha_ext.MultiHeadAttention(16, 4).eval(), features()
    names = {"input_names": ["q", "k", "v"], "output_names": ["output", "weights"]}
    mha_onnx.export(layer, (x, x, x), tmp_path / "layer.onnx", **names, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {name: x.numpy() for name in "qkv"})
    torch.testing.assert_close(torch.from_numpy(output), layer(x, x, x)[0].detach())


def test_table_for_torch():
    layer, x = mha_ext.MultiHeadAttention(16, 4).eval(), features()
    exporter = {"dynamo": True, "opset_version": 23, "verbose": False}
    program = torch.onnx.export(layer, (x, x, x), **exporter, custom_translation_table=mha_onnx.translations(23))
    assert operators(program.model_proto)["Attention"] == 1
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="No ONNX function found for .*mha_ext"):
        torch.onnx.export(layer, (x, x, x), **exporter)


def test_table_of_the_user_comes_first():
    def constant(query, key, value, **options):
        from onnxscript import opset23 as op

        return op.Identity(value), op.Identity(value), op.Identity(value)

    table = {torch.ops.mha_ext.attention.default: constant}
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    graph = exported(Attend(1), query, key, value, options={"custom_translation_table": table})
    torch.testing.assert_close(run(graph, query, key, value)[0], value)


def test_results_without_optimisation():
    case = Case("mask", mask="plane", need_weights=True)
    call, model = call_of(case), model_of(case, 3)
    assert_same(exported(model, *call, options={"optimize": False}), model, *call)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"opset_version": 22}, "onnx.export: expected opset_version >= 23, which has Attention, got 22"),
        ({"opset_version": 99}, "onnx.export: expected opset_version that torch and onnxscript reach, .*, got 99"),
        ({"dynamo": False}, "onnx.export: expected dynamo=True, .*, got False"),
        ({}, "onnx.export: expected dropout_p = 0, as in eval mode, got 0.25"),
    ),
)
@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_refused(options, text):
    layer, x = mha_ext.MultiHeadAttention(16, 4, dropout=0.25 * (not options)), features()
    with pytest.raises(ValueError, match=f"^{text}"):
        mha_onnx.export(layer, (x, x, x), verbose=False, **options)


@pytest.mark.parametrize("missing", ("onnx", "onnxscript"))
def test_missing_library(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"^onnx\.export: expected onnx and onnxscript, found no {missing}; "):
        mha_onnx.translations()


def test_libraries_are_imported_when_needed():
    code = "import sys, mha_ext.integrations.onnx; assert not {'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
