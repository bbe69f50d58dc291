"""Models of Hugging Face Transformers with attn_implementation="mha_ext" against their own eager attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mha_ext.integrations.transformers import attend, make_mask, register
from tests.checks import assert_as_good_as_plain
from tests.models.architectures import (
    ARCHITECTURES,
    LENGTH,
    OF_BART,
    Architecture,
    Count,
    configured,
    tokens,
    two_sides,
)

VERSION = int(transformers.__version__.split(".")[0])
NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.since <= VERSION]
GENERATING = [name for name in NAMES if ARCHITECTURES[name].generates]
PADDING = {"none": [LENGTH] * 3, "right": [LENGTH, 6, 9], "left": [LENGTH, -6, -9]}
PADDED = [(name, padding) for name in NAMES for padding in PADDING if padding == "none" or ARCHITECTURES[name].padded]

transformers.logging.set_verbosity_error()
register()


@pytest.fixture(autouse=True)
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention casts scores to float32, in which its float64 mask is -inf: here float64 stays float64."""
    softmax = torch.nn.functional.softmax

    def exact(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


@functools.cache
def model_of(name: str, attention: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return ARCHITECTURES[name].build(attention, dtype)


def mask_of(padding: str) -> Tensor:
    """(3, L), 1 = a token; a negative length stands at the right."""
    place = torch.arange(LENGTH)
    return torch.stack([place < n if n > 0 else place >= LENGTH + n for n in PADDING[padding]]).long()


def inputs_of(architecture: Architecture, padding: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    inputs = architecture.inputs(mask_of(padding))
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def live(x: Tensor, mask: Tensor) -> Tensor:
    """The entries of tokens out of (B, L, ...) or, for weights, (B, H, L, ...); others have no padding."""
    if x.shape[:2] == mask.shape:
        return x[mask.bool()]
    if x.dim() == 4 and x.shape[0] == len(mask) and x.shape[2] == mask.shape[1]:
        return x.transpose(1, 2)[mask.bool()]
    return x


def result(output: Any) -> Tensor:
    """What a model computes: logits, or the last hidden state."""
    names = ("logits", "logits_per_text", "last_hidden_state")
    return next(output[name] for name in names if name in output)


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Up to the float32 in which many models normalise and turn positions, whatever their dtype."""
    assert found.isfinite().all(), what
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * scale + 1e-12, msg=lambda text: f"{what}: {text}")


def gradients(model: nn.Module, name: str, padding: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The live results, and the gradients of all parameters for a loss on them."""
    found = live(result(model(**inputs_of(ARCHITECTURES[name], padding))), mask_of(padding))
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(3))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad((found * weights).sum(), list(parameters.values()), allow_unused=True)
    return found, {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_results_and_gradients_equal_eager(name: str, padding: str, train: bool) -> None:
    ours, eager = model_of(name, "mha_ext").train(train), model_of(name, "eager").train(train)
    with Count() as count:
        found, found_grads = gradients(ours, name, padding)
    expected, expected_grads = gradients(eager, name, padding)
    assert count.calls == ARCHITECTURES[name].layers
    assert_equal(found, expected, "result")
    assert found_grads.keys() == expected_grads.keys() and len(found_grads) > 0
    for parameter, grad in expected_grads.items():
        assert_equal(found_grads[parameter], grad, parameter)


@pytest.mark.parametrize(
    ("name", "padding"), [case for case in PADDED if ARCHITECTURES[case[0]].weights_since <= VERSION]
)
def test_returned_weights_equal_eager(name: str, padding: str) -> None:
    inputs, mask = inputs_of(ARCHITECTURES[name], padding), mask_of(padding)
    found = model_of(name, "mha_ext").eval()(**inputs, output_attentions=True)
    expected = model_of(name, "eager").eval()(**inputs, output_attentions=True)
    if name == "clip":
        found = {**found.text_model_output, "vision_attentions": found.vision_model_output.attentions}
        expected = {**expected.text_model_output, "vision_attentions": expected.vision_model_output.attentions}
    kinds = [kind for kind in expected if kind.endswith("attentions")]
    assert sum(len(expected[kind]) for kind in kinds) == ARCHITECTURES[name].layers
    for kind in kinds:
        side = inputs["attention_mask"] if kind == "encoder_attentions" and "attention_mask" in inputs else mask
        assert len(found[kind]) == len(expected[kind])
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            assert ours.shape == theirs.shape
            assert_equal(live(ours, side), live(theirs, side), kind)


def test_weights_that_the_configuration_asks_for() -> None:
    model = ARCHITECTURES["llama"].build("eager", output_attentions=True)
    model.set_attn_implementation("mha_ext")
    inputs = inputs_of(ARCHITECTURES["llama"], "none")
    assert len(model(**inputs).attentions) == 2
    assert model(**inputs, output_attentions=False).attentions is None


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generated_tokens_equal_eager(name: str, cache: str) -> None:
    inputs = inputs_of(ARCHITECTURES[name], "left")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with Count() as count:
        found = model_of(name, "mha_ext").eval().generate(**inputs, **options)
    expected = model_of(name, "eager").eval().generate(**inputs, **options)
    assert count.calls == 8 * ARCHITECTURES[name].layers
    assert torch.equal(found.sequences, expected.sequences)
    for step, (ours, theirs) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert_equal(ours, theirs, f"logits of step {step}")


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", GENERATING)
def test_prefill_in_chunks_equals_one_forward(name: str, padding: str) -> None:
    """Several queries after cached keys."""
    model, mask = model_of(name, "mha_ext").eval(), mask_of(padding)
    inputs = inputs_of(ARCHITECTURES[name], padding)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model_of(name, "eager").eval()(**inputs, position_ids=positions).logits
    cache, chunks = None, []
    for begin, end in ((0, 5), (5, 8), (8, 9), (9, LENGTH)):
        output = model(
            input_ids=inputs["input_ids"][:, begin:end],
            attention_mask=mask[:, :end] if padding != "none" else None,
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        chunks.append(output.logits)
    assert_equal(live(torch.cat(chunks, 1), mask), live(expected, mask), "logits")


def test_from_config_and_set_attn_implementation() -> None:
    architecture = ARCHITECTURES["llama"]
    model = transformers.AutoModelForCausalLM.from_config(architecture.config(), attn_implementation="mha_ext")
    assert model.config._attn_implementation == "mha_ext"
    inputs = inputs_of(architecture, "right")
    for attention, calls in (("eager", 0), ("mha_ext", 2), ("sdpa", 0)):
        model.set_attn_implementation(attention)
        with Count() as count:
            model(**inputs)
        assert count.calls == calls


def test_compiled_equals_eager() -> None:
    architecture = ARCHITECTURES["llama"]
    inputs = inputs_of(architecture, "left")
    model = architecture.build("mha_ext")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = compiled(**inputs).logits, model_of("llama", "eager").eval()(**inputs).logits
    assert_equal(live(found, mask_of("left")), live(expected, mask_of("left")), "logits")
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bfloat16_is_as_good_as_eager() -> None:
    inputs, mask = inputs_of(ARCHITECTURES["llama"], "right"), mask_of("right")
    found, plain = (
        live(model_of("llama", attention, torch.bfloat16)(**inputs).logits, mask) for attention in ("mha_ext", "eager")
    )
    rounded = ARCHITECTURES["llama"].build("eager", torch.bfloat16).double()
    assert_as_good_as_plain(found, plain, live(rounded(**inputs).logits, mask).detach(), what="logits")


def test_dropout_in_training_drops_weights() -> None:
    architecture = ARCHITECTURES["llama"]
    model, inputs = architecture.build("mha_ext", attention_dropout=0.5), inputs_of(architecture, "none")
    whole = model(**inputs, output_attentions=True).attentions[0]
    assert_equal(whole, model_of("llama", "eager").eval()(**inputs, output_attentions=True).attentions[0], "eval")
    dropped = model.train()(**inputs, output_attentions=True).attentions[0]
    kept = dropped != 0
    assert 0.3 < kept.sum() / (whole != 0).sum() < 0.7
    assert_equal(dropped[kept], 2 * whole[kept], "kept weights")
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


# --- The attention function by itself -----------------------------------------------------------------------------


def tensors(q_len: int = 5, kv_len: int = 5) -> list[Tensor]:
    """Query of four heads, key and value of two."""
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 6))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def called_with(*arguments: Any, causal: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention of a module that trains, with weights."""
    module = SimpleNamespace(training=True, is_causal=causal)
    return attend(module, *arguments, output_attentions=True, **options)


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0, sink: Tensor | None = None) -> tuple:
    """softmax of (scores + bias) and of the sink's score, without the sink's weight: output (B, Lq, H, Dv), weights."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


def assert_same_with_gradients(found: tuple, expected: tuple, leaves: list[Tensor]) -> None:
    """Both results, and the gradients of a loss on both."""
    loss_weights = [torch.randn_like(x) for x in expected]
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, loss_weights, strict=True)), leaves)
        for pair in (found, expected)
    ]
    for name, ours, theirs in zip(
        ("output", "weights", *(f"gradient {i}" for i in range(len(leaves)))),
        (*found, *grads[0]),
        (*expected, *grads[1]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_position_bias_with_a_mask() -> None:
    q, k, v = tensors()
    position_bias = torch.randn(1, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    seen = torch.rand(2, 1, 5, 5) < 0.5
    seen[..., 0] = True
    hidden = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    for mask in (seen, hidden):
        found = called_with(q, k, v, mask, position_bias=position_bias)
        expected = plain(q, k, v, position_bias + hidden)
        assert_same_with_gradients(found, expected, [q, k, v, position_bias])


@pytest.mark.parametrize(("name", "shape"), [("s_aux", (4,)), ("sinks", (2, 4, 5, 1))])
def test_sinks(name: str, shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = plain(q, k, v, sink=sink if sink.dim() == 4 else sink[:, None, None])
    assert_same_with_gradients(called_with(q, k, v, **{name: sink}), expected, [q, k, v, sink])


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1, 1)])
def test_head_mask(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    factors = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    output, weights = plain(q, k, v)
    expected = output * factors[:, None], weights * factors[:, None, None]
    assert_same_with_gradients(called_with(q, k, v, head_mask=factors.reshape(shape)), expected, [q, k, v])


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_packed_sequences_are_separate(kind: str) -> None:
    q, k, v = tensors(9, 9)
    bounds = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    seen = torch.rand(1, 1, 9, 9) < 0.5 if kind == "masked" else None
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6, "max_length_k": 6}
    output, _ = called_with(q, k, v, seen, causal=kind == "causal", **packing)
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        own = slice(begin, end)
        part = seen if seen is None else seen[:, :, own, own]
        alone, _ = called_with(*(x[:, :, own] for x in (q, k, v)), part, causal=kind == "causal")
        torch.testing.assert_close(output[:, own], alone)


@pytest.mark.parametrize("q_len", [1, 3, 7])
def test_causal_queries_without_a_mask_are_the_last_of_the_keys(q_len: int) -> None:
    q, k, v = tensors(q_len, 7)
    future = torch.full((q_len, 7), -torch.inf, dtype=torch.float64).triu(8 - q_len)
    assert_same_with_gradients(called_with(q, k, v, causal=True), plain(q, k, v, future), [q, k, v])


def test_a_query_that_sees_no_key_gets_zero() -> None:
    q, k, v = tensors()
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    seen[0, 0, 2] = False
    output, weights = called_with(q, k, v, seen, s_aux=torch.zeros(4, dtype=torch.float64))
    assert not output[0, 2].any() and not weights[0, :, 2].any()
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_mask_for_more_keys_is_cut() -> None:
    q, k, v = tensors()
    seen = torch.rand(2, 1, 5, 8) < 0.5
    assert torch.equal(called_with(q, k, v, seen)[0], called_with(q, k, v, seen[..., :5])[0])


def test_a_module_that_does_not_train_drops_nothing() -> None:
    q, k, v = tensors()
    output, _ = attend(SimpleNamespace(training=False, is_causal=False), q, k, v, dropout=0.5)
    torch.testing.assert_close(output, plain(q, k, v)[0])


def test_softcap() -> None:
    q, k, v = tensors()
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    expected = plain(q, k, v, 0.5 * (scores / 0.5).tanh() - scores)
    assert_same_with_gradients(called_with(q, k, v, softcap=0.5), expected, [q, k, v])


def test_weights_are_not_computed_unless_asked_for() -> None:
    assert attend(SimpleNamespace(training=False, is_causal=False), *tensors())[1] is None


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a selection of keys": ({"indices": torch.zeros(1)}, ValueError, "indices"),
    "a table of pages": ({"block_table": torch.zeros(1)}, ValueError, "block_table"),
    "a head mask that is none": ({"head_mask": torch.zeros(3)}, ValueError, "head_mask"),
    "a head mask as a mask": ({"attention_mask": torch.ones(1, 4, 1, 1)}, ValueError, "attention_mask"),
    "a mask of integers": ({"attention_mask": torch.ones(2, 5, dtype=torch.long)}, TypeError, "attention_mask"),
    "a window without a mask": ({"sliding_window": 3}, ValueError, "sliding_window"),
    "a mask for fewer keys": ({"attention_mask": torch.ones(2, 1, 5, 3).bool()}, ValueError, "attention_mask"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused(what: str) -> None:
    options, kind, name = REFUSED[what]
    with pytest.raises(kind, match=name):
        called_with(*tensors(), **options)


MODULES = {
    "nothing says whether it is causal": ({}, "is_causal"),
    "scores are not scaled": ({"is_causal": False, "scale_attn_weights": False}, "scale_attn_weights"),
    "scores are scaled by layer": ({"is_causal": False, "scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
    "relative positions": ({"is_causal": False, "position_embedding_type": "relative_key"}, "relative_key"),
}


@pytest.mark.parametrize("what", MODULES)
def test_a_module_with_its_own_rules_is_refused(what: str) -> None:
    attributes, name = MODULES[what]
    with pytest.raises(ValueError, match=name):
        attend(SimpleNamespace(training=False, **attributes), *tensors())


def test_causal_lengths_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="no more queries than keys"):
        called_with(*tensors(6, 5), causal=True)
    with pytest.raises(ValueError, match="as many queries as keys with cu_seq_lens_q"):
        called_with(*tensors(2, 5), causal=True, cu_seq_lens_q=torch.tensor([0, 1, 2]))


def test_an_argument_that_is_none_is_not_given() -> None:
    called_with(*tensors(), indices=None)


# --- The mask function and registering ----------------------------------------------------------------------------


def test_only_what_the_causal_rule_says_needs_no_mask() -> None:
    model = model_of("llama", "mha_ext").eval()
    seen: list[Tensor | None] = []
    layer = model.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    inputs = inputs_of(ARCHITECTURES["llama"], "none")
    cache = model(**inputs).past_key_values
    model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache)
    model(input_ids=inputs["input_ids"][:, :3], past_key_values=cache)
    model(**inputs, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=16))
    model(**inputs_of(ARCHITECTURES["llama"], "right"))
    hook.remove()
    assert [mask is None for mask in seen] == [True, True, False, False, False]
    assert all(mask.dtype == torch.bool for mask in seen[2:])


def test_a_decoder_that_does_not_say_that_it_is_causal() -> None:
    """The modules of Pegasus-X say is_causal=False in the decoder too; its eager attention relies on its masks."""
    architecture = Architecture(
        "PegasusXForConditionalGeneration", configured("PegasusXConfig", **OF_BART), 4, two_sides
    )
    inputs = inputs_of(architecture, "none")
    del inputs["decoder_attention_mask"]
    with Count() as count:
        found = architecture.build("mha_ext")(**inputs).logits
    assert count.calls == architecture.layers
    assert_equal(found, architecture.build("eager")(**inputs).logits, "logits")


@pytest.mark.parametrize(
    ("model", "config", "rule"),
    [
        ("BloomModel", configured("BloomConfig", n_head=4), "ALL_ATTENTION_FUNCTIONS"),
        ("DebertaV2Model", configured("DebertaV2Config"), "ALL_ATTENTION_FUNCTIONS"),
        ("NllbMoeModel", configured("NllbMoeConfig", **OF_BART, num_experts=2), "masks for attention only"),
        # A part of these adds the masks itself, though their files use the table.
        ("GitForCausalLM", configured("GitConfig"), "another attention than eager"),
        ("BigBirdPegasusModel", configured("BigBirdPegasusConfig", **OF_BART), "another attention than eager"),
    ],
)
def test_models_with_an_attention_of_their_own_are_refused(model: str, config: Callable[[], Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"mha_ext: expected a model .*{rule}.*{model}"):
        Architecture(model, config, 0, tokens).build("mha_ext")


def test_register_may_be_called_again() -> None:
    register()
    assert transformers.AttentionInterface()["mha_ext"] is attend
    assert transformers.AttentionMaskInterface()["mha_ext"] is make_mask


@pytest.mark.parametrize(("module", "text"), [(None, "found none"), (SimpleNamespace(__version__="4.56.2"), "4.56.2")])
def test_register_without_a_transformers_that_fits(monkeypatch: pytest.MonkeyPatch, module: Any, text: str) -> None:
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(ImportError, match=f"register: expected transformers >= 4.57, .*{text}"):
        register()
