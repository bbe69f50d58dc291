"""The weights of heads that are told of a layer, against what the layer itself computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import mha_ext
from mha_ext.heads.layout import HeadParameters, head_parameters
from mha_ext.train.attention import make_attention
from tests.documents import MultiHeadAttention as Document
from tests.models.architectures import ARCHITECTURES, VOCABULARY, Architecture, configured, tokens

E, HEADS, BATCH, LENGTH = 12, 3, 2, 5
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def attend(p: HeadParameters, query: Tensor, key: Tensor, value: Tensor, biases: dict[str, Tensor]) -> Tensor:
    """W_o softmax(Q K^T / sqrt(D)) V of (B, L, features), loop by loop; biases (H, D) and (Eo,) by name."""
    group = len(p.w_q) // len(p.w_k)
    output = biases.get("o", torch.zeros(len(p.w_o), dtype=query.dtype))
    for h in range(len(p.w_q)):
        q, k, v = (
            x @ w[i].T + (biases[name][i] if name in biases else 0)
            for x, w, i, name in (
                (query, p.w_q, h, "q"),
                (key, p.w_k, h // group, "k"),
                (value, p.w_v, h // group, "v"),
            )
        )
        output = output + (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v @ p.w_o[:, h].T
    return output


def sequences(*features: int) -> list[Tensor]:
    return [torch.randn(BATCH, length, n).double() for length, n in zip((LENGTH, 7, 7), features, strict=True)]


# --- Ours, torch's, the documents' ----------------------------------------------------------------------------------


def grouped() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(16, 4)
    layer.W_k, layer.W_v = nn.Linear(16, 8), nn.Linear(16, 8)
    return layer


def replaced(module: nn.Module) -> nn.Module:
    assert mha_ext.replace_attention(module)
    return module


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "MultiHeadAttention": lambda: mha_ext.MultiHeadAttention(E, HEADS),
    "without biases": lambda: mha_ext.MultiHeadAttention(E, HEADS, bias=False),
    "grouped": grouped,
    "document": lambda: Document(E, HEADS),
    "replaced document": lambda: replaced(Document(E, HEADS)),
    "train reference": lambda: make_attention("reference", E, HEADS),
    "train sdpa": lambda: make_attention("sdpa", E, HEADS),
    "train torch": lambda: make_attention("torch", E, HEADS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_four_projections(name):
    layer = LAYERS[name]().double()
    p = head_parameters(layer, "")
    x = sequences(*[p.w_q.size(-1)] * 3)
    biases = {} if layer.W_q.bias is None else {n: getattr(layer, f"W_{n}").bias for n in "qkvo"}
    biases = {n: b if n == "o" else b.unflatten(0, (-1, p.w_q.size(1))) for n, b in biases.items()}
    torch.testing.assert_close(layer(*x)[0], attend(p, *x, biases))
    assert p.w_q.data_ptr() == layer.W_q.weight.data_ptr() and p.w_o.data_ptr() == layer.W_o.weight.data_ptr()
    assert not any(w.requires_grad for w in vars(p).values())


@pytest.mark.parametrize("front", [nn.MultiheadAttention, mha_ext.nn.MultiheadAttention])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 6}, {"bias": False}], ids=str)
def test_torchs_layer(options, batch_first, front):
    layer = front(E, HEADS, batch_first=batch_first, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    model = nn.ModuleDict({"block": nn.ModuleDict({"attention": layer})})
    p = head_parameters(model, "block.attention")
    assert p.w_k.shape == (HEADS, E // HEADS, options.get("kdim", E)) and p.w_v.size(2) == options.get("vdim", E)
    x = sequences(E, options.get("kdim", E), options.get("vdim", E))
    biases = {}
    if layer.in_proj_bias is not None:
        biases = dict(zip("qkv", layer.in_proj_bias.unflatten(0, (3, HEADS, -1)), strict=True))
        biases["o"] = layer.out_proj.bias
    output = layer(*(x if batch_first else [y.transpose(0, 1) for y in x]))[0]
    torch.testing.assert_close(output if batch_first else output.transpose(0, 1), attend(p, *x, biases))


def test_parametrised_weights_are_those_of_the_moment():
    layer = mha_ext.MultiHeadAttention(E, HEADS, bias=False).double()
    parametrizations.weight_norm(layer.W_q)
    layer.W_q.parametrizations.weight.original0.data.mul_(3)
    p, x = head_parameters(layer, ""), sequences(E, E, E)
    torch.testing.assert_close(layer(*x)[0], attend(p, *x, {}))
    assert not p.w_q.requires_grad


# --- Hugging Face's -------------------------------------------------------------------------------------------------

BASE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {
    "gpt_neox": Architecture("GPTNeoXModel", configured("GPTNeoXConfig"), 2, tokens),
    "qwen2": Architecture("Qwen2Model", configured("Qwen2Config", num_key_value_heads=2), 2, tokens),
    "albert": Architecture("AlbertModel", configured("AlbertConfig", embedding_size=8, inner_group_num=2), 4, tokens),
    "electra": Architecture("ElectraModel", configured("ElectraConfig", embedding_size=8), 2, tokens),
    "bert decoder": Architecture(
        "BertModel", configured("BertConfig", is_decoder=True, add_cross_attention=True), 4, tokens
    ),
}
HUGGING_FACE = {**ARCHITECTURES, **MORE}
NORMALISED = ("qwen3", "gemma3")  # queries and keys, after the projection
SCALED = ("gpt_oss", "whisper")  # queries and keys, by the factor of YaRN; queries, by 1 / sqrt(D)
ATTENTIONS = {  # names of the first layer's modules
    "bert": "encoder.layer.0.attention.self",
    "bert decoder": "encoder.layer.1.crossattention.self",
    "distilbert": "transformer.layer.0.attention",
    "gpt2": "transformer.h.0.attn",
    "llama": "model.layers.0.self_attn",
    "vit": "layers.0.attention",
    "t5": "decoder.block.1.layer.1.EncDecAttention",
    "gpt_neox": "layers.0.attention",
}


class Seen(dict):
    """What each attention module was given, handed to the attention function, and gave: by module."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        group = query.size(1) // key.size(1)
        k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        context = F.scaled_dot_product_attention(query, k, v).transpose(1, 2)  # (B, L, H, D): any will do
        self.setdefault(module, {}).update(query=query, key=key, value=value, context=context)
        return context, None

    def given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        memory = next((kwargs[n] for n in ("key_value_states", "encoder_hidden_states") if n in kwargs), None)
        self[module] = {"hidden": hidden, "memory": hidden if memory is None else memory}


@pytest.fixture
def seen():
    seen, before = Seen(), dict(transformers.AttentionInterface._global_mapping)
    transformers.AttentionInterface.register("seen", seen.attend)
    transformers.AttentionMaskInterface.register("seen", lambda *_, **__: None)
    yield seen
    transformers.AttentionInterface._global_mapping.clear()
    transformers.AttentionInterface._global_mapping.update(before)


def output_of(model: nn.Module, name: str) -> nn.Module:
    """The module whose result is the projected heads."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    if "dense" in module._modules:  # ALBERT, GPT-NeoX
        return module.dense
    return parent.output.dense if name.endswith(".self") else module


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_layers(name, seen):
    """Queries and keys of the first position (which rotary embeddings do not turn), all values, the output."""
    architecture = HUGGING_FACE[name]
    model = architecture.build("seen")
    for module in model.modules():
        if getattr(module, "bias", None) is not None and not isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
    outputs: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_pre_hook(seen.given, with_kwargs=True)
        module.register_forward_hook(lambda module, _, output: outputs.update({module: output}))
    inputs = architecture.inputs(torch.ones(BATCH, LENGTH, dtype=torch.long))
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    if name == "bert decoder":
        inputs["encoder_hidden_states"] = torch.randn(BATCH, 7, 16).double()
    with torch.no_grad():
        model(**inputs)
    layers = {n: m for n, m in model.named_modules() if "context" in seen.get(m, {})}
    assert len(layers) == architecture.layers or name == "albert"
    assert ATTENTIONS.get(name, next(iter(layers))) in layers
    for layer_name, module in layers.items():
        p, call = head_parameters(model, layer_name), seen[module]
        for what, x, w in (("query", "hidden", p.w_q), ("key", "memory", p.w_k), ("value", "memory", p.w_v)):
            places = slice(None) if what == "value" else slice(1)
            found, expected = call[what][:, :, places], torch.einsum("ble,hde->bhld", call[x][:, places], w)
            if name in SCALED and what != "value":
                found, expected = F.normalize(found, dim=-1), F.normalize(expected, dim=-1)
            if name not in NORMALISED or what == "value":
                torch.testing.assert_close(found, expected, msg=lambda m, w=what: f"{w}: {m}")
        output = torch.einsum("blhd,ehd->ble", call["context"], p.w_o)
        found = outputs[output_of(model, layer_name)]
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, output)


def test_sizes_that_do_not_fit_are_not_told():
    """A gate that the query projection holds too; a head size that contradicts the number of heads."""
    model = ARCHITECTURES["llama"].build("eager")
    attention = model.model.layers[0].self_attn
    assert head_parameters(model, "model.layers.0.self_attn").w_k.shape == (2, 4, 16)
    before = attention.q_proj
    attention.q_proj = nn.Linear(16, 32, bias=False)
    assert head_parameters(model, "model.layers.0.self_attn") is None
    attention.q_proj, attention.head_dim = before, 6
    assert head_parameters(model, "model.layers.0.self_attn") is None
    attention.head_dim, attention.num_heads = 4, 8
    assert head_parameters(model, "model.layers.0.self_attn") is None


@pytest.mark.parametrize("multi_query", [True, False])
def test_layouts_that_the_names_do_not_tell(multi_query):
    config = transformers.GPTBigCodeConfig(n_embd=16, n_layer=1, n_head=4, vocab_size=40, multi_query=multi_query)
    model = transformers.GPTBigCodeModel(config)
    assert head_parameters(model, "h.0.attn") is None


def test_heads_that_attend_in_pairs_are_not_told():
    """Differential attention: two heads of weights, one of values and outputs."""
    config = configured("DiffLlamaConfig")(num_key_value_heads=4)
    assert head_parameters(transformers.DiffLlamaModel(config), "layers.0.self_attn") is None


def test_cross_attention_of_gpt2_is_not_told():
    config = ARCHITECTURES["gpt2"].config(add_cross_attention=True)
    model = transformers.GPT2LMHeadModel(config)
    assert head_parameters(model, "transformer.h.0.crossattention") is None
    assert head_parameters(model, "transformer.h.0.attn") is not None


# --- Hand-written ones: known by a trial ----------------------------------------------------------------------------


class Named(nn.Module):
    """Causal self-attention with Hugging Face's names, heads side by side or interleaved."""

    def __init__(self, interleaved: bool = False, is_causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.num_heads, self.interleaved, self.is_causal, self.scale = HEADS, interleaved, is_causal, scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        if self.interleaved:
            return x.unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2)
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.scale)
        return self.out_proj(context.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """As in nanoGPT: one projection, an nn.Linear, for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).split(E, dim=-1))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(context.transpose(1, 2).reshape(x.shape))


def test_a_hand_written_layer_is_told_after_a_trial():
    layer, state = Named(), torch.get_rng_state()
    layer.register_forward_hook(lambda *_: pytest.fail("the module itself is not called"))
    layer.q_proj.register_forward_hook(lambda *_: pytest.fail("nor its projections"))
    before = copy.deepcopy(layer.state_dict())
    p = head_parameters(nn.Sequential(layer), "0")
    assert torch.equal(p.w_q.flatten(0, 1), layer.q_proj.weight) and torch.equal(
        p.w_o.flatten(1), layer.out_proj.weight
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[n]) for n, x in layer.state_dict().items())
    fused = Fused()
    p = head_parameters(fused, "")
    assert torch.equal(torch.cat([w.flatten(0, 1) for w in (p.w_q, p.w_k, p.w_v)]), fused.c_attn.weight)


class Interleaved(Document):
    def split_heads(self, x: Tensor, batch_size: int) -> Tensor:
        return x.view(batch_size, -1, self.d_k, self.num_heads).permute(0, 3, 1, 2)


def with_adapter() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    layer.W_v = nn.Sequential(layer.W_v)
    return layer


class DoublingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_subclass() -> nn.Module:
    layer = mha_ext.nn.MultiheadAttention(E, HEADS)
    layer.out_proj = DoublingLinear(E, E)
    return layer


def pruned_by_torch() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    prune.l1_unstructured(layer.W_q, "weight", 0.3)
    return layer


def with_its_own_forward() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    layer.forward = lambda *x: None
    return layer


def of_another_width() -> nn.Module:
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    layer.W_o = nn.Linear(E + 1, E)
    return layer


class Subclass(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OursWithAScale(mha_ext.MultiHeadAttention):
    def forward(self, query, key, value):
        return super().forward(2 * query, key, value)


NOT_TOLD: dict[str, Callable[[], nn.Module]] = {
    "interleaved heads": lambda: Interleaved(E, HEADS),
    "interleaved heads by name": lambda: Named(interleaved=True),
    "another scale": lambda: Named(scale=1.0),
    "an adapter": with_adapter,
    "a subclass of Linear": with_subclass,
    "a subclass of torch's layer": lambda: Subclass(E, HEADS),
    "a subclass of ours": lambda: OursWithAScale(E, HEADS),
    "a weight that a hook makes": pruned_by_torch,
    "a forward of its own": with_its_own_forward,
    "sizes": of_another_width,
    "a ScriptModule": lambda: torch.jit.script(mha_ext.MultiHeadAttention(E, HEADS)),
    "no attention": lambda: nn.Linear(E, E),
    "nothing": nn.Identity,
}


@pytest.mark.parametrize("name", NOT_TOLD)
def test_what_cannot_be_told(name):
    model = nn.Sequential(NOT_TOLD[name]())
    assert head_parameters(model, "0") is None


def test_errors():
    model = nn.Sequential(mha_ext.MultiHeadAttention(E, HEADS))
    with pytest.raises(ValueError, match="head_parameters: expected names of modules of the model, got '1'"):
        head_parameters(model, "1")
    with pytest.raises(ValueError, match="got '0.weight'"):
        head_parameters(model, "0.weight")
    with pytest.raises(TypeError, match="head_parameters: expected an nn.Module, got dict"):
        head_parameters({}, "0")
    with pytest.raises(TypeError, match="head_parameters: expected names of modules, got int"):
        head_parameters(model, 0)
