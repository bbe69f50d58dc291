"""What the tests hold results against: the plain formula in ATen calls, and one rule for how close is close enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.cases import Inputs
from tests.reference import ACCUMULATE


def isa_every(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which one in `step` is tested with every instruction set as well (test_isa.py)."""
    return [pytest.param(x, marks=pytest.mark.isa) if i % step == 0 else x for i, x in enumerate(values)]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(Q K^T scale + bias) V, written down with ATen in the dtype of its arguments; differentiable."""
    options = dict(options)
    dropout_p, seed = options.pop("dropout_p", 0.0), options.pop("seed", None)
    scale, uniform = options.pop("scale", None), options.pop("uniform_dead_rows", False)
    options.pop("need_weights", None)
    averages, before_dropout = options.pop("average_weights", False), options.pop("weights_before_dropout", False)
    softcap, bias = options.pop("softcap", None), options.get("bias")

    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != heads:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.from_numpy(reference.visible(tuple(scores.shape), **options))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    dead = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, float("-inf")).masked_fill(dead, 0.0)  # no NaN of dead rows in the gradients
    weights = scores.softmax(-1).masked_fill(dead, 1 / max(key.shape[2], 1) if uniform else 0.0).to(query.dtype)
    logsumexp = scores.to(ACCUMULATE[query.dtype]).logsumexp(-1).masked_fill(dead[..., 0], float("-inf"))
    returned = weights
    if dropout_p > 0:
        kept = torch.from_numpy(reference.keep_mask(int(seed), tuple(scores.shape), dropout_p))
        weights = (weights * kept) / (1 - dropout_p) if dropout_p < 1 else weights * 0
    if not before_dropout:
        returned = weights
    return weights @ value, returned.mean(1) if averages else returned, logsumexp


def plain_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads: int, **options
) -> tuple[Tensor, Tensor]:
    """The layer in ATen calls."""
    linear = torch.nn.functional.linear
    kv_heads = w_k.shape[0] // (w_q.shape[0] // num_heads)
    q, k, v = (
        reference.split_heads(linear(x, w, b), heads)
        for x, w, b, heads in ((query, w_q, b_q, num_heads), (key, w_k, b_k, kv_heads), (value, w_v, b_v, kv_heads))
    )
    output, weights, _ = plain_attention(q, k, v, **options)
    return linear(reference.merge_heads(output), w_o, b_o), weights


def composite(op, *arguments, **options):
    """Runs the kernel that serves devices other than the CPU on CPU tensors."""
    return op.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments, **options)


def largest(x: Tensor) -> float:
    """The largest absolute value, 0 of nothing."""
    return x.abs().max().item() if x.numel() else 0.0


def error(found: Tensor, exact: Tensor) -> float:
    """The largest distance from the exact result, where both are finite."""
    both = exact.isfinite() & found.isfinite()
    return largest(found.detach().double()[both] - exact[both])


def assert_as_good_as_plain(
    actual: Tensor,
    plain: Tensor,
    exact: Tensor,
    magnitude: Tensor | None = None,
    what: str = "result",
    dtype: torch.dtype | None = None,
) -> None:
    """err(actual) <= 2 err(plain) + eps, where err is the distance from the exact (float64) result.

    eps is what rounding alone costs: 4 units in the last place of the largest result, plus (for sums that cancel) 4
    units of the accumulating dtype of the largest magnitude of what is summed up. `dtype` is that of the computation if
    it is not the result's own. NaN and infinity must stand where they stand in the exact result.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    found, dtype = actual.detach().double(), dtype or actual.dtype
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(exact)), f"{what}: {kind.__name__} in the wrong places"
    epsilon = 4 * max(torch.finfo(dtype).eps, torch.finfo(actual.dtype).eps) * largest(exact[exact.isfinite()])
    if magnitude is not None:
        epsilon += 4 * torch.finfo(ACCUMULATE[dtype]).eps * largest(magnitude[magnitude.isfinite()])
    ours, theirs = error(actual, exact), error(plain, exact)
    assert ours <= 2 * theirs + epsilon, (
        f"{what}: error {ours:.3g}, expected <= 2 * {theirs:.3g} (plain formula) + {epsilon:.3g} ({dtype})"
    )


def plain_gradients(inputs: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    """The plain formula's results and, by autograd, its gradients in the dtype of the inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.leaves().items()}
    options = {**inputs.options, **({"bias": leaves["bias"]} if "bias" in leaves else {})}
    results = plain_attention(leaves["query"], leaves["key"], leaves["value"], **options)
    return results, gradients_of(results, inputs, leaves)


def gradients_of(
    results: tuple[Tensor, Tensor, Tensor], inputs: Inputs, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the leaves from the incoming gradients that come with the inputs."""
    incoming = [inputs.grad_output, inputs.grad_weights, inputs.grad_logsumexp]
    pairs = [(y, dy) for y, dy in zip(results, incoming, strict=True) if dy is not None and y.requires_grad]
    found = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs])
    return dict(zip(leaves, found, strict=True))


def exact_gradients(inputs: Inputs, magnitude: bool = False) -> dict[str, Tensor]:
    """The oracle's gradients by name, or the size of what is summed up for them."""
    found = reference.attention_backward(
        inputs.grad_output,
        inputs.grad_weights,
        inputs.grad_logsumexp,
        inputs.query,
        inputs.key,
        inputs.value,
        magnitude=inputs.query.dtype if magnitude else None,
        **inputs.options,
    )
    return {name: getattr(found, name) for name in inputs.leaves()}
