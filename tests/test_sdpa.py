"""mha_ext.scaled_dot_product_attention against PyTorch's own: its samples, every shape, every class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import mha_ext
from tests.cases import DTYPES, all_pairs, row_id
from tests.checks import assert_as_good_as_plain
from tests.reference import storing_error

sdpa = mha_ext.scaled_dot_product_attention

# --- One comparison for all -----------------------------------------------------------------------------------------


def exact_sdpa(*args, **options) -> Tensor:
    """PyTorch's unfused path, in float64."""
    args, options = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, options))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def as_many_heads(x: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) if enable_gqa else x


def plain_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """The formula's softmax(scale Q K^T + mask), in the dtype of its arguments."""
    scores = query @ as_many_heads(key, query, enable_gqa).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else (scores + attn_mask).to(query.dtype)
    return scores.softmax(-1)


def plain_sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    weights = plain_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
    return weights @ as_many_heads(value, query, enable_gqa)


def sizes(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Of the output and of each gradient: the sum of the absolute values of what is summed up for it."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    q, (k, v) = leaves[0], (as_many_heads(x, query, enable_gqa) for x in leaves[1:])
    p = plain_weights(q.double(), key.double(), attn_mask, is_causal, scale, enable_gqa).detach().nan_to_num(0)
    output = p @ v.abs()
    d_output = incoming(output).abs()
    d_p = d_output @ v.abs().mT
    stored = storing_error(query.dtype) * (d_output * (p @ v).abs()).sum(-1, keepdim=True)
    d_scores = p * (d_p + (p * d_p).sum(-1, keepdim=True) + stored)
    factor = abs(query.shape[-1] ** -0.5 if scale is None else scale)
    grads = (factor * d_scores @ k.abs(), factor * d_scores.mT @ q.abs(), p.mT @ d_output)
    grads = (g.sum_to_size(x.shape) for g, x in zip(grads, (q, k, v), strict=True))
    grads = torch.autograd.grad((q, k, v), leaves, list(grads))
    floating = attn_mask is not None and attn_mask.is_floating_point()
    return output.detach(), *grads, *([d_scores.sum_to_size(attn_mask.shape)] if floating else [])


def incoming(output: Tensor) -> Tensor:
    """A gradient for an output of this shape, the same in every dtype but for rounding to bfloat16."""
    values = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).bfloat16()
    return values.view(output.shape).to(output.dtype)


def run(function, args: tuple, options: dict) -> tuple[Tensor, ...]:
    """The output of a function, and the gradients of its floating arguments."""
    args, options = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, options))
    leaves = [x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    output = function(*args, **options)
    return output.detach(), *torch.autograd.grad(output, leaves, incoming(output))


def compare(*args, **options) -> None:
    found, plain, exact = (run(function, args, options) for function in (sdpa, plain_sdpa, exact_sdpa))
    assert found[0].dtype == args[0].dtype
    results = zip(found, plain, exact, sizes(*args, **options), strict=True)
    for name, (a, b, c, size) in zip(("output", "query", "key", "value", "attn_mask"), results, strict=False):
        assert_as_good_as_plain(a, b, c.double(), size, name, args[0].dtype)


# --- The samples that come with PyTorch -----------------------------------------------------------------------------

(ENTRY,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
SAMPLES = len(list(ENTRY.sample_inputs("cpu", torch.float32)))


@pytest.mark.parametrize("index", range(SAMPLES))
@pytest.mark.parametrize("dtype", sorted(ENTRY.dtypes, key=str), ids=str)
def test_samples_of_op_db(dtype, index):
    sample = list(ENTRY.sample_inputs("cpu", dtype))[index]
    args = (sample.input, *sample.args)
    if sample.kwargs.get("dropout_p", 0) == 0:
        compare(*args, **sample.kwargs)
        return
    ours, again, theirs = (
        run(torch.random.fork_rng()(function), args, sample.kwargs)
        for function in (sdpa, sdpa, F.scaled_dot_product_attention)
    )
    for a, b, c in zip(ours, again, theirs, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
        assert (a.shape, a.dtype) == (c.shape, c.dtype)


# --- Every rank, broadcast and mask ---------------------------------------------------------------------------------

Q_LEN, KV_LEN, HEAD_DIM = 5, 6, 8
LEADING = {  # of query, key and value
    "plane": ((), (), ()),
    "heads": ((4,), (4,), (4,)),
    "four": ((2, 4), (2, 4), (2, 4)),
    "five": ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "six": ((2, 1, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4)),
    "one_query_batch": ((1, 4), (2, 4), (2, 4)),
    "one_kv_batch": ((2, 4), (1, 4), (1, 4)),
    "one_key_head": ((2, 4), (2, 1), (2, 4)),
    "one_kv_head": ((2, 4), (2, 1), (2, 1)),
    "one_query_head": ((2, 1), (2, 4), (2, 1)),
    "query_without_batch": ((4,), (2, 4), (2, 4)),
    "kv_without_heads": ((2, 4), (), ()),
    "crossed": ((2, 1, 4), (3, 1), (2, 3, 4)),
    "grouped": ((2, 4), (2, 2), (2, 2)),
    "grouped_3d": ((4,), (2,), (2,)),
    "grouped_five": ((2, 3, 4), (2, 1, 2), (3, 2)),
    "grouped_unlike": ((2, 4), (2, 2), (2, 1)),
}
MASKS = {  # in front of (Lq, Lk), of the leading dimensions of the scores
    "scalar": lambda leading: (),
    "keys": lambda leading: (KV_LEN,),
    "rows": lambda leading: (Q_LEN, 1),
    "plane": lambda leading: (Q_LEN, KV_LEN),
    "one": lambda leading: (*[1] * len(leading), Q_LEN, KV_LEN),
    "heads": lambda leading: (*leading[-1:], 1, KV_LEN),
    "first": lambda leading: (*leading[:1], *[1] * len(leading[1:]), 1, KV_LEN),
    "last_batch": lambda leading: (*leading[-2:-1], *[1] * len(leading[-1:]), Q_LEN, KV_LEN),
    "full": lambda leading: (*leading, Q_LEN, KV_LEN),
}


def tensors_of(leading: str, dtype: torch.dtype, value_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    ends = ((Q_LEN, HEAD_DIM), (KV_LEN, HEAD_DIM), (KV_LEN, value_dim))
    query, key, value = (torch.randn(*a, *b).to(dtype) for a, b in zip(LEADING[leading], ends, strict=True))
    return query, key, value


def mask_of(mask: str, kind: str, leading: str, dtype: torch.dtype) -> Tensor:
    grouped = leading.startswith("grouped")
    lead = LEADING[leading][0] if grouped else tuple(torch.broadcast_shapes(*LEADING[leading]))
    shape = MASKS[mask](lead)
    visible = torch.rand(shape) < 0.8
    if kind == "bool":
        return visible
    bias = torch.randn(shape).masked_fill(~visible, float("-inf"))
    return bias.to(dtype if kind == "same" else torch.float32)


ROWS = all_pairs(
    leading=list(LEADING),
    mask=list(MASKS),
    kind=("bool", "same", "float32"),
    dtype=list(DTYPES),
    value_dim=(HEAD_DIM, 3),
    scale=(None, 0.3),
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_masks_of_every_shape(row):
    dtype = DTYPES[row["dtype"]]
    tensors = tensors_of(row["leading"], dtype, row["value_dim"])
    attn_mask = mask_of(row["mask"], row["kind"], row["leading"], dtype)
    compare(*tensors, attn_mask=attn_mask, scale=row["scale"], enable_gqa=row["leading"].startswith("grouped"))


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("is_causal", (False, True))
def test_leading_dimensions(leading, is_causal):
    compare(*tensors_of(leading, torch.float32), is_causal=is_causal, enable_gqa=leading.startswith("grouped"))


@pytest.mark.parametrize("empty", ("query", "key", "head", "value"))
@pytest.mark.parametrize("leading", ("plane", "four", "five", "grouped"))
def test_empty_tensors(leading, empty):
    """What follows from the formula: no key gives 0, a head of size 0 the mean of all values."""
    query, key, value = tensors_of(leading, torch.float32)
    if empty == "query":
        query = query[..., :0, :]
    elif empty == "key":
        key, value = key[..., :0, :], value[..., :0, :]
    elif empty == "head":
        query, key = query[..., :0], key[..., :0]
    else:
        value = value[..., :0]
    options = {"enable_gqa": leading == "grouped"}
    output, *grads = run(sdpa, (query, key, value), options)
    assert output.shape == (*query.shape[:-1], value.shape[-1])
    mean = (
        torch.zeros(()) if empty == "key" else as_many_heads(value, query, leading == "grouped").mean(-2, keepdim=True)
    )
    torch.testing.assert_close(output, mean.expand(output.shape))
    assert [x.shape for x in grads] == [x.shape for x in (query, key, value)]
    assert all(not x.any() for x in grads[:2])


# --- Nothing is copied on the way to the engine ---------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps what the engine is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mha_ext.attention.default:
            self.calls.append((args, kwargs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "leading", [name for name in LEADING if name not in ("crossed", "grouped_five", "grouped_unlike")]
)
@pytest.mark.parametrize(
    ("mask", "kind"), ((None, None), ("keys", "bool"), ("one", "bool"), ("heads", "same"), ("full", "same")), ids=str
)
def test_the_engine_gets_views(leading, mask, kind):
    tensors = tensors_of(leading, torch.float32)
    attn_mask = None if mask is None else mask_of(mask, kind, leading, torch.float32)
    with Recorder() as recorder:
        sdpa(*tensors, attn_mask, enable_gqa=leading.startswith("grouped"))
    ((args, options),) = recorder.calls
    for given, got in zip(tensors, args, strict=True):
        assert got.data_ptr() == given.data_ptr()
    if leading == "one_kv_head":
        assert [x.shape[1] for x in args] == [4, 1, 1]
    if attn_mask is not None:
        assert options["mask" if kind == "bool" else "bias"].data_ptr() == attn_mask.data_ptr()


def compiled(function, backend: str = "eager", **options):
    """In one graph, and without what earlier tests compiled."""
    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


# --- Classes of tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", (causal_upper_left, causal_lower_right))
@pytest.mark.parametrize("kv_len", (3, 5, 7))
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(make, kv_len):
    query, key, attn_mask = torch.randn(2, 4, 5, 8), torch.randn(2, 2, kv_len, 8), make(5, kv_len)
    with Recorder() as recorder:
        found = sdpa(query, key, key, attn_mask, enable_gqa=True)
    ((_, options),) = recorder.calls
    assert "mask" not in options
    assert "bias" not in options
    seen = torch.ones(5, kv_len).bool().tril(kv_len - 5 if make is causal_lower_right else 0)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, key, seen, enable_gqa=True))
    torch.testing.assert_close(compiled(sdpa)(query, key, key, attn_mask, enable_gqa=True), found)


def test_a_causal_bias_for_other_lengths():
    query, key = torch.randn(4, 5, 8), torch.randn(4, 7, 8)
    torch.testing.assert_close(sdpa(query, key, key, causal_upper_left(3, 3)), sdpa(query, key, key, is_causal=True))
    with pytest.raises(ValueError, match=r"expected causal_lower_right\(Lq, Lk\) = \(5, 7\), got \(4, 7\)"):
        sdpa(query, key, key, causal_lower_right(4, 7))
    with pytest.raises(ValueError, match="either attn_mask or is_causal, got both"):
        sdpa(query, key, key, causal_upper_left(5, 7), is_causal=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_agree_with_torch():
    sequences = [torch.randn(3, 16), torch.randn(5, 16)]

    def call(function) -> tuple[Tensor, Tensor]:
        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
        heads = nested.unflatten(-1, (2, 8)).transpose(1, 2)
        output = function(heads, heads, heads)
        output.values().square().sum().backward()
        return output.values(), nested.grad.values()

    torch.testing.assert_close(call(sdpa), call(F.scaled_dot_product_attention))


class Plain(Tensor):
    """A subclass that changes nothing."""


class Halved(Tensor):
    """A subclass whose attention is something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return result / 2 if func is F.scaled_dot_product_attention else result


def test_a_subclass_stays_on_the_engine():
    query = torch.randn(2, 4, 5, 8)
    with Recorder() as recorder:
        found = sdpa(query.as_subclass(Plain), query, query)
    assert len(recorder.calls) == 1
    assert type(found) is Plain
    torch.testing.assert_close(found.as_subclass(Tensor), sdpa(query, query, query))


@pytest.mark.parametrize("how", (lambda function: function, compiled), ids=("eager", "compiled"))
@pytest.mark.parametrize("position", range(4))
def test_a_subclass_with_an_attention_of_its_own_is_asked(position, how):
    args = [*(torch.randn(2, 4, 5, 8) for _ in range(3)), torch.randn(5, 5)]
    expected = sdpa(*args) / 2
    args[position] = args[position].as_subclass(Halved)
    torch.testing.assert_close(how(sdpa)(*args).as_subclass(Tensor), expected)


def test_other_devices():
    query = torch.empty(2, 3, 4, 5, 8, device="meta")
    assert sdpa(query, query, query[..., :3]).shape == (2, 3, 4, 5, 3)


# --- Ways to call ---------------------------------------------------------------------------------------------------


def layer(x: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> Tensor:
    keys = x[..., ::2, :, :] if enable_gqa else x
    return mha_ext.scaled_dot_product_attention(x.cos(), keys, keys, attn_mask, enable_gqa=enable_gqa)


@pytest.mark.parametrize("how", ("script", "compile", "export"))
@pytest.mark.parametrize(("leading", "mask"), (("heads", "first"), ("four", None), ("five", "full")), ids=str)
def test_scripted_compiled_and_exported(how, leading, mask):
    x = tensors_of(leading, torch.float32)[1]
    attn_mask = None if mask is None else mask_of(mask, "bool", leading, torch.float32)[..., :1, :]
    if how == "script":
        function = torch.jit.script(layer)
    elif how == "compile":
        function = compiled(layer, "aot_eager", dynamic=True)
    else:
        module = torch.nn.Module()
        module.forward = layer
        function = torch.export.export(module, (x, attn_mask, True)).module()
    torch.testing.assert_close(function(x, attn_mask, True), layer(x, attn_mask, True))


# --- Errors ---------------------------------------------------------------------------------------------------------

QUERY = torch.zeros(2, 4, 5, 8)
FIVE = torch.zeros(2, 3, 4, 5, 8)


@pytest.mark.parametrize(
    ("args", "options", "error"),
    (
        (([[0.0]], QUERY, QUERY), {}, TypeError("expected query to be a tensor, got list")),
        ((QUERY, QUERY, QUERY, [True]), {}, TypeError("expected attn_mask to be a tensor, got list")),
        (
            (QUERY.to_sparse(), QUERY, QUERY),
            {},
            TypeError("expected query of layout torch.strided, got torch.sparse_coo"),
        ),
        ((QUERY, QUERY.double(), QUERY), {}, TypeError("expected key of dtype float32, got float64")),
        ((QUERY.int(), QUERY.int(), QUERY.int()), {}, TypeError("expected query of dtype float32, float64, bfloat16")),
        ((QUERY, QUERY, QUERY[:, :, :3]), {}, ValueError("expected value of key's length 5, got 3")),
        ((QUERY, QUERY[..., :0], QUERY), {}, ValueError("expected key of query's head size 8, got 0")),
        ((QUERY, QUERY, QUERY, FIVE[..., :5].bool()), {}, ValueError("attn_mask of at most 4 dimensions, got 5")),
        ((QUERY, QUERY, QUERY, torch.ones(5, 4).bool()), {}, ValueError(r"broadcasts to \(B, H, Lq, Lk\)")),
        ((FIVE, FIVE, FIVE, torch.ones(3, 3, 1, 5, 5)), {}, ValueError(r"broadcast to \[2, 3\], got \[3, 3\]")),
        (
            (FIVE[:1], FIVE[:1], FIVE[:1], torch.ones(2, 1, 1, 5, 5)),
            {},
            ValueError(r"attn_mask whose leading dimensions broadcast to \[1, 3\], got \[2, 1\]"),
        ),
        ((QUERY[0, 0], QUERY[0, 0], QUERY[0, 0]), {"enable_gqa": True}, ValueError("at least 3 dimensions, got 2, 2")),
        ((QUERY, QUERY[:, :3], QUERY[:, :3]), {"enable_gqa": True}, ValueError("multiple of key's, got 4 and 3")),
        ((QUERY, QUERY[:, :2], QUERY[:, :3]), {"enable_gqa": True}, ValueError("as many heads as key, 4, got 3")),
        ((QUERY, QUERY, QUERY), {"dropout_p": -0.5}, ValueError("expected dropout_p between 0 and 1, got -0.5")),
    ),
    ids=lambda x: str(x)[:60] if isinstance(x, Exception) else "",
)
def test_errors(args, options, error):
    with pytest.raises(type(error), match=f"attention: .*{error}"):
        sdpa(*args, **options)


def test_causal_bias_is_known_by_its_class():
    """It is a tensor of uninitialised numbers whose shape means nothing."""
    assert isinstance(causal_upper_left(5, 5), CausalBias)
    assert causal_upper_left(5, 5).shape == (1, 5, 5)
