"""Export to ONNX: models with our attention become graphs of standard operators, `Attention` (opset 23) among them.

    import mha_ext.integrations.onnx
    program = mha_ext.integrations.onnx.export(model.eval(), (x,), "model.onnx")

or, where torch.onnx.export is called already,

    table = mha_ext.integrations.onnx.translations(23)
    torch.onnx.export(model, (x,), "model.onnx", dynamo=True, opset_version=23, custom_translation_table=table)

Needs onnx and onnxscript. onnxruntime (tested: 1.32) has a kernel for Attention of opsets 23 and 24; with later opsets
it runs the parts of which Attention is defined.

What is exported, and how:

    plain, GQA, Dv != D             Attention
    is_causal                       Attention with is_causal, if nothing else hides or is added; from the bottom-right
                                    corner only where Lq = Lk in every run. Else as a mask
    mask, bias, key_lengths         Attention with one attn_mask, bool or floating (B or 1, H or 1, Lq, Lk); key_lengths
                                    alone, without weights, is nonpad_kv_seqlen from opset 24 on
    softcap                         Attention with softcap, if nothing hides or is added and the dtype is not float64:
                                    releases of ONNX differ in which comes first. Else MatMul, Tanh, Softmax, MatMul
    scale                           Attention with scale; a factor of the query if it is not positive, or in float64
    need_weights                    the fourth output of Attention if Lk is a number; its size is inferred wrongly if Lk
                                    is dynamic: then MatMul, Softmax, MatMul
    logsumexp, where it is used     MatMul and ReduceLogSumExp besides
    a query that sees no key        selected after Attention: 0, or the mean of the values
    whole layers                    MatMul and Add for the projections, around Attention

Results are equal up to rounding, as the order of sums is the runtime's. float16 and bfloat16 are computed in float32
and rounded at the end, as in the engine.

What differs: ONNX adds masks to the scores, so a NaN or infinity in a key that only some queries see reaches the others
(keys that no query sees are cleared, unless only the end of is_causal hides them); key_lengths out of range are no
error; a size of 0 is served if the model is exported with it, while the kernel of onnxruntime refuses it where the size
is dynamic. Dropout is refused: export in eval mode.

torch.onnx.export without the table stops with 'No ONNX function found' for our operators. With dynamo=False it ends at
opset 20, before Attention, and is not served.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

FIRST_OPSET = 23  # the first that has Attention
LENGTHS_OPSET = 24  # the first in which it takes lengths
DEFAULT_OPSET = 23
# Arguments of torch.onnx.export about the file, and what it does without them.
_SAVING = {"export_params": True, "keep_initializers_as_inputs": False, "external_data": True}

Value = Any  # a value of the graph that is being built (onnx_ir.Value); its sizes and dtype are known if torch gave it


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    path: str | PathLike[str] | None = None,
    *,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """torch.onnx.export(dynamo=True) that knows our operators; written to `path` if there is one.

    The arguments are torch's; `options` may hold more of them (kwargs, opset_version, external_data, verbose, ...).
    opset_version is 23 unless given; a custom_translation_table is used before ours. The mode of the model is left as
    it is: put it in eval mode first. A tensor that is given twice becomes two inputs.

    Raises ValueError for dropout, for an opset before 23 and for dynamo=False, ImportError if onnx or onnxscript is
    missing, and what torch.onnx.export raises.
    """
    if not options.pop("dynamo", True):
        raise ValueError("onnx.export: expected dynamo=True, as opsets of the other exporter lack Attention, got False")
    path, opset = options.pop("f", path), options.pop("opset_version", None)
    opset = DEFAULT_OPSET if opset is None else opset
    how_to_save = {name: options.pop(name, default) for name, default in _SAVING.items()}
    table = {**translations(opset), **(options.pop("custom_translation_table", None) or {})}
    args, options["kwargs"] = _without_repeats((args, options.get("kwargs")))
    try:
        program = torch.onnx.export(
            model,
            args,
            dynamo=True,
            opset_version=opset,
            custom_translation_table=table,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
            **options,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        refusal = _refusal_behind(error)
        if refusal is None:
            raise
        raise ValueError(str(refusal)) from error
    assert program is not None  # as it is with dynamo=False
    reached = program.model.opset_imports[""]
    if reached != opset:
        raise ValueError(f"onnx.export: expected opset_version that torch and onnxscript reach, {reached}, got {opset}")
    if path is not None:
        program.save(
            path,
            include_initializers=how_to_save["export_params"],
            keep_initializers_as_inputs=how_to_save["keep_initializers_as_inputs"],
            external_data=how_to_save["external_data"],
        )
    return program


def translations(opset: int = DEFAULT_OPSET) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The custom_translation_table of torch.onnx.export(dynamo=True) for our operators, for one opset_version.

    Raises ValueError for an opset before 23, TypeError for one that is no int, ImportError if onnx or onnxscript is
    missing.
    """
    if not isinstance(opset, int):
        raise TypeError(f"onnx.export: expected opset_version to be an int, got {type(opset).__name__}")
    if opset < FIRST_OPSET:
        raise ValueError(f"onnx.export: expected opset_version >= {FIRST_OPSET}, which has Attention, got {opset}")
    onnxscript = _import_onnxscript()
    op, ir = onnxscript.values.Opset("", opset), onnxscript.ir

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        nodes = _Nodes(op, ir, query.dtype)
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
        sizes = _Sizes(batch, heads, kv_heads, q_len, kv_len, head_dim)
        q, k, v = (nodes.computed(x) for x in (query, key, value))
        output, weights, logsumexp = _Attention(nodes, sizes, q, k, v, _Options(**options)).results()
        return nodes.returned(output), nodes.returned(weights), logsumexp

    def multi_head_attention(
        query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any,
        b_q: Any, b_k: Any, b_v: Any, b_o: Any, num_heads: int, **options: Any,
    ) -> Any:  # fmt: skip
        nodes = _Nodes(op, ir, query.dtype)
        head_dim = w_q.shape[0] // num_heads
        kv_heads = w_k.shape[0] // head_dim
        value_dim = w_v.shape[0] // kv_heads
        sizes = _Sizes(query.shape[0], num_heads, kv_heads, query.shape[1], key.shape[1], head_dim)
        q = nodes.split_heads(nodes.linear(query, w_q, b_q), num_heads, head_dim)
        k = nodes.split_heads(nodes.linear(key, w_k, b_k), kv_heads, head_dim)
        v = nodes.split_heads(nodes.linear(value, w_v, b_v), kv_heads, value_dim)
        options = {"need_weights": True, **options}
        output, weights, _ = _Attention(nodes, sizes, q, k, v, _Options(**options)).results()
        output = nodes.linear(nodes.merge_heads(output, num_heads * value_dim), w_o, b_o)
        return nodes.returned(output), nodes.returned(weights)

    return {
        torch.ops.mha_ext.attention.default: attention,
        torch.ops.mha_ext.multi_head_attention.default: multi_head_attention,
    }


def _import_onnxscript() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxscript  # type: ignore[import-not-found, import-untyped]
    except ImportError as error:
        raise ImportError(
            f"onnx.export: expected onnx and onnxscript, found no {error.name}; `pip install onnx onnxscript`"
        ) from None
    return onnxscript


def _without_repeats(arguments: Any) -> Any:
    """The same arguments, a tensor that stands there again as a copy.

    torch.export takes them for one input: the others would be inputs of the graph that nothing reads.
    """
    seen: set[int] = set()

    def copy_of_repeated(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        repeated = id(x) in seen
        seen.add(id(x))
        return x.clone() if repeated else x

    return pytree.tree_map(copy_of_repeated, arguments)


class _Refusal(ValueError):
    """What the graph cannot say; torch's exporter wraps it."""


def _refusal_behind(error: BaseException | None) -> _Refusal | None:
    while error is not None and not isinstance(error, _Refusal):
        error = error.__cause__
    return error


@dataclass(frozen=True)
class _Options:
    """The options of mha_ext::attention. Dropout is refused, so seed and weights_before_dropout say nothing."""

    mask: Value = None
    bias: Value = None
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    need_weights: bool = False
    key_lengths: Value = None
    causal_bottom_right: bool = False
    uniform_dead_rows: bool = False
    seed: Value = None
    average_weights: bool = False
    weights_before_dropout: bool = False
    softcap: float | None = None
    need_logsumexp: bool = True

    def __post_init__(self) -> None:
        if self.dropout_p != 0:
            raise _Refusal(f"onnx.export: expected dropout_p = 0, as in eval mode, got {self.dropout_p}")


@dataclass(frozen=True)
class _Sizes:
    """Numbers, or symbols (onnx_ir.SymbolicDim) of sizes that are known when the graph runs."""

    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    head_dim: Any

    def __post_init__(self) -> None:
        if not isinstance(self.head_dim, int):
            raise _Refusal(f"onnx.export: expected a known head size, got {self.head_dim}")

    @staticmethod
    def _always_equal(a: Any, b: Any) -> bool:
        return a == b and (isinstance(a, int) or a.value is not None)

    def square(self) -> bool:
        """Whether there are as many queries as keys in every run."""
        return self._always_equal(self.q_len, self.kv_len)

    def empty(self) -> bool:
        return any(isinstance(n, int) and n == 0 for n in (self.batch, self.heads, self.q_len, self.kv_len))

    def group(self) -> int:
        """Query heads for each key head."""
        if self._always_equal(self.heads, self.kv_heads):
            return 1
        if not (isinstance(self.heads, int) and isinstance(self.kv_heads, int)):
            raise _Refusal(f"onnx.export: expected known numbers of heads, got {self.heads} and {self.kv_heads}")
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class _Nodes:
    """Adds nodes to the graph: `op` has ONNX's operators as methods, `dtype` is that of our operator's tensors."""

    op: Any
    ir: Any
    dtype: Any

    @property
    def in_double(self) -> bool:
        return bool(self.dtype == self.ir.DataType.DOUBLE)

    @property
    def accumulate(self) -> Any:
        """The dtype in which the engine computes."""
        return self.dtype if self.in_double else self.ir.DataType.FLOAT

    def computed(self, x: Value) -> Value:
        return x if x is None or x.dtype == self.accumulate else self.op.Cast(x, to=self.accumulate)

    def returned(self, x: Value) -> Value:
        return x if self.dtype == self.accumulate else self.op.Cast(x, to=self.dtype)

    def number(self, x: float) -> Value:
        return self.op.Constant(value=self.ir.tensor(x, dtype=self.accumulate))

    def integers(self, *x: int) -> Value:
        return self.op.Constant(value_ints=x)

    def filled(self, x: float, shape: Value) -> Value:
        return self.op.Expand(self.number(x), shape)

    def size(self, x: Value, axis: int) -> Value:
        """(1,) of int64."""
        return self.op.Shape(x, start=axis, end=axis + 1)

    def range_of(self, x: Value, axis: int) -> Value:
        """0, 1, ... for the size of an axis."""
        zero, one = (self.op.Constant(value_int=n) for n in (0, 1))
        return self.op.Range(zero, self.op.Squeeze(self.size(x, axis)), one)

    def in_four_dimensions(self, x: Value) -> Value:
        """A mask or bias of fewer dimensions with those that broadcasting adds."""
        return x if x is None or len(x.shape) == 4 else self.op.Unsqueeze(x, self.integers(*range(4 - len(x.shape))))

    def linear(self, x: Value, weight: Value, bias: Value) -> Value:
        y = self.op.MatMul(self.computed(x), self.op.Transpose(self.computed(weight), perm=[1, 0]))
        return y if bias is None else self.op.Add(y, self.computed(bias))

    def split_heads(self, x: Value, heads: int, head_dim: int) -> Value:
        """(B, L, H D) -> (B, H, L, D)"""
        return self.op.Transpose(self.op.Reshape(x, self.integers(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])

    def merge_heads(self, x: Value, features: int) -> Value:
        """(B, H, L, D) -> (B, L, H D)"""
        return self.op.Reshape(self.op.Transpose(x, perm=[0, 2, 1, 3]), self.integers(0, 0, features))


class _Attention:
    """softmax(scale Q K^T + bias) V in nodes: query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv)."""

    def __init__(self, nodes: _Nodes, sizes: _Sizes, query: Value, key: Value, value: Value, options: _Options) -> None:
        self.nodes, self.op, self.sizes, self.options = nodes, nodes.op, sizes, options
        self.query, self.key = query, key
        self.scale = 1 / math.sqrt(sizes.head_dim) if options.scale is None else options.scale
        self.bottom_right = options.causal_bottom_right and not sizes.square()
        self.mask = nodes.in_four_dimensions(options.mask)
        self.bias = nodes.computed(nodes.in_four_dimensions(options.bias))
        self.lengths = self._keys_within_lengths()
        # From the top-left corner every query sees the first key; ONNX's own is_causal is only used where it says all.
        alone = options.mask is None and options.bias is None and options.key_lengths is None
        self.only_causal = options.is_causal and not self.bottom_right and alone
        self.shown = self._all_of(self.mask, self.lengths, None if self.only_causal else self._causal())
        self.seen = self._all_of(self.shown, self._where_bias_is_finite())
        self.all_values = value
        self.key, self.value = self._cleared(key), self._cleared(value)

    # --- What is seen ---------------------------------------------------------------------------------------------

    def _keys_within_lengths(self) -> Value:
        """bool (B, 1, 1, Lk), or None without key_lengths"""
        if self.options.key_lengths is None:
            return None
        lengths = self.op.Reshape(self.options.key_lengths, self.nodes.integers(-1, 1, 1, 1))
        return self.op.Less(self.nodes.range_of(self.key, 2), self._as_int64(lengths))

    def _as_int64(self, x: Value) -> Value:
        return self.op.Cast(x, to=self.nodes.ir.DataType.INT64)

    def _causal(self) -> Value:
        """bool (1, 1, Lq, Lk), or None without is_causal"""
        if not self.options.is_causal:
            return None
        last = self.nodes.range_of(self.query, 2)
        if self.bottom_right:
            last = self.op.Add(last, self.op.Sub(self.nodes.size(self.key, 2), self.nodes.size(self.query, 2)))
        seen = self.op.LessOrEqual(
            self.nodes.range_of(self.key, 2), self.op.Unsqueeze(last, self.nodes.integers(1))
        )  # (Lq, Lk)
        return self.op.Unsqueeze(seen, self.nodes.integers(0, 1))

    def _all_of(self, *conditions: Value) -> Value:
        seen = None
        for condition in conditions:
            if condition is not None:
                seen = condition if seen is None else self.op.And(seen, condition)
        return seen

    def _where_bias_is_finite(self) -> Value:
        if self.bias is None:
            return None
        return self.op.Not(self.op.Equal(self.bias, self.nodes.number(-math.inf)))

    def _cleared(self, x: Value) -> Value:
        """Key or value with 0 for what no query sees: times a weight of 0, a NaN there would not be 0."""
        if self.seen is None or self.sizes.empty():
            return x
        by_some = self.op.ReduceMax(self.seen, self.nodes.integers(1, 2), keepdims=1)  # (B or 1, 1, 1, Lk or 1)
        return self.op.Where(self.op.Transpose(by_some, perm=[0, 1, 3, 2]), x, self.nodes.number(0.0))

    def _sees_keys(self) -> Value:
        """bool (B or 1, H or 1, Lq or 1, 1), or None if every query does"""
        return None if self.seen is None else self.op.ReduceMax(self.seen, self.nodes.integers(-1), keepdims=1)

    def _attn_mask(self) -> Value:
        """What hides and what is added in one: bool or floating (B or 1, H or 1, Lq, Lk), or None.

        The last two sizes are written out: Attention takes fewer keys for the first ones.
        """
        mask = self.shown
        if self.bias is not None:
            mask = self.bias if mask is None else self.op.Where(mask, self.bias, self.nodes.number(-math.inf))
        if mask is None:
            return None
        sizes = (self.nodes.integers(1, 1), self.nodes.size(self.query, 2), self.nodes.size(self.key, 2))
        return self.op.Expand(mask, self.op.Concat(*sizes, axis=0))

    # --- Results --------------------------------------------------------------------------------------------------

    def results(self) -> tuple[Value, Value, Value]:
        """output (B, H, Lq, Dv); weights (B, H, Lq, Lk), (B, Lq, Lk) or nothing; logsumexp (B, H, Lq) or nothing"""
        if self.sizes.empty():
            output, weights, logsumexp = self._empty_results()
        else:
            found = self._by_attention() if self._attention_says_the_same() else self._by_primitives()
            output, weights, logsumexp = self._without_dead_rows(*found, self._logsumexp())
        nothing = self.nodes.filled(0.0, self.nodes.integers(0))
        if not self.options.need_logsumexp:
            logsumexp = nothing
        if not self.options.need_weights:
            weights = nothing
        elif self.options.average_weights:
            weights = self.op.ReduceMean(weights, self.nodes.integers(1), keepdims=0)
        return output, weights, logsumexp

    def _empty_results(self) -> tuple[Value, Value, Value]:
        rows = self.op.Shape(self.query, end=3)
        output, weights = (
            self.nodes.filled(0.0, self.op.Concat(rows, width, axis=0))
            for width in (self.nodes.size(self.value, 3), self.nodes.size(self.key, 2))
        )
        return output, weights, self.nodes.filled(-math.inf, rows)

    def _attention_says_the_same(self) -> bool:
        """Whether the operator does what ours does in every release.

        Softcap and masks changed places in one. The size of the weights is inferred as 0 where Lk is dynamic.
        """
        unmasked = self.shown is None and self.bias is None and not self.only_causal
        capped_alike = self.options.softcap is None or (unmasked and not self.nodes.in_double)
        return capped_alike and not (self.options.need_weights and not isinstance(self.sizes.kv_len, int))

    def _by_attention(self) -> tuple[Value, Value]:
        # The attribute is a positive float32; 1 stands for what is multiplied before.
        direct = self.scale > 0 and not self.nodes.in_double
        by_lengths = self._lengths_say_all()
        lengths = (None, None, self._as_int64(self.options.key_lengths)) if by_lengths else ()
        output, *present, weights = self.op.Attention(
            self.query if direct else self._scaled_query(),
            self.key,
            self.value,
            None if by_lengths else self._attn_mask(),
            *lengths,
            is_causal=int(self.only_causal),
            scale=self.scale if direct else 1.0,
            softcap=self.options.softcap,
            qk_matmul_output_mode=3 if self.options.need_weights else None,  # 3: the weights
        )
        for unused in present if self.options.need_weights else (*present, weights):
            unused.name = ""  # no such output: those of a cache must not stand beside lengths
        return output, weights

    def _lengths_say_all(self) -> bool:
        """Whether nonpad_kv_seqlen, which allows one output only, will do; with is_causal it would shift the corner."""
        alone = self.shown is self.lengths is not None and self.bias is None
        return alone and not self.options.need_weights and self.op.version >= LENGTHS_OPSET

    def _without_dead_rows(self, output: Value, weights: Value, logsumexp: Value) -> tuple[Value, Value, Value]:
        """Results in which a query that sees no key has what the engine gives it, whatever the runtime computed."""
        alive = self._sees_keys()
        if alive is not None:
            mean, weight = self._of_dead_rows()
            output = self.op.Where(alive, output, mean)
            weights = self.op.Where(alive, weights, weight) if self.options.need_weights else weights
            logsumexp = self.op.Where(alive, logsumexp, self.nodes.number(-math.inf))
        return output, weights, self.op.Squeeze(logsumexp, self.nodes.integers(-1))

    def _of_dead_rows(self) -> tuple[Value, Value]:
        """Output and weights of a query that sees no key."""
        if not self.options.uniform_dead_rows:
            return self.nodes.number(0.0), self.nodes.number(0.0)
        mean = self.op.ReduceMean(self._for_query_heads(self.all_values), self.nodes.integers(2), keepdims=1)
        return mean, self.op.Reciprocal(self.op.Cast(self.nodes.size(self.key, 2), to=self.nodes.accumulate))

    # --- Attention in primitives ----------------------------------------------------------------------------------

    def _by_primitives(self) -> tuple[Value, Value]:
        weights = self.op.Softmax(self._scores(), axis=-1)
        return self.op.MatMul(weights, self._for_query_heads(self.value)), weights

    def _logsumexp(self) -> Value:
        """(B, H, Lq, 1); torch's exporter removes it where nothing uses it."""
        return self.op.ReduceLogSumExp(self._scores(), self.nodes.integers(-1), keepdims=1)

    def _scores(self) -> Value:
        """(B, H, Lq, Lk), -inf where hidden"""
        keys = self.op.Transpose(self._for_query_heads(self.key), perm=[0, 1, 3, 2])
        scores = self.op.MatMul(self._scaled_query(), keys)
        if self.options.softcap is not None:
            softcap = self.nodes.number(self.options.softcap)
            scores = self.op.Mul(self.op.Tanh(self.op.Div(scores, softcap)), softcap)
        if self.bias is not None:
            scores = self.op.Add(scores, self.bias)
        shown = self._causal() if self.only_causal else self.shown
        return scores if shown is None else self.op.Where(shown, scores, self.nodes.number(-math.inf))

    def _scaled_query(self) -> Value:
        return self.op.Mul(self.query, self.nodes.number(self.scale))

    def _for_query_heads(self, x: Value) -> Value:
        """(B, Hkv, L, D) -> (B, H, L, D)"""
        group = self.sizes.group()
        if group == 1:
            return x
        each = self.op.Expand(self.op.Unsqueeze(x, self.nodes.integers(2)), self.nodes.integers(1, 1, group, 1, 1))
        shape = (self.nodes.integers(0, self.sizes.heads), self.op.Shape(x, start=2))
        return self.op.Reshape(each, self.op.Concat(*shape, axis=0))
