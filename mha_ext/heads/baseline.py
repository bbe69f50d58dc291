"""What a model's heads were before training: a copy with new initial values, to compare with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .pruning import prune_heads, pruned_heads


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of the model, in its mode, with newly drawn initial values.

    A Hugging Face model is made again from its configuration, and pruned like the model. In others each module draws
    anew with its own `reset_parameters`, children first; parameters that this leaves alone are drawn from a normal
    distribution with the mean and the standard deviation that they have. Buffers are copied. PyTorch's own random
    numbers stay as they are. A model that draws its values elsewhere (in its constructor) is better made again by its
    constructor.

    Raises TypeError for what is no nn.Module or a ScriptModule.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"randomized: expected an nn.Module that is no ScriptModule, got {type(model).__name__}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
        if isinstance(model, pretrained):
            return _made_again(model).train(model.training)
        twin = copy.deepcopy(model)
        for module in reversed(list(twin.modules())):  # children first: a parent may say more of what they begin with
            _draw(module)
        return twin


def _made_again(model: Any) -> nn.Module:
    """A new model of the configuration, its parameters where the old ones are."""
    twin = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype).to(model.device)
    prune_heads(twin, pruned_heads(model))
    return twin


def _draw(module: nn.Module) -> None:
    reset: Callable[[], None] | None = None
    for name in ("reset_parameters", "_reset_parameters"):
        reset = reset or getattr(module, name, None)
    own = [p for p in module.parameters(recurse=False) if not (is_lazy(p) or p.is_meta)]
    before = [parameter.clone() for parameter in own]
    if callable(reset):
        reset()
    for parameter, old in zip(own, before, strict=True):  # of a subclass or a reparametrisation, too
        if parameter.numel() > 1 and parameter.is_floating_point() and parameter.equal(old):
            mean, std = parameter.mean(), parameter.std()
            parameter.normal_().mul_(std).add_(mean)
