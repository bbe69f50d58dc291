"""What `record` sees in Hugging Face models, against the weights that their eager attention returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mha_ext.heads.baseline import randomized
from mha_ext.heads.importance import importance
from mha_ext.heads.pruning import prune_heads, pruned_heads
from mha_ext.heads.recording import gate, record
from mha_ext.integrations.transformers import register
from tests.models.architectures import ARCHITECTURES, LENGTH

register()
VERSION = int(transformers.__version__.split(".")[0])
MASK = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()  # no query sees nothing, for which eager has NaN
LEFT = MASK.flip(1)
NAMES = [name for name, a in ARCHITECTURES.items() if max(a.since, a.weights_since) <= VERSION and name != "clip"]


def weights_of(outputs: Any) -> list[Tensor]:
    """The weights that a model returns, in the order in which its layers run."""
    if getattr(outputs, "encoder_attentions", None) is None:
        return list(outputs.attentions)
    pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(weights for pair in pairs for weights in pair)]


def inputs_of(name: str, mask: Tensor) -> dict[str, Tensor]:
    given = ARCHITECTURES[name].inputs(mask)
    return {key: x.double() if x.is_floating_point() else x for key, x in given.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "mha_ext"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_results(name: str, attention: str) -> None:
    architecture, mask = ARCHITECTURES[name], MASK if ARCHITECTURES[name].padded else torch.ones_like(MASK)
    eager = architecture.build("eager")
    with torch.no_grad():
        expected = weights_of(eager(**inputs_of(name, mask), output_attentions=True))
    leaves_out_softcap = name == "gemma2" and VERSION < 5  # so its results are others
    if attention == "sdpa" and (leaves_out_softcap or not eager._supports_sdpa):
        attention = "mha_ext"
    model = architecture.build(attention)
    with torch.no_grad():
        plain = model(**inputs_of(name, mask))[0]
        with record(model) as recording:
            output = model(**inputs_of(name, mask))[0]
    assert model.config._attn_implementation == attention
    tokens = mask.bool() if output.shape[:2] == mask.shape else slice(None)  # eager gives NaN for some padding
    torch.testing.assert_close(output[tokens], plain[tokens], rtol=1e-4, atol=1e-5)  # norms are in float32
    assert recording.left == {}
    calls = [call for layer in recording.values() for call in layer.calls]
    assert len(calls) == len(expected) == architecture.layers
    for call, weights in zip(calls, expected, strict=True):
        weights = weights[..., : call.weights.size(-1)]  # some return the sink too, as one more key
        queries = torch.ones(call.weights.shape[0], call.weights.shape[2]) if call.queries is None else call.queries
        valid = queries.bool()[:, None, :, None].expand(call.weights.shape)
        torch.testing.assert_close(call.weights[valid], weights[valid], rtol=1e-4, atol=1e-6)
        assert valid.any()


@pytest.mark.parametrize("name", [name for name in ("bert", "llama", "t5") if name in NAMES])
def test_valid_tokens(name: str) -> None:
    for mask in (MASK, LEFT) if name != "t5" else (MASK,):
        model = ARCHITECTURES[name].build("mha_ext")
        with torch.no_grad(), record(model) as recording:
            model(**inputs_of(name, mask))
        first = next(iter(recording.values())).calls[0]
        assert torch.equal(first.queries, inputs_of(name, mask)["attention_mask"].bool())
    offsets = {layer.calls[0].offset for layer in recording.values()}
    assert offsets == ({0, None} if name == "t5" else {0})


@pytest.mark.parametrize("name", [name for name in ("bert", "llama", "gpt_oss", "t5") if name in NAMES])
def test_streaming(name: str) -> None:
    model = ARCHITECTURES[name].build("mha_ext")
    with torch.no_grad():
        with record(model) as full:
            model(**inputs_of(name, MASK))
        with record(model, streaming=True, queries=4) as some:
            model(**inputs_of(name, MASK))
        with record(model, streaming=True, queries=None) as streamed:
            model(**inputs_of(name, MASK))
    for layer, other in zip(full.values(), streamed.values(), strict=True):
        torch.testing.assert_close(layer.statistics().entropy(), other.statistics().entropy())
        torch.testing.assert_close(layer.statistics().linear_cka(), other.statistics().linear_cka())
    for layer, other in zip(full.values(), some.values(), strict=True):
        assert 0 < other.statistics().rows < layer.statistics().rows


@pytest.mark.parametrize("name", [name for name in ("bert", "llama", "gpt_oss", "bart") if name in NAMES])
def test_importance_is_the_derivative_of_the_gates(name: str) -> None:
    model = ARCHITECTURES[name].build("eager")
    given = inputs_of(name, MASK)

    def score(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        return model(**given)[0].sin().sum(dim=tuple(range(1, model(**given)[0].dim())))

    found = importance(model, lambda model, given: score(model, given).sum(), [given])
    assert len(found) == ARCHITECTURES[name].layers
    for layer, value in list(found.items())[:3]:
        heads = len(value)
        expected = []
        for head in range(heads):
            sides = []
            for step in (1e-2, -1e-2):
                gates = torch.ones(heads, dtype=torch.float64)
                gates[head] += step  # norms are in float32: no smaller
                with torch.no_grad(), gate(model, {layer: gates}):
                    sides.append(score(model, given))
            expected.append(((sides[0] - sides[1]) / 2e-2).abs().mean())
        torch.testing.assert_close(value, torch.stack(expected), rtol=1e-2, atol=1e-4)


def test_randomized_is_another_model_of_the_configuration() -> None:
    model = ARCHITECTURES["bert"].build("mha_ext") if "bert" in NAMES else ARCHITECTURES["llama"].build("mha_ext")
    twin, again = randomized(model), randomized(model)
    assert type(twin) is type(model) and not twin.training
    for (name, parameter), other, trained in zip(
        twin.named_parameters(), again.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(parameter, other) and parameter.dtype == trained.dtype, name
    with torch.no_grad(), record(twin) as recording:
        twin(**inputs_of("bert", MASK))
    assert recording and not recording.left


def test_randomized_of_a_pruned_model_is_as_small() -> None:
    if "bert" in NAMES:
        model, layer = ARCHITECTURES["bert"].build("mha_ext"), "encoder.layer.0.attention.self"
    else:
        model, layer = ARCHITECTURES["bart"].build("mha_ext"), "model.encoder.layers.0.self_attn"
    prune_heads(model, {layer: [1, 2]})
    twin = randomized(model)
    assert pruned_heads(twin) == pruned_heads(model)
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]


def test_a_model_that_cannot_be_seen_is_told() -> None:
    """ALBERT-like names of attention do not matter: only what is called does."""
    config = transformers.DebertaV2Config(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = transformers.DebertaV2Model(config).eval()
    with torch.no_grad(), record(model) as recording:
        model(torch.ones(1, 3, dtype=torch.long))
    assert not recording and recording.left
    assert all(isinstance(reason, str) and reason for reason in recording.left.values())
