"""Sees the attention that a model computes, whichever front it takes, while the model runs as usual.

A `TorchFunctionMode` meets each call of an attention function on its way: the operators of mha_ext, PyTorch's
F.scaled_dot_product_attention and F.multi_head_attention_forward, and through these nn.MultiheadAttention, Hugging
Face's models and hand-written ones. Hooks on the modules tell which of them is running. PyTorch's functions are
redirected to ours of the same name, which end in our operators: two kinds of calls are all that has to be understood.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import functional, masks, modules, ops, replace
from .. import nn as ours
from ..integrations import transformers as integration

HIDES = -1e4  # a bias from here down hides: what models add for a mask is this, -1e9, the least float or -inf
CHUNK = 1024  # query rows of a mask that are looked at together

_attention = torch.ops.mha_ext.attention
_layer = torch.ops.mha_ext.multi_head_attention
_NOT_MASKS = ("scale", "softcap", "uniform_dead_rows")  # options that any rows of a call share


@dataclass
class Call:
    """softmax(scale Q K^T + bias) V of one layer: query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv)."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]  # those of ops.attention
    is_cross: bool
    extra_keys: int = 0  # learned keys, or keys of zeros, that stand before the others
    sink: Tensor | None = None  # (H,) or (B, H, Lq, 1): the score of one more key whose value is 0

    @property
    def offset(self) -> int | None:
        """Query i stands at the key i + offset, extra keys not counted; None where they are of different sequences."""
        offset = self.key.size(2) - self.extra_keys - self.query.size(2)
        return None if self.is_cross or offset < 0 else offset

    def hides(self) -> bool:
        """Whether any key may be hidden from any query."""
        return self.options.get("is_causal", False) or any(
            self.options.get(name) is not None for name in ("mask", "bias", "key_lengths")
        )

    def visible(self, rows: Tensor) -> Tensor:
        """Which keys the queries at `rows` (R,) see: bool, broadcasts to (B, H, R, Lk)."""
        q_len, kv_len = self.query.size(2), self.key.size(2)
        positions = torch.arange(kv_len, device=rows.device)
        seen = torch.ones(1, 1, 1, kv_len, dtype=torch.bool, device=rows.device)
        if self.options.get("is_causal", False):
            last = rows + (kv_len - q_len if self.options.get("causal_bottom_right", False) else 0)
            seen = (positions <= last[:, None])[None, None]
        if self.options.get("key_lengths") is not None:
            seen = seen & masks.padding(self.options["key_lengths"], kv_len)
        if self.options.get("mask") is not None:
            seen = seen & _rows_of(self.options["mask"], rows)
        if self.options.get("bias") is not None:
            seen = seen & (_rows_of(self.options["bias"], rows) > HIDES)
        return seen

    def valid_queries(self) -> Tensor:
        """(B, Lq): the queries that see a key, and in self-attention are seen themselves; the others are padding."""
        batch, _, q_len, _ = self.query.shape
        kv_len, device = self.key.size(2), self.query.device
        alive = []
        seen = torch.zeros(1, kv_len, dtype=torch.bool, device=device)
        for rows in torch.arange(q_len, device=device).split(CHUNK):
            visible = self.visible(rows)
            alive.append(visible.any(-1).any(1).expand(-1, len(rows)))
            seen = seen | visible.flatten(1, 2).any(1)
        valid = torch.cat(alive, 1) if alive else torch.ones(1, 0, dtype=torch.bool, device=device)
        if self.offset is not None:
            start = self.extra_keys + self.offset
            valid = valid & seen[:, start : start + q_len]
        return valid.expand(batch, -1)

    def of_rows(self, rows: Tensor, visible: Tensor | None) -> Call:
        """The same for the queries at `rows` alone, without dropout."""
        options = {name: value for name, value in self.options.items() if name in _NOT_MASKS}
        if self.options.get("bias") is not None:
            options["bias"] = _rows_of(self.options["bias"], rows)
        if visible is not None:
            options["mask"] = visible
        sink = self.sink if self.sink is None or self.sink.dim() == 1 else _rows_of(self.sink, rows)
        query = self.query[:, :, rows]
        return Call(self.layer, query, self.key, self.value, options, self.is_cross, self.extra_keys, sink)

    def weights(self) -> Tensor:
        """(B, H, Lq, Lk) before dropout, as the layer has them."""
        plain = {"dropout_p": 0.0, "seed": None, "need_weights": True, "average_weights": False}
        value = self.value[..., :1]  # their product is not needed
        return self.finish(*ops.attention(self.query, self.key, value, **{**self.options, **plain}))[1]

    def finish(self, outputs: Tensor, weights: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """What the operator leaves to be done: the sink's share, and extra keys behind the others."""
        if self.sink is not None:
            share = integration._share_of_the_keys(logsumexp, self.sink).to(outputs.dtype)
            outputs, weights = outputs * share, weights * share
        return outputs, weights.roll(-self.extra_keys, -1) if self.extra_keys else weights


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """x, which broadcasts to (B, H, Lq, Lk), at some queries."""
    return x if x.dim() < 2 or x.size(-2) == 1 else x[..., rows, :]


@dataclass
class _Running:
    """A module whose forward is running."""

    name: str
    module: nn.Module
    is_cross: bool


@dataclass
class Interception(TorchFunctionMode):
    """Calls `attention` and `layer` for all attention of a model inside `with`; they are to return what was asked for.

    Hooks, redirections and attention implementations are as before afterwards.
    """

    model: nn.Module
    changes_results: bool = False  # PyTorch's own functions are computed by ours too
    running: list[_Running] = field(default_factory=list)
    called: dict[str, nn.Module] = field(default_factory=dict)  # modules that ran and look like attention
    seen: set[str] = field(default_factory=set)  # the layers that attended
    reasons: dict[str, str] = field(default_factory=dict)  # why models cannot be seen
    sink: Tensor | None = None
    redirecting: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    # What subclasses do.

    def attention(self, call: Call, run: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Results of the operator `attention`; run(**options) computes them."""
        raise NotImplementedError

    def layer(
        self, name: str, given: dict[str, Any], run: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Results of the operator `multi_head_attention` on the arguments given; run() computes them."""
        raise NotImplementedError

    # Names.

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The hooks, Hugging Face's models on functions that can be seen, and the mode itself."""
        handles = []
        for name, module in self.model.named_modules():
            if _may_attend(module):
                enter, leave = self._hooks(name, module)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with replace.attention_functions_swapped(self.model) as reasons, self._sinks_known():
                self.reasons.update(reasons)
                with torch.compiler.set_stance("force_eager"), self:
                    yield
        finally:
            for handle in handles:
                handle.remove()
            self.running.clear()

    def _hooks(self, name: str, module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(_Running(name, module, _reads_two_sequences((*args, *kwargs.values()))))
            if "attention" in type(module).__name__.lower():
                self.called.setdefault(name, module)

        def leave(*_: Any) -> None:
            if self.running:
                self.running.pop()

        return enter, leave

    @contextlib.contextmanager
    def _sinks_known(self) -> Iterator[None]:
        """Sees the sinks of Hugging Face's attention, whose share is taken outside the operator."""
        if "transformers" not in sys.modules:
            yield
            return
        table = sys.modules["transformers"].AttentionInterface
        before = table().get(integration.NAME) if integration.NAME in table() else None
        if before is None:
            yield
            return

        def attend(*args: Any, **kwargs: Any) -> Any:
            s_aux, sinks = kwargs.get("s_aux"), kwargs.get("sinks")
            self.sink = sinks if s_aux is None else s_aux
            try:
                return before(*args, **kwargs)
            finally:
                self.sink = None

        table.register(integration.NAME, attend)
        try:
            yield
        finally:
            table.register(integration.NAME, before)

    def left(self) -> dict[str, str]:
        """Modules that look like attention, ran, and were not seen to attend; and why."""
        names = set(self.seen)
        unseen = {
            name: "attends by none of the functions that can be seen"
            for name in self.called
            if not any(_is_within(a, b) for seen in names for a, b in ((name, seen), (seen, name)))
        }
        return {**unseen, **self.reasons}

    # Calls.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running:
            return func(*args, **kwargs)
        if func in (_attention, _attention.default):
            return self._attention(func, *args, **kwargs)
        if func in (_layer, _layer.default):
            return self.layer(self._name(), _bound_layer(*args, **kwargs), lambda: func(*args, **kwargs))
        if not self.redirecting and func is _SDPA:
            return self._redirect(func, functional.scaled_dot_product_attention, {"dropout_p": 0.0}, args, kwargs)
        if not self.redirecting and func is _MHA:
            plain = {"training": False, "need_weights": False}
            return self._redirect(func, ours.functional.multi_head_attention_forward, plain, args, kwargs)
        return func(*args, **kwargs)

    def _name(self) -> str:
        name = self.running[-1].name
        if self.changes_results and _inside_checkpoint():
            raise ValueError(
                f"{name or 'the model'}: expected no activation checkpoint around attention whose results are gated or "
                "kept with their graph, got one; the forward that it repeats in the backward would be another"
            )
        self.seen.add(name)
        return name

    def _attention(self, func: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        module = self.running[-1]
        call = Call(
            self._name(), query, key, value, options, module.is_cross, _extra_keys(module.module), sink=self.sink
        )
        return self.attention(call, lambda **changed: func(query, key, value, **{**options, **changed}))

    def _redirect(self, func: Any, our_function: Any, plain: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """PyTorch's function, and ours on the same arguments to be seen; or ours alone where results change."""
        self.redirecting = True
        try:
            if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
                return func(*args, **kwargs)
            if self.changes_results:
                with self:
                    return our_function(*args, **kwargs)
            result = func(*args, **kwargs)
            bound = inspect.signature(our_function).bind(*args, **kwargs).arguments
            try:
                with self, torch.no_grad():
                    our_function(**{**bound, **plain})
            except Exception as error:  # seeing must not break what runs
                self.reasons[self.running[-1].name] = f"is given what mha_ext does not take ({error})"
            return result
        finally:
            self.redirecting = False


_SDPA = torch._C._nn.scaled_dot_product_attention
_MHA = F.multi_head_attention_forward


def _inside_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _may_attend(module: nn.Module) -> bool:
    """Whether attention may be this module's own. No hooks on what layers use: we call plain projections only if they
    have none."""
    if isinstance(module, (torch.jit.ScriptModule, nn.Linear)):
        return False
    if any(True for _ in module.children()):
        return True
    return len(module._parameters) > 0 and not type(module).__module__.startswith("torch.nn.")


def _reads_two_sequences(given: tuple[Any, ...]) -> bool:
    """Whether a module was given different tensors for queries and keys, by the first two that may be sequences."""
    sequences = [x for x in given if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()]
    return len(sequences) > 1 and sequences[0] is not sequences[1]


def _extra_keys(module: nn.Module) -> int:
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    return int(module.bias_k is not None) + int(module.add_zero_attn)


def _is_within(name: str, other: str) -> bool:
    return name == other or other == "" or name.startswith(other + ".")


_LAYER_ARGUMENTS = [argument.name for argument in _layer.default._schema.arguments]


def _bound_layer(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of the operator `multi_head_attention` by name."""
    return {**dict(zip(_LAYER_ARGUMENTS, args, strict=False)), **kwargs}


_OF_LAYER_ALONE = {"query", "key", "value", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "num_heads"}


def of_projections(name: str, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The heads of the operator `multi_head_attention`, q (B, Lq, H D), k (B, Lk, Hkv D), v (B, Lk, Hkv Dv)."""
    heads = given["num_heads"]
    kv_heads = k.size(-1) // max(q.size(-1) // heads, 1)
    query = q.unflatten(-1, [heads, -1]).transpose(1, 2)
    key, value = (x.unflatten(-1, [kv_heads, -1]).transpose(1, 2) for x in (k, v))
    options = {option: value for option, value in given.items() if option not in _OF_LAYER_ALONE}
    options.setdefault("need_weights", True)  # the layer's default
    return Call(name, query, key, value, options, is_cross=given["query"] is not given["key"])


def heads_apart(
    name: str, given: dict[str, Any], attention: Callable[[Call, Callable[..., Any]], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor]:
    """The operator `multi_head_attention` in three steps, of which attention(call, run) is the middle one."""
    hidden = modules._hidden_keys(
        given["query"],
        given["key"],
        given["value"],
        given["num_heads"],
        given.get("mask"),
        given.get("bias"),
        given.get("is_causal", False),
        given.get("causal_bottom_right", False),
        given.get("key_lengths"),
    )
    key, value = given["key"], given["value"]
    if hidden is not None:  # a NaN there would reach the gradients of the weights, as 0 NaN = NaN
        key, value = key.masked_fill(hidden[0], 0.0), value.masked_fill(hidden[1], 0.0)
    q = F.linear(given["query"], given["w_q"], given.get("b_q"))
    k = F.linear(key, given["w_k"], given.get("b_k"))
    v = F.linear(value, given["w_v"], given.get("b_v"))
    call = of_projections(name, given, q, k, v)

    def run(**changed: Any) -> tuple[Tensor, ...]:
        return ops.attention(call.query, call.key, call.value, **{**call.options, **changed})

    outputs, weights, _ = attention(call, run)
    return F.linear(outputs.transpose(1, 2).flatten(2), given["w_o"], given.get("b_o")), weights
