"""Models without some heads compute what they computed with these masked; nothing else changes, or nothing at all."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import mha_ext
from mha_ext.heads.pruning import PruningCurve, prune_heads, pruned_heads, pruning_curve
from mha_ext.heads.recording import gate
from mha_ext.train.attention import make_attention
from tests.documents import MultiHeadAttention as Document
from tests.heads.test_layout import HUGGING_FACE, Fused, Named
from tests.models.architectures import Architecture

E, HEADS, BATCH, LENGTH, KEYS = 12, 4, 2, 5, 7
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def inputs(*features: int) -> list[Tensor]:
    features = features or (E, E, E)
    return [torch.randn(BATCH, length, n).double() for length, n in zip((LENGTH, KEYS, KEYS), features, strict=True)]


def factors(heads: list[int], total: int = HEADS) -> Tensor:
    return torch.tensor([float(h not in heads) for h in range(total)], dtype=torch.float64)


def drawn(module: nn.Module) -> nn.Module:
    """In float64, no parameter 0."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


# --- Layers ---------------------------------------------------------------------------------------------------------


def grouped() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    layer.W_k, layer.W_v = nn.Linear(E, E // 2), nn.Linear(E, 4)
    layer.W_o = nn.Linear(2 * HEADS, E)
    return layer


def ours(**options: Any) -> nn.Module:
    return mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True, **options)


def theirs(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(E, HEADS, batch_first=True, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "MultiHeadAttention": (lambda: mha_ext.MultiHeadAttention(E, HEADS), [0, 2]),
    "without biases": (lambda: mha_ext.MultiHeadAttention(E, HEADS, bias=False), [3]),
    "grouped": (grouped, [2, 3]),
    "document": (lambda: Document(E, HEADS), [1, 2, 3]),
    "mha_ext.nn": (ours, [1]),  # 12 features are not divisible by 3 heads of 4, or were they
    "mha_ext.nn of three": (ours, [0, 1, 3]),
    "mha_ext.nn, separate": (lambda: ours(kdim=5, vdim=6), [0, 3]),
    "mha_ext.nn, more keys": (lambda: ours(add_bias_kv=True, add_zero_attn=True), [0, 2]),
    "torch.nn": (theirs, [0, 2]),
    "torch.nn, separate": (lambda: theirs(kdim=5, vdim=6, bias=False), [1]),
    "torch.nn, more keys": (lambda: theirs(add_bias_kv=True), [2]),
}


def run(layer: nn.Module, tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.MultiheadAttention):
        options["average_attn_weights"] = False
    return layer(*tensors, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_computes_what_a_mask_computed(name):
    """Output, weights of the heads that stay, gradients of the input and of all that stays."""
    build, heads = LAYERS[name]
    layer = drawn(build())
    tensors = [x.requires_grad_() for x in inputs(E, getattr(layer, "kdim", E), getattr(layer, "vdim", E))]
    whole = copy.deepcopy(layer)
    mha_ext.replace_attention(whole)
    expected, weights = run(whole, tensors, head_mask=factors(heads))
    assert prune_heads(layer, {"": heads}) == {"": heads}
    found, rest = run(layer, tensors)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(rest, weights[:, [h for h in range(HEADS) if h not in heads]])
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sin().sum(), tensors, retain_graph=True) for y in (found, expected))
    )
    of_rest = {n: x.numel() for n, x in layer.named_parameters()}
    grads = torch.autograd.grad(found.sin().sum(), list(layer.parameters()))
    of_whole = torch.autograd.grad(expected.sin().sum(), list(whole.parameters()))
    for (n, small), large in zip(zip(of_rest, grads, strict=True), of_whole, strict=True):
        torch.testing.assert_close(small.abs().sum(), large.abs().sum(), msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_left_is_smaller(name):
    build, heads = LAYERS[name]
    layer = build()
    first = next(layer.parameters())
    first.requires_grad_(False)
    first.marked = "as before"
    before = {n: (p.shape, p.requires_grad) for n, p in layer.named_parameters()}
    share = 1 - len(heads) / HEADS
    prune_heads(layer, {"": heads})
    assert layer.num_heads == HEADS - len(heads)
    for n, parameter in layer.named_parameters():
        shape, requires_grad = before[n]
        is_output_bias = n in ("W_o.bias", "out_proj.bias")
        assert type(parameter) is nn.Parameter and parameter.requires_grad == requires_grad and parameter.is_leaf
        assert parameter.numel() == math.prod(shape) * (1 if is_output_bias else share), n
        assert parameter.is_contiguous()
    assert next(layer.parameters()).marked == "as before"
    for linear in layer.modules():
        if isinstance(linear, nn.Linear):
            assert linear.weight.shape == (linear.out_features, linear.in_features)
    assert getattr(layer, "d_model", E) == getattr(layer, "embed_dim", E) == E
    assert getattr(layer, "d_k", 3) == getattr(layer, "head_dim", 3) == 3


def test_known_rows_and_columns():
    layer = mha_ext.MultiHeadAttention(6, 3)
    for name in ("W_q", "W_k", "W_v", "W_o"):
        linear = getattr(layer, name)
        linear.weight.data.copy_(torch.arange(36.0).view(6, 6))
        linear.bias.data.copy_(torch.arange(6.0))
    prune_heads(layer, {"": [1]})
    for name in ("W_q", "W_k", "W_v"):
        assert getattr(layer, name).weight[:, 0].tolist() == [0, 6, 24, 30]
        assert getattr(layer, name).bias.tolist() == [0, 1, 4, 5]
    assert layer.W_o.weight[0].tolist() == [0, 1, 4, 5] and layer.W_o.bias.tolist() == [0, 1, 2, 3, 4, 5]


def test_other_masks_and_ways_to_call():
    """Padding, causality, no batch, nested tensors; a mask of the heads that are left."""
    layer = drawn(ours())
    whole = copy.deepcopy(layer)
    prune_heads(layer, {"": [0, 2]})
    x, mask = torch.randn(BATCH, LENGTH, E).double(), factors([0, 2])
    padding = torch.arange(LENGTH) >= torch.tensor([[3], [LENGTH]])
    for options in ({"key_padding_mask": padding}, {"is_causal": True}, {"need_weights": False}):
        torch.testing.assert_close(layer(x, x, x, **options)[0], whole(x, x, x, head_mask=mask, **options)[0])
    y = x[0]
    torch.testing.assert_close(layer(y, y, y)[0], whole(y, y, y, head_mask=mask)[0])
    nested = torch.nested.nested_tensor([x[0, :3], x[1]], layout=torch.jagged)
    found, expected = layer(nested, nested, nested)[0], whole(nested, nested, nested, head_mask=mask)[0]
    torch.testing.assert_close(found.values(), expected.values())
    left = torch.tensor([2.0, -1.0]).double()
    of_all = torch.tensor([0.0, 2.0, 0.0, -1.0]).double()
    torch.testing.assert_close(layer(x, x, x, head_mask=left)[0], whole(x, x, x, head_mask=of_all)[0])


@pytest.mark.parametrize("name", ["MultiHeadAttention", "mha_ext.nn"])
def test_adapters_of_other_layers_and_dropout_stay(name):
    build, heads = LAYERS[name]
    layer = build().train()
    layer.dropout = 0.5
    layer.register_forward_hook(lambda module, args, results: (results[0] + 1, results[1]))
    prune_heads(layer, {"": heads})
    x = torch.randn(BATCH, 40, E)
    output, weights = run(layer, [x, x, x])
    assert 0.4 < (weights == 0).float().mean() < 0.6
    layer.eval()
    hooks = layer._forward_hooks.copy()
    output = layer(x, x, x)[0]
    layer._forward_hooks.clear()
    torch.testing.assert_close(output, layer(x, x, x)[0] + 1)
    assert len(hooks) == 1


# --- Models ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """One attention of each kind, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mha_ext.MultiHeadAttention(E, HEADS), ours(), theirs(), Document(E, HEADS)])

    def forward(self, x: Tensor, head_mask: dict[int, Tensor] | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            options = {"head_mask": head_mask[i]} if head_mask and i in head_mask else {}
            x = x + layer(x, x, x, **options)[0]
        return x


CHOSEN = {"layers.0": [1], "layers.1": [0, 3], "layers.2": [2], "layers.3": [0, 1, 2]}


def test_a_model_and_numbers():
    """Heads are numbered as in the layer as it is, what is gone as in the whole one; nothing is removed of others."""
    model, x = drawn(Model()), torch.randn(BATCH, LENGTH, E).double()
    whole = copy.deepcopy(model)
    mha_ext.replace_attention(whole)
    assert pruned_heads(model) == {}
    assert prune_heads(model, {"layers.1": [3], "layers.2": []}) == {"layers.1": [3]}
    assert type(model.layers[2]) is nn.MultiheadAttention  # nothing to do, nothing done
    torch.testing.assert_close(model(x), whole(x, {1: factors([3])}))
    assert prune_heads(model, {"layers.1": [0]}) == {"layers.1": [0]}
    torch.testing.assert_close(model(x), whole(x, {1: factors([0, 3])}))
    others = {name: heads for name, heads in CHOSEN.items() if name != "layers.1"}
    assert prune_heads(model, {name: torch.tensor(heads) for name, heads in others.items()}) == others
    torch.testing.assert_close(model(x), whole(x, {i: factors(h) for i, h in enumerate(CHOSEN.values())}))
    assert pruned_heads(model) == CHOSEN
    assert prune_heads(model, {"layers.1": [1]}) == {"layers.1": [1]}  # which was 2, the last of 1 and 2 that were left
    assert pruned_heads(model) == {**CHOSEN, "layers.1": [0, 2, 3]}
    assert isinstance(model.layers[2], mha_ext.nn.MultiheadAttention)
    assert isinstance(model.layers[3], Document) and isinstance(model.layers[3], mha_ext.MultiHeadAttention)


def test_a_layer_under_two_names_is_one_layer():
    model = nn.ModuleDict({"a": mha_ext.MultiHeadAttention(E, HEADS)})
    model["b"] = model["a"]
    assert prune_heads(model, {"a": [0], "b": [2]}) == {"a": [0, 2]}
    assert model["a"].num_heads == 2 and model["b"] is model["a"]
    with pytest.raises(ValueError, match="expected at least one head of 'a' to stay, got all 2"):
        prune_heads(model, {"a": [0], "b": [1]})


def test_torchs_encoder():
    """In both modes: its shortcut in eval mode does not bypass the smaller layer."""
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True)
    model = drawn(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x, padding = torch.randn(BATCH, LENGTH, E).double(), torch.arange(LENGTH) >= torch.tensor([[3], [LENGTH]])
    with gate(model, {"layers.1.self_attn": factors([0, 1])}):
        expected = model(x, src_key_padding_mask=padding)
    prune_heads(model, {"layers.1.self_attn": [0, 1]})
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            found = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], expected[~padding])


def test_training_goes_on():
    model, x = Model(), torch.randn(BATCH, LENGTH, E)
    prune_heads(model, CHOSEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_pruned_in_inference_mode_and_on_meta():
    model, x = Model(), torch.randn(BATCH, LENGTH, E)
    with torch.inference_mode():
        prune_heads(model, CHOSEN)
    model(x).sum().backward()
    layer = mha_ext.MultiHeadAttention(E, HEADS, device="meta")
    prune_heads(layer, {"": [0]})
    assert layer.W_q.weight.shape == (9, E) and layer.W_q.weight.is_meta


# --- Saving, copying, compiling -------------------------------------------------------------------------------------


def bytes_of(save: Callable[[io.BytesIO], None]) -> io.BytesIO:
    buffer = io.BytesIO()
    save(buffer)
    buffer.seek(0)
    return buffer


def fresh() -> Model:
    model = Model().double()
    mha_ext.replace_attention(model)
    return model


@pytest.mark.parametrize("options", [{}, {"assign": True}], ids=str)
def test_saved_and_loaded(options):
    model, x = drawn(Model()), torch.randn(BATCH, LENGTH, E).double()
    prune_heads(model, CHOSEN)
    state = torch.load(bytes_of(lambda file: torch.save(model.state_dict(), file)))
    assert state["layers.1.pruned_heads"].tolist() == [0, 3]
    other = fresh()
    assert str(other.load_state_dict(state, strict=True, **options)) == "<All keys matched successfully>"
    assert pruned_heads(other) == CHOSEN
    assert torch.equal(other(x), model(x))
    other.load_state_dict(state)  # again, into one that is small already
    assert list(other.state_dict()) == list(state)
    assert type(other.layers[0].W_q.weight) is nn.Parameter and other.layers[0].num_heads == 3


def test_state_dicts_of_whole_models_are_as_before():
    model = fresh()
    names = list(model.state_dict())
    assert not any("pruned_heads" in name for name in names)
    model.load_state_dict(Model().state_dict(), strict=True)
    with pytest.raises(ValueError, match="got 9"):
        prune_heads(model, {"layers.0": [9]})
    assert list(model.state_dict()) == names


def test_loading_prunes_further():
    model, other = Model().double(), fresh()
    prune_heads(model, {"layers.0": [1, 3]})
    prune_heads(other, {"layers.0": [3]})
    other.load_state_dict({n: x for n, x in model.state_dict().items() if n.startswith("layers.0")}, strict=False)
    assert pruned_heads(other) == {"layers.0": [1, 3]}
    assert torch.equal(other.layers[0].W_k.weight, model.layers[0].W_k.weight)


WRONG_SAVED = {
    "other heads": (torch.tensor([1]), "not lost other heads than .1., got one without .0."),
    "all heads": (torch.arange(HEADS), "expected at least one head of '' to stay"),
    "no such head": (torch.tensor([0, HEADS]), r"expected pruned_heads from 0 to 3, got \[0, 4\]"),
    "dtype": (torch.tensor([0.0]), r"expected pruned_heads int64 \(n,\), got torch.float32 \(1,\)"),
    "shape": (torch.tensor([[0]]), r"got torch.int64 \(1, 1\)"),
    "a list": ([0, 1], r"expected pruned_heads int64 \(n,\), got list"),
    "no values": (torch.tensor([0, 1], device="meta"), r"got torch.int64 \(2,\)"),
    "a head twice": (torch.tensor([0, 1, 1]), r"expected pruned_heads in ascending order, got \[0, 1, 1\]"),
    "weights of more heads": (
        torch.tensor([0, 1]),
        r"(W_q.weight|in_proj_weight) of shape .* without heads \[0, 1\], got",
    ),
}


@pytest.mark.parametrize(
    "layer", [lambda: mha_ext.MultiHeadAttention(E, HEADS), ours], ids=["MultiHeadAttention", "nn"]
)
@pytest.mark.parametrize("wrong", WRONG_SAVED)
def test_wrong_state_dicts(wrong, layer):
    saved, text = WRONG_SAVED[wrong]
    module = layer()
    prune_heads(module, {"": [0]})
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=text):
        module.load_state_dict({**state, "pruned_heads": saved})
    assert module.num_heads == 3 and pruned_heads(module) == {"": [0]}


FRONTS = pytest.mark.parametrize("front", [lambda **o: mha_ext.MultiHeadAttention(E, HEADS, **o), ours])


@FRONTS
def test_pruned_without_values_and_filled(front):
    layer, x = drawn(front()), torch.randn(BATCH, LENGTH, E).double()
    prune_heads(layer, {"": [0, 2]})
    other = front(device="meta", dtype=torch.float64)
    for head in (0, 1):  # the second of what is left then, which was 2
        assert prune_heads(other, {"": [head]}) == {"": [head]}
    assert pruned_heads(other) == {"": [0, 2]}
    other.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(other(x, x, x)[0], layer(x, x, x)[0]) and pruned_heads(other) == {"": [0, 2]}


@FRONTS
def test_the_default_device_does_not_matter(front):
    layer, x = drawn(front()), torch.randn(BATCH, LENGTH, E).double()
    prune_heads(layer, {"": [0]})
    with torch.device("meta"):
        prune_heads(layer, {"": [1]})  # which was 2
        other = front(dtype=torch.float64)
        other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x, x, x)[0], layer(x, x, x)[0]) and pruned_heads(other) == {"": [0, 2]}


def with_adapter(layer: nn.Module) -> None:
    layer.W_q = nn.Sequential(layer.W_q)


@pytest.mark.parametrize("change", [with_adapter, lambda layer: prune.l1_unstructured(layer.W_q, "weight", 0.3)])
def test_loaded_whatever_its_projections_have_become(change):
    """Its own state_dict, once there is nothing left to remove."""
    layer, x = mha_ext.MultiHeadAttention(E, HEADS), torch.randn(BATCH, LENGTH, E)
    prune_heads(layer, {"": [1]})
    change(layer)
    state, expected = copy.deepcopy(layer.state_dict()), layer(x, x, x)[0]
    nn.init.zeros_(layer.W_o.weight)
    layer.load_state_dict(state)
    assert torch.equal(layer(x, x, x)[0], expected)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "mha_ext.nn"])
def test_training_is_taken_up_again(name):
    """A new model, its optimizer, then what both were: the optimizer has the parameters of the smaller layer."""
    build, heads = LAYERS[name]
    x = torch.randn(BATCH, LENGTH, E)

    def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        optimizer.zero_grad()
        layer(x, x, x)[0].square().mean().backward()
        optimizer.step()
        return [p.detach().clone() for p in layer.parameters()]

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        layer = build()
        return layer, torch.optim.Adam(layer.parameters(), lr=0.1)

    layer = build()
    prune_heads(layer, {"": heads})
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    before = step(layer, optimizer)
    again, optimizer_again = begun()
    again.load_state_dict(layer.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = step(layer, optimizer)
    for old, new, y in zip(before, step(again, optimizer_again), expected, strict=True):
        assert torch.equal(new, y) and not torch.equal(new, old)


def test_whole_layers_stay_whole_if_what_is_loaded_does_not_fit():
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    before = snapshot(layer)
    state = {**layer.state_dict(), "pruned_heads": torch.tensor([1])}
    with pytest.raises(RuntimeError, match=r"W_q.weight of shape \(9, 12\) without heads \[1\], got \(12, 12\)"):
        layer.load_state_dict(state)
    assert snapshot(layer) == before


def test_whole_state_dicts_do_not_fit():
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    state = copy.deepcopy(layer.state_dict())
    prune_heads(layer, {"": [0]})
    with pytest.raises(RuntimeError, match='Missing key.*"pruned_heads"'):
        layer.load_state_dict(state)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(bytes_of(lambda file: torch.save(model, file)), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(duplicate):
    model, x = Model(), torch.randn(BATCH, LENGTH, E)
    prune_heads(model, CHOSEN)
    other = duplicate(model)
    assert torch.equal(other(x), model(x)) and pruned_heads(other) == CHOSEN
    assert prune_heads(other, {"layers.0": [2]}) == {"layers.0": [2]}
    assert pruned_heads(model) == CHOSEN


def test_replaced_models_are_not_restored():
    """Nor is any other layer of theirs."""
    model, x = Model(), torch.randn(BATCH, LENGTH, E)
    prune_heads(model, {"layers.3": [1]})
    mha_ext.replace_attention(model)
    expected = model(x)
    with pytest.raises(ValueError, match="restore_attention: expected layers with all their heads, got 'layers.3'"):
        mha_ext.restore_attention(model)
    assert isinstance(model.layers[2], mha_ext.nn.MultiheadAttention)
    assert torch.equal(model(x), expected)
    report = mha_ext.replace_attention(model)
    assert not report and {entry.reason for entry in report.left} <= {"was replaced before", "is mha_ext's own"}
    assert mha_ext.restore_attention(model.layers[2]) == 1


def test_scripted_compiled_exported():
    model, x = Model(), torch.randn(BATCH, LENGTH, E)
    prune_heads(model, {n: h for n, h in CHOSEN.items() if n != "layers.3"})
    for layer in model.layers[:3]:
        expected = layer(x, x, x)[0]
        scripted = torch.jit.load(bytes_of(lambda file, m=layer: torch.jit.save(torch.jit.script(m), file)))
        torch.testing.assert_close(scripted(x, x, x)[0], expected)
        torch.testing.assert_close(torch.export.export(layer, (x, x, x)).module()(x, x, x)[0], expected)
        torch.testing.assert_close(
            torch.func.functional_call(layer, dict(layer.named_parameters()), (x, x, x))[0], expected
        )
    torch._dynamo.reset()
    whole = Model()
    compiled = torch.compile(whole, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), whole(x))
    prune_heads(compiled, {f"_orig_mod.{name}": heads for name, heads in CHOSEN.items()})
    assert pruned_heads(whole) == CHOSEN
    torch.testing.assert_close(compiled(x), whole(x))
    torch._dynamo.reset()


# --- Errors: nothing has changed ------------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = Model()
    model.layers[0].W_q.weight = model.layers[3].W_k.weight
    return model


def shared_linear() -> nn.Module:
    model = Model()
    model.layers[3].W_o = model.layers[0].W_o
    return model


def changed(change: Callable[[Any], Any], layer: int = 0) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Model()
        change(model.layers[layer])
        return model

    return build


def adapt(layer: Any) -> None:
    layer.W_v = nn.Sequential(layer.W_v)


def sparse_in_proj(layer: Any) -> None:
    prune.l1_unstructured(layer, "in_proj_weight", 0.3)


def widen(layer: Any) -> None:
    layer.W_q.bias = nn.Parameter(torch.zeros(1))


def wrapped() -> nn.Module:
    model = Model()
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.layers = model.layers
    return wrapper


def with_scripted() -> nn.Module:
    model = Model()
    model.layers[0] = torch.jit.script(model.layers[0])
    return model


def subclass() -> nn.Module:
    class Subclass(nn.MultiheadAttention):
        pass

    model = Model()
    model.layers[0] = Subclass(E, HEADS)
    return model


def with_layer(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Model()
        model.layers[0] = build()
        return model

    return make


def interleaved_document() -> nn.Module:
    class Interleaved(Document):
        def split_heads(self, x: Tensor, batch_size: int) -> Tensor:
            return x.view(batch_size, -1, self.d_k, self.num_heads).permute(0, 3, 1, 2)

    return Interleaved(E, HEADS)


class OfOneNumber(Document):
    """The number of heads is the class's."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__(E, HEADS)
        del self.num_heads


FIRST = {"layers.1": [0], "layers.2": [1], "layers.0": [0]}  # the last one is refused
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "no such layer": (
        Model,
        {"layers.2": [0], "layers.9": [0]},
        ValueError,
        "names of modules of the model, got 'layers.9'",
    ),
    "no attention": (Model, {"layers.0.W_q": [0]}, ValueError, "projections can be told, got 'layers.0.W_q', a Linear"),
    "the model": (Model, {"": [0]}, ValueError, "projections can be told, got '', a Model"),
    "no such head": (Model, {"layers.2": [0], "layers.0": [4]}, ValueError, "heads 0 to 3 of 'layers.0', got 4"),
    "a negative head": (Model, {"layers.2": [-1]}, ValueError, "heads 0 to 3 of 'layers.2', got -1"),
    "all heads": (Model, {"layers.2": range(4)}, ValueError, "at least one head of 'layers.2' to stay, got all 4"),
    "no integers": (Model, {"layers.2": [0.5]}, TypeError, "integers for the heads of 'layers.2', got .0.5."),
    "flags": (Model, {"layers.2": [True, False]}, TypeError, "expected integers for the heads"),
    "a bool tensor": (Model, {"layers.2": torch.tensor([True])}, TypeError, "expected integers for the heads"),
    "one number": (Model, {"layers.2": 1}, TypeError, "expected integers for the heads of 'layers.2', got 1"),
    "a list": (Model, ["layers.2"], TypeError, "expected a mapping of layer names to heads, got list"),
    "a number as name": (Model, {2: [0]}, TypeError, "expected names of modules, got int"),
    "half a group": (
        with_layer(grouped),
        {"layers.2": [0], "layers.0": [1, 2]},
        ValueError,
        r"groups of 2 heads .* got \[1, 2\]",
    ),
    "tied weights": (tied, FIRST, ValueError, "'layers.0' that nothing else uses, got a shared weight"),
    "a shared Linear": (shared_linear, FIRST, ValueError, "'layers.0' that nothing else uses, got a shared weight"),
    "W_q is W_k": (
        changed(lambda layer: setattr(layer, "W_k", layer.W_q)),
        FIRST,
        ValueError,
        "that nothing else uses",
    ),
    "an adapter": (changed(adapt), FIRST, ValueError, "projections can be told, got 'layers.0', a MultiHeadAttention"),
    "a hook": (
        changed(lambda layer: layer.W_k.register_forward_hook(lambda *_: None)),
        FIRST,
        ValueError,
        "without hooks, parametrisations or adapters, got Linear",
    ),
    "a parametrisation": (
        changed(lambda layer: parametrizations.weight_norm(layer.W_o)),
        FIRST,
        ValueError,
        "without hooks, parametrisations or adapters",
    ),
    "a parametrised in_proj_weight": (
        changed(lambda layer: parametrizations.weight_norm(layer, "in_proj_weight"), 2),
        {"layers.1": [0], "layers.2": [0]},
        ValueError,
        "without hooks, parametrisations or adapters",
    ),
    "a masked in_proj_weight": (
        changed(sparse_in_proj, 2),
        {"layers.1": [0], "layers.2": [0]},
        ValueError,
        "projections can be told, got 'layers.2', a MultiheadAttention",
    ),
    "a hook on out_proj": (
        changed(lambda layer: layer.out_proj.register_forward_pre_hook(lambda *_: None), 1),
        {"layers.2": [0], "layers.1": [0]},
        ValueError,
        "without hooks, parametrisations or adapters, got NonDynamicallyQuantizableLinear",
    ),
    "a hook on a parameter": (
        changed(lambda layer: layer.W_v.bias.register_hook(lambda grad: 2 * grad)),
        FIRST,
        ValueError,
        "parameters of 'layers.0' without hooks, got some on bias",
    ),
    "a bias of another size": (changed(widen), FIRST, ValueError, "bias of 12 rows in 'layers.0', got .1,."),
    "a ScriptModule": (with_scripted, FIRST, ValueError, "projections can be told, got 'layers.0', a Recursive"),
    "distributed": (wrapped, FIRST, ValueError, "not wrapped yet, got DistributedDataParallel"),
    "a subclass of torch's": (subclass, FIRST, ValueError, "'layers.0', which is a subclass of torch.nn"),
    "interleaved heads": (with_layer(interleaved_document), FIRST, ValueError, "projections can be told"),
    "another forward": (
        with_layer(lambda: make_attention("reference", E, HEADS)),
        FIRST,
        ValueError,
        "or those that it replaces, got 'layers.0', which has forward.query, key, value, is_causal",
    ),
    "heads of a class": (
        with_layer(OfOneNumber),
        {"layers.1": [0], **FIRST},
        ValueError,
        "'layers.0' to have num_heads as an attribute that can be set",
    ),
    "an attribute pruned_heads": (
        changed(lambda layer: setattr(layer, "pruned_heads", set())),
        {"layers.1": [0], **FIRST},
        ValueError,
        "'layers.0' to have no attribute pruned_heads of its own",
    ),
    "a width": (
        with_layer(Fused),
        FIRST,
        ValueError,
        "can do without heads, got 'layers.0', which cannot be tried out",
    ),
}


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Every module's class, attributes, parameters by where they lie, and buffers."""
    return [
        (
            name,
            type(module),
            {k: v for k, v in vars(module).items() if not k.startswith("_") or k.startswith("_mha_ext")},
            [(n, p.data_ptr(), p.shape) for n, p in module.named_parameters(recurse=False)],
            [n for n, _ in module.named_buffers(recurse=False)],
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_has_changed(name):
    build, heads, error, text = REFUSED[name]
    model = build()
    before, state, random = snapshot(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(error, match=text) as raised:
        prune_heads(model, heads)
    assert str(raised.value).startswith("prune_heads: expected ")
    assert snapshot(model) == before
    assert all(torch.equal(x, state[n]) for n, x in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_errors_of_models():
    for function in (lambda model: prune_heads(model, {}), pruned_heads):
        with pytest.raises(TypeError, match="expected an nn.Module that is no ScriptModule, got dict"):
            function({})
        with pytest.raises(TypeError, match="expected an nn.Module that is no ScriptModule, got Recursive"):
            function(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))


# --- Other libraries' layers ----------------------------------------------------------------------------------------

MASK = torch.ones(2, 6, dtype=torch.long)
MASK[1, 4:] = 0
PRUNED = (  # with grouped heads two of four; BERT's cross-attention too
    "albert bart bert distilbert electra gpt2 gpt_neox llama mistral modernbert qwen2 qwen3 roberta vit whisper"
).split()
GROUPED = ("gemma2", "gemma3", "gpt_oss", "llama", "mistral", "phi3", "qwen2", "qwen3")


def attentions(architecture: Architecture, model: nn.Module, mask: Tensor = MASK) -> list[str]:
    from mha_ext.heads.recording import record

    with torch.no_grad(), record(model) as recording:
        model(**given(architecture, mask))
    return list(recording)


def given(architecture: Architecture, mask: Tensor = MASK) -> dict[str, Tensor]:
    inputs = architecture.inputs(mask)
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def logits(model: nn.Module, architecture: Architecture) -> Tensor:
    with torch.no_grad():
        return model(**given(architecture))[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "mha_ext"])
@pytest.mark.parametrize("name", PRUNED)
def test_hugging_faces_models(name, attention):
    if attention == "mha_ext":
        mha_ext.integrations.transformers.register()
    architecture = HUGGING_FACE[name]
    model = architecture.build(attention)
    heads = [2, 3] if name in GROUPED else [0, 2]
    chosen = dict.fromkeys(attentions(architecture, model)[1:], heads)
    whole = copy.deepcopy(model)
    with gate(whole, {layer: factors(heads) for layer in chosen}):
        expected = logits(whole, architecture)
    assert prune_heads(model, chosen) == chosen
    torch.testing.assert_close(logits(model, architecture), expected, rtol=1e-5, atol=1e-5)
    assert pruned_heads(model) == chosen
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    assert list(model.state_dict()) == list(whole.state_dict())
    other = architecture.build(attention)
    prune_heads(other, pruned_heads(model))
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits(other, architecture), logits(model, architecture))
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), architecture), logits(model, architecture))


def test_pruned_again():
    architecture = HUGGING_FACE["bert"]
    model = architecture.build("sdpa")
    layer = "encoder.layer.1.attention.self"
    with gate(model, {layer: factors([1, 3])}):
        expected = logits(model, architecture)
    assert prune_heads(model, {layer: [3]}) == {layer: [3]}
    assert prune_heads(model, {layer: [1]}) == {layer: [1]}
    assert pruned_heads(model) == {layer: [1, 3]}
    torch.testing.assert_close(logits(model, architecture), expected)
    assert model.get_submodule(layer).num_attention_heads == 2
    with pytest.raises(ValueError, match="at least one head"):
        prune_heads(model, {layer: [0, 1]})


def test_cross_attention():
    architecture = HUGGING_FACE["bert decoder"]
    model, memory = architecture.build("sdpa"), torch.randn(2, 7, 16).double()
    layer = "encoder.layer.0.crossattention.self"

    def run() -> Tensor:
        with torch.no_grad():
            return model(**given(architecture), encoder_hidden_states=memory)[0]

    with gate(model, {layer: factors([0, 1, 3])}):
        expected = run()
    prune_heads(model, {layer: [0, 1, 3]})
    torch.testing.assert_close(run(), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_generation_with_a_cache(name):
    """As without a cache."""
    architecture = HUGGING_FACE[name]
    model = architecture.build("sdpa")
    heads = [0, 1] if name in GROUPED else [1]
    prune_heads(model, dict.fromkeys(attentions(architecture, model), heads))
    inputs = given(architecture, torch.ones(2, 5, dtype=torch.long))
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1, "eos_token_id": None}
    if name == "bart":
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    with torch.no_grad():
        found, expected = (model.generate(**inputs, **options, use_cache=cached) for cached in (True, False))
    assert torch.equal(found, expected)


CANNOT = {
    "t5": ("decoder.block.0.layer.0.SelfAttention", "takes position_bias"),
    "umt5": ("encoder.block.0.layer.0.SelfAttention", "cannot be tried out without heads|takes"),
    "gpt_oss": ("model.layers.0.self_attn", "cannot be tried out without heads"),
    "phi3": ("model.layers.0.self_attn", "cannot be tried out without heads"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_models_whose_heads_are_used_elsewhere(name):
    """Biases of positions and sinks have a number for each head; Phi-3 asks its configuration how many there are."""
    layer, reason = CANNOT[name]
    model = HUGGING_FACE[name].build("eager")
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"can do without heads, got '{layer}', which ({reason})"):
        prune_heads(model, {layer: [2, 3]})
    assert snapshot(model) == before


class Flexible(Named):
    """A hand-written class that asks for the size of heads, not for their number."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.head_dim = 4

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def test_a_hand_written_layer_that_can_do_without_heads():
    model, x = nn.Sequential(Flexible()).double(), torch.randn(BATCH, LENGTH, E).double()
    with gate(model, {"0": factors([1], 3)}):
        expected = model(x)
    assert prune_heads(model, {"0": [1]}) == {"0": [1]}
    assert type(model[0]) is Flexible
    torch.testing.assert_close(model(x), expected)


# --- The curve ------------------------------------------------------------------------------------------------------

ORDER = [("layers.1", 3), ("layers.0", 0), ("layers.1", 0), ("layers.2", 1), ("layers.3", 2)]


def test_curve():
    """Each score is that of a model with the first heads pruned; the model itself is as before."""
    model, x = drawn(fresh()), torch.randn(BATCH, LENGTH, E).double()
    before = snapshot(model)

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return model(x).sin().sum().item()

    curve = pruning_curve(score, model, ORDER)
    assert curve.pruned == [0, 1, 2, 3, 4, 5] and curve.order == ORDER
    for count, found in zip(curve.pruned, curve.scores, strict=True):
        pruned = copy.deepcopy(model)
        heads: dict[str, list[int]] = {}
        for name, head in ORDER[:count]:
            heads.setdefault(name, []).append(head)
        prune_heads(pruned, heads)
        assert found == pytest.approx(score(pruned), rel=1e-9)
    assert snapshot(model) == before
    assert len(set(curve.scores)) == 6


def test_curve_in_steps():
    model, x, calls = fresh(), torch.randn(BATCH, LENGTH, E).double(), []

    def score(model: nn.Module) -> Tensor:
        calls.append(model)
        return model(x).sum().detach()

    curve = pruning_curve(score, model, ORDER, steps=2)
    assert curve.pruned == [0, 2, 5] and len(calls) == 3 and all(isinstance(y, float) for y in curve.scores)
    assert pruning_curve(score, model, ORDER, steps=100).pruned == [0, 1, 2, 3, 4, 5]
    assert pruning_curve(score, model, []) == PruningCurve([0], [pytest.approx(model(x).sum().item())], [])


def test_curve_of_a_pruned_model_and_of_whole_layers():
    """Numbers are those of the layer as it is, as in what importance gives; masked layers may lose all heads."""
    model, x = drawn(Model()), torch.randn(BATCH, LENGTH, E).double()
    whole = copy.deepcopy(model)
    prune_heads(model, {"layers.0": [1]})
    scores = pruning_curve(lambda m: m(x).sum(), model, [("layers.0", head) for head in (2, 0, 1)]).scores
    full = pruning_curve(lambda m: m(x).sum(), whole, [("layers.0", head) for head in (1, 3, 0, 2)]).scores
    assert scores == pytest.approx(full[1:])
    without = copy.deepcopy(whole)
    without.layers[0].W_o.weight.data.zero_()
    assert full[-1] == pytest.approx(without(x).sum().item())
    with pytest.raises(ValueError, match="pruning_curve: expected heads that 'layers.0' has, got 3"):
        pruning_curve(lambda m: m(x).sum(), model, [("layers.0", 3)])


def test_errors_of_the_curve():
    model, x = Model(), torch.randn(BATCH, LENGTH, E)

    def curve(*arguments: Any) -> PruningCurve:
        return pruning_curve(lambda m: m(x).sum(), *arguments)

    with pytest.raises(TypeError, match="pruning_curve: expected an nn.Module"):
        curve({}, [])
    for order in ([("layers.0",)], [("layers.0", 0.5)], 3):
        with pytest.raises(TypeError, match="pruning_curve: expected pairs of layer name and head"):
            curve(model, order)
    with pytest.raises(ValueError, match=r"expected each head once, got \('layers.0', 1\) again"):
        curve(model, [("layers.0", 1), ("layers.0", 1)])
    with pytest.raises(ValueError, match="expected heads that 'layers.0' has, got 4"):
        curve(model, [("layers.0", 4)])
    with pytest.raises(ValueError, match="expected names of layers that run, got 'layers.9'"):
        curve(model, [("layers.9", 0)])
    for steps in (0, True, 1.5):
        with pytest.raises(ValueError, match="expected steps >= 1 or None"):
            curve(model, [], steps)


def test_a_transformers_score():
    """Perplexity of a model of Hugging Face rises, or not; it is what the model says with the heads masked."""
    architecture = HUGGING_FACE["gpt2"]
    model = architecture.build("eager")
    inputs = given(architecture)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return model(**inputs, labels=inputs["input_ids"]).loss.item()

    curve = pruning_curve(loss, model, [("transformer.h.0.attn", 1), ("transformer.h.1.attn", 0)])
    prune_heads(model, {"transformer.h.0.attn": [1], "transformer.h.1.attn": [0]})
    assert curve.scores[-1] == pytest.approx(loss(model), rel=1e-6)
    assert transformers.GPT2LMHeadModel is type(model)
