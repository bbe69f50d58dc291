"""Sees the attention that a model computes, whichever front it takes, while the model runs as usual.

A `TorchFunctionMode` meets each call of an attention function on its way: the operators of mha_ext, PyTorch's
F.scaled_dot_product_attention and F.multi_head_attention_forward, and through these nn.MultiheadAttention, Hugging
Face's models and hand-written ones. Hooks on the modules tell which of them is running. PyTorch's functions are
redirected to ours of the same name, which end in our operators: two kinds of calls are all that has to be understood.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from .. import functional, masks, modules, ops, replace
from .. import nn as ours
from ..integrations import transformers as integration

HIDES = -9e3  # a bias from here down hides: models add -1e4, -1e9, the least float or -inf to another, small bias
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

    @functools.cached_property
    def offset(self) -> int | None:
        """Query i stands at the key i + offset, extra keys not counted; None where they are of different sequences.

        Keys behind those of the queries are room that a cache has left: causal queries do not see them.
        """
        most = self.key.size(2) - self.extra_keys - self.query.size(2)
        if most < 0 or (self.is_cross and not self.options.get("is_causal", False)):
            return None
        if most == 0 or not self.hides():
            return most
        rows = torch.arange(self.query.size(2), device=self.query.device)
        return min(most, max((self._furthest_ahead(some) for some in rows.split(CHUNK)), default=0))

    def _furthest_ahead(self, rows: Tensor) -> int:
        """The most that a query i among `rows` sees beyond key i; of causal queries, this is the offset."""
        seen = self.visible(rows).flatten(0, 1).any(0)[:, self.extra_keys :]  # (R, Lk)
        keys = torch.arange(seen.size(1), device=seen.device)
        ahead = (keys - rows.unsqueeze(1)).masked_fill(~seen, 0)
        return int(ahead.max()) if ahead.numel() else 0

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

    def attended(self) -> tuple[Tensor, Tensor]:
        """Outputs (B, H, Lq, Dv) and weights (B, H, Lq, Lk) before dropout, as the layer has them."""
        plain = {"dropout_p": 0.0, "seed": None, "need_weights": True, "average_weights": False}
        return self.finish(*ops.attention(self.query, self.key, self.value, **{**self.options, **plain}))

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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def sequences(self) -> list[Tensor]:
        """What it was given that may be sequences: floating tensors (L, E) or (B, L, E), all of one rank."""
        try:
            names = list(inspect.signature(self.module.forward).parameters)
        except ValueError:  # a function that Python knows nothing about
            names = []
        named = [*zip(names + [""] * len(self.args), self.args, strict=False), *self.kwargs.items()]
        found = [
            x
            for name, x in named
            if isinstance(x, Tensor) and x.dim() in (2, 3) and x.is_floating_point()
            if _NOT_SEQUENCES.isdisjoint(name.lower().split("_"))
        ]
        return [x for x in found if x.dim() == found[0].dim()]


# Parts of the names of arguments that are no sequences.
_NOT_SEQUENCES = {"pos", "position", "positions", "positional", "pe", "rotary", "rope", "freqs", "cos", "sin"}
_NOT_SEQUENCES |= {"mask", "bias"}


@dataclass
class Interception(TorchFunctionMode):
    """Calls `attention` and `layer` for all attention of a model inside `with`; they are to return what was asked for.

    Hooks, redirections and attention implementations are as before afterwards.
    """

    model: nn.Module
    changes_results: bool = False  # PyTorch's own functions are computed by ours too
    running: list[_Running] = field(default_factory=list)
    called: dict[str, None] = field(default_factory=dict)  # in order: modules that ran and look like attention
    seen: set[str] = field(default_factory=set)  # the layers that attended
    reasons: dict[str, str] = field(default_factory=dict)  # why models cannot be seen
    sink: Tensor | None = None
    heads: int | None = None  # of the call of Transformers' "sdpa" that is running
    redirected: dict[str, Any] | None = None  # the arguments of PyTorch's function for which ours is running
    thread: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def is_inside_another(self) -> bool:
        """Whether what this one calls is seen by another: asked while this one is at work."""
        return any(isinstance(mode, Interception) for mode in _get_current_function_mode_stack())

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
        self.thread = threading.get_ident()
        for name, module in self.model.named_modules():
            if _may_attend(module):
                enter, leave = self._hooks(name, module)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with replace.attention_functions_swapped(self.model) as reasons, self._transformers_known():
                self.reasons.update(reasons)
                with torch.compiler.set_stance("force_eager"), self:
                    yield
        finally:
            for handle in handles:
                handle.remove()
            self.running.clear()

    def _hooks(self, name: str, module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            self.running.append(_Running(name, module, args, kwargs))
            if "attention" in type(module).__name__.lower():
                self.called[name] = None

        def leave(*_: Any) -> None:  # also if another hook failed before `enter`
            if threading.get_ident() == self.thread and self.running and self.running[-1].module is module:
                self.running.pop()

        return enter, leave

    @contextlib.contextmanager
    def _transformers_known(self) -> Iterator[None]:
        """Sees what Transformers' attention functions do to heads outside of the calls that we see.

        The share of a sink is taken after ours; "sdpa" hands the heads of a single query over as queries.
        """
        if "transformers" not in sys.modules:
            yield
            return
        table = sys.modules["transformers"].AttentionInterface
        before = {name: table()[name] for name in (integration.NAME, "sdpa") if name in table()}
        for name, function in before.items():
            table.register(name, self._noting(name, function))
        try:
            yield
        finally:
            for name, function in before.items():
                table.register(name, function)

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(module, query, *args, **kwargs)
            if name == "sdpa":
                self.heads = query.size(1)
            else:
                s_aux, sinks = kwargs.get("s_aux"), kwargs.get("sinks")
                self.sink = sinks if s_aux is None else s_aux
            try:
                return function(module, query, *args, **kwargs)
            finally:
                self.heads = self.sink = None

        return attend

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
            run = functools.partial(self._run, func, *args, **kwargs)
            return self.layer(self._name(), _bound_layer(*args, **kwargs), run)
        if self.redirected is None and func is _SDPA:
            by_head = functools.partial(_attention_by_head, self.heads)
            return self._redirect(func, by_head, {"dropout_p": 0.0}, args, kwargs)
        if self.redirected is None and func is _MHA:
            plain = {"training": False, "need_weights": False}
            return self._redirect(func, ours.functional.multi_head_attention_forward, plain, args, kwargs)
        return func(*args, **kwargs)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Other modes around this one see what the model asks for, but not what is computed only to be seen."""
        is_extra = self.redirected is not None and not self.changes_results
        with unseen() if is_extra else contextlib.nullcontext():
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
        name = self._name()
        call = Call(name, query, key, value, options, self._is_cross(), self._extra_keys(), self.sink)
        return self.attention(call, lambda **changed: self._run(func, query, key, value, **{**options, **changed}))

    def _is_cross(self) -> bool:
        """Whether the innermost module that was given sequences was given different ones for queries and keys."""
        given = next(filter(None, (running.sequences() for running in reversed(self.running))), [])
        return len(given) > 1 and given[0] is not given[1]

    def _extra_keys(self) -> int:
        if self.redirected is not None:
            bias_k, add_zero_attn = (self.redirected.get(name) for name in ("bias_k", "add_zero_attn"))
        else:
            module = self.running[-1].module
            if not isinstance(module, nn.MultiheadAttention):
                return 0
            bias_k, add_zero_attn = module.bias_k, module.add_zero_attn
        return int(bias_k is not None) + int(bool(add_zero_attn))

    def _redirect(self, func: Any, our_function: Any, plain: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """PyTorch's function, and ours on the same arguments to be seen; or ours alone where results change."""
        name = self.running[-1].name
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            self.reasons[name] = "is given nested tensors"
            return func(*args, **kwargs)
        result = None if self.changes_results else func(*args, **kwargs)
        self.redirected = inspect.signature(our_function).bind(*args, **kwargs).arguments
        try:
            with self:
                if result is None:
                    return our_function(*args, **kwargs)
                with torch.no_grad():
                    our_function(**{**self.redirected, **plain})
        except Exception as error:
            if result is None:
                raise
            self.reasons[name] = f"is given what mha_ext does not take ({error})"  # seeing must not break what runs
        finally:
            self.redirected = None
        return result


def unseen() -> Any:
    """Inside, no mode sees the functions that are called."""
    return torch._C.DisableTorchFunction()


def _attention_by_head(
    heads: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Ours in place of F.scaled_dot_product_attention, with the heads where our operators have them.

    Three dimensions are a batch of single heads to PyTorch. Transformers' "sdpa" hands over the one query of its
    `heads` as (B, Hkv, heads / Hkv, D).
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    attend: Callable[..., Tensor] = functools.partial(functional.scaled_dot_product_attention, **options)
    mask = attn_mask
    if query.dim() == key.dim() == value.dim() == 3 and not enable_gqa:
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        return attend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), mask).squeeze(1)
    if heads is not None and query.size(1) != heads == query.size(1) * query.size(2):
        mask = mask if mask is None or mask.size(1) == 1 else mask.flatten(1, 2).unsqueeze(2)
        output = attend(query.flatten(1, 2).unsqueeze(2), key, value, mask, enable_gqa=True)
        return output.squeeze(2).unflatten(1, query.shape[1:3])
    return attend(query, key, value, mask, enable_gqa=enable_gqa)


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
