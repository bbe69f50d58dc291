"""Routes torch.nn.functional.scaled_dot_product_attention, in code that knows nothing of mha_ext, to mha_ext."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from . import functional

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch.nn.functional.scaled_dot_product_attention is while it is patched."""
    ours = query.device.type == "cpu"
    if not torch.jit.is_scripting():
        # A CausalBias compares the function it is called by with that in torch.nn.functional.
        ours = (ours and patch_sdpa.is_on()) or isinstance(attn_mask, CausalBias)
    if ours:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    return torch._C._nn.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _rebind(old: Callable[..., Tensor], new: Callable[..., Tensor]) -> None:
    """Every global of every loaded module that is `old` becomes `new`. Lazy modules are not asked, only looked into."""
    for key, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and key not in (__name__, "torch._C._nn"):
            names = ModuleType.__getattribute__(module, "__dict__")
            for name in [name for name, x in list(names.items()) if x is old]:
                names[name] = new


class patch_sdpa(ContextDecorator):
    """Sends calls of torch.nn.functional.scaled_dot_product_attention to mha_ext, for unmodified code.

        with mha_ext.patch_sdpa():  # or @mha_ext.patch_sdpa() on a function
            model(x)

        patch = mha_ext.patch_sdpa()
        patch.enable()
        patch.disable()

    It replaces the function in torch.nn.functional and in every loaded module that imported it by name, for the whole
    process and all its threads, until the last that enabled it is done: uses may nest and overlap. Then each name that
    still holds it gets back what torch.nn.functional held before; what others patched meanwhile stays. This takes some
    milliseconds, so enclose a run rather than a call.

    Tensors on other devices and nested tensors go to PyTorch's function. Not reached: calls of torch._C._nn and of
    torch.ops.aten, references held elsewhere than in a module (defaults, closures, partials), and what was scripted,
    traced or exported before. torch.compile compiles again when the patch comes or goes.
    """

    _lock = threading.Lock()
    _users = 0  # of the process
    _before: Callable[..., Tensor]

    def __init__(self) -> None:
        self._entered = 0

    @classmethod
    def is_on(cls) -> bool:
        """Whether anyone has it enabled."""
        return cls._users > 0

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function. Raises TypeError for one that runs later than it is called (coroutines, generators)."""
        later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(function) for kind in later):
            raise TypeError(f"patch_sdpa: expected a function that is done when it returns, got {function!r}")
        return super().__call__(function)

    def enable(self) -> None:
        """Patches. Counts: as many calls of disable undo it."""
        with patch_sdpa._lock:
            if patch_sdpa._users == 0:
                if F.scaled_dot_product_attention is not _routed:  # which another patch may have put back
                    patch_sdpa._before = F.scaled_dot_product_attention
                _rebind(patch_sdpa._before, _routed)
            patch_sdpa._users += 1
            self._entered += 1

    def disable(self) -> None:
        """Takes back one enable of this object; does nothing if there is none."""
        with patch_sdpa._lock:
            if self._entered == 0:
                return
            self._entered -= 1
            patch_sdpa._users -= 1
            if patch_sdpa._users == 0:
                _rebind(_routed, patch_sdpa._before)

    def __enter__(self) -> patch_sdpa:
        self.enable()
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()
