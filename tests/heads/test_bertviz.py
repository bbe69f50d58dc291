"""What bertviz is given is what it asks for: checked here by the rules that head_view and model_view have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mha_ext.heads.bertviz import sides, to_bertviz
from mha_ext.heads.recording import Recording, record
from tests.heads.sample_report import OTHER_TOKENS, TOKENS, sentence_report, translation_report

KINDS = {
    "attention": ("tokens", "tokens"),
    "encoder_attention": ("encoder_tokens", "encoder_tokens"),
    "decoder_attention": ("decoder_tokens", "decoder_tokens"),
    "cross_attention": ("decoder_tokens", "encoder_tokens"),
}
ENCODER_DECODER = {"encoder_attention", "decoder_attention", "cross_attention", "encoder_tokens", "decoder_tokens"}


def drawn(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """What bertviz would draw, (layers, H, Lq, Lk) of each kind; its own checks and some that it leaves to the user."""
    assert (
        set(arguments) == {"attention", "tokens"}
        or {"encoder_tokens", "decoder_tokens"} < set(arguments) <= ENCODER_DECODER
    )
    shown = {}
    for kind in KINDS.keys() & arguments.keys():
        layers = arguments[kind]
        left, right = (arguments[name] for name in KINDS[kind])
        assert type(layers) is tuple and layers
        assert all(type(tokens) is list and all(type(token) is str for token in tokens) for tokens in (left, right))
        for layer in layers:
            assert type(layer) is Tensor and layer.dtype == torch.float32 and not layer.requires_grad
            assert layer.dim() == 4 and layer.size(0) == 1 and layer.shape[2:] == (len(left), len(right))
            torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:3]))
        shown[kind] = torch.stack([layer.squeeze(0) for layer in layers])
        json.dumps([shown[kind].tolist(), left, right], allow_nan=False)
    return shown


def translator() -> nn.Module:
    sizes = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 16, "encoder_layers": 3, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return transformers.BartModel(transformers.BartConfig(**sizes, **heads)).eval()


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Two pairs, the second padded: 7 and 5 source tokens, 4 and 2 target tokens."""
    ids = torch.randint(3, 40, (2, 11), generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": ids[:, :7],
        "attention_mask": torch.arange(7).lt(torch.tensor([[7], [5]])).long(),
        "decoder_input_ids": ids[:, 7:],
        "decoder_attention_mask": torch.arange(4).lt(torch.tensor([[4], [2]])).long(),
    }


def eager_attention(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    eager = type(model)._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return eager(**inputs, output_attentions=True)


def recorded(model: nn.Module, **inputs: Tensor) -> Recording:
    with torch.no_grad(), record(model) as recording:
        model(**inputs)
    return recording


@pytest.mark.parametrize("input, tokens", [(0, TOKENS), (1, OTHER_TOKENS)])
def test_a_report(input: int, tokens: list[str]) -> None:
    report = sentence_report()
    arguments = to_bertviz(report, input=input)
    expected = torch.stack([attention.weights for attention in report.inputs[input].attention])
    torch.testing.assert_close(drawn(arguments), {"attention": expected}, rtol=0, atol=0)
    assert arguments["tokens"] == tokens


def test_a_report_of_an_encoder_decoder() -> None:
    report = translation_report()
    arguments = to_bertviz(report)
    own, cross = (attention.weights for attention in report.inputs[0].attention)
    expected = {"decoder_attention": own[None], "cross_attention": cross[None]}
    torch.testing.assert_close(drawn(arguments), expected, rtol=0, atol=0)
    assert arguments["encoder_tokens"] == ["der", "Hund", "ist", "m\u00fcde", "."]
    assert arguments["decoder_tokens"] == ["<s>", "the", "dog"]


@pytest.mark.parametrize("padded", [True, False], ids=["with padding", "without"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_recording(side: str, padded: bool) -> None:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(1))
    recording = recorded(model, input_ids=ids, attention_mask=mask)
    expected = torch.stack(eager_attention(model, {"input_ids": ids, "attention_mask": mask}).attentions, 1)
    for item in range(2):
        kept = slice(None) if padded else mask[item].bool()
        tokens = [f"t{i}" for i in torch.arange(5)[kept].tolist()]
        found = drawn(to_bertviz(recording, tokens, input=item))["attention"]
        torch.testing.assert_close(found, expected[item][:, :, kept][:, :, :, kept], rtol=1e-5, atol=1e-6)


def test_a_recording_of_an_encoder_decoder() -> None:
    model = translator()
    inputs = inputs_of(model)
    recording, eager = recorded(model, **inputs), eager_attention(model, inputs)
    for item, (source, target) in enumerate([(7, 4), (5, 2)]):
        arguments = to_bertviz(
            recording, [f"s{i}" for i in range(source)], [f"t{i}" for i in range(target)], input=item
        )
        found = drawn(arguments)
        assert {name: len(layers) for name, layers in found.items()} == {
            "encoder_attention": 3,
            "decoder_attention": 2,
            "cross_attention": 2,
        }
        expected = {
            "encoder_attention": torch.stack(eager.encoder_attentions, 1)[item, :, :, :source, :source],
            "decoder_attention": torch.stack(eager.decoder_attentions, 1)[item, :, :, :target, :target],
            "cross_attention": torch.stack(eager.cross_attentions, 1)[item, :, :, :target, :source],
        }
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "offsets, expected",
    [
        ([0, 0], [(0, 0), (0, 0)]),
        ([0, 0, 0, None], [(0, 0), (0, 0), (1, 1), (1, 0)]),
        ([0, 0, None, 0, None], [(0, 0), (1, 1), (1, 0), (1, 1), (1, 0)]),
        ([], []),
    ],
)
def test_sides(offsets: list[int | None], expected: list[tuple[int, int]]) -> None:
    assert sides(offsets) == expected


def test_what_a_caller_can_get_wrong() -> None:
    report, model = sentence_report(), translator()
    inputs = inputs_of(model)
    recording = recorded(model, **inputs)
    source, target = ["s"] * 7, ["t"] * 4
    with torch.no_grad(), record(model) as twice:
        model(**inputs)
        model(**inputs)
    fewer = replace(report.inputs[0].attention[0], weights=report.inputs[0].attention[0].weights[:3])
    pruned = replace(report, inputs=[replace(report.inputs[0], attention=[fewer, *report.inputs[0].attention[1:]])])
    short = replace(report, inputs=[replace(report.inputs[0], sequences=[TOKENS[:3]])])
    wrong: list[tuple[type[Exception], str, tuple, dict]] = [
        (ValueError, "expected input from 0 to 1, got 2", (report,), {"input": 2}),
        (TypeError, "expected input of type int, got str", (report,), {"input": "0"}),
        (ValueError, "expected no tokens with a report", (report, TOKENS), {}),
        (ValueError, "expected tokens for weights", (short,), {}),
        (ValueError, "expected as many heads in every layer, got 3, 8", (pruned,), {}),
        (
            ValueError,
            "expected at least one layer, got none",
            (replace(report, layers=[], inputs=[replace(report.inputs[0], attention=[])]),),
            {},
        ),
        (ValueError, "expected at least one layer, got none", (Recording(), TOKENS), {}),
        (ValueError, "expected the tokens of the recorded sequence, got none", (recording,), {}),
        (ValueError, "expected decoder_tokens with the cross-attention", (recording, source), {}),
        (
            ValueError,
            r"expected tokens for weights \(7, 7\) of encoder.*, got 6 and 6",
            (recording, source[:6], target),
            {},
        ),
        (ValueError, "expected input from 0 to 1, got -1", (recording, source, target), {"input": -1}),
        (ValueError, "expected one call of encoder.* with its weights, got 2", (twice, source, target), {}),
        (TypeError, "expected a Report or a Recording, got dict", ({},), {}),
    ]
    for error, message, arguments, options in wrong:
        with pytest.raises(error, match=f"^to_bertviz: {message}"):
            to_bertviz(*arguments, **options)
