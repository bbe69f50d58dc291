"""replace_attention and restore_attention: what is swapped runs on the engine and means the same; the rest is left."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

import mha_ext
from mha_ext.replace import Report, replace_attention, restore_attention
from tests.checks import assert_as_good_as_plain
from tests.documents import MultiHeadAttention as Document

E, H, B, L = 16, 4, 3, 6
FORWARDS = ("mha_ext::attention", "mha_ext::multi_head_attention")


def calls(run: Callable[[], Any]) -> int:
    """How many attentions run on the engine."""
    with torch.autograd.profiler.profile() as profile:
        run()
    # Under autograd `attention` calls itself below it.
    return sum(
        event.name in FORWARDS and (event.cpu_parent is None or event.cpu_parent.name != event.name)
        for event in profile.function_events
    )


def replaced(model: nn.Module) -> nn.Module:
    """A copy in which everything that looks like attention was swapped."""
    model = copy.deepcopy(model)
    report = replace_attention(model)
    assert report and not report.left, str(report)
    return model


def snapshot(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    """The class and attributes of each module."""
    return [(type(module), dict(vars(module))) for module in model.modules()]


def assert_same_modules(model: nn.Module, before: list[tuple[type, dict[str, Any]]]) -> None:
    for module, (cls, attributes) in zip(model.modules(), before, strict=True):
        assert type(module) is cls
        assert vars(module).keys() == attributes.keys()
        assert all(value is attributes[name] for name, value in vars(module).items())


def padding() -> Tensor:
    """(B, L): True where padded"""
    return torch.arange(L) >= torch.tensor([L, 4, 2])[:, None]


# --- torch.nn.MultiheadAttention alone ------------------------------------------------------------------------------

OPTIONS = {
    "default": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "dropout": {"dropout": 0.5},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "add_bias_kv": True},
    "kdim": {"kdim": 6, "vdim": 10},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("need_weights", (True, False))
def test_torch_attention(options, need_weights):
    module = nn.MultiheadAttention(E, H, **options).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours, exact = replaced(module), copy.deepcopy(module).double()
    assert type(ours) is mha_ext.nn.MultiheadAttention
    sizes = [E, module.kdim, module.vdim]
    tensors = [torch.randn(B, L, size) if module.batch_first else torch.randn(L, B, size) for size in sizes]
    results = []
    for layer in (ours, module, exact):
        leaves = [x.to(layer.out_proj.weight.dtype).requires_grad_() for x in tensors]
        output, weights = layer(*leaves, key_padding_mask=padding(), need_weights=need_weights)
        loss = output.square().sum() + (weights.square().sum() if need_weights else 0)
        gradients = torch.autograd.grad(loss, [*leaves, *layer.parameters()])
        results.append([output, *([weights] if need_weights else []), *gradients])
    for actual, plain, right in zip(*results, strict=True):
        assert_as_good_as_plain(actual, plain, right)


# --- nn.Transformer -------------------------------------------------------------------------------------------------


def encoder(**options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 32, **({"batch_first": True, "dropout": 0.0} | options))
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E), enable_nested_tensor=not layer.norm_first)


def decoder(**options) -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 32, batch_first=True, dropout=0.0, **options), 2)


def transformer(**options) -> nn.Transformer:
    return nn.Transformer(E, H, 1, 1, 32, batch_first=True, dropout=0.0, **options)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "encoder": (encoder, 2),
    "encoder, norm first": (lambda: encoder(norm_first=True), 2),
    "encoder, gelu": (lambda: encoder(activation="gelu"), 2),
    "encoder, silu": (lambda: encoder(activation=F.silu), 2),
    "encoder, no bias": (lambda: encoder(bias=False), 2),
    "encoder layer": (lambda: encoder().layers[0], 1),
    "decoder": (decoder, 4),
    "decoder, norm first": (lambda: decoder(norm_first=True), 4),
    "transformer": (transformer, 3),
    "transformer, norm first": (lambda: transformer(norm_first=True), 3),
}
ENCODER_MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": padding()},
    "causal": {"is_causal": True, "mask": CAUSAL},
    "float mask": {"mask": torch.randn(L, L)},
    "both": {"mask": CAUSAL.bool(), "src_key_padding_mask": padding()},
}
DECODER_MASKS = {
    "none": {},
    "padding": {"tgt_key_padding_mask": padding(), "memory_key_padding_mask": padding()},
    "causal": {"tgt_is_causal": True, "tgt_mask": CAUSAL},
    "float mask": {"memory_mask": torch.randn(L, L)},
    "both": {"tgt_mask": CAUSAL.bool(), "memory_key_padding_mask": padding()},
}
MODES = {
    "train": torch.enable_grad,
    "eval": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def run(name: str, model: nn.Module, kind: str, source: Tensor, target: Tensor) -> Tensor:
    dtype = source.dtype
    masks = ENCODER_MASKS[kind] if name.startswith("encoder") else DECODER_MASKS[kind]
    masks = {key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in masks.items()}
    if name == "encoder layer" and "mask" in masks:
        masks["src_mask"] = masks.pop("mask")
    return model(source, **masks) if name.startswith("encoder") else model(source, target, **masks)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ENCODER_MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_run_on_the_engine_and_mean_the_same(name, kind, mode):
    """Against the ordinary path; the fast path of eval takes a float mask for a bool one."""
    build, attentions = MODELS[name]
    model = build()
    ours, exact = replaced(model).train(mode == "train"), copy.deepcopy(model).double()
    source, target = torch.randn(2, B, L, E)
    found = []
    with MODES[mode]():
        assert calls(lambda: found.append(run(name, ours, kind, source, target))) == attentions
    assert torch.backends.mha.get_fastpath_enabled()
    plain, right = run(name, model, kind, source, target), run(name, exact, kind, source.double(), target.double())
    live = ~padding() if kind in ("padding", "both") else torch.ones(B, L, dtype=torch.bool)
    assert_as_good_as_plain(*(x.detach()[live] for x in (found[0], plain, right)))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("mode", ("no_grad", "inference"))
def test_what_an_encoder_leaves_where_it_is_padded_stays(mode):
    """In eval it computes without the padding and fills up with zeros."""
    model = encoder().eval()
    ours, source = replaced(model), torch.randn(B, L, E)
    with MODES[mode]():
        expected, found = (m(source, src_key_padding_mask=padding()) for m in (model, ours))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[padding()], model.norm.bias.expand(6, E))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("is_padded", (False, True))
def test_an_encoder_gives_the_same_in_every_mode(is_padded):
    ours = replaced(encoder().double())
    source = torch.randn(B, L, E, dtype=torch.float64)
    mask = padding() if is_padded else None
    expected = ours.train()(source, src_key_padding_mask=mask)
    live = ~padding() if is_padded else torch.ones(B, L, dtype=torch.bool)
    for mode in ("eval", "no_grad", "inference"):
        with MODES[mode]():
            found = ours.eval()(source, src_key_padding_mask=mask)
        assert found.shape == expected.shape
        torch.testing.assert_close(found[live], expected[live])


@pytest.mark.parametrize("layout", (torch.strided, torch.jagged))
def test_an_encoder_takes_nested_tensors(layout):
    layer = encoder().layers[0].eval()
    ours = replaced(layer)
    rows = [torch.randn(length, E) for length in (6, 4, 2)]
    with torch.no_grad():
        found = ours(torch.nested.nested_tensor(rows, layout=layout))
        expected = [layer(row[None])[0] for row in rows]
    assert found.is_nested
    for actual, wanted in zip(found.unbind(), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("grad", (torch.enable_grad, torch.no_grad))
def test_an_encoder_layer_with_hooks_runs_on_the_engine(grad):
    layer = encoder().layers[0].eval()
    called = []
    layer.self_attn.register_forward_hook(lambda *_: called.append("attention"))
    layer.register_forward_pre_hook(lambda *_: called.append("layer"))
    ours = replaced(layer)
    with grad():
        assert calls(lambda: ours(torch.randn(B, L, E))) == 1
    assert called == ["layer", "attention"]


def test_an_attention_of_ours_in_an_encoder_layer_runs():
    """Put there by hand it would not: the layer's fast path reads its parameters."""
    layer = encoder().layers[0].eval()
    layer.self_attn = mha_ext.nn.MultiheadAttention(E, H, batch_first=True).eval()
    report = replace_attention(layer)
    assert not report and "own" in str(report)
    with torch.no_grad():
        assert calls(lambda: layer(torch.randn(B, L, E))) == 1
    restore_attention(layer)
    assert type(layer.self_attn) is mha_ext.nn.MultiheadAttention and layer.activation_relu_or_gelu == 1


# --- What stays -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """All that can be swapped, one of it under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.document = Document(E, H)
        self.twin = self.document
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.document(x, x, x)[0] + self.twin(x, x, x, torch.ones(L, L).tril())[0]
        return self.encoder(x + self.attention(x, x, x)[0])


ATTENTIONS = ("document", "attention", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn")


def test_modules_parameters_hooks_and_modes_stay():
    model = Model()
    model.attention.eval()
    model.document.W_k.requires_grad_(False)
    model.attention.extra = "of the user"
    called = []
    for name in ATTENTIONS:
        model.get_submodule(name).register_forward_hook(lambda module, *_: called.append(module))
        model.get_submodule(name).register_full_backward_hook(lambda module, *_: called.append(module))
    model.document.W_o.register_forward_hook(lambda *_: called.append("W_o"))
    modules, parameters, state = list(model.modules()), list(model.parameters()), list(model.state_dict())
    modes, keys = [module.training for module in modules], [set(vars(module)) for module in modules]
    replace_attention(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == state
    assert [module.training for module in modules] == modes
    assert all(keys[i] <= set(vars(module)) for i, module in enumerate(modules))
    assert model.attention.extra == "of the user"
    model(torch.randn(B, L, E)).sum().backward()
    once = [model.get_submodule(name) for name in ATTENTIONS]
    assert called.count("W_o") == 2  # the document runs twice
    assert all(called.count(module) == (4 if module is model.document else 2) for module in once)


@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.AdamW))
def test_training_is_the_same(optimizer):
    """The optimiser was made before the attention was replaced."""
    model = Model().double()
    model.document.W_v.weight = model.document.W_k.weight  # tied
    model.encoder.layers[0].self_attn.in_proj_bias.requires_grad_(False)
    ours = copy.deepcopy(model)
    optimizers = [optimizer(m.parameters(), lr=0.01) for m in (model, ours)]
    assert len(replace_attention(ours)) == 4
    batches = torch.randn(4, B, L, E, dtype=torch.float64)
    for x in batches:
        for m, o in zip((model, ours), optimizers, strict=True):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
    for (name, actual), expected in zip(ours.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_state_dicts_go_both_ways():
    model, ours = Model(), replaced(Model())
    ours.load_state_dict(model.state_dict())
    model.load_state_dict(ours.state_dict())
    x = torch.randn(B, L, E)
    torch.testing.assert_close(ours.train()(x), model.train()(x))


@pytest.mark.parametrize("how", ("itself", "deepcopy", "pickle"))
def test_restored_exactly(how):
    model = Model()
    before = snapshot(model)
    replace_attention(model)
    if how == "itself":
        assert restore_attention(model) == 4
        assert_same_modules(model, before)
        return
    duplicate = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.randn(B, L, E)
    assert calls(lambda: duplicate(x)) == calls(lambda: model(x)) == 5
    torch.testing.assert_close(duplicate(x), model(x), rtol=0, atol=0)
    assert duplicate.twin is duplicate.document
    assert restore_attention(duplicate) == 4
    assert calls(lambda: duplicate(x)) == 0
    for module, (cls, attributes) in zip(duplicate.modules(), before, strict=True):
        assert type(module) is cls and vars(module).keys() == attributes.keys()
    assert duplicate.encoder.layers[0].activation_relu_or_gelu == 1
    assert calls(lambda: model(x)) == 5  # the first is still replaced


def test_a_second_call_does_nothing_and_says_so():
    model = Model()
    assert len(replace_attention(model)) == 4
    before = snapshot(model)
    report = replace_attention(model)
    assert not report and {entry.reason for entry in report.left} == {"was replaced before"}
    assert_same_modules(model, before)
    assert restore_attention(model) == 4 and restore_attention(model) == 0


def test_the_report_is_readable():
    report = replace_attention(nn.ModuleList([Model(), torch.ao.nn.quantizable.MultiheadAttention(E, H)]))
    assert [entry.name for entry in report.swapped] == [f"0.{name}" for name in ATTENTIONS]
    lines = str(report).splitlines()
    assert lines[0] == "swapped: 4" and lines[5] == "left: 1"
    assert lines[1].split() == ["0.document:", "tests.documents.MultiHeadAttention", "->", "mha_ext.MultiHeadAttention"]
    assert lines[2].endswith("torch.nn.MultiheadAttention -> mha_ext.nn.MultiheadAttention")
    assert "quantizable" in lines[6] and lines[6].endswith("is a subclass of torch.nn.MultiheadAttention")
    assert str(replace_attention(nn.MultiheadAttention(E, H))).splitlines()[1].startswith("    the model: torch.nn")


def test_a_model_without_attention():
    report = replace_attention(nn.Sequential(nn.Linear(E, E), nn.ReLU()))
    assert isinstance(report, Report) and not report and not report.left


@pytest.mark.parametrize("function", (replace_attention, restore_attention))
def test_only_modules_are_taken(function):
    with pytest.raises(TypeError, match=f"{function.__name__}: expected an nn.Module, got list"):
        function([])


# --- What is left ---------------------------------------------------------------------------------------------------


class Subclass(nn.MultiheadAttention):
    def forward(self, *args, **options):
        output, weights = super().forward(*args, **options)
        return output + 1, weights


def with_own_forward(module: nn.Module) -> nn.Module:
    original = module.forward
    module.forward = lambda *args, **options: original(*args, **options)
    return module


LEFT = {
    "a subclass": (lambda: Subclass(E, H), "a subclass"),
    "quantizable": (lambda: torch.ao.nn.quantizable.MultiheadAttention(E, H), "a subclass"),
    "a forward of its own": (lambda: with_own_forward(nn.MultiheadAttention(E, H)), "forward of its own"),
    "a document's with that": (lambda: with_own_forward(Document(E, H)), "forward of its own"),
    "scripted": (lambda: torch.jit.script(nn.MultiheadAttention(E, H)), "ScriptModule"),
    "a document's, scripted": (lambda: torch.jit.script(Document(E, H)), "ScriptModule"),
    "ours": (lambda: mha_ext.MultiHeadAttention(E, H), "own"),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("inside", (False, True))
@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name, inside):
    build, reason = LEFT[name]
    module = build()
    model = nn.ModuleDict({"a": module}) if inside else module
    before = snapshot(module)
    report = replace_attention(model)
    assert not report and [entry.name for entry in report.left] == ["a" if inside else ""]
    assert reason in report.left[0].reason
    assert_same_modules(module, before)


def test_left_if_the_class_was_patched(monkeypatch):
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, query, *_, **__: (query, None))
    assert not replace_attention(nn.MultiheadAttention(E, H))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_a_parametrised_attention_stays_so():
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    parametrize.register_parametrization(module, "in_proj_weight", Halved())
    ours, x = replaced(module), torch.randn(B, L, E, dtype=torch.float64)
    assert isinstance(ours, mha_ext.nn.MultiheadAttention) and not isinstance(module, mha_ext.nn.MultiheadAttention)
    assert calls(lambda: ours(x, x, x)) == 1
    torch.testing.assert_close(ours(x, x, x), module(x, x, x))
    restored = copy.deepcopy(ours)
    restore_attention(restored)
    assert parametrize.type_before_parametrizations(restored) is nn.MultiheadAttention
    assert calls(lambda: restored(x, x, x)) == 0
    torch.testing.assert_close(restored(x, x, x), module(x, x, x))
    parametrize.remove_parametrizations(ours, "in_proj_weight")
    assert type(ours) is mha_ext.nn.MultiheadAttention
    restore_attention(ours)
    assert type(ours) is nn.MultiheadAttention
    torch.testing.assert_close(ours(x, x, x), module(x, x, x))


# --- Classes with W_q, W_k, W_v, W_o --------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A projection and a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down, self.up = nn.Linear(E, 2, bias=False), nn.Linear(2, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Eighths(nn.Module):
    """A projection with weights of 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", (linear.weight * 64).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) / 64)


def tie(layer: nn.Module) -> None:
    layer.W_k = layer.W_q


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda layer: None,
    "an adapter": lambda layer: setattr(layer, "W_q", Adapter(layer.W_q)),
    "8 bits": lambda layer: setattr(layer, "W_v", Eighths(layer.W_v)),
    "one module twice": tie,
    "a parametrisation": lambda layer: parametrize.register_parametrization(layer.W_o, "weight", Halved()),
    "zeros": lambda layer: nn.init.zeros_(layer.W_o.weight),  # a new layer that adds nothing yet
    "frozen": lambda layer: layer.requires_grad_(False),
    "double": lambda layer: layer.double(),
    "bfloat16": lambda layer: layer.bfloat16(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_documents_are_swapped_whatever_their_projections_are(name):
    layer = Document(E, H).eval()
    CHANGES[name](layer)
    ours = replaced(layer)
    assert isinstance(ours, mha_ext.MultiHeadAttention) and isinstance(ours, Document)
    dtype = next(layer.parameters()).dtype
    x, mask = torch.randn(B, L, E, dtype=dtype), torch.rand(B, H, L, L) < 0.5
    exact = copy.deepcopy(layer).double()(x.double(), x.double(), x.double(), mask)
    for actual, plain, right in zip(ours(x, x, x, mask), layer(x, x, x, mask), exact, strict=True):
        assert_as_good_as_plain(actual, plain, right.detach())
    assert calls(lambda: ours(x, x, x)) == 1
    assert ours.split_heads(x, B).shape == (B, H, L, E // H) and repr(ours) == repr(layer)  # its other methods stay
    assert calls(lambda: type(ours)(E, H)(*torch.randn(3, B, L, E))) == 1


def test_a_trial_disturbs_nothing():
    """No random number is drawn, no hook runs, and the modes of the caller do not matter."""
    called = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        layer = Document(E, H)
        layer.register_forward_hook(lambda *_: called.append("layer"))
        layer.W_q.register_forward_hook(lambda *_: called.append("projection"))
        handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append("global"))
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        with mode(), torch.autocast("cpu"), torch.device("meta"):
            assert replace_attention(layer)
        handle.remove()
        assert torch.equal(state, torch.get_rng_state()) and not called and layer.training
        assert layer.W_q.weight.grad is None and torch.get_num_threads() == threads


def test_documents_on_the_meta_device_are_swapped():
    with torch.device("meta"):
        layer = Document(E, H)
    assert replace_attention(layer)
    x = torch.empty(B, L, E, device="meta")
    assert layer(x, x, x)[1].shape == (B, H, L, L)
    layer.to_empty(device="cpu")
    assert calls(lambda: layer(*torch.randn(3, B, L, E))) == 1


class LookAlike(Document):
    """The document's class in steps that can be changed."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None):
        Q, K, V = (
            self.split_heads(projection(x), query.size(0))
            for projection, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value))
        )
        scores = self.score(Q, K)
        if mask is not None:
            scores = self.hide(scores, mask)
        weights = self.drop(self.normalise(scores))
        context = self.mix(weights, V).transpose(1, 2).flatten(2)
        return self.finish(self.W_o(context), weights, query)

    def score(self, Q: Tensor, K: Tensor) -> Tensor:
        return Q @ K.mT / self.d_k**0.5

    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask == 0, -1e9)

    def normalise(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def mix(self, weights: Tensor, V: Tensor) -> Tensor:
        return weights @ V

    def finish(self, output: Tensor, weights: Tensor, query: Tensor) -> Any:
        return output, weights


def variant(**methods: Callable) -> nn.Module:
    return type("Variant", (LookAlike,), methods)(E, H)


def with_child(name: str, child: nn.Module, **methods: Callable) -> nn.Module:
    layer = variant(**methods)
    layer.add_module(name, child)
    return layer


def with_dropout(**methods: Callable) -> nn.Module:
    return with_child("dropout", nn.Dropout(0.1), **methods)


class Dropped(LookAlike):
    """The document's class with dropout of the attention weights."""

    def __init__(self, p: float) -> None:
        super().__init__(E, H)
        self.dropout = nn.Dropout(p)

    def drop(self, weights: Tensor) -> Tensor:
        return self.dropout(weights)


def with_renamed_arguments() -> nn.Module:
    return variant(forward=lambda self, q, k, v, mask=None: LookAlike.forward(self, q, k, v, mask))


def with_another_argument() -> nn.Module:
    return variant(
        forward=lambda self, query, key, value, mask=None, is_causal=False: LookAlike.forward(self, query, key, value)
    )


def that_reads_weights() -> nn.Module:
    """Its projections are never called, so their hooks are not either."""

    def forward(self, query, key, value, mask=None):
        called = copy.copy(self)
        called._modules = dict(self._modules, W_q=lambda x: F.linear(x, self.W_q.weight, self.W_q.bias))
        return LookAlike.forward(called, query, key, value, mask)

    return variant(forward=forward)


def with_parameter(register: str) -> nn.Module:
    layer = variant(score=lambda self, Q, K: Q @ K.mT / self.temperature)
    value = torch.tensor((E // H) ** 0.5)
    if register == "parameter":
        layer.temperature = nn.Parameter(value)
    else:
        layer.register_buffer("temperature", value)
    return layer


def with_setting() -> nn.Module:
    """A setting that is off today."""

    def normalise(self, scores: Tensor) -> Tensor:
        return (scores + CAUSAL[: scores.size(-2), : scores.size(-1)] if self.is_causal else scores).softmax(-1)

    layer = variant(normalise=normalise)
    layer.is_causal = False
    return layer


def with_temperature() -> nn.Module:
    layer = variant(score=lambda self, Q, K: Q @ K.mT / self.d_k**0.5 / self.temperature)
    layer.temperature = 1.0
    return layer


def no_subclasses(cls) -> None:
    raise TypeError("final")


def with_hook(layer: nn.Module) -> nn.Module:
    layer.dropout.register_forward_hook(lambda *_: None)
    return layer


def remember(self: nn.Module, output: Tensor, weights: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    self.last_weights = weights
    return output, weights


def without_gradient(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None):
    with torch.no_grad():
        return LookAlike.forward(self, query, key, value, mask)


def hide_in_batch(self: nn.Module, scores: Tensor, mask: Tensor) -> Tensor:
    return LookAlike.hide(self, scores, mask[:, None] if mask.dim() == 3 else mask)


def windowed(scores: Tensor, width: int) -> Tensor:
    distance = torch.arange(scores.size(-2))[:, None] - torch.arange(scores.size(-1))
    return scores.masked_fill(distance.abs() > width, -1e9)


def largest_only(scores: Tensor, count: int) -> Tensor:
    least = scores.topk(min(count, scores.size(-1))).values[..., -1:]
    return scores.masked_fill(scores < least, -1e9)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "1 hides": (lambda: variant(hide=lambda self, s, mask: s.masked_fill(mask != 0, -1e9)), "mask: bool"),
    "bool, True hides": (lambda: variant(hide=lambda self, s, mask: s.masked_fill(mask, -1e9)), "mask: bool"),
    "-inf hides": (lambda: variant(hide=lambda self, s, mask: s.masked_fill(mask == 0, -torch.inf)), "dead row"),
    "the mask is added": (lambda: variant(hide=lambda self, s, mask: s + (1 - mask.float()) * -1e9), "mask: "),
    "the mask is ignored": (lambda: variant(hide=lambda self, s, mask: s), "mask: bool"),
    "three dimensions are a batch's": (lambda: variant(hide=hide_in_batch), "three dimensions"),
    "always causal": (
        lambda: variant(normalise=lambda self, s: (s + CAUSAL[: s.size(-2), : s.size(-1)]).softmax(-1)),
        "",
    ),
    "no scale": (lambda: variant(score=lambda self, Q, K: Q @ K.mT), "differs in output"),
    "scale of d_model": (lambda: variant(score=lambda self, Q, K: Q @ K.mT / self.d_model**0.5), "differs in output"),
    "softmax over queries": (lambda: variant(normalise=lambda self, s: s.softmax(-2)), "differs in output"),
    "a residual": (lambda: variant(finish=lambda self, output, weights, query: (output + query, weights)), "output"),
    "no weights": (lambda: variant(finish=lambda self, output, weights, query: output), "does not return"),
    "None for weights": (
        lambda: variant(finish=lambda self, output, weights, query: (output, None)),
        "does not return",
    ),
    "mean weights": (lambda: variant(finish=lambda self, o, weights, query: (o, weights.mean(1))), "attention weights"),
    "weights first": (lambda: variant(finish=lambda self, output, weights, query: (weights, output)), "output"),
    "a projection twice": (
        lambda: variant(finish=lambda self, o, w, query: (o + 0 * self.W_q(query), w)),
        "calls of projections",
    ),
    "detached weights": (lambda: variant(finish=lambda self, o, w, query: (o, w.detach())), "attention weights"),
    "no gradient": (lambda: variant(forward=without_gradient), ""),
    "functional dropout": (lambda: variant(drop=lambda self, w: F.dropout(w, 0.1, self.training)), "training"),
    "always dropout": (lambda: variant(drop=lambda self, w: F.dropout(w, 0.1)), ""),
    "rarely dropout": (lambda: variant(drop=lambda self, w: F.dropout(w, 1e-6, self.training)), "random numbers"),
    "heads interleaved": (
        lambda: variant(
            split_heads=lambda self, x, batch: x.unflatten(-1, (self.d_k, self.num_heads)).permute(0, 3, 1, 2)
        ),
        "differs in output",
    ),
    "memory of weights": (lambda: variant(finish=remember), "changes of its attributes"),
    "other names": (with_renamed_arguments, "forward(q, k, v, mask)"),
    "another argument": (with_another_argument, "is_causal"),
    "a norm": (lambda: with_child("norm", nn.LayerNorm(E)), "has norm beside"),
    "a dropout of another kind": (lambda: with_child("dropout", nn.AlphaDropout(0.1)), "has dropout beside"),
    "a dropout with a hook": (lambda: with_hook(Dropped(0.1)), "has dropout beside"),
    "an unused dropout": (with_dropout, "drops something else"),
    "dropout of scores": (
        lambda: with_dropout(normalise=lambda self, s: self.dropout(s).softmax(-1)),
        "drops something else",
    ),
    "dropout of the output": (
        lambda: with_dropout(finish=lambda self, output, w, query: (self.dropout(output), w)),
        "drops something else",
    ),
    "dropout twice": (lambda: with_dropout(drop=lambda self, w: self.dropout(self.dropout(w))), "drops something else"),
    "weights before dropout": (
        lambda: with_dropout(mix=lambda self, w, V: self.dropout(w) @ V),
        "does not return the weights",
    ),
    "dropout of the returned weights": (
        lambda: with_dropout(finish=lambda self, output, w, query: (output, self.dropout(w))),
        "does not use its dropout",
    ),
    "a parameter": (lambda: with_parameter("parameter"), "temperature"),
    "a buffer": (lambda: with_parameter("buffer"), "temperature"),
    "a setting": (with_setting, "heeds its attributes is_causal"),
    "a temperature": (with_temperature, "heeds its attributes temperature"),
    "no subclasses": (
        lambda: type("Variant", (LookAlike,), {"__init_subclass__": no_subclasses})(E, H),
        "be subclassed",
    ),
    "a window": (lambda: variant(normalise=lambda self, s: windowed(s, 8).softmax(-1)), "differs in output"),
    "the 16 largest": (lambda: variant(normalise=lambda self, s: largest_only(s, 16).softmax(-1)), "differs in output"),
    "clamped scores": (lambda: variant(normalise=lambda self, s: s.clamp(-50, 50).softmax(-1)), "differs in output"),
    "-20 hides": (lambda: variant(hide=lambda self, s, mask: s.masked_fill(mask == 0, -20.0)), "differs in output"),
    "another scale without gradients": (
        lambda: variant(score=lambda self, Q, K: Q @ K.mT / (self.d_k**0.5 if torch.is_grad_enabled() else 1.0)),
        "differs in output",
    ),
    "reads weights": (that_reads_weights, "raises AttributeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_look_alikes_are_left(name):
    build, reason = REFUSED[name]
    layer = build()
    before, state = snapshot(layer), torch.get_rng_state()
    report = replace_attention(layer)
    assert not report and len(report.left) == 1
    assert torch.equal(state, torch.get_rng_state())
    assert any(text in report.left[0].reason for text in reason.split("|")), str(report)
    assert_same_modules(layer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("d_model, heads", [(512, 8), (384, 12), (256, 2), (1024, 32), (2048, 16), (8, 1)])
def test_the_document_is_swapped_at_every_size(d_model, heads, dtype):
    report = replace_attention(Document(d_model, heads).to(dtype))
    assert report, str(report)


def test_the_look_alike_itself_is_swapped():
    layer = variant(score=lambda self, Q, K: Q @ K.mT * self.scale)
    layer.scale, layer.layer_index, layer.name = layer.d_k**-0.5, 3, "unread"
    layer.register_forward_hook(functools.partial(lambda lock, *_: None, threading.Lock()))  # cannot be copied
    report = replace_attention(layer)
    assert report, str(report)
    assert replace_attention(variant(hide=lambda self, scores, mask: scores.masked_fill(~mask.bool(), -1e9)))


# --- Documents' classes with dropout --------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_drops, module_trains", ((True, True), (True, False), (False, True), (False, False)))
def test_dropout_follows_its_module(layer_drops, module_trains):
    """Its p and its mode at each call: models are put in eval mode and their dropouts back in training."""
    layer = Dropped(0.25).double()
    ours = replaced(layer)
    ours.train(module_trains)
    ours.dropout.train(layer_drops)
    ours.dropout.p = 0.5
    query, key, value = torch.randn(3, 8, 40, E, dtype=torch.float64)
    output, weights = ours(query, key, value)
    _, exact = layer.eval()(query, key, value)
    kept = weights != 0
    assert abs(kept.double().mean() - (0.5 if layer_drops else 1)) < 0.02
    torch.testing.assert_close(weights, exact * kept * (2 if layer_drops else 1))
    v = ours.split_heads(ours.W_v(value), 8)
    torch.testing.assert_close(output, ours.W_o((weights @ v).transpose(1, 2).flatten(2)))


def test_dropout_is_never_bypassed():
    ours, x = replaced(Dropped(0.1)), torch.randn(B, L, E)
    handle = ours.dropout.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="expected dropout to stay an nn.Dropout"):
        ours(x, x, x)
    handle.remove()
    assert calls(lambda: ours(x, x, x)) == 1
    ours.dropout = nn.AlphaDropout(0.1)
    with pytest.raises(TypeError, match="expected dropout to stay an nn.Dropout"):
        ours(x, x, x)
    restore_attention(ours)
    assert type(ours) is Dropped and calls(lambda: ours(x, x, x)) == 0


def test_dropout_pickles_and_restores():
    layer = Dropped(0.5)
    before = snapshot(layer)
    replace_attention(layer)
    assert type(layer)(0.25).dropout.p == 0.25  # its constructor stays too
    duplicate, x = pickle.loads(pickle.dumps(layer)), torch.randn(B, L, E)
    results = []
    for module in (layer, duplicate):
        torch.manual_seed(1)
        results.append(module(x, x, x))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert restore_attention(layer) == 1
    assert_same_modules(layer, before)


# --- Compilers and wrappers -----------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Self-attention, as models call it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


ATTENDING = {
    "document": lambda: Attending(Document(E, H)),
    "with dropout": lambda: Attending(Dropped(0.1)),
    "torch": lambda: Attending(nn.MultiheadAttention(E, H, batch_first=True)),
}


@pytest.mark.parametrize("name", ATTENDING)
def test_scripted(name):
    model, x = ATTENDING[name]().eval(), torch.randn(B, L, E)
    before, expected = snapshot(model), model(x)
    replace_attention(model)
    scripted = torch.jit.script(model)
    assert calls(lambda: scripted(x)) == 1
    torch.testing.assert_close(scripted(x), expected)
    restore_attention(model)
    for module in model.modules():
        vars(module).pop("__overloads__")  # which scripting leaves on every module
    assert_same_modules(model, before)


@pytest.mark.parametrize("name", [*ATTENDING, "encoder layer"])
@pytest.mark.parametrize("first", ("replace", "compile"))
def test_compiled(name, first):
    """In one graph, also if the model was compiled, and ran, before its attention was replaced."""
    torch._dynamo.reset()
    model = (ATTENDING.get(name) or (lambda: encoder().layers[0]))().eval()
    x = torch.randn(B, L, E)
    with torch.no_grad():
        expected = model(x)
        if first == "replace":
            replace_attention(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        if first == "compile":
            assert calls(lambda: compiled(x)) == 0
            assert replace_attention(compiled)
            torch.testing.assert_close(compiled(x), expected)
        assert calls(lambda: compiled(x)) == 1
        restore_attention(compiled)
        torch.testing.assert_close(compiled(x), expected)
        assert calls(lambda: compiled(x)) == 0


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", (nn.DataParallel, nn.parallel.DistributedDataParallel))
@pytest.mark.parametrize("first", ("replace", "wrap"))
def test_wrapped(wrap, first, process_group):
    model, x = Model(), torch.randn(B, L, E)
    gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    if first == "replace":
        replace_attention(model)
    wrapped = wrap(model)
    if first == "wrap":
        assert [entry.name for entry in replace_attention(wrapped).swapped] == [f"module.{name}" for name in ATTENTIONS]
    assert calls(lambda: wrapped(x).square().sum().backward()) == 5
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-3)


def test_sharded(process_group):
    """Sharding makes a class for each module, which stays when the attention is restored."""
    model, x = Model(), torch.randn(B, L, E)
    expected = model(x)
    replace_attention(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (model.document, model.attention, model):
        fully_shard(module, mesh=mesh)
    assert calls(lambda: model(x).sum().backward()) == 5
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(model(x), expected)
    assert restore_attention(model) == 4
    for module, cls in ((model.document, Document), (model.attention, nn.MultiheadAttention)):
        assert isinstance(module, FSDPModule) and isinstance(module, cls)
    assert calls(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ATTENDING)
def test_under_autocast(name):
    model, x = ATTENDING[name]().eval(), torch.randn(B, L, E)
    ours = replaced(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = ours(x), model(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_as_good_as_plain(found, expected, model.double()(x.double()).detach())
