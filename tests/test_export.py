"""Layers and models that leave Python: torch.export, AOTInductor and TorchScript, against the same module in eager."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import mha_ext
from mha_ext.train import checkpoint as checkpoints
from mha_ext.train.model import CharacterModel
from mha_ext.train.settings import Settings

E, HEADS = 16, 2
SIZES = [(3, 5, 7), (1, 1, 1), (2, 1, 9), (4, 9, 9), (6, 3, 4)]  # batch, length of queries, of keys
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
strictly = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
models = pytest.mark.parametrize("kind", ["decoder", "seq2seq"])


def operators(program: torch.export.ExportedProgram) -> list[str]:
    """Those that the graph calls, without the access to parts of a tuple."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return [str(target) for target in targets if isinstance(target, torch._ops.OpOverload)]


# torch.export of layers


@strictly
def test_plain_layer_is_one_operator(strict):
    x = torch.randn(2, 5, E), torch.randn(2, 7, E), torch.randn(2, 7, E)
    program = torch.export.export(mha_ext.MultiHeadAttention(E, HEADS), x, strict=strict)
    assert operators(program) == ["mha_ext.multi_head_attention.default"]
    assert operators(program.run_decompositions()) == ["mha_ext.multi_head_attention.default"]
    program = torch.export.export(mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True), x, strict=strict)
    assert "mha_ext.multi_head_attention.default" in operators(program)
    assert "aten.linear.default" not in operators(program)


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@strictly
def test_projection_that_is_not_plain_is_called(strict):
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    layer.W_k = nn.Sequential(layer.W_k, Scale())
    x = tuple(torch.randn(2, 5, E) for _ in range(3))
    program = torch.export.export(layer, x, strict=strict)
    assert operators(program).count("aten.linear.default") == 4
    torch.testing.assert_close(program.module()(*x), layer(*x))


def test_projection_whose_signature_is_kept_stays_a_module():
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    x = tuple(torch.randn(2, 5, E) for _ in range(3))
    program = torch.export.export(layer, x, preserve_module_call_signature=("W_q",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about attributes that unflatten adds itself
        unflattened = torch.export.unflatten(program)
    unflattened.W_q = nn.Sequential(layer.W_q, Scale())
    changed = copy.deepcopy(layer)
    changed.W_q = nn.Sequential(changed.W_q, Scale())
    torch.testing.assert_close(unflattened(*x), changed(*x))


def test_symbolic_trace_shows_the_projections():
    """fx.symbolic_trace, which tools use to exchange modules, makes nodes of them."""
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    fixed = {"mask": None, "is_causal": False, "need_weights": True, "key_lengths": None, "bias": None}
    traced = torch.fx.symbolic_trace(layer, concrete_args={**fixed, "causal_bottom_right": False, "head_mask": None})
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["W_q", "W_k", "W_v", "W_o"]


class Call(nn.Module):
    """A layer called with options, one of which is an input of the graph."""

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__()
        self.layer = mha_ext.MultiHeadAttention(E, HEADS)
        self.name, self.options = name, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None = None):
        given = {} if self.name is None else {self.name: extra}
        return self.layer(query, key, value, **self.options, **given)


def key_lengths(batch: int, queries: int, keys: int) -> Tensor:
    return torch.arange(batch) % (keys + 1)  # a row without any key among them


def mask(batch: int, queries: int, keys: int) -> Tensor:
    return torch.rand(batch, 1, queries, keys) > 0.3


def padding(batch: int, queries: int, keys: int) -> Tensor:
    return (torch.arange(keys) < key_lengths(batch, queries, keys).unsqueeze(1))[:, None, None].int()


def bias(batch: int, queries: int, keys: int) -> Tensor:
    return torch.randn(HEADS, queries, keys)


# the call, the tensor that goes along, and its dynamic dimensions
CALLS: dict[str, tuple[Call, Callable[..., Tensor] | None, dict[int, str]]] = {
    "weights": (Call(None), None, {}),
    "causal": (Call(None, is_causal=True, causal_bottom_right=True, need_weights=False), None, {}),
    "key_lengths": (Call("key_lengths", is_causal=True), key_lengths, {0: "batch"}),
    "mask": (Call("mask"), mask, {0: "batch", 2: "queries", 3: "keys"}),
    "padding": (Call("mask"), padding, {0: "batch", 3: "keys"}),
    "bias": (Call("bias"), bias, {1: "queries", 2: "keys"}),
}


@pytest.mark.parametrize("named", [True, False], ids=["Dim", "AUTO"])
@pytest.mark.parametrize("call", CALLS)
def test_layer_with_dynamic_sizes(call, named):
    module, make, varies = CALLS[call]
    module.eval()
    sizes = {name: Dim(name) if named else Dim.AUTO for name in ("batch", "queries", "keys")}
    shape = {0: sizes["batch"], 1: sizes["keys"]}
    shapes = {"query": {0: sizes["batch"], 1: sizes["queries"]}, "key": shape, "value": shape}
    shapes["extra"] = {i: sizes[name] for i, name in varies.items()} if make else None

    def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor | None, ...]:
        rows = (torch.randn(batch, length, E) for length in (queries, keys, keys))
        return *rows, make(batch, queries, keys) if make else None

    program = torch.export.export(module, inputs(*SIZES[0]), dynamic_shapes=shapes)
    decomposed = program.run_decompositions()
    for size in SIZES:
        arguments = inputs(*size)
        expected = module(*arguments)
        torch.testing.assert_close(program.module()(*arguments), expected)
        torch.testing.assert_close(decomposed.module()(*arguments), expected)


# torch.export of models


@strictly
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_transformer_after_replace_attention(training, strict):
    model = nn.Transformer(E, HEADS, 1, 1, 32, batch_first=True, dropout=0.0).train(training)
    assert len(mha_ext.replace_attention(model).swapped) == 3

    def inputs(batch: int, source: int, target: int) -> dict[str, Any]:
        padded = torch.arange(source) >= (torch.arange(batch) % source + 1).unsqueeze(1)
        return {
            "src": torch.randn(batch, source, E),
            "tgt": torch.randn(batch, target, E),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(target),
            "src_key_padding_mask": padded,
            "memory_key_padding_mask": padded.clone(),  # a tensor that is given twice would be one input
            "tgt_is_causal": True,  # else the model reads its mask, which no export can follow
        }

    batch, source, target = Dim("batch"), Dim("source"), Dim("target")
    read = {0: batch, 1: source}
    shapes = {"src": read, "tgt": {0: batch, 1: target}, "tgt_mask": {0: target, 1: target}}
    shapes |= {"src_key_padding_mask": read, "memory_key_padding_mask": read, "tgt_is_causal": None}
    program = torch.export.export(model, (), inputs(*SIZES[0]), dynamic_shapes=shapes, strict=strict)
    assert operators(program).count("mha_ext.multi_head_attention.default") == 3
    for size in SIZES:
        arguments = inputs(*size)
        torch.testing.assert_close(program.module()(**arguments), model(**arguments))


def model_of(kind: str, attention: str = "mha_ext") -> CharacterModel:
    torch.manual_seed(0)
    settings = Settings(model=kind, attention=attention, context=24, d_model=E, heads=HEADS, layers=1)
    return checkpoints.build_model(settings, "abcdefgh .")


def batch_of(kind: str, step: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs of the model, of sizes that vary with the step, and what it shall predict."""
    generator = torch.Generator().manual_seed(step)
    source = torch.randint(3, 12, (4, 7 + step % 3), generator=generator)
    if kind == "decoder":
        return (source[:, :-1].contiguous(),), source[:, 1:]
    target = torch.randint(3, 12, (4, 9 - step % 2), generator=generator)
    return (source, torch.tensor([7, 3, 5, 1]), target[:, :-1].contiguous()), target[:, 1:]


def loss_of(model: Callable[..., Tensor], kind: str, step: int) -> Tensor:
    inputs, targets = batch_of(kind, step)
    return F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())


@models
def test_exported_program_trains(kind):
    model = model_of(kind).train()
    batch, length, other = Dim("batch"), Dim("length", max=24), Dim("target_length", max=24)
    shapes = ({0: batch, 1: length}, {0: batch}, {0: batch, 1: other})
    inputs, _ = batch_of(kind)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes[: len(inputs)])
    trained = program.module()
    loss_of(trained, kind, step=1).backward()
    loss_of(model, kind, step=1).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad)
    inputs, _ = batch_of(kind, step=2)
    torch.testing.assert_close(torch.export.unflatten(program)(*inputs), model(*inputs))


# Files for other processes


class Layers(nn.Module):
    """Both layers, with all that an export may carry: masks, lengths, weights, dropout that eval mode leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5)
        self.torchs = mha_ext.nn.MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor, padded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, E), mask (L, L), lengths (B,), padded (B, L) -> (B, L, E) and both weights"""
        h, weights = self.ours(x, x, x, mask, key_lengths=lengths)
        y, averaged = self.torchs(h, x, x, key_padding_mask=padded)
        return y, weights, averaged


def layers_inputs(batch: int, length: int) -> tuple[Tensor, ...]:
    lengths = torch.arange(batch) % length + 1
    padded = torch.arange(length) >= lengths.unsqueeze(1)
    return torch.randn(batch, length, E), torch.rand(length, length) > 0.3, lengths, padded


LOAD_AND_COMPARE = """
import sys, torch
if sys.argv[1] == "with":
    import mha_ext
load = {"program": lambda: torch.export.load("program.pt2").module(),
        "package": lambda: torch._inductor.aoti_load_package("package.pt2")}[sys.argv[2]]
model = load()
for inputs, expected in torch.load("expected.pt"):
    with torch.no_grad():
        torch.testing.assert_close(list(model(*inputs)), list(expected))
print("equal")
"""


def process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python that knows no more than the files in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mha_ext.__file__).parents[1])}
    command = [sys.executable, "-c", LOAD_AND_COMPARE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with program.pt2, package.pt2, and what they shall compute."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = Layers().eval()
    batch, length = Dim("batch"), Dim("length")
    shapes = ({0: batch, 1: length}, {0: length, 1: length}, {0: batch}, {0: batch, 1: length})
    with torch.no_grad():
        program = torch.export.export(model, layers_inputs(3, 7), dynamic_shapes=shapes)
        torch.export.save(program, folder / "program.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "package.pt2"))
        cases = [layers_inputs(*size) for size in ((3, 7), (1, 1), (2, 12), (5, 3))]
        torch.save([(inputs, model(*inputs)) for inputs in cases], folder / "expected.pt")
    return folder


@pytest.mark.parametrize("file", ["program", "package"])
def test_fresh_process_loads_it(saved, file):
    result = process(saved, "with", file)
    assert result.stdout == "equal\n", result.stderr


def test_package_without_the_operators_is_an_error_that_names_them(saved):
    result = process(saved, "without", "package")
    assert result.returncode == 1
    assert "Could not find schema for mha_ext::multi_head_attention" in result.stderr


# TorchScript


def reloaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@models
def test_loaded_script_is_fine_tuned_as_the_model_is(kind):
    eager = model_of(kind)
    losses = []
    for model in (eager, reloaded(torch.jit.script(copy.deepcopy(eager).eval()))):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(6):
            loss = loss_of(model, kind, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert losses[0][-1] < losses[0][0] - 0.3


def frozen(model: nn.Module, inputs: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    return torch.jit.freeze(torch.jit.script(model))


def optimized(model: nn.Module, inputs: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    return torch.jit.optimize_for_inference(torch.jit.script(model))


def traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    return torch.jit.trace(model, inputs)


@models
@pytest.mark.parametrize("convert", [frozen, optimized, traced])
def test_script_forms_of_a_model(convert, kind):
    model = model_of(kind).eval()
    script = reloaded(convert(model, batch_of(kind)[0]))
    with torch.no_grad():
        for step in range(4):  # other lengths; and the profiling executor changes the graph after the first runs
            inputs, _ = batch_of(kind, step)
            torch.testing.assert_close(script(*inputs), model(*inputs))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.mha_ext.attention(query, key, value, is_causal=True)[0]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return mha_ext.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("function", [causal_attention, sdpa])
def test_functions_that_script(function):
    x = [torch.randn(2, HEADS, 5, 8) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*x, is_causal=True)
    torch.testing.assert_close(torch.jit.script(function)(*x), expected)
