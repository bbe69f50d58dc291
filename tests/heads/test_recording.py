"""What `record` gathers, against weights that layers return themselves or that the plain formula gives."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.detr.modeling_detr import DetrDecoder

import mha_ext
from mha_ext.heads.recording import gate, record
from mha_ext.integrations.transformers import register
from tests import documents

E, H, B, L = 16, 4, 3, 6
LENGTHS = torch.tensor([6, 4, 1])
PADDING = torch.arange(L) >= LENGTHS[:, None]  # (B, L), True hides
VALID = ~PADDING


def sequences(length: int = L) -> Tensor:
    return torch.randn(B, length, E)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class HandWritten(nn.Module):
    """Calls F.scaled_dot_product_attention itself; `inner` does so in a module without parameters."""

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.core = self.Core() if inner else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) if self.core is None else self.core(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, _ = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / (E // H) ** 0.5
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


class Own(nn.Module):
    """A class with W_q to W_o whose softmax is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = documents.MultiHeadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


# --- Each front ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"key_lengths": LENGTHS}, {"key_lengths": LENGTHS, "is_causal": True}],
    ids=["all", "causal", "padded", "causal, padded"],
)
def test_our_layer(options: dict[str, Any], need_weights: bool, grad: bool) -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    expected, weights = layer(x, x, x, **options)
    with torch.set_grad_enabled(grad), record(layer) as recording:
        output, returned = layer(x, x, x, need_weights=need_weights, **options)
    assert torch.equal(output, expected)  # bit for bit
    assert (returned is not None) == need_weights
    assert list(recording) == [""] and recording.left == {}
    (call,) = recording[""].calls
    assert recording[""].heads == H and call.offset == 0
    assert not call.weights.requires_grad and not call.outputs.requires_grad
    close(call.weights, weights.detach())
    close(layer.W_o(call.outputs.transpose(1, 2).flatten(2)).detach(), expected.detach())
    queries = torch.ones(B, L, dtype=torch.bool) if call.queries is None else call.queries
    assert torch.equal(queries, VALID if "key_lengths" in options else torch.ones(B, L, dtype=torch.bool))
    seen = torch.full((B, H, L), L) if call.visible is None else call.visible.expand(B, H, L)
    by_position = torch.arange(1, L + 1).expand(B, H, L) if "is_causal" in options else torch.full((B, H, L), L)
    assert torch.equal(
        seen, torch.minimum(by_position, LENGTHS[:, None, None]) if "key_lengths" in options else by_position
    )


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("layer_class", [nn.MultiheadAttention, mha_ext.nn.MultiheadAttention])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 5, "vdim": 7}], ids=str)
def test_torch_layer(layer_class: type, options: dict[str, Any], need_weights: bool, average: bool) -> None:
    layer = layer_class(E, H, **options)
    reference = nn.MultiheadAttention(E, H, **options)
    reference.load_state_dict(layer.state_dict())
    query, key, value = (
        sequences(),
        torch.randn(B, 9, options.get("kdim", E)),
        torch.randn(B, 9, options.get("vdim", E)),
    )
    given = [query, key, value] if options.get("batch_first") else [t.transpose(0, 1) for t in (query, key, value)]
    _, weights = reference(*given, average_attn_weights=False)
    plain = layer(*given, need_weights=need_weights, average_attn_weights=average)
    with record(layer) as recording:
        output, returned = layer(*given, need_weights=need_weights, average_attn_weights=average)
    assert torch.equal(output, plain[0])
    assert returned is None if plain[1] is None else torch.equal(returned, plain[1])
    close(recording[""].weights, weights.detach())
    assert recording[""].calls[0].offset is None  # the sequences are different
    merged = F.linear(recording[""].outputs.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    close(merged.detach(), (output if options.get("batch_first") else output.transpose(0, 1)).detach())


@pytest.mark.parametrize("layer_class", [nn.MultiheadAttention, mha_ext.nn.MultiheadAttention])
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_extra_keys_stand_at_the_end_as_the_layer_returns_them(layer_class: type, options: dict[str, bool]) -> None:
    layer, x = layer_class(E, H, batch_first=True, **options), sequences()
    expected = layer(x, x, x, key_padding_mask=PADDING, average_attn_weights=False)[1]
    with record(layer) as recording:
        layer(x, x, x, key_padding_mask=PADDING)
    (call,) = recording[""].calls
    close(call.weights[VALID.unsqueeze(1).expand(B, H, L)], expected.detach()[VALID.unsqueeze(1).expand(B, H, L)])
    assert call.offset == 0 and torch.equal(call.queries, VALID)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_whole_transformer(replaced: bool, batch_first: bool, training: bool) -> None:
    model = nn.Transformer(E, H, 1, 1, 24, batch_first=batch_first, dropout=0.0).train(training)
    if replaced:
        mha_ext.replace_attention(model)
    source, target = sequences(), sequences(5)
    given = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    options = {"tgt_mask": causal, "tgt_is_causal": True, "src_key_padding_mask": PADDING}
    options |= {"memory_key_padding_mask": PADDING}
    expected = model(*given, **options)
    with record(model) as recording:
        output = model(*given, **options)
    close(output.detach(), expected.detach())
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert list(recording) == names and recording.left == {}
    encoder, decoder, cross = (recording[name].calls[0] for name in names)
    assert (encoder.offset, decoder.offset, cross.offset) == (0, 0, None)
    assert torch.equal(encoder.queries, VALID) and decoder.queries.all() and cross.queries.all()
    assert torch.equal(cross.visible.expand(B, H, 5), LENGTHS[:, None, None].expand(B, H, 5))
    for call in (encoder, decoder, cross):
        alive = call.queries.unsqueeze(1).expand(call.weights.shape[:3])
        close(call.weights.sum(-1)[alive], torch.ones(int(alive.sum())))
    assert cross.weights.shape == (B, H, 5, L)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("mask", [None, VALID[:, None, None, :]], ids=["all", "padded"])
def test_hand_written_layer(mask: Tensor | None, inner: bool, patched: bool) -> None:
    model, x = HandWritten(inner), sequences()
    expected = model(x, mask)
    if patched:
        with mha_ext.patch_sdpa(), record(model) as recording:
            output = model(x, mask)
        close(output.detach(), expected.detach())
    else:
        with record(model) as recording:
            output = model(x, mask)
        assert torch.equal(output, expected)
    assert list(recording) == [""]
    close(recording[""].weights, model.weights(x, mask).detach())


def test_functional_attention_in_a_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            return mha_ext.attention(q, k[:, :2], v[:, :2], is_causal=True)  # grouped heads

    model, x = Model(), sequences()
    with record(model) as recording:
        model(x)
    q, k, _ = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in model.project(x).chunk(3, -1))
    scores = q @ k[:, :2].repeat_interleave(2, 1).transpose(-2, -1) / 2
    close(recording[""].weights, scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf).softmax(-1).detach())


def test_additive_masks_hide_padding() -> None:
    for hides in (-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4):
        model, x = HandWritten(), sequences()
        bias = torch.rand(B, 1, 1, L)  # of positions, say
        with record(model) as recording:
            model(x, bias + torch.zeros(B, 1, 1, L).masked_fill(PADDING[:, None, None, :], hides))
        (call,) = recording[""].calls
        assert torch.equal(call.queries, VALID)
        assert torch.equal(call.visible.expand(B, H, L), LENGTHS[:, None, None].expand(B, H, L))


def test_keys_longer_than_queries_are_a_cache() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(E, E)

        def forward(self, x: Tensor, past: int) -> Tensor:
            y = self.project(x).unflatten(-1, (H, -1)).transpose(1, 2)
            return mha_ext.attention(y[:, :, past:], y, y, is_causal=True, causal_bottom_right=True)

    model = Cached()
    with record(model) as recording:
        model(sequences(), 4)
    assert recording[""].calls[0].offset == 4
    assert recording[""].calls[0].visible.flatten().tolist() == [5, 6]


class Queries(nn.Module):
    """Attention of a part of a sequence, or of what stands in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(E, E)

    def forward(self, x: Tensor, start: int, end: int, **options: Any) -> Tensor:
        y = self.project(x).unflatten(-1, (H, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(y[:, :, start:end], y, y, **options)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (2, 3), (2, 4), (5, 6)])
def test_a_cache_with_room_left(start: int, end: int) -> None:
    model, x = Queries(), sequences()
    seen = (torch.arange(L) <= torch.arange(start, end)[:, None]) & ~PADDING[:, None].flip(2)  # padded on the left
    with record(model) as recording, record(model, streaming=True, queries=1) as streamed:
        model(x, start, end, attn_mask=seen.unsqueeze(1))
    (call,) = recording[""].calls
    assert call.offset == start
    assert torch.equal(call.queries, ~PADDING.flip(1)[:, start:end])
    assert streamed[""].statistics().distance().isfinite().all()


def test_causal_from_the_first_of_more_keys() -> None:
    model, x = Queries(), sequences()
    with record(model) as recording:
        model(x, 0, 2, is_causal=True)
    assert recording[""].calls[0].offset == 0
    assert recording[""].statistics().rows == 2 * B


def test_padding_behind_queries_with_a_cache() -> None:
    model, x = Queries(), sequences()
    lengths = torch.tensor([5, 4, 5])  # shorter than the batch: the last query is padding in all
    seen = (torch.arange(L) <= torch.arange(2, L)[:, None]) & (torch.arange(L) < lengths[:, None, None])
    with record(model) as recording:
        model(x, 2, L, attn_mask=seen.unsqueeze(1))
    assert recording[""].calls[0].offset == 2
    assert torch.equal(recording[""].calls[0].queries, torch.arange(2, L) < lengths[:, None])


def test_a_layer_with_a_cache_is_causal_within_one_sequence() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    with record(layer) as recording:
        layer(x[:, -1:], x, x, is_causal=True, causal_bottom_right=True)
    assert recording[""].calls[0].offset == L - 1


def test_sequences_are_told_from_what_else_modules_are_given() -> None:
    class Attention(HandWritten):
        def forward(self, x: Tensor, query_pos: Tensor | None = None, attn_bias: Tensor | None = None, **given: Tensor):
            return super().forward(x)

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.dropout(F.scaled_dot_product_attention(q, k, v))

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.core = nn.Linear(E, E), Core()

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            q, k = (self.project(y).unflatten(-1, (H, -1)).transpose(1, 2) for y in (x, memory))
            return self.core(q, k, k)

    x, other = sequences(), sequences()
    for given in ((other,), (None, torch.randn(B, L, L))):
        with record(model := Attention()) as recording:
            model(x, *given)
            model(x, cos=torch.randn(1, L, 4), sin=torch.randn(1, L, 4))
        assert [call.offset for call in recording[""].calls] == [0, 0]
    with record(model := Apart()) as recording:
        model(x, other)
        model(x, x)
    assert [call.offset for call in recording["core"].calls] == [None, 0]


def test_extra_keys_of_the_function_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(E, H, add_bias_kv=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            layer = self.layer
            projections = (layer.in_proj_weight, layer.in_proj_bias, layer.bias_k, layer.bias_v, True, 0.0)
            out = (layer.out_proj.weight, layer.out_proj.bias)
            return F.multi_head_attention_forward(x, x, x, E, H, *projections, *out, average_attn_weights=False)

    with record(model := Model()) as recording:
        weights = model(sequences().transpose(0, 1))[1]
    close(recording[""].weights, weights.detach())
    assert recording[""].calls[0].offset == 0


@pytest.mark.parametrize("keep_graph", [False, True])
def test_three_dimensions_are_a_batch_of_single_heads(keep_graph: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(E, E)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.project(x)
            return F.scaled_dot_product_attention(y, y, x, mask)

    model, x = Head(), sequences()
    for mask in (None, VALID[:, None], torch.ones(L, L, dtype=torch.bool).tril()):
        expected = model(x, mask)
        with record(model, keep_graph=keep_graph) as recording:
            close(model(x, mask).detach(), expected.detach())
        assert recording[""].heads == 1 and recording[""].weights.shape == (B, 1, L, L)
        close(recording[""].outputs.squeeze(1).detach(), expected.detach())


def test_a_sequence_that_is_padded_on_the_left() -> None:
    model, x = HandWritten(), sequences()
    keys = ~PADDING.flip(1)
    mask = keys[:, None, None, :] & torch.ones(L, L, dtype=torch.bool).tril()
    with record(model) as recording:
        model(x, mask)
    assert torch.equal(recording[""].calls[0].queries, keys)


# --- Training, tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weights_before_dropout": True, "average_attn_weights": False}], ids=str)
def test_dropout_without_gradients(options: dict[str, bool]) -> None:
    layer, x = mha_ext.nn.MultiheadAttention(E, H, dropout=0.5), sequences()
    results = []
    with torch.no_grad():
        for recorded in (False, True):
            torch.manual_seed(1)
            if recorded:
                with record(layer):
                    output = layer(x, x, x, **options)[0]
            else:
                output = layer(x, x, x, **options)[0]
            results.append((output, torch.rand(3)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_outputs_are_those_before_dropout(keep_graph: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mha_ext.MultiHeadAttention(E, H, dropout=0.5)
            self.layer.W_o.register_forward_hook(lambda *_: None)  # such a layer is no single operator

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x)[0]

    model, x = Model(), sequences()
    for _ in range(2):
        with record(model, keep_graph=keep_graph) as recording:
            model(x)
        layer = model.layer
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (layer.W_q, layer.W_k, layer.W_v))
        heads = (q @ k.transpose(-2, -1) / (E // H) ** 0.5).softmax(-1) @ v
        close(recording["layer"].outputs.detach(), heads.detach())
        assert recording["layer"].outputs.requires_grad == keep_graph
        model.layer.W_o._forward_hooks.clear()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("layer_class", [mha_ext.MultiHeadAttention, mha_ext.nn.MultiheadAttention])
def test_training_is_bit_for_bit_what_it_is_without(layer_class: type, streaming: bool) -> None:
    def gradients(recorded: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        layer = layer_class(E, H, dropout=0.4)
        x = sequences().requires_grad_()
        recording = None
        if recorded:
            with record(layer, streaming=streaming, queries=2) as recording:
                output, _ = layer(x, x, x)
        else:
            output, _ = layer(x, x, x)
        output.square().sum().backward()
        return [output.detach(), x.grad, *(p.grad for p in layer.parameters()), torch.rand(3)], recording

    (found, recording), (expected, _) = gradients(True), gradients(False)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    if not streaming:  # the weights are those before dropout
        weights = recording[""].weights
        close(weights.sum(-1), torch.ones(weights.shape[:3]))


def test_keep_graph() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H).double(), sequences().double()
    with record(layer, keep_graph=True) as recording:
        output, _ = layer(x, x, x, is_causal=True)
    (call,) = recording[""].calls
    target = torch.randn(B, H, L, L, dtype=torch.float64)
    ((call.weights * target).sum() + call.outputs.sin().sum() + call.values.cos().sum() + output.sum()).backward()

    copied = copy.deepcopy(layer)
    copied.zero_grad()
    q, k, v = (
        projection(x).unflatten(-1, (H, -1)).transpose(1, 2) for projection in (copied.W_q, copied.W_k, copied.W_v)
    )
    scores = (q @ k.transpose(-2, -1) / (E // H) ** 0.5).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    heads = weights @ v
    result = copied.W_o(heads.transpose(1, 2).flatten(2))
    ((weights * target).sum() + heads.sin().sum() + v.cos().sum() + result.sum()).backward()
    for (name, a), b in zip(layer.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "build", [lambda: nn.MultiheadAttention(E, H, batch_first=True), HandWritten], ids=["torch", "sdpa"]
)
def test_keep_graph_of_torch_functions(build: Callable[[], nn.Module]) -> None:
    model, x = build(), sequences()
    given = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    with record(model, keep_graph=True) as recording:
        model(*given)
    weights = recording[""].weights
    assert weights.requires_grad and recording[""].calls[0].values.requires_grad
    (weights[..., 0].sum() + recording[""].outputs.sum()).backward()
    projection = model.in_proj_weight if isinstance(model, nn.MultiheadAttention) else model.qkv.weight
    assert all(part.abs().sum() > 0 for part in projection.grad.chunk(3))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class OurBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mha_ext.MultiHeadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("block", [OurBlock, HandWritten])
@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_recorded_once(
    reentrant: bool, inside: bool, backward: Callable[[Tensor], None], block: type[nn.Module]
) -> None:
    inner = block()
    model, x = Checkpointed(inner, reentrant), sequences().requires_grad_()
    expected = torch.autograd.grad(inner(x).square().sum(), [x])[0]
    with record(model) as recording:
        loss = model(x).square().sum()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    assert [len(layer.calls) for layer in recording.values()] == [1]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_changed_results_are_refused(reentrant: bool) -> None:
    model, x = Checkpointed(OurBlock(), reentrant), sequences().requires_grad_()
    with pytest.raises(ValueError, match=r"inner\.layer: expected no activation checkpoint"):
        with record(model, keep_graph=True):
            model(x)
    with pytest.raises(ValueError, match=r"inner\.layer: expected no activation checkpoint"):
        with gate(model, {"inner.layer": torch.ones(H)}):
            model(x)


def test_compiled_models_are_seen() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    compiled = torch.compile(layer, backend="eager")
    expected = compiled(x, x, x)[1]
    with record(layer) as recording:
        compiled(x, x, x)
    close(recording[""].weights, expected.detach())
    close(compiled(x, x, x)[1].detach(), expected.detach())


def test_autocast() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    with torch.autocast("cpu", torch.bfloat16):
        expected, weights = layer(x, x, x)
        with record(layer) as recording:
            output, _ = layer(x, x, x)
    assert torch.equal(output, expected)
    assert recording[""].weights.dtype == weights.dtype
    torch.testing.assert_close(recording[""].weights, weights.detach(), rtol=2e-2, atol=2e-2)


def test_inference_mode_and_double_and_half() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        layer, x = mha_ext.MultiHeadAttention(E, H, dtype=dtype), sequences().to(dtype)
        with torch.inference_mode(), record(layer) as recording:
            _, weights = layer(x, x, x)
        assert torch.equal(recording[""].weights, weights)


def test_adapters_and_hooks_on_projections() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    layer.W_q.register_forward_hook(lambda module, given, output: output * 3)
    expected, weights = layer(x, x, x)
    with record(layer) as recording:
        output, _ = layer(x, x, x)
    assert torch.equal(output, expected)
    close(recording[""].weights, weights.detach())


def test_recorded_tensors_are_the_recordings_own() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    with torch.no_grad(), record(layer) as recording:
        _, weights = layer(x, x, x)
        expected = weights.clone()
        weights.zero_()
    assert torch.equal(recording[""].weights, expected)


def test_several_calls_are_kept_apart() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    with record(layer) as recording:
        layer(x, x, x)
        layer(x[:1, :2], x[:1, :2], x[:1, :2])
    assert [tuple(call.weights.shape) for call in recording[""].calls] == [(B, H, L, L), (1, H, 2, 2)]
    with pytest.raises(ValueError, match="expected one call of the layer, got 2"):
        _ = recording[""].weights
    assert recording[""].statistics().rows == B * L + 2


def test_nothing_is_left_behind() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24), 1)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(KeyError), record(model):
        raise KeyError
    for name, module in model.named_modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert set(vars(module)) == set(before[name])
    with record(model) as recording:
        pass
    model(torch.randn(3, 2, E))
    assert not recording and not recording.left


def test_a_forward_that_fails_does_not_confuse_the_names() -> None:
    model = nn.ModuleDict({"a": mha_ext.MultiHeadAttention(E, H), "b": mha_ext.MultiHeadAttention(E, H)})
    x = sequences()
    with record(model) as recording:
        with pytest.raises(ValueError):
            model["a"](x[..., 1:], x, x)
        model["b"](x, x, x)
    assert list(recording) == ["b"]


def test_a_hook_that_fails_does_not_confuse_the_names() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = OurBlock(), HandWritten()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.inner(x)
            except RuntimeError:
                pass
            y = x.unsqueeze(1)
            return mha_ext.attention(y, y, y)

    def fail(*_: Any) -> None:
        raise RuntimeError

    model = Model()
    model.inner.register_forward_pre_hook(fail)
    with record(model) as recording:
        model(sequences())
    assert list(recording) == [""]


def test_other_threads_do_not_confuse_the_names() -> None:
    begun = threading.Event()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.during: Callable[[], None] = lambda: None

        def forward(self, x: Tensor) -> Tensor:
            self.during()
            return mha_ext.attention(x, x, x)

    model, x = nn.ModuleDict({"a": Model(), "b": Model()}), torch.randn(B, H, L, 4)
    done = threading.Event()

    def wait() -> None:
        begun.set()
        assert done.wait(60)

    model["b"].during = wait
    other = threading.Thread(target=lambda: model["b"](x))

    def run_the_other() -> None:
        other.start()
        assert begun.wait(60)

    model["a"].during = run_the_other
    with record(model) as recording:
        model["a"](x)
        done.set()
        other.join()
    assert list(recording) == ["a"] and len(recording["a"].calls) == 1


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: mha_ext.MultiHeadAttention(E, H),
    "ours in torch's place": lambda: mha_ext.nn.MultiheadAttention(E, H, batch_first=True),
    "torch": lambda: nn.MultiheadAttention(E, H, batch_first=True),
    "sdpa": HandWritten,
}


def run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) if isinstance(model, HandWritten) else model(x, x, x)[0]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("inner_options", [{}, {"keep_graph": True}, {"streaming": True, "queries": 2}], ids=str)
@pytest.mark.parametrize("outer_options", [{}, {"keep_graph": True}, {"streaming": True, "queries": 2}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_records_inside_records(
    layer: str, outer_options: dict[str, Any], inner_options: dict[str, Any], autocast: bool, grad: bool
) -> None:
    model, x = LAYERS[layer](), sequences()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
        with record(model) as alone:
            run(model, x)
        with record(model, **outer_options) as outer, record(model, **inner_options) as inner:
            run(model, x)
    for recording, options in ((outer, outer_options), (inner, inner_options)):
        assert recording.left == {}
        if options.get("streaming"):
            assert recording[""].statistics().rows == 2 * B
        else:
            torch.testing.assert_close(recording[""].weights, alone[""].weights, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("options", [{}, {"keep_graph": True}, {"streaming": True, "queries": 2}], ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_gates_around_and_inside_records(layer: str, gate_first: bool, options: dict[str, Any], grad: bool) -> None:
    model, x, gates = LAYERS[layer](), sequences(), {"": torch.tensor([0.0, 1.0, 0.5, 2.0])}
    with torch.set_grad_enabled(grad):
        with gate(model, gates):
            expected = run(model, x)
        with record(model, streaming=options.get("streaming", False), queries=2) as alone:
            run(model, x)
        if gate_first:
            with gate(model, gates), record(model, **options) as recording:
                output = run(model, x)
        else:
            with record(model, **options) as recording, gate(model, gates):
                output = run(model, x)
    close(output.detach(), expected.detach())
    found, wanted = recording[""].statistics(), alone[""].statistics()
    assert found.rows == wanted.rows
    close(found.entropy(), wanted.entropy())
    close(found.linear_cka(), wanted.linear_cka())


def test_what_cannot_be_seen_is_told() -> None:
    model, x = Own(), sequences()
    with record(model) as recording:
        model(x)
    assert not recording and list(recording.left) == ["attention"]
    assert "attends by none of the functions" in recording.left["attention"]
    assert mha_ext.replace_attention(model)
    with record(model) as recording:
        model(x)
    assert list(recording) == ["attention"] and not recording.left


def test_nested_tensors_are_told() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    nested = torch.nested.nested_tensor([torch.randn(n, H, 4) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    with torch.no_grad(), record(model := Model()) as recording:
        model(nested)
    assert not recording and recording.left == {"": "is given nested tensors"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_vmap_runs_and_is_told(layer: str, streaming: bool) -> None:
    model, x = LAYERS[layer](), torch.randn(2, B, L, E)
    expected = torch.func.vmap(lambda y: run(model, y))(x)
    with record(model, streaming=streaming) as recording:
        output = torch.func.vmap(lambda y: run(model, y))(x)
    close(output.detach(), expected.detach())
    assert not recording and recording.left == {"": "runs in torch.func.vmap"}


def test_without_values() -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H, device="meta"), torch.empty(B, L, E, device="meta")
    with record(layer) as recording:
        layer(x, x, x)
    assert recording[""].weights.shape == (B, H, L, L)


@pytest.mark.parametrize("attention", [mha_ext.attention, F.scaled_dot_product_attention])
def test_streaming_other_heads_does_not_break_the_model(attention: Callable[..., Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [attention(y, y, y) for y in (x, x[:, :2])]

    with torch.no_grad(), record(model := Model(), streaming=True) as recording:
        model(torch.randn(B, H, L, 4))
    assert "expected 4 heads as before, got 2" in recording.left[""]


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (3, {}, TypeError, "expected an nn.Module that is no ScriptModule, got int"),
        (nn.Linear, {}, TypeError, "expected an nn.Module"),
        (nn.Linear(1, 1), {"streaming": True, "keep_graph": True}, ValueError, "either streaming or keep_graph"),
        (nn.Linear(1, 1), {"streaming": True, "queries": 0}, ValueError, "queries >= 1 or None, got 0"),
        (nn.Linear(1, 1), {"streaming": True, "queries": True}, ValueError, "queries >= 1 or None, got True"),
        (nn.Linear(1, 1), {"streaming": True, "queries": 2.5}, ValueError, "queries >= 1 or None, got 2.5"),
    ],
)
def test_errors(model: Any, options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text), record(model, **options):
        pass


def test_script_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="ScriptModule"), record(torch.jit.script(mha_ext.MultiHeadAttention(E, H))):
        pass


# --- Streaming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [None, L, 3], ids=["all", "L", "some"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("front", ["ours", "torch", "sdpa"])
def test_streaming_equals_statistics_of_full_weights(front: str, causal: bool, queries: int | None) -> None:
    x = sequences()
    if front == "ours":
        model: nn.Module = mha_ext.MultiHeadAttention(E, H)
        run = lambda: model(x, x, x, is_causal=causal, key_lengths=LENGTHS)  # noqa: E731
    elif front == "torch":
        model = nn.MultiheadAttention(E, H, batch_first=True)
        mask = torch.ones(L, L, dtype=torch.bool).triu(1) if causal else None
        run = lambda: model(x, x, x, attn_mask=mask, key_padding_mask=PADDING)  # noqa: E731
    else:
        model = HandWritten()
        mask = VALID[:, None, None, :] & (torch.ones(L, L, dtype=torch.bool).tril() if causal else True)
        run = lambda: model(x, mask)  # noqa: E731
    with record(model) as full:
        run()
    with record(model, streaming=True, queries=queries) as streamed:
        run()
    assert streamed[""].calls == [] and streamed[""].heads == H
    with pytest.raises(ValueError, match="streaming"):
        _ = streamed[""].weights
    found = streamed[""].statistics()
    if queries == 3:  # rows 0, 2 (2.5 rounded to even) and 5
        (call,) = full[""].calls
        kept = torch.zeros(L, dtype=torch.bool)
        kept[torch.linspace(0, L - 1, 3).round().long()] = True
        from mha_ext.heads.statistics import Statistics

        expected = Statistics()
        rows = VALID & kept
        expected.add(call.weights, call.outputs, queries=call.queries & rows, visible=call.visible, offset=0)
        assert found.rows == int(rows.sum())
        for name in ("entropy", "relative_entropy", "distance", "jensen_shannon", "cosine_similarity", "linear_cka"):
            torch.testing.assert_close(
                getattr(found, name)(), getattr(expected, name)(), rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )
        return
    expected = full[""].statistics()
    assert found.rows == expected.rows == int(VALID.sum())
    for name in ("entropy", "relative_entropy", "distance", "jensen_shannon", "cosine_similarity", "linear_cka"):
        torch.testing.assert_close(getattr(found, name)(), getattr(expected, name)(), rtol=1e-5, atol=1e-6, msg=name)
    for name, value in found.position_shares().items():
        torch.testing.assert_close(value, expected.position_shares()[name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_streaming_long_input_takes_memory_for_some_rows_only() -> None:
    """16 rows of 8192 keys take 1/512 of the weights (512 MiB for two heads)."""
    layer = mha_ext.MultiHeadAttention(8, 2)
    x = torch.randn(1, 8192, 8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            tensors = result if isinstance(result, tuple) else (result,)
            largest = max([largest, *(t.numel() for t in tensors if isinstance(t, Tensor))])
            return result

    with torch.no_grad(), record(layer, streaming=True) as recording, Watch():
        layer(x, x, x, need_weights=False, is_causal=True)
    assert recording[""].statistics().rows == 16
    assert largest <= 1024 * 8192  # a chunk of a mask


# --- Gates ---------------------------------------------------------------------------------------------------------


def gated_layer(layer: mha_ext.MultiHeadAttention, x: Tensor, gates: Tensor) -> Tensor:
    """Output with head h multiplied by gates[..., h], by the plain formula."""
    q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (layer.W_q, layer.W_k, layer.W_v))
    heads = (q @ k.transpose(-2, -1) / (E // H) ** 0.5).softmax(-1) @ v
    return layer.W_o((heads * gates[..., None, None]).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shape", [(H,), (B, H)])
def test_gate(shape: tuple[int, ...]) -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H).double(), sequences().double()
    gates = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    with gate(layer, {"": gates}):
        output, weights = layer(x, x, x)
    plain = layer(x, x, x)[1]
    expected = gated_layer(layer, x, gates)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, plain * gates[..., None, None])
    found, wanted = (torch.autograd.grad(y.sin().sum(), gates)[0] for y in (output, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("replaced", [False, True])
def test_gate_of_a_torch_model(replaced: bool) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, batch_first=True), 1).eval()
    if replaced:
        mha_ext.replace_attention(model)
    x = sequences()
    name = "layers.0.self_attn"
    with gate(model, {name: torch.ones(H)}):
        close(model(x).detach(), model(x).detach())
    with gate(model, {name: torch.zeros(H)}):
        gone = model(x)
    cleared = copy.deepcopy(model)
    with torch.no_grad():
        cleared.layers[0].self_attn.out_proj.weight.zero_()
    close(gone.detach(), cleared(x).detach())


@pytest.mark.parametrize("average", [True, False])
def test_gated_weights_of_a_torch_layer(average: bool) -> None:
    layer, x, gates = nn.MultiheadAttention(E, H, batch_first=True), sequences(), torch.rand(H)
    expected = layer(x, x, x, average_attn_weights=False)[1] * gates[:, None, None]
    with gate(layer, {"": gates}):
        _, weights = layer(x, x, x, average_attn_weights=average)
    close(weights.detach(), (expected.mean(1) if average else expected).detach())


@pytest.mark.parametrize(
    ("gates", "error", "text"),
    [
        ({"": torch.ones(H + 1)}, ValueError, r"expected \(4,\) or \(3, 4\)"),
        ({"": torch.ones(B + 1, H)}, ValueError, r"expected \(4,\) or \(3, 4\)"),
        ({"": torch.ones(1, 1, H)}, ValueError, r"expected \(H,\) or \(B, H\)"),
        ({"": torch.ones(H, dtype=torch.bool)}, TypeError, "floating tensor"),
        ({"": [1.0] * H}, TypeError, "floating tensor"),
        ([torch.ones(H)], TypeError, "expected a mapping of layer names to tensors, got list"),
        ({"elsewhere": torch.ones(H)}, ValueError, "expected names of layers that run, got 'elsewhere'"),
    ],
)
def test_gate_errors(gates: dict[str, Any], error: type, text: str) -> None:
    layer, x = mha_ext.MultiHeadAttention(E, H), sequences()
    with pytest.raises(error, match=text), gate(layer, gates):
        layer(x, x, x)


# --- Transformers --------------------------------------------------------------------------------------------------


def llama(implementation: str, **options: Any) -> Any:
    sizes = {"vocab_size": 30, "hidden_size": E, "intermediate_size": E, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": H, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, **heads, attn_implementation=implementation, **options)
    return transformers.LlamaForCausalLM(config).eval()


LLAMA = "model.layers.0.self_attn"
IDS = torch.randint(1, 30, (B, L), generator=torch.Generator().manual_seed(0))
LEFT = (~PADDING).flip(1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "mha_ext"])
def test_generation_with_a_cache(implementation: str, cache: str) -> None:
    register()
    model = llama(implementation)
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(IDS, attention_mask=LEFT.long(), **options)
    with record(model) as recording, record(model, streaming=True) as streamed:
        found = model.generate(IDS, attention_mask=LEFT.long(), **options)
    assert torch.equal(found, expected) and not recording.left and not streamed.left
    with torch.no_grad(), record(model) as whole:  # what was generated, once more and at once
        model(expected, attention_mask=F.pad(LEFT, (0, 3), value=True).long(), use_cache=False)
    weights, outputs = whole[LLAMA].weights, whole[LLAMA].outputs
    calls = recording[LLAMA].calls
    assert [call.offset for call in calls] == [0, L, L + 1]
    assert recording[LLAMA].heads == H
    for call in calls:
        rows, keys = slice(call.offset, call.offset + call.weights.size(2)), call.weights.size(3)
        valid = whole[LLAMA].calls[0].queries[:, rows]
        assert torch.equal(call.queries, valid)
        wanted = F.pad(weights, (0, max(0, keys - weights.size(3))))[:, :, rows, :keys]
        close(call.weights.transpose(1, 2)[valid], wanted.transpose(1, 2)[valid])
        close(call.outputs.transpose(1, 2)[valid], outputs[:, :, rows].transpose(1, 2)[valid])
    assert streamed[LLAMA].statistics().rows == recording[LLAMA].statistics().rows == int(LEFT.sum()) + 2 * B


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gates_while_generating(implementation: str) -> None:
    model = llama(implementation)
    cleared = copy.deepcopy(model)
    with torch.no_grad():
        cleared.model.layers[0].self_attn.o_proj.weight[:, 4:8] = 0.0
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = cleared.generate(IDS, attention_mask=LEFT.long(), **options)
    with gate(model, {LLAMA: torch.tensor([1.0, 0.0, 1.0, 1.0])}):
        found = model.generate(IDS, attention_mask=LEFT.long(), **options)
    for a, b in zip(found.logits, expected.logits, strict=True):
        close(a, b)


def test_transformers_attention_that_is_changed_meanwhile_stays() -> None:
    model = llama("eager")
    with torch.no_grad(), record(model):
        model.set_attn_implementation("sdpa")
        model(IDS)
    assert model.config._attn_implementation == "sdpa"
    model = llama("eager")
    with torch.no_grad(), record(model) as recording:
        assert mha_ext.restore_attention(model) == 1
        model(IDS)
    assert model.config._attn_implementation == "eager" and list(recording.left) == [LLAMA]
    assert mha_ext.restore_attention(model) == 0


def test_transformers_functions_are_as_before() -> None:
    table = transformers.AttentionInterface()
    before = {name: table[name] for name in table}
    with record(llama("sdpa")):
        assert table["sdpa"] is not before["sdpa"]
    assert {name: table[name] for name in before} == before


def test_positions_given_to_attention_are_no_sequence() -> None:
    """DETR's layers are given the positions of both sequences."""
    sizes = {"d_model": E, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": E, "decoder_ffn_dim": E}
    heads = {"encoder_attention_heads": H, "decoder_attention_heads": H}
    decoder = DetrDecoder(transformers.DetrConfig(**sizes, **heads)).eval()
    positions = {
        "spatial_position_embeddings": sequences(),
        "object_queries_position_embeddings": sequences(),
    }
    with torch.no_grad(), record(decoder) as recording:
        decoder(inputs_embeds=sequences(), encoder_hidden_states=sequences(), **positions)
    offsets = {name: layer.calls[0].offset for name, layer in recording.items()}
    assert offsets == {"layers.0.self_attn": 0, "layers.0.encoder_attn": None}
