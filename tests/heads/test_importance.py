"""Importance against loops over sequences and against differences; the randomly initialised copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mha_ext
from mha_ext.heads.baseline import randomized
from mha_ext.heads.importance import importance
from mha_ext.heads.recording import record

E, H, B, L = 12, 3, 4, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = mha_ext.MultiHeadAttention(E, H)
        self.second = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, is_causal=True)[0]
        return x + self.second(x, x, x)[0]


def loss_of_each(model: nn.Module, x: Tensor) -> Tensor:
    """(B,)"""
    return model(x).sin().flatten(1).sum(1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of_each(model, x).sum()


def by_hand(model: Model, x: Tensor) -> list[Tensor]:
    """E |sum of W_o's input times its gradient| for each head, sequence by sequence: Michel et al., equation 4."""
    totals = [torch.zeros(H, dtype=torch.float64) for _ in range(2)]
    for row in x:
        sequence = row[None]
        layer = model.first
        q, k, v = (p(sequence).unflatten(-1, (H, -1)).transpose(1, 2) for p in (layer.W_q, layer.W_k, layer.W_v))
        scores = (q @ k.transpose(-2, -1) / (E // H) ** 0.5).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
        first = scores.softmax(-1) @ v
        y = sequence + layer.W_o(first.transpose(1, 2).flatten(2))
        other = model.second
        q, k, v = (
            part.unflatten(-1, (H, -1)).transpose(1, 2)
            for part in nn.functional.linear(y, other.in_proj_weight, other.in_proj_bias).chunk(3, -1)
        )
        second = (q @ k.transpose(-2, -1) / (E // H) ** 0.5).softmax(-1) @ v
        value = (y + other.out_proj(second.transpose(1, 2).flatten(2))).sin().sum()
        for total, heads in zip(totals, (first, second), strict=True):
            (gradient,) = torch.autograd.grad(value, heads, retain_graph=True)
            total += (gradient * heads).sum((0, 2, 3)).abs().detach()
    return [total / len(x) for total in totals]


def test_importance() -> None:
    model, x = Model().double(), torch.randn(B, L, E, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    found = importance(model, loss, [x[:1], x[1:]])
    assert list(found) == ["first", "second"]
    for value, expected in zip(found.values(), by_hand(model, x), strict=True):
        torch.testing.assert_close(value, expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_importance_normalized() -> None:
    model, x = Model(), torch.randn(B, L, E)
    plain, scaled = importance(model, loss, [x]), importance(model, loss, [x], normalize=True)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value / value.norm())
        torch.testing.assert_close(scaled[name].norm(), torch.tensor(1.0, dtype=torch.float64))


def test_importance_of_frozen_models_and_without_gradients() -> None:
    model, x = Model().requires_grad_(False), torch.randn(B, L, E)
    with torch.no_grad():
        found = importance(model, loss, [x])
    with torch.inference_mode():
        again = importance(model, loss, [x.clone()])
    for name, value in found.items():
        assert (value > 0).all() and torch.equal(value, again[name])


def test_a_head_without_effect_has_no_importance() -> None:
    model, x = Model(), torch.randn(B, L, E)
    with torch.no_grad():
        model.first.W_o.weight[:, : E // H] = 0.0
    found = importance(model, loss, [x])["first"]
    assert found[0] == 0.0 and (found[1:] > 0).all()


def test_a_layer_that_the_loss_does_not_reach() -> None:
    model, x = Model(), torch.randn(B, L, E)

    def first_only(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return model.first(x, x, x)[0].sum()

    found = importance(model, first_only, [x])
    assert (found["second"] == 0).all() and (found["first"] > 0).all()


@pytest.mark.parametrize(
    ("function", "batches", "text"),
    [
        (loss, [], "expected batches on which the model attends, got none"),
        (loss_of_each, [torch.zeros(B, L, E)], r"scalar tensor, got \(4,\)"),
        (lambda model, x: 1.0, [0], "scalar tensor, got float"),
        (lambda model, x: model(x).sum().detach(), [torch.zeros(B, L, E)], "depends on the heads"),
        (lambda model, x: x.sum(), [torch.zeros(1, requires_grad=True)], "got none"),
        (
            lambda model, x: (model(x), model(x[:1]))[1].sum(),
            [torch.zeros(B, L, E)],
            "'first' to attend with 3 heads to 4 sequences each time, got 3 and 1",
        ),
    ],
)
def test_importance_errors(function: Any, batches: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        importance(Model(), function, batches)


def test_importance_of_other_heads_in_another_batch() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return mha_ext.attention(x, x, x)

    batches = [torch.randn(B, heads, L, 4) for heads in (3, 2)]
    with pytest.raises(ValueError, match="expected '' to keep its 3 heads, got 2"):
        importance(Attention(), loss, batches)


def test_importance_is_for_modules() -> None:
    with pytest.raises(TypeError, match="expected an nn.Module"):
        importance(loss, loss, [])  # type: ignore[arg-type]


# --- A randomly initialised copy -----------------------------------------------------------------------------------


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(60, 50) * 0.3 + 2)
        self.scale = nn.Parameter(torch.tensor(7.0))
        self.register_buffer("steps", torch.tensor(3))


@pytest.mark.parametrize(
    "build",
    [
        lambda: mha_ext.MultiHeadAttention(E, H),
        lambda: nn.MultiheadAttention(E, H, add_bias_kv=True),
        lambda: mha_ext.nn.MultiheadAttention(E, H, kdim=5),
        lambda: nn.TransformerEncoderLayer(E, H, 20),
        lambda: nn.Transformer(E, H, 1, 1, 20),
    ],
)
def test_randomized_draws_what_the_constructor_draws(build: Any) -> None:
    model = build()
    for parameter in model.parameters():
        parameter.data.normal_(3.0, 5.0)
    fresh, twin = build(), randomized(model)
    for (name, a), b, trained in zip(fresh.named_parameters(), twin.parameters(), model.parameters(), strict=True):
        assert a.shape == b.shape and not torch.equal(b, trained), name
        if a.std() == 0:
            assert torch.equal(a, b), name  # biases of 0, scales of 1
        else:  # a few numbers of the same distribution
            assert a.abs().max() < 3 * b.abs().max() and b.abs().max() < 3 * a.abs().max(), name


def test_randomized_is_repeatable_and_leaves_the_rest_alone() -> None:
    model = Model().eval()
    state, before = torch.random.get_rng_state(), copy.deepcopy(model.state_dict())
    one, two, other = randomized(model), randomized(model), randomized(model, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not one.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.first.W_q.weight, other.first.W_q.weight)
    x = torch.randn(B, L, E)
    with record(one) as recording:
        one(x)
    assert list(recording) == ["first", "second"]


def test_randomized_parameters_without_a_constructor_of_their_own() -> None:
    model = Raw()
    twin = randomized(model)
    assert twin.steps == 3 and twin.scale == 7.0
    assert not torch.equal(twin.matrix, model.matrix)
    assert abs(twin.matrix.mean() - model.matrix.mean()) < 0.05 and abs(twin.matrix.std() - model.matrix.std()) < 0.05


class WithAdapter(nn.Linear):
    """Draws, by what it inherits, the parameters that it inherits."""

    def __init__(self) -> None:
        super().__init__(E, E)
        self.down = nn.Parameter(torch.randn(E, 2))


@pytest.mark.parametrize("build", [WithAdapter, lambda: nn.utils.spectral_norm(nn.Linear(E, E))])
def test_randomized_parameters_that_their_module_does_not_draw(build: Any) -> None:
    model = build()
    twin = randomized(model)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert not torch.equal(a, b), name


def test_randomized_without_values() -> None:
    for model in (nn.Linear(E, E, device="meta"), nn.LazyLinear(E)):
        assert type(randomized(model)) is type(model)


def test_randomized_model_of_transformers_has_the_dtypes_of_the_model() -> None:
    sizes = {"vocab_size": 30, "hidden_size": E, "intermediate_size": E, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=H, attn_implementation="eager")
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    twin = randomized(model, seed=1)
    assert twin.config._attn_implementation == "eager"
    assert not torch.equal(twin.lm_head.weight, model.lm_head.weight)
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a.dtype == b.dtype == torch.bfloat16, name
    for (name, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name  # the frequencies of positions, in float32


def test_randomized_is_for_modules() -> None:
    for wrong in (3, torch.jit.script(mha_ext.MultiHeadAttention(E, H))):
        with pytest.raises(TypeError, match="expected an nn.Module"):
            randomized(wrong)  # type: ignore[arg-type]
