"""What torch.utils.flop_counter counts for the operators: as for torch's own attention and the document's layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import mha_ext
from tests import documents
from tests.checks import plain_attention, plain_multi_head_attention

ops = torch.ops.mha_ext


def count(run) -> tuple[int, int]:
    """Operations of the forward, and of the backward of what `run` returns."""
    with FlopCounterMode(display=False) as counter:
        results = run()
        forward = counter.get_total_flops()
        if any(y.requires_grad for y in results):
            torch.autograd.backward([y.sum() for y in results if y.requires_grad])
    return forward, counter.get_total_flops() - forward


def recomputed(batch: int, heads: int, q_len: int, kv_len: int, head_dim: int) -> int:
    """Q K^T once more: what the backward of fused attention has in addition to that of stored weights."""
    return 2 * batch * heads * q_len * kv_len * head_dim


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kv_len", [5, 7])
def test_core_counts_as_fused_attention_of_torch(kv_heads, kv_len):
    q, k, v = (
        torch.empty(2, h, n, 8, device="meta", requires_grad=True) for h, n in ((4, 5), *[(kv_heads, kv_len)] * 2)
    )
    assert count(lambda: ops.attention(q, k, v)[:1]) == count(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:1]
    )


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "need_weights": True}, {"bias": torch.randn(5, 7)}], ids=str
)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_core_counts_as_the_plain_formula(options, kv_heads):
    """A mask saves nothing, another value size counts."""
    shapes = [(2, 4, 5, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 3)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    forward, backward = count(lambda: plain_attention(q, k, v, **options)[:1])
    assert forward == 2 * 2 * 4 * 5 * 7 * (8 + 3)
    assert count(lambda: ops.attention(q, k, v, **options)[:1]) == (forward, backward + recomputed(2, 4, 5, 7, 8))


def one_operator(layer: mha_ext.MultiHeadAttention, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The layer as it runs without a counter, whose hooks on all modules make it call its projections."""
    projections = [getattr(layer, name) for name in ("W_q", "W_k", "W_v", "W_o")]
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    return ops.multi_head_attention(*inputs, *weights, *biases, layer.num_heads, need_weights=False)


@pytest.mark.parametrize("frozen", ["", "W_q", "W_o", "W_k W_v", "x", "x W_q W_k W_v"])
@pytest.mark.parametrize("cross", [False, True])
def test_layer_counts_as_the_document(frozen, cross):
    """Gradients that nobody needs are not counted."""
    ours, document = mha_ext.MultiHeadAttention(16, 4), documents.MultiHeadAttention(16, 4)
    x, memory = (torch.randn(2, length, 16, requires_grad="x" not in frozen) for length in (5, 7))
    for module in (ours, document):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)
    inputs = (x, memory, memory) if cross else (x, x, x)
    forward, backward = count(lambda: document(*inputs))
    if frozen != "x W_q W_k W_v":
        backward += recomputed(2, 4, 5, inputs[1].shape[1], 4)
    assert count(lambda: ours(*inputs)) == count(lambda: one_operator(ours, *inputs)) == (forward, backward)
    with torch.no_grad():
        assert count(lambda: ours(*inputs)) == count(lambda: one_operator(ours, *inputs)) == (forward, 0)


def test_layer_of_grouped_heads():
    shapes = [(2, 5, 6), (2, 7, 6), (2, 7, 6), (8, 6), (4, 6), (6, 6), (6, 12)]  # 4 heads on 2, value size 3
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    run = [lambda op=op: op(*tensors, *[None] * 4, 4) for op in (plain_multi_head_attention, ops.multi_head_attention)]
    forward, backward = count(run[0])
    assert count(run[1]) == (forward, backward + recomputed(2, 4, 5, 7, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = mha_ext.MultiHeadAttention(16, 4)
        self.feed_forward = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.feed_forward(self.attention(x, x, x, need_weights=False)[0]),)


def test_counts_by_module():
    """The operator inside its module, with the projections as the modules that they are."""
    block, x = Block(), torch.randn(2, 5, 16, requires_grad=True)
    projection, feed_forward, product = 2 * 10 * 16 * 16, 2 * 10 * 16 * 32, 2 * 2 * 4 * 5 * 5 * 4
    with FlopCounterMode(display=False, depth=3) as counter:
        (output,) = block(x)
        forward = counter.get_flop_counts()
        output.sum().backward()
    for name in ("W_q", "W_k", "W_v", "W_o"):
        assert forward[f"Block.attention.{name}"] == {torch.ops.aten.addmm: projection}
    assert forward["Block.attention"] == {torch.ops.aten.addmm: 4 * projection, ops.attention: 2 * product}
    both = counter.get_flop_counts()["Block"]
    assert both[ops.attention_backward] == 5 * product
    assert sum(both.values()) == 3 * (4 * projection + feed_forward) + (2 + 5) * product


def test_counts_without_running():
    """Of fake tensors, as it is done for models that are too large."""
    with FakeTensorMode():
        layer, x = mha_ext.MultiHeadAttention(1024, 16), torch.empty(64, 8192, 1024, requires_grad=True)
        forward, backward = count(lambda: one_operator(layer, x, x, x))
    projections, product = 4 * 2 * 64 * 8192 * 1024**2, 2 * 64 * 8192**2 * 1024
    assert (forward, backward) == (projections + 2 * product, 2 * projections + 5 * product)


def test_second_derivatives_are_counted_call_by_call():
    """They are ATen calls: the five products of the composite backward, and two for each that depends on two inputs."""
    x = torch.randn(1, 2, 3, 4, requires_grad=True)

    def gradient() -> tuple[Tensor]:
        return torch.autograd.grad(ops.attention(x, x, x)[0].sum(), x, create_graph=True)

    product = 2 * 2 * 3 * 3 * 4
    assert count(gradient) == ((2 + 5) * product, (2 * 5 - 2) * product)  # dO is a constant
