"""What the heads of a model attend to, gathered while the model runs as usual; and gates on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack

from ..head_mask import masked_heads
from .interception import Call, Interception, heads_apart, of_projections, unseen
from .statistics import Statistics

_layer_forward = torch.ops.mha_ext.multi_head_attention_forward.default


@dataclass(frozen=True)
class Attended:
    """One call of one layer: B sequences, H heads (Hkv of keys and values), lengths Lq and Lk, head size Dv.

    weights     (B, H, Lq, Lk) before dropout and gates; 0 where a key is hidden
    outputs     (B, H, Lq, Dv): what the heads hand to W_o, before dropout and gates
    values      (B, Hkv, Lk, Dv) with keep_graph, else None
    queries     bool (B, Lq): valid ones, that see a key and are no padding; None: all
    visible     int64, broadcasts to (B, H, Lq): how many keys each query sees; None: all
    offset      query i stands at the position of key i + offset; None in cross-attention
    """

    weights: Tensor
    outputs: Tensor
    values: Tensor | None
    queries: Tensor | None
    visible: Tensor | None
    offset: int | None


@dataclass
class LayerRecording:
    """What one layer did: each call of it, or statistics of them all."""

    name: str
    heads: int
    calls: list[Attended] = field(default_factory=list)
    streamed: Statistics | None = None

    @property
    def weights(self) -> Tensor:
        """(B, H, Lq, Lk) of the only call. Raises ValueError if there were others, or if none are kept."""
        return self._only_call().weights

    @property
    def outputs(self) -> Tensor:
        """(B, H, Lq, Dv) of the only call. Raises ValueError if there were others, or if none are kept."""
        return self._only_call().outputs

    def statistics(self) -> Statistics:
        """Of all calls so far."""
        if self.streamed is not None:
            return self.streamed
        result = Statistics()
        for call in self.calls:
            result.add(
                call.weights.detach(),
                call.outputs.detach(),
                queries=call.queries,
                visible=call.visible,
                offset=call.offset,
            )
        return result

    def _only_call(self) -> Attended:
        if self.streamed is not None:
            raise ValueError(f"{self.name}: expected a recording that keeps the weights, got streaming statistics")
        if len(self.calls) != 1:
            raise ValueError(f"{self.name}: expected one call of the layer, got {len(self.calls)}; see calls")
        return self.calls[0]


class Recording(dict[str, LayerRecording]):
    """Layer names, in the order in which they ran, to what they did.

    left    modules that look like attention, ran, and could not be seen; why
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}


@contextlib.contextmanager
def record(
    model: nn.Module, *, streaming: bool = False, queries: int | None = 16, keep_graph: bool = False
) -> Iterator[Recording]:
    """Gathers what every attention layer of the model does inside `with`; the model computes what it always does.

    Layers are modules that call the operators of mha_ext, F.scaled_dot_product_attention or
    F.multi_head_attention_forward: ours, torch.nn.MultiheadAttention, Hugging Face's, hand-written ones. Hugging Face
    models with another attention than "sdpa" run on ours meanwhile, compiled models run uncompiled, and torch's
    Transformer layers do not take their shortcut: results may change by rounding, and where a query sees no key.

    streaming   keep statistics of O(heads^2) per layer instead of weights and outputs, for long inputs and whole data
                sets
    queries     with streaming: of each sequence, look at this many rows, evenly spread; None: all of them
    keep_graph  weights, outputs and values carry gradients, for losses on them; layers on PyTorch's functions run on
                ours then

    F.scaled_dot_product_attention of three dimensions is a batch of single heads. Nested tensors are seen in our layers
    alone; torch.nn.MultiheadAttention refuses them inside `with`. What runs in torch.func.vmap is left. Records and
    gates may be nested in any order.

    Forward passes in the backward, of activation checkpoints, are not recorded again. Other threads are not recorded.
    Raises TypeError for a model that is no nn.Module or a ScriptModule, ValueError for options that do not fit and for
    layers inside activation checkpoints with keep_graph.
    """
    check_model("record", model)
    if streaming and keep_graph:
        raise ValueError("record: expected either streaming or keep_graph, got both")
    if queries is not None and (isinstance(queries, bool) or not isinstance(queries, int) or queries < 1):
        raise ValueError(f"record: expected queries >= 1 or None, got {queries!r}")
    recording = Recording()
    recorder = _Recorder(model, recording, streaming, queries, keep_graph)
    try:
        with recorder.entered():
            yield recording
    finally:
        recording.left.update(recorder.left())


@contextlib.contextmanager
def gate(model: nn.Module, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies what the heads hand to W_o by gates inside `with`: layer name -> floating (H,) or (B, H).

    Names are those that `record` gives. Differentiable in the gates; weights that a layer returns are multiplied too.
    Layers on PyTorch's functions run on ours then. A gate of a layer that did not run raises ValueError at the end, one
    inside an activation checkpoint raises it at once.
    """
    check_model("gate", model)
    if not isinstance(gates, Mapping):
        raise TypeError(f"gate: expected a mapping of layer names to tensors, got {type(gates).__name__}")
    for name, value in gates.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"gate: expected a floating tensor for {name!r}, got {got}")
        if value.dim() not in (1, 2):
            raise ValueError(f"gate: expected (H,) or (B, H) for {name!r}, got {tuple(value.shape)}")

    gater = Gater(model, lambda name, outputs: gates.get(name))
    with gater.entered():
        yield
    missing = [name for name in gates if name not in gater.seen]
    if missing:
        raise ValueError(f"gate: expected names of layers that run, got {', '.join(map(repr, missing))}")


def check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{op}: expected an nn.Module that is no ScriptModule, got {type(model).__name__}")


class _Recorder(Interception):
    def __init__(
        self, model: nn.Module, recording: Recording, streaming: bool, queries: int | None, keep_graph: bool
    ) -> None:
        super().__init__(model, changes_results=keep_graph)
        self.recording, self.streaming, self.queries, self.keep_graph = recording, streaming, queries, keep_graph

    def attention(self, call: Call, run: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._is_mapped(call.layer):
            return run()
        rows = self._some_rows(call.query.size(2))
        wanted = call.options.get("need_weights", False)
        once = self.keep_graph or not _has_graph({"q": call.query, "k": call.key, "v": call.value, **call.options})
        if rows is None and once and _gives_plain_weights(call.options) and not self.is_inside_another():
            outputs, weights, logsumexp = run(need_weights=True, average_weights=False)
            self._keep(call, *call.finish(outputs, weights, logsumexp), shared=True)
            return outputs, weights if wanted else weights.new_empty(0), logsumexp
        results = run()
        with torch.set_grad_enabled(self.keep_graph and torch.is_grad_enabled()), unseen():
            self._see_again(call, rows)
        return results

    def layer(
        self, name: str, given: dict[str, Any], run: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        if self._is_mapped(name):
            return run()
        if self.keep_graph:
            return heads_apart(name, given, self.attention)
        rows = self._some_rows(given["query"].size(1))
        wanted = given.get("need_weights", True)
        device = given["query"].device.type
        autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        once = _gives_plain_weights(given) and not (_has_graph(given) or autocasts or self.is_inside_another())
        results = None if once else run()
        with torch.no_grad(), unseen():
            if autocasts and results is not None:  # the forward operator knows no autocast
                heads_apart(name, {**given, "dropout_p": 0.0}, self.attention)
                return results
            need_weights = rows is None or (once and wanted)
            options = {"need_weights": need_weights, "dropout_p": 0.0, "average_weights": False}
            output, weights, q, k, v, context, _ = _layer_forward(**{**given, **options})
            call = of_projections(name, given, q, k, v)
            if rows is None:
                outputs = context.unflatten(-1, [given["num_heads"], -1]).transpose(1, 2)
                self._keep(call, outputs, weights, shared=wanted)
            else:
                self._see_again(call, rows)
        return results or (output, weights if wanted else weights.new_empty(0))

    def _is_mapped(self, name: str) -> bool:
        """Whether vmap is at work: its tensors mean nothing afterwards."""
        mapped = any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or [])
        if mapped:
            self.reasons[name] = "runs in torch.func.vmap"
        return mapped

    def _some_rows(self, length: int) -> Tensor | None:
        """The queries to look at; None: all, in the call itself."""
        if not self.streaming or self.queries is None or length <= self.queries:
            return None
        return torch.linspace(0, length - 1, self.queries).round().long()

    def _see_again(self, call: Call, rows: Tensor | None) -> None:
        """Keeps weights and outputs that are computed for this alone: of some rows, or without dropout."""
        if rows is None:
            outputs, weights = call.attended()
        else:
            rows = rows.to(call.query.device)
            outputs, weights = call.of_rows(rows, call.visible(rows) if call.hides() else None).attended()
        self._keep(call, outputs, weights, rows=rows)

    def _keep(
        self, call: Call, outputs: Tensor, weights: Tensor, *, rows: Tensor | None = None, shared: bool = False
    ) -> None:
        """Keeps what queries (those at `rows`) did. shared: the model has the same tensors, and may write into them."""
        if torch._C._current_graph_task_id() != -1:  # a checkpoint runs the forward again
            return
        queries = visible = None
        if call.hides():
            queries = call.valid_queries()
            all_rows = torch.arange(call.query.size(2), device=outputs.device)
            visible = call.visible(all_rows if rows is None else rows).sum(-1)
        layer = self.recording.get(call.layer)
        if layer is None:
            streamed = Statistics() if self.streaming else None
            layer = self.recording[call.layer] = LayerRecording(call.layer, weights.size(1), streamed=streamed)
        if layer.streamed is not None:
            try:
                layer.streamed.add(weights, outputs, queries=queries, visible=visible, offset=call.offset, rows=rows)
            except ValueError as error:  # seeing must not break what runs
                self.reasons[call.layer] = f"attends in different ways ({error})"
        elif self.keep_graph:
            layer.calls.append(Attended(weights, outputs, call.value, queries, visible, call.offset))
        else:
            weights, outputs = weights.detach(), outputs.detach()
            if shared:
                weights, outputs = weights.clone(), outputs.clone()
            layer.calls.append(Attended(weights, outputs, None, queries, visible, call.offset))


class Gater(Interception):
    """Multiplies heads by gates: gate_of(layer name, outputs (B, H, Lq, Dv)) gives (H,), (B, H) or None."""

    def __init__(self, model: nn.Module, gate_of: Callable[[str, Tensor], Tensor | None]) -> None:
        super().__init__(model, changes_results=True)
        self.gate_of = gate_of

    def attention(self, call: Call, run: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        wants_mean = call.options.get("need_weights", False) and call.options.get("average_weights", False)
        outputs, weights, logsumexp = run(average_weights=False)
        gates = self.gate_of(call.layer, outputs)
        if gates is not None:
            _check_gates(call.layer, gates, outputs)
            outputs = masked_heads(outputs, gates)
            weights = masked_heads(weights, gates) if weights.dim() == 4 else weights
        return outputs, weights.mean(1) if wants_mean else weights, logsumexp

    def layer(
        self, name: str, given: dict[str, Any], run: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        return heads_apart(name, given, self.attention)


def _check_gates(name: str, gates: Tensor, outputs: Tensor) -> None:
    batch, heads = outputs.shape[:2]
    if gates.shape not in ((heads,), (batch, heads)):
        raise ValueError(f"gate: expected ({heads},) or ({batch}, {heads}) for {name!r}, got {tuple(gates.shape)}")


def _gives_plain_weights(options: dict[str, Any]) -> bool:
    """Whether a call has no dropout and returns the weights of each head, if it returns weights."""
    return not (
        options.get("dropout_p", 0.0) > 0.0
        or (options.get("need_weights", False) and options.get("average_weights", False))
    )


def _has_graph(given: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given.values())
