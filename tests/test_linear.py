"""The projections of a layer in tiles of our own, MHA_EXT_LINEAR=tiles, whatever is the fastest on this machine."""

from __future__ import annotations

import ast
import copy
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from mha_ext import _C
from tests import reference, test_multi_head_attention
from tests.cases import all_pairs, row_id
from tests.checks import isa_every
from tests.test_determinism import assert_same_bits, same_bits
from tests.test_multi_head_attention import Layer, check, gradients, lay, multi_head_attention

# Around the sizes of blocks (kernels/tile_size.h): 64 and 128 rows and columns, a depth of 512, few rows up to 32.
FEATURES = [1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 100, 129, 511, 512, 513, 1030]
ROWS = {  # batch, length
    1: (1, 1),
    2: (2, 1),
    15: (3, 5),
    16: (2, 8),
    17: (17, 1),
    31: (1, 31),
    32: (4, 8),
    33: (3, 11),
    63: (7, 9),
    64: (64, 1),
    65: (5, 13),
    100: (4, 25),
    129: (3, 43),
    1025: (41, 25),
}
SIZES = all_pairs(
    rows=list(ROWS),
    inputs=FEATURES,
    outputs=FEATURES,
    heads=[(1, 1), (2, 1)],
    cross=[False, True],
    biases=[True, False],
)
NAMES = tuple(name for name in reference.LAYER_GRADIENTS if name != "bias")
INPUTS, WEIGHTS, BIASES = NAMES[:3], NAMES[3:7], NAMES[7:]


def start() -> None:
    os.environ["MHA_EXT_LINEAR"] = "tiles"


def run(function: Callable, *arguments) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    function(*arguments)


@pytest.fixture(scope="module")
def tiles() -> Iterator[Callable[..., None]]:
    """Calls a function in a process of its own whose projections are in tiles: a process chooses once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start) as process:
        yield lambda function, *arguments: process.submit(run, function, *arguments).result(timeout=300)


def check_use() -> None:
    assert set(_C.linear_backends().values()) == {"tiles" if _C.brgemm_available() else "blas"}


def test_tiles_are_used(tiles):
    tiles(check_use)


def test_what_is_measured_is_one_of_three():
    backends = _C.linear_backends()
    assert list(backends) == ["forward", "grad_input", "grad_weight"]
    assert set(backends.values()) <= {"tiles", "onednn", "blas"}


def make(
    batch: int,
    length: int,
    inputs: int,
    outputs: int,
    heads: tuple[int, int] = (1, 1),
    cross: bool = False,
    biases: bool = True,
    **options,
) -> Layer:
    """Projects `inputs` features to `outputs`, with 1 head if those cannot be divided.

    In cross-attention no two lengths and no two numbers of features are the same.
    """
    heads, kv_heads = heads if outputs % heads[0] == 0 else (1, 1)
    other = int(cross)
    head_dim, value_dim = outputs // heads, outputs // heads + other
    x = torch.randn(batch, length, inputs)
    key, value = (torch.randn(batch, length + 2, inputs + n) if cross else x for n in (1, 2))
    shapes = {
        "w_q": (heads * head_dim, inputs),
        "w_k": (kv_heads * head_dim, inputs + other),
        "w_v": (kv_heads * value_dim, inputs + 2 * other),
        "w_o": (inputs + 3 * other, heads * value_dim),
    }
    weights = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    b = {f"b_{name[-1]}": torch.randn(shape[0]) if biases else None for name, shape in shapes.items()}
    grad_output = torch.randn(batch, length, shapes["w_o"][0])
    return Layer(
        {"query": x, "key": key, "value": value, **weights, **b},
        heads,
        {"need_weights": False, **options},
        grad_output,
        None,
    )


def attend(layer: Layer, wanted: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    """The output, and the gradients that are wanted, by name."""
    leaves = layer.leaves()
    for name, x in leaves.items():
        x.requires_grad_(name in wanted)
    results = multi_head_attention(*layer.arguments(), **layer.options)
    found = gradients(results, layer, {name: x for name, x in leaves.items() if x.requires_grad})
    return {"output": results[0].detach(), **found}


def check_values(layer: Layer, found: dict[str, Tensor] | None = None) -> None:
    found = dict(found or attend(layer))
    output = found.pop("output")
    check(layer, (output, output.new_empty(0)), found, output_cancels=True)


# --- Values -------------------------------------------------------------------------------------------------------


def check_size(row: dict) -> None:
    row = dict(row)
    check_values(make(*ROWS[row.pop("rows")], **row))


@pytest.mark.parametrize("row", isa_every(5, SIZES), ids=row_id)
def test_values_and_gradients_of_all_sizes(tiles, row):
    tiles(check_size, row)


@pytest.mark.parametrize("row", test_multi_head_attention.FEATURES, ids=row_id)
def test_values_and_gradients_of_feature_combinations(tiles, row):
    check_row = test_multi_head_attention.test_values_and_gradients_of_feature_combinations
    tiles(check_row, {**row, "dtype": "float32"})


def check_each_gradient(cross: bool, size: tuple[int, ...]) -> None:
    layer = make(*size, heads=(4, 2), cross=cross)
    together = attend(layer)
    inputs = INPUTS if cross else INPUTS[:1]
    for wanted in [(name,) for name in (*inputs, *WEIGHTS, *BIASES)] + [inputs, WEIGHTS, BIASES, (*inputs, "w_k")]:
        found = attend(layer, wanted)
        assert set(found) == {"output", *wanted}
        assert_same_bits(found, together)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 5, 12), (2, 50, 100, 64), (3, 400, 65, 516)], ids=str)
def test_each_gradient_alone(tiles, cross, size):
    tiles(check_each_gradient, cross, size)


def check_weights_only(size: tuple[int, ...]) -> None:
    """Of the results only the weights have a gradient: the output's is one zero, expanded."""
    layer = make(*size, need_weights=True)
    leaves = {name: x.requires_grad_() for name, x in layer.leaves().items()}
    layer.grad_weights = torch.randn(size[0], 1, size[1], size[1])
    output, weights = multi_head_attention(*layer.arguments(), **layer.options)
    grads = torch.autograd.grad(weights, list(leaves.values()), layer.grad_weights)
    layer.grad_output = torch.zeros_like(layer.grad_output)
    check(layer, (output, weights), dict(zip(leaves, grads, strict=True)))


@pytest.mark.parametrize("size", [(1, 3, 5, 4), (3, 30, 65, 64)], ids=str)
def test_a_gradient_of_the_weights_only(tiles, size):
    tiles(check_weights_only, size)


# --- Layouts ------------------------------------------------------------------------------------------------------


def in_sliced_rows(x: Tensor) -> Tensor:
    buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 5), math.nan)
    return buffer[..., 3:-2].copy_(x)


def in_odd_strides_of_ones(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, [(0, 3, 4097)[i] if n == 1 else x.stride(i) for i, n in enumerate(x.shape)])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: lay(x, "odd_strides"),
    "sliced rows": in_sliced_rows,
    "first for all": lambda x: x[:1].expand_as(x),
    "first column for all": lambda x: x[..., :1].expand_as(x),
    "one number": lambda x: x.new_full((), 0.5).expand_as(x),
    "odd strides of ones": in_odd_strides_of_ones,
}


def check_layout(layout: str, cross: bool, size: tuple[int, ...]) -> None:
    layer = make(*size, cross=cross)
    for name in (*layer.leaves(), "grad_output"):
        stored, dense = copy.deepcopy(layer), copy.deepcopy(layer)
        x = LAYOUTS[layout](layer.grad_output if name == "grad_output" else layer.tensors[name])
        for other, y in ((stored, x), (dense, x.clone(memory_format=torch.contiguous_format))):
            if name == "grad_output":
                other.grad_output = y
            else:
                same = [n for n, tensor in other.tensors.items() if tensor is other.tensors[name]]
                other.tensors.update(dict.fromkeys(same, y))
        found, expected = attend(stored), attend(dense)
        for result in expected:
            assert same_bits(found[result], expected[result]), f"{result}, with {name} {layout}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1), (1, 40, 1, 16), (40, 1, 16, 1), (2, 20, 1, 1), (1, 1, 48, 32), (3, 30, 70, 65)], ids=str
)
def test_inputs_parameters_and_incoming_gradients_of_any_layout(tiles, layout, cross, size):
    tiles(check_layout, layout, cross, size)


# --- Rows that must not meet --------------------------------------------------------------------------------------


def check_padding(lengths: tuple[int, ...], cross: bool, features: tuple[int, int], uniform: bool) -> None:
    options = {"key_lengths": torch.tensor(lengths), "uniform_dead_rows": uniform}
    check_values(make(len(lengths), 40, *features, heads=(4, 2), cross=cross, **options))


@pytest.mark.parametrize("lengths", [(10, 40, 30), (40, 40, 39), (1, 0, 40), (0, 1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("features", [(64, 64), (100, 68)], ids=str)
@pytest.mark.parametrize("uniform", [False, True])
def test_padded_keys(tiles, lengths, cross, features, uniform):
    tiles(check_padding, lengths, cross, features, uniform)


def check_hidden(hide: str, size: tuple[int, ...]) -> None:
    batch, length = size[:2]
    seen = torch.arange(length + 2) < length
    option = {
        "mask": seen,
        "bias": torch.zeros(length + 2).masked_fill(~seen, -math.inf),
        "key_lengths": torch.full((batch,), length),
        "is_causal": True,
        "half": torch.full((batch,), length // 2),
        "dead query": (torch.arange(length) > 0)[:, None],
    }[hide]
    name = {"half": "key_lengths", "dead query": "mask"}.get(hide, hide)
    layer = make(*size, cross=True, **{name: option})
    spoiled = copy.deepcopy(layer)
    if hide == "dead query":
        spoiled.tensors["query"][:, 0] = math.nan
    else:
        first = length // 2 if hide == "half" else length
        spoiled.tensors["key"][:, first:] = math.nan
        spoiled.tensors["value"][:, first:, -1] = math.inf
    check_values(layer, attend(spoiled))


@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "is_causal", "half", "dead query"])
@pytest.mark.parametrize("size", [(2, 4, 16, 16), (3, 30, 100, 64), (2, 70, 17, 65)], ids=str)
def test_nothing_leaks_from_hidden_rows(tiles, hide, size):
    """NaN and infinity there reach neither the output nor a gradient."""
    tiles(check_hidden, hide, size)


def test_nothing_leaks_from_padded_keys(tiles):
    tiles(test_multi_head_attention.test_nothing_leaks_from_padded_keys)


def check_spoiled_inputs(size: tuple[int, ...], bad: float) -> None:
    layer = make(*size, cross=True)
    expected = attend(layer)["output"].flatten(0, 1)
    rows, length = expected.shape[0], size[1]
    for row in sorted({0, 1, 15, 31, 32, 63, 64, rows - 1} & set(range(rows))):
        alone, sequence = torch.arange(rows) == row, torch.arange(rows) // length == row // length
        for name, reached in (("query", alone), ("key", sequence), ("value", sequence)):
            spoiled = copy.deepcopy(layer)
            with torch.no_grad():
                spoiled.tensors[name][row // length, row % length, -1] = bad
            found = attend(spoiled)["output"].flatten(0, 1)
            assert same_bits(found[~reached], expected[~reached]), f"{name} {row}"
            assert not math.isnan(bad) or found[reached].isnan().all(), f"{name} {row}"


@pytest.mark.parametrize("size", [(5, 1, 16, 16), (3, 10, 48, 65), (2, 40, 100, 64), (9, 8, 513, 17)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(tiles, size, bad):
    tiles(check_spoiled_inputs, size, bad)


def check_spoiled_gradients(size: tuple[int, ...]) -> None:
    layer = make(*size, cross=True)
    expected = attend(layer)
    for i in range(0, size[0], 2):
        spoiled = copy.deepcopy(layer)
        spoiled.grad_output[i] = math.nan
        found, others = attend(spoiled), torch.arange(size[0]) != i
        for name in INPUTS:
            assert same_bits(found[name][others], expected[name][others]), name
        assert found["query"][i].isnan().all() and found["w_o"].isnan().all()
    features = expected["b_o"].numel()
    for column in {0, features // 2, features - 1}:
        spoiled = copy.deepcopy(layer)
        spoiled.grad_output[-1, -1, column] = math.nan
        found, others = attend(spoiled), torch.arange(features) != column
        for name in ("w_o", "b_o"):
            assert same_bits(found[name][others], expected[name][others]), name
            assert found[name][column].isnan().all()


@pytest.mark.parametrize("size", [(5, 1, 16, 16), (3, 10, 48, 65), (2, 40, 100, 64), (9, 8, 513, 17)], ids=str)
def test_incoming_gradients_that_are_nan_stay_in_their_row_and_column(tiles, size):
    tiles(check_spoiled_gradients, size)


# --- The same bits ------------------------------------------------------------------------------------------------


def check_threads(cross: bool, size: tuple[int, ...], padded: bool) -> None:
    options = {"key_lengths": torch.tensor([size[1], 1, *[size[1] // 2] * (size[0] - 2)])} if padded else {}
    layer = make(*size, heads=(4, 2), cross=cross, **options)
    expected = None
    for threads in (1, 2, 3, 8, 2):
        torch.set_num_threads(threads)
        found = attend(layer)
        expected = expected or found
        assert_same_bits(found, expected)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("size", [(2, 10, 512, 512), (3, 41, 100, 260), (2, 300, 65, 516), (5, 205, 48, 64)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_any_number_of_threads(tiles, cross, size, padded):
    tiles(check_threads, cross, size, padded)


def check_batch_mates(cross: bool, length: int, features: tuple[int, int], lengths: tuple[int, ...] | None) -> None:
    batch = 5 if lengths is None else len(lengths)
    options = {} if lengths is None else {"key_lengths": torch.tensor([n * length // 100 for n in lengths])}
    layer = make(batch, length, *features, heads=(4, 2), cross=cross, **options)
    together = attend(layer)
    different = []
    for i in range(batch):
        alone = copy.deepcopy(layer)
        query, key, value = (x[i : i + 1].clone() for x in list(layer.tensors.values())[:3])
        alone.tensors.update({"query": query, "key": key if cross else query, "value": value if cross else query})
        alone.grad_output = layer.grad_output[i : i + 1].clone()
        alone.options = {name: x[i : i + 1] if name == "key_lengths" else x for name, x in layer.options.items()}
        found = attend(alone)
        names = [name for name in ("output", *INPUTS) if name in found]
        different += [name for name in names if not same_bits(found[name], together[name][i : i + 1])]
    assert not different, f"{sorted(set(different))} with {batch} sequences and with 1"


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 300])
@pytest.mark.parametrize(
    "features", [(16, 16), (17, 16), (48, 20), (64, 64), (65, 100), (100, 64), (512, 512)], ids=str
)
def test_a_batch_equals_its_members_alone(tiles, cross, length, features):
    tiles(check_batch_mates, cross, length, features, None)


@pytest.mark.parametrize("lengths", [(10, 80, 100), (1, 100, 0, 30)], ids=str)  # in percent
@pytest.mark.parametrize("length", [10, 40, 100])
@pytest.mark.parametrize("features", [(64, 64), (100, 64)], ids=str)
def test_a_padded_batch_equals_its_members_alone(tiles, lengths, length, features):
    tiles(check_batch_mates, True, length, features, lengths)


def check_rows_that_begin_alike() -> None:
    """Few rows of an input are copied once for all projections: not for others that only begin at the same place."""
    x, w = torch.randn(1, 10, 64), torch.randn(64, 64) / 8
    forward = torch.ops.mha_ext.multi_head_attention_forward
    for key in (x[:, :5], x.reshape(1, 20, 32), x[..., :48], x.reshape(1, 5, 128)[..., :64]):
        w_k = torch.randn(64, key.size(-1)) / 8
        projected = forward(x, key, key, w, w_k, w_k, w, None, None, None, None, 4)
        for found, expected in zip(projected[2:5], (x @ w.T, key @ w_k.T, key @ w_k.T), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_begin_alike(tiles):
    tiles(check_rows_that_begin_alike)


def check_far_rows(of: str) -> None:
    """Rows so far apart that their distances do not fit in 2^31 bytes; only touched pages take memory."""
    layer = make(520, 1, 16, 16) if of == "query" else make(2, 40, 16, 520)
    dense = attend(layer)
    x = layer.tensors[of].detach()
    distance = 2**31 // 4 // 512 + 16
    far = torch.empty(x.shape[0] * distance).as_strided(x.shape, (*[distance] * (x.dim() - 1), 1))
    far.copy_(x)
    layer.tensors = {name: far if tensor is layer.tensors[of] else tensor for name, tensor in layer.tensors.items()}
    found = attend(layer)
    for name in dense:
        torch.testing.assert_close(found[name], dense[name], rtol=0, atol=0)


@pytest.mark.parametrize("of", ["query", "w_q"])
def test_rows_far_apart(tiles, of):
    tiles(check_far_rows, of)


def test_no_features():
    x = torch.randn(2, 3, 0, requires_grad=True)
    w = [torch.randn(4, 0, requires_grad=True) for _ in range(3)] + [torch.randn(5, 4, requires_grad=True)]
    output = torch.ops.mha_ext.multi_head_attention(x, x, x, *w, None, None, None, None, 2)[0]
    output.sum().backward()
    assert x.grad.shape == x.shape and all(each.grad.shape == each.shape for each in w)


def test_the_default_dtype_does_not_choose():
    script = "import torch; torch.set_default_dtype(torch.float64); from mha_ext import _C; print(_C.linear_backends())"
    environment = {name: value for name, value in os.environ.items() if name != "MHA_EXT_LINEAR"}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    # On a machine where BLAS wins all three there is nothing to see.
    assert set(_C.linear_backends().values()) == {"blas"} or set(ast.literal_eval(ran.stdout).values()) != {"blas"}
