"""torch.compile of layers and of whole Transformers: one graph, the same bits, nothing compiled anew for other sizes.

Backend aot_eager shows the graphs as PyTorch's compiler makes them, without the rounding of what Inductor fuses; where
attention is all there is, Inductor too is equal bit for bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mha_ext
from mha_ext.train.model import Decoder
from mha_ext.train.seq2seq import Seq2Seq
from tests.checks import assert_as_good_as_plain

E, HEADS, LETTERS = 16, 2, "abcdefgh"
SIZES = ((3, 5), (4, 7), (5, 9))  # no batch of HEADS: PyTorch takes equal sizes to stay equal
Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    torch.set_num_threads(1)


@pytest.fixture
def draws_of_eager():
    """Lets Inductor draw random numbers as eager mode does; by default it has a generator of its own."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


def results_and_gradients(run: Call, inputs: tuple[Any, ...], leaves: list[Tensor], seed: int = 1) -> list[Tensor]:
    """The one tensor that `run` returns, and the gradients of the leaves if it has any."""
    torch.manual_seed(seed)
    y = run(*inputs)
    if not y.requires_grad:
        return [y]
    found = torch.autograd.grad(y, leaves, y.detach().cos(), allow_unused=True)
    return [y.detach(), *(x for x in found if x is not None)]


def assert_equal_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


# --- Layers -------------------------------------------------------------------------------------------------------


def layer(front: str, dropout: float = 0.0) -> nn.Module:
    if front == "MultiHeadAttention":
        return mha_ext.MultiHeadAttention(E, HEADS, dropout=dropout)
    return mha_ext.nn.MultiheadAttention(E, HEADS, dropout, batch_first=True)


def flat(module: nn.Module) -> Call:
    """Output and weights, if any, as one vector."""
    return lambda *inputs, **options: torch.cat([x.flatten() for x in module(*inputs, **options) if x is not None])


def no_options(batch: int, length: int) -> dict[str, Any]:
    return {}


def everything(batch: int, length: int) -> dict[str, Any]:
    """Every option of mha_ext.MultiHeadAttention."""
    return {
        "mask": torch.rand(length, length) < 0.7,
        "bias": torch.randn(HEADS, length, length),
        "key_lengths": torch.randint(1, length + 1, (batch,)),
        "is_causal": True,
    }


def masks_of_torch(batch: int, length: int) -> dict[str, Any]:
    return {"attn_mask": torch.rand(length, length) < 0.3, "is_causal": True}


LAYERS = [
    ("MultiHeadAttention", no_options, 0.0),
    ("MultiHeadAttention", lambda batch, length: {"need_weights": False}, 0.5),
    ("MultiHeadAttention", everything, 0.5),
    ("MultiheadAttention", no_options, 0.5),
    ("MultiheadAttention", masks_of_torch, 0.0),
]
layers = pytest.mark.parametrize("front, options, dropout", LAYERS, ids=lambda x: getattr(x, "__name__", x))


@layers
@pytest.mark.parametrize("training", [True, False], ids=("train", "eval"))
def test_layer_under_inductor(front, options, dropout, training, draws_of_eager):
    """The same bits in one graph, which serves other sizes; with its gradients and the same draws."""
    module = layer(front, dropout).train(training)
    counter = CompileCounterWithBackend("inductor")
    compiled = flat(torch.compile(module, backend=counter, fullgraph=True, dynamic=True))
    leaves, graphs = list(module.parameters()), 0
    for batch, length in SIZES:
        x = torch.randn(batch, length, E, requires_grad=True)
        given = options(batch, length)
        found, expected = (
            results_and_gradients(functools.partial(run, **given), (x, x, x), [x, *leaves])
            for run in (compiled, flat(module))
        )
        assert_equal_bits(found, expected)
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs


def test_sizes_of_one_are_compiled_for_themselves():
    """PyTorch takes 0 and 1 for constants; all other sizes share a graph, and mode and dtype have one each."""
    counter = CompileCounterWithBackend("eager")
    module = mha_ext.MultiHeadAttention(E, HEADS).eval()
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    seen = []
    for batch, length in ((2, 5), (3, 4), (1, 5), (1, 9), (2, 1), (4, 1), (5, 8)):
        compiled(*[torch.randn(batch, length, E)] * 3)
        seen.append(counter.frame_count)
    assert seen == [1, 1, 2, 2, 3, 3, 3]


def test_static_sizes_are_compiled_once_each():
    counter = CompileCounterWithBackend("aot_eager")
    module = mha_ext.MultiHeadAttention(E, HEADS)
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=False)
    for batch, length in SIZES * 2:
        x = torch.randn(batch, length, E, requires_grad=True)
        found, expected = (
            results_and_gradients(flat(m), (x, x, x), [x, *module.parameters()]) for m in (compiled, module)
        )
        assert_equal_bits(found, expected)
    assert counter.frame_count == len(SIZES)


def test_inductor_drops_the_same_in_the_backward():
    """With Inductor's own random numbers: the gradient of the values is made of the weights that were returned."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, weights, _ = torch.ops.mha_ext.attention(q, k, v.sin(), dropout_p=0.5, need_weights=True)
        return output, weights

    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(attend, fullgraph=True)
    torch.manual_seed(0)
    output, weights = compiled(q, k, v)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    torch.testing.assert_close(gradient, weights.sum(2).unsqueeze(-1) * v.cos())
    assert 0.4 < (weights == 0).double().mean() < 0.6
    assert not torch.equal(compiled(q, k, v)[1], weights)
    torch.manual_seed(0)
    assert torch.equal(compiled(q, k, v)[1], weights)


def test_strides_survive_inductor():
    """Inductor may choose an order for what it fuses before the operator; the operator's results keep theirs."""

    def attend(q: Tensor, base: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = base.permute(0, 3, 1, 2) + 0.5
        return torch.ops.mha_ext.attention(q * 1.5, k, (v + 1).transpose(1, 2), need_weights=True, is_causal=True)

    leaves = [torch.randn(size, requires_grad=True) for size in ((2, 3, 5, 8), (2, 6, 8, 3), (2, 6, 3, 8))]
    found, expected = torch.compile(attend, fullgraph=True)(*leaves), attend(*leaves)
    assert_equal_bits(found, expected)
    assert_equal_bits(*(torch.autograd.grad(y, leaves, [x.cos() for x in expected]) for y in (found, expected)))


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_modes(mode):
    module, x = mha_ext.MultiHeadAttention(E, HEADS), torch.randn(2, 6, E, requires_grad=True)
    leaves = [x, *module.parameters()]
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    found, expected = (results_and_gradients(flat(m), (x, x, x), leaves) for m in (compiled, module))
    assert_equal_bits(found, expected)


# --- Whole Transformers -------------------------------------------------------------------------------------------


def decoder(dropout: float, layers: int = 2) -> nn.Module:
    return Decoder(LETTERS, attention="mha_ext", context=16, d_model=E, heads=HEADS, layers=layers, dropout=dropout)


def seq2seq(dropout: float) -> nn.Module:
    return Seq2Seq(LETTERS, attention="mha_ext", context=16, d_model=E, heads=HEADS, layers=1, dropout=dropout)


def encoder(dropout: float) -> nn.Module:
    encoder_layer = nn.TransformerEncoderLayer(E, HEADS, 2 * E, dropout, batch_first=True)
    return replaced(nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=False))


def transformer(dropout: float) -> nn.Module:
    return replaced(nn.Transformer(E, HEADS, 1, 1, 2 * E, dropout, batch_first=True))


def replaced(model: nn.Module) -> nn.Module:
    assert mha_ext.replace_attention(model)
    return model


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, 3 + len(LETTERS), (batch, length))


def inputs_of(build: Call, batch: int, length: int) -> tuple[Any, ...]:
    if build is decoder:
        return (ids(batch, length),)
    if build is seq2seq:
        return ids(batch, length), torch.randint(1, length + 1, (batch,)), ids(batch, length + 2)
    x, target = torch.randn(batch, length, E), torch.randn(batch, length + 2, E)
    if build is encoder:
        return (x,)
    mask = nn.Transformer.generate_square_subsequent_mask(length + 2)
    return x, target, None, mask, None, None, None, None, False, True  # the hints: else torch reads the mask


MODELS = (decoder, seq2seq, encoder, transformer)


@pytest.mark.parametrize(
    "build, training",
    [*((build, True) for build in MODELS), (decoder, False), (transformer, False)],
    ids=lambda x: x.__name__ if callable(x) else "train" if x else "eval",
)
def test_model_in_one_graph(build, training):
    model = build(0.2).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    leaves, graphs = list(model.parameters()), 0
    for batch, length in SIZES:
        inputs = inputs_of(build, batch, length)
        found, expected = (results_and_gradients(m, inputs, leaves) for m in (compiled, model))
        assert_equal_bits(found, expected)
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs


def test_model_under_inductor(draws_of_eager):
    """Inductor rounds its fusions as it likes: as good as eager mode, against the same model in float64."""
    model = decoder(0.2, layers=1)
    exact_model = copy.deepcopy(model).double()
    inputs = inputs_of(decoder, 3, 7)
    compiled = torch.compile(model, fullgraph=True)
    found, plain, exact = (
        results_and_gradients(m, inputs, list(m.parameters())) for m in (compiled, model, exact_model)
    )
    names = ["logits", *(name for name, _ in model.named_parameters())]
    for name, a, b, c in zip(names, found, plain, exact, strict=True):
        assert_as_good_as_plain(a, b, c, c.abs().sum().expand_as(c), name)


def test_blocks_alone_share_a_graph():
    """Regional compilation: three equal blocks cost one compilation."""
    model = decoder(0.2, layers=3)
    inputs, leaves = (ids(2, 9),), list(model.parameters())
    expected = results_and_gradients(model, inputs, leaves)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    assert_equal_bits(results_and_gradients(model, inputs, leaves), expected)
    assert counter.frame_count == 1


def test_padding_that_eager_mode_leaves_out():
    """Eager mode reads the padding mask and does not compute what it ends the sequences with; a graph cannot. The sums
    over positions then differ in their last bit, nothing else does."""
    model = encoder(0.0)
    x = torch.randn(3, 7, E)
    padded = torch.arange(7) >= torch.tensor([[7], [4], [5]])

    def run(m: nn.Module) -> Tensor:
        return m(x, src_key_padding_mask=padded)

    leaves = list(model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (results_and_gradients(functools.partial(run, m), (), leaves) for m in (compiled, model))
    for name, a, b in zip(["output", *dict(model.named_parameters())], found, expected, strict=True):
        if name.endswith(("in_proj_bias", "in_proj_weight")):
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b), name


# --- Checkpoints, compiled autograd, optimizers -------------------------------------------------------------------

SAVED = (torch.ops.mha_ext.multi_head_attention_forward.default, torch.ops.mha_ext.attention.default)


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_attention)}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("order", ["checkpoint in graph", "selective in graph", "graph in checkpoint"])
def test_checkpoints_draw_the_same_again(backend, order, draws_of_eager):
    module = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5)
    x = torch.randn(2, 30, E, requires_grad=True)
    run, leaves = flat(module), [x, *module.parameters()]
    if order == "graph in checkpoint":
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        both = functools.partial(checkpoint, compiled, use_reentrant=False)
    else:
        options = SELECTIVE if order == "selective in graph" else {}
        both = torch.compile(
            lambda *x: checkpoint(run, *x, use_reentrant=False, **options), backend=backend, fullgraph=True
        )
    found, expected = (results_and_gradients(f, (x, x, x), leaves) for f in (both, run))
    assert_equal_bits(found, expected)


@pytest.mark.filterwarnings("error:.*The output of this custom operator")  # results that share memory
@pytest.mark.parametrize("options", [{}, {"need_weights": False}], ids=["weights", "no weights"])
@pytest.mark.parametrize("kind", ["self-attention", "cross-attention", "called projections"])
def test_compiled_autograd(kind, options):
    """A forward in eager mode whose backward is compiled: one graph, for one input as for three."""
    module = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5)
    if kind == "called projections":
        module.W_q.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 9, E, requires_grad=True)
    inputs = (
        (x, x, x) if kind != "cross-attention" else (x, *(torch.randn(2, 11, E, requires_grad=True) for _ in range(2)))
    )
    leaves = [*dict.fromkeys(inputs), *module.parameters()]
    run = functools.partial(flat(module), **options)
    expected = results_and_gradients(run, inputs, leaves)
    torch.manual_seed(1)
    y = run(*inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        y.backward(y.detach().cos())
    assert_equal_bits([y.detach(), *(leaf.grad for leaf in leaves)], expected)


def test_compiled_training_step():
    """Forward, backward under compiled autograd, and the optimizer's step."""
    model = decoder(0.2)
    twin, inputs = copy.deepcopy(model), (ids(2, 9),)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        m(*inputs).square().mean().backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            torch.manual_seed(2)
            compiled(twin, optimizers[1])
    for _ in range(3):
        torch.manual_seed(2)
        step(model, optimizers[0])
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
