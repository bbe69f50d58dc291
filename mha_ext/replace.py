"""Attention inside models that exist: swapped in place for ours, and back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import jit, nn
from torch.nn.utils import parametrize

from . import probe
from .integrations.transformers import NAME, register
from .modules import MultiHeadAttention
from .nn import MultiheadAttention

_CHANGE = "_mha_ext_change"  # the attribute of a changed module: (name of a function in _UNDO, how it was)
_SET_BY_SCRIPTING = ("plain", "_calls_out_proj")  # what our classes note when torch.jit.script meets them
_ATTENTION_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"  # Transformers' table; a file of models that use it imports it
_PUBLIC_NAMES = {
    nn.MultiheadAttention: "torch.nn.MultiheadAttention",
    MultiheadAttention: "mha_ext.nn.MultiheadAttention",
    MultiHeadAttention: "mha_ext.MultiHeadAttention",
}
_torch_forward = nn.MultiheadAttention.forward


@dataclass(frozen=True)
class Swapped:
    """One module that was swapped: its name in the model, and what its attention was and is now."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Left:
    """One module that looks like attention and was left: its name in the model, its class, and the reason."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind} {self.reason}"


@dataclass(frozen=True)
class Report:
    """What `replace_attention` did. Its length is the number of swapped modules; printing it gives a line for each."""

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.swapped)

    def __str__(self) -> str:
        if not (self.swapped or self.left):
            return (
                "found no attention to swap; what calls F.scaled_dot_product_attention can run in mha_ext.patch_sdpa()"
            )
        lines = [f"swapped: {len(self.swapped)}", *(f"    {entry}" for entry in self.swapped)]
        lines += [f"left: {len(self.left)}", *(f"    {entry}" for entry in self.left)]
        return "\n".join(lines)


def replace_attention(model: nn.Module) -> Report:
    """Lets the attention in a model (or the model, if it is attention) run on mha_ext; says what it swapped and left.

    Modules are swapped in place: parameters, buffers, hooks, modes and whoever refers to them stay as they are.

    - torch.nn.MultiheadAttention becomes mha_ext.nn.MultiheadAttention, which an nn.TransformerEncoderLayer calls in
      eval mode too.
    - A module with children W_q, W_k, W_v, W_o and an attribute num_heads gets the forward of
      mha_ext.MultiHeadAttention, if trials on a copy show no difference: forward(query, key, value, mask) returns
      (output, weights) and sets nothing, `mask == 0` hides by -1e9 or so (with -inf a query that sees no key is NaN),
      scores are divided by sqrt(d_k), gradients are the same. A child `dropout`, an nn.Dropout of the weights, goes on
      to count. The module is an instance of both classes then.
    - A transformers.PreTrainedModel that calls attention functions gets the attention implementation "mha_ext".

    Whatever else looks like attention is left, with the reason: a subclass, a forward of its own, another meaning. A
    second call swaps nothing and says so. `restore_attention` undoes it, in copies and after pickling too.

    Raises TypeError if the model is no nn.Module.
    """
    _check_is_module("replace_attention", model)
    report = Report()
    for name, module in list(model.named_modules()):
        swap = _swap_of(module)
        if swap is None:
            continue
        try:
            report.swapped.append(Swapped(name, *swap(module)))
        except _Leave as reason:
            report.left.append(Left(name, _name_of(type(module)), str(reason)))
    _swap_attention_functions(model, report)
    return report


def restore_attention(model: nn.Module) -> int:
    """Undoes `replace_attention` in all modules of the model, exactly; returns how many were restored.

    Raises TypeError if the model is no nn.Module, ValueError, and restores nothing, if a layer has lost heads since
    (`mha_ext.heads.prune_heads`): its old class could not do without them.
    """
    _check_is_module("restore_attention", model)
    for name, module in model.named_modules():
        if _CHANGE in module.__dict__ and "pruned_heads" in module._buffers:
            raise ValueError(f"restore_attention: expected layers with all their heads, got {name!r} without some")
    restored = 0
    for module in model.modules():
        if _CHANGE in module.__dict__:
            undo, before = module.__dict__.pop(_CHANGE)
            _UNDO[undo](module, before)
            restored += 1
    return restored


class _Leave(Exception):
    """Why a module is left."""


def _check_is_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: expected an nn.Module, got {type(model).__name__}")


def _name_of(cls: type) -> str:
    return _PUBLIC_NAMES.get(cls, f"{cls.__module__}.{cls.__qualname__}")


def _swap_of(module: nn.Module) -> Callable[[nn.Module], tuple[str, str]] | None:
    """The function that swaps the module, None if it is no attention; it returns the old and the new class's name."""
    is_scripted = isinstance(module, jit.ScriptModule)
    if isinstance(module, nn.MultiheadAttention) or (is_scripted and module.original_name == "MultiheadAttention"):
        return _swap_torch
    if all(isinstance(getattr(module, name, None), nn.Module) for name in probe.PROJECTIONS):
        return _swap_document
    return None


def _check_may_be_swapped(module: nn.Module, ours: type[nn.Module]) -> None:
    if _CHANGE in module.__dict__:
        raise _Leave("was replaced before")
    if isinstance(module, ours):
        raise _Leave("is mha_ext's own")
    if isinstance(module, jit.ScriptModule):
        raise _Leave("is a ScriptModule")
    if "forward" in module.__dict__:
        raise _Leave("has a forward of its own")


# --- torch.nn.MultiheadAttention ------------------------------------------------------------------------------------


def _swap_torch(module: Any) -> tuple[str, str]:
    _check_may_be_swapped(module, MultiheadAttention)
    if parametrize.type_before_parametrizations(module) is not nn.MultiheadAttention:
        raise _Leave("is a subclass of torch.nn.MultiheadAttention")
    if nn.MultiheadAttention.forward is not _torch_forward:
        raise _Leave("has a forward that was replaced for all of its class")
    module.__class__ = _with_base(type(module), nn.MultiheadAttention, MultiheadAttention)
    module.__dict__[_CHANGE] = ("torch", nn.MultiheadAttention)
    return _name_of(nn.MultiheadAttention), _name_of(MultiheadAttention)


def _restore_torch(module: Any, original: type) -> None:
    module.__class__ = _with_base(type(module), MultiheadAttention, original)
    _forget_scripting(module)


def _forget_scripting(module: nn.Module) -> None:
    for name in _SET_BY_SCRIPTING:
        module.__dict__.pop(name, None)


def _with_base(cls: type, old: type, new: type) -> type:
    """`new` for `old`, and for a class that was made for one module (parametrized, sharded): the same over `new`."""
    if cls is old:
        return new
    if not issubclass(cls, old):
        return cls
    bases = tuple(_with_base(base, old, new) for base in cls.__bases__)
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, body)


# --- Classes with W_q, W_k, W_v, W_o --------------------------------------------------------------------------------


def _swap_document(module: Any) -> tuple[str, str]:
    _check_may_be_swapped(module, MultiHeadAttention)
    if not hasattr(module, "num_heads"):
        raise _Leave("has no attribute num_heads")
    original: Any = type(module)
    try:
        ours = _class_over(original, "dropout" in module._modules)
    except Exception as error:  # a metaclass, say, or __init_subclass__
        raise _Leave(f"cannot be subclassed ({probe.first_line(error)})") from error
    reason = probe.difference(module, ours)
    if reason is not None:
        raise _Leave(reason)
    module.__class__ = ours
    module.__dict__[_CHANGE] = ("document", original)
    return _name_of(original), _name_of(MultiHeadAttention)


def _restore_document(module: Any, original: type) -> None:
    # The class that was made over both, which may have become the base of another that was made for this module alone.
    ours = next(cls for cls in type(module).__mro__ if cls.__bases__ == (MultiHeadAttention, original))
    module.__class__ = _with_base(type(module), ours, original)
    _forget_scripting(module)


@functools.cache
def _class_over(original: Any, has_dropout: bool) -> type[nn.Module]:
    """The class with our forward and, for everything else, the methods of the original.

    has_dropout     its child `dropout`, an nn.Dropout, says what is dropped and when
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = original.__reduce_ex__(self, max(protocol, 2))
        return _unpickle, (original, has_dropout), *state

    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__init__": original.__init__,
        "__reduce_ex__": reduce,  # no import finds this class
        "__constants__": ["num_heads", "plain", "adds_mask", *([] if has_dropout else ["dropout"])],
        "extra_repr": original.extra_repr,
        "plain": True,
        "adds_mask": False,
        **({"_dropout_p": _dropout_p, "_check_dropout": _check_dropout} if has_dropout else {"dropout": 0.0}),
    }
    return type(original.__name__, (MultiHeadAttention, original), body)


def _unpickle(original: Any, has_dropout: bool) -> nn.Module:
    """What unpickling fills in."""
    cls = _class_over(original, has_dropout)
    return cls.__new__(cls)


def _dropout_p(self: Any) -> float:
    if not jit.is_scripting():
        self._check_dropout()
    return self.dropout.p if self.dropout.training else 0.0


@jit.unused
def _check_dropout(self: Any) -> None:
    """The child is not called, so it must be what it was when the module was replaced."""
    if not probe.is_plain_dropout(self.dropout):
        raise TypeError(
            "replace_attention: expected dropout to stay an nn.Dropout without hooks; restore_attention first"
        )


# --- Transformers ---------------------------------------------------------------------------------------------------


def _swap_attention_functions(model: nn.Module, report: Report) -> None:
    """Sets the attention implementation of each PreTrainedModel; those that share a configuration count as one."""
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    found: dict[int, tuple[str, Any, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, pretrained):
            found.setdefault(id(module.config), (name, module, _implementations(module.config)))
    for name, module, before in found.values():
        try:
            _set_implementation(module, before)
            old, new = f"attn_implementation={before['']!r}", f"attn_implementation={NAME!r}"
            report.swapped.append(Swapped(name, old, new))
        except _Leave as reason:
            module.config._attn_implementation = before
            report.left.append(Left(name, _name_of(type(module)), str(reason)))


@contextmanager
def attention_functions_swapped(model: nn.Module) -> Iterator[dict[str, str]]:
    """Lets Transformers' models whose attention is neither ours nor PyTorch's run on ours inside `with`.

    Gives the names of those that cannot, with the reasons.
    """
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    swapped: list[Any] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, pretrained) or module.config._attn_implementation in (NAME, "sdpa"):
            continue
        before = _implementations(module.config)
        try:
            _set_implementation(module, before)
            swapped.append(module)
        except _Leave as reason:
            module.config._attn_implementation = before
            left[name] = str(reason)
    try:
        yield left
    finally:
        for module in reversed(swapped):
            undo, before = module.__dict__.pop(_CHANGE, (None, None))
            if undo is not None and module.config._attn_implementation == NAME:  # else somebody chose another meanwhile
                _restore_implementation(module, before)


def _implementations(config: Any) -> dict[str, Any]:
    """The attention implementations of a configuration ("") and of those in it, as its setter takes them."""
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config._attn_implementation} | {name: _implementations(c) for name, c in inner.items() if c is not None}


def _set_implementation(module: Any, before: dict[str, Any]) -> None:
    if _CHANGE in module.__dict__:
        raise _Leave("was replaced before")
    if before[""] == NAME:
        raise _Leave("is mha_ext's own")
    if not any(hasattr(sys.modules.get(type(m).__module__), _ATTENTION_FUNCTIONS) for m in module.modules()):
        raise _Leave("calls no attention functions (mha_ext.patch_sdpa may serve it)")
    try:
        register()
        module.set_attn_implementation(NAME)
    except (ImportError, ValueError) as error:
        raise _Leave(f"refuses it ({probe.first_line(error)})") from error
    if module.config._attn_implementation != NAME:
        raise _Leave("does not let its attention implementation be set")
    module.__dict__[_CHANGE] = ("implementation", before)


def _restore_implementation(module: Any, before: dict[str, Any]) -> None:
    module.config._attn_implementation = before


_UNDO: dict[str, Callable[[Any, Any], None]] = {
    "torch": _restore_torch,
    "document": _restore_document,
    "implementation": _restore_implementation,
}
