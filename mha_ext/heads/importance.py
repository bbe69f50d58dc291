"""How much a loss would change without a head: the gradient of gates on the heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from .recording import Gater, check_model

Batch = TypeVar("Batch")


def importance(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batches: Iterable[Batch], *, normalize: bool = False
) -> dict[str, Tensor]:
    """Layer name -> (H,) float64: E |dL/d gate|, where a gate of 1 multiplies what the head hands to W_o.

    The first-order estimate of what the loss of one sequence changes when the head is left out (Michel, Levy, Neubig
    2019, "Are Sixteen Heads Really Better than One?"). The mean is over all sequences of the batches.

    loss        loss(model, batch) -> scalar: the SUM over the sequences of the batch of their losses. A mean would make
                the values smaller by the size of the batch
    normalize   divide the values of a layer by their Euclidean norm, as Michel et al. do

    The model runs in the mode it is in (`eval()` for no dropout); its parameters, their gradients and its mode stay as
    they are. Layers are those of `record`. Raises ValueError if there is no batch or no layer, or if the loss is no
    scalar or depends on no head.
    """
    check_model("importance", model)
    sums: dict[str, Tensor] = {}
    sequences: dict[str, int] = {}
    for batch in batches:
        gates: dict[str, Tensor] = {}
        with torch.inference_mode(False), torch.enable_grad():
            with Gater(model, lambda name, outputs: _gate_of(gates, name, outputs)).entered():  # noqa: B023
                value = loss(model, batch)
            gradients = _gradients(value, gates)
        for name, gradient in gradients.items():
            total = gradient.detach().double().abs().sum(0)
            if name in sums and sums[name].shape != total.shape:
                raise ValueError(f"importance: expected {name!r} to keep its {len(sums[name])} heads, got {len(total)}")
            sums[name] = sums[name] + total if name in sums else total
            sequences[name] = sequences.get(name, 0) + gradient.size(0)
    if not sums:
        raise ValueError("importance: expected batches on which the model attends, got none")
    means = {name: total / max(sequences[name], 1) for name, total in sums.items()}
    if normalize:
        means = {name: value / value.norm().clamp_min(torch.finfo(value.dtype).tiny) for name, value in means.items()}
    return means


def _gate_of(gates: dict[str, Tensor], name: str, outputs: Tensor) -> Tensor:
    """(B, H) of ones: the layer's gates; the same ones when it attends again."""
    shape = outputs.shape[:2]
    if name not in gates:
        gates[name] = torch.ones(shape, dtype=outputs.dtype, device=outputs.device, requires_grad=True)
    if gates[name].shape != shape:
        sequences, heads = gates[name].shape
        raise ValueError(
            f"importance: expected {name!r} to attend with {heads} heads to {sequences} sequences each time, "
            f"got {shape[1]} and {shape[0]}"
        )
    return gates[name]


def _gradients(value: Tensor, gates: dict[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"importance: expected loss(model, batch) to be a scalar tensor, got {got}")
    if not gates:
        return {}
    if not value.requires_grad:
        raise ValueError("importance: expected a loss that depends on the heads, got one without a gradient")
    found = torch.autograd.grad(value, list(gates.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(gates, found, strict=True))
