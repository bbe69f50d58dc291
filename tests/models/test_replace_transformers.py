"""replace_attention on models of Hugging Face Transformers, and what comes of their Conv1D."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mha_ext import convert
from mha_ext.replace import replace_attention, restore_attention
from tests.models.architectures import ARCHITECTURES, LENGTH, Count

VERSION = int(transformers.__version__.split(".")[0])
NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.since <= VERSION]
TEXT, IMPLEMENTATION = ARCHITECTURES["llama"], "sdpa"
MASK = torch.ones(2, LENGTH, dtype=torch.long)


def implementations(model: nn.Module) -> list[str]:
    return [m.config._attn_implementation for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, Tensor]:
    """How many attentions ran on the engine, and the first output."""
    with torch.no_grad(), Count() as count:
        result = model(**inputs)[0]
    return count.calls, result


@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_on_the_engine_and_back(name):
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build("eager", torch.float32), architecture.inputs(MASK)
    _, expected = run(model, inputs)
    report = replace_attention(model)
    assert str(report.swapped[0]) == "the model: attn_implementation='eager' -> attn_implementation='mha_ext'"
    assert not report.left and set(implementations(model)) == {"mha_ext"}
    count, found = run(model, inputs)
    assert count == architecture.layers
    torch.testing.assert_close(found, expected)
    again = replace_attention(model)
    assert not again and {entry.reason for entry in again.left} == {"was replaced before"}
    assert restore_attention(model) == len(report) and set(implementations(model)) == {"eager"}
    assert run(model, inputs)[0] == 0


class Around(nn.Module):
    """A model with one of Transformers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TEXT.build(IMPLEMENTATION)
        self.pool = nn.MultiheadAttention(40, 2, batch_first=True, dtype=torch.float64)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        states = self.body(**inputs).logits
        return self.pool(states, states, states)


HOW = {"itself": lambda x: x, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("how", HOW)
def test_a_model_inside_another(how):
    model, inputs = Around(), TEXT.inputs(MASK)
    _, expected = run(model, inputs)
    report = replace_attention(model)
    assert [entry.name for entry in report.swapped] == ["pool", "body"]
    duplicate = HOW[how](model)
    count, found = run(duplicate, inputs)
    assert count >= TEXT.layers
    torch.testing.assert_close(found, expected)
    assert restore_attention(duplicate) == 2
    assert set(implementations(duplicate)) == {IMPLEMENTATION}
    assert set(implementations(model)) == {IMPLEMENTATION if duplicate is model else "mha_ext"}


def test_parts_go_back_to_implementations_of_their_own():
    """A model of two, of which one is on eager: their configurations have no class in common."""
    parts = nn.ModuleList([TEXT.build("eager"), ARCHITECTURES["vit"].build("sdpa")])
    whisper = ARCHITECTURES["whisper"].build("eager")
    before = implementations(parts), implementations(whisper)
    assert set(before[0]) == {"eager", "sdpa"}
    for model in (parts, whisper):
        assert replace_attention(model)
        assert set(implementations(model)) == {"mha_ext"}
        restore_attention(model)
    assert (implementations(parts), implementations(whisper)) == before


class Custom(transformers.LlamaPreTrainedModel):
    """A model with attention of its own, which no implementation changes."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)


def test_left_with_a_reason():
    custom, ours = Custom(TEXT.config()), TEXT.build(IMPLEMENTATION)
    assert replace_attention(ours)
    report = replace_attention(nn.ModuleList([custom, ours, TEXT.build(IMPLEMENTATION)]))
    assert [entry.name for entry in report.swapped] == ["2"]
    assert [(entry.name, entry.reason) for entry in report.left] == [
        ("0", "calls no attention functions (mha_ext.patch_sdpa may serve it)"),
        ("1", "was replaced before"),
    ]
    assert implementations(custom) == [IMPLEMENTATION]


def test_a_model_on_mha_ext_already():
    replace_attention(TEXT.build("eager"))  # registers
    model = TEXT.build("mha_ext")
    report = replace_attention(model)
    assert not report and [entry.reason for entry in report.left] == ["is mha_ext's own"]
    assert restore_attention(model) == 0 and set(implementations(model)) == {"mha_ext"}


def test_conv1d_is_transposed():
    qkv, out, x = Conv1D(48, 16), Conv1D(16, 16), torch.randn(2, 3, 16)
    nn.init.normal_(qkv.bias)
    layer = convert.from_fused(qkv, out, num_heads=4)
    torch.testing.assert_close(torch.cat([layer.W_q(x), layer.W_k(x), layer.W_v(x)], -1), qkv(x))
    torch.testing.assert_close(layer.W_o(x), out(x))
    state = convert.document_to_fused(layer.state_dict(), 4, transposed=True, names=("c_attn", "c_proj"))
    assert torch.equal(state["c_attn.weight"], qkv.weight) and torch.equal(state["c_attn.bias"], qkv.bias)
    assert torch.equal(state["c_proj.weight"], out.weight) and torch.equal(state["c_proj.bias"], out.bias)
