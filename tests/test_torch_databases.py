"""Inputs that no one here wrote: every sample of torch.testing's databases for attention layers, against torch.

Truth is torch's math path in float64, without the fast paths that its layers have in evaluation. No sample has a query
that sees no key, and the databases hold no error inputs for these entries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import mha_ext.nn
from tests.checks import assert_as_good_as_plain, error, largest

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
FUNCTION = torch.nn.functional.multi_head_attention_forward


@pytest.fixture(autouse=True)
def no_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def results_and_gradients(
    run: Callable, inputs: Any, parameters: dict[str, Tensor], dtype: torch.dtype, sign: Callable = torch.clone
) -> dict[str, Tensor]:
    """What run(*args, **kwargs) of inputs = (args, kwargs) returns, and gradients of all that is floating, in dtype."""
    args, kwargs = tree_map(lambda x: x.detach().to(dtype).requires_grad_() if is_floating(x) else x, inputs)
    results = [y for y in tree_leaves(run(*args, **kwargs)) if isinstance(y, Tensor)]
    leaves = {f"input {i}": x for i, x in enumerate(tree_leaves((args, kwargs))) if is_floating(x)} | parameters
    generator = torch.Generator().manual_seed(1)
    grads = [sign(torch.randn(y.shape, generator=generator, dtype=torch.float64)).to(dtype) for y in results]
    found = torch.autograd.grad(results, list(leaves.values()), grads, allow_unused=True, materialize_grads=True)
    return {f"result {i}": y for i, y in enumerate(results)} | dict(zip(leaves, found, strict=True))


# --- The function -------------------------------------------------------------------------------------------------


def function_samples(dtype: torch.dtype) -> list[tuple[tuple, dict]]:
    """The arguments of each sample of the function, those for gradients among them."""
    (entry,) = [entry for entry in op_db if entry.name == "nn.functional.multi_head_attention_forward"]
    samples = [s for grad in (False, True) for s in entry.sample_inputs("cpu", dtype, requires_grad=grad)]
    return [((sample.input, *sample.args), sample.kwargs) for sample in samples]


F64_TOLERANCE = 1e-12  # between two ways to round the same in float64
DROPOUT = 10  # the place of dropout_p among the arguments


class SignlessSoftmax(torch.autograd.Function):
    """Given weights, and as gradient the size of the terms: p_j (d_j + sum_k p_k d_k)."""

    @staticmethod
    def forward(ctx, scores: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return weights.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        return p * (grad + (p * grad).sum(-1, keepdim=True)), None


def magnitudes(inputs: tuple[tuple, dict]) -> dict[str, Tensor]:
    """The sizes of what is summed up for each result and gradient: the scores of many samples are in the thousands."""
    softmax, weights = torch.nn.functional.softmax, []
    with mock.patch("torch.nn.functional.softmax", lambda x, dim: weights.append(softmax(x, dim=dim)) or weights[0]):
        results_and_gradients(FUNCTION, inputs, {}, torch.float64)
    signless = tree_map(lambda x: x.abs() if is_floating(x) else x, inputs)
    with mock.patch("torch.nn.functional.softmax", lambda x, dim: SignlessSoftmax.apply(x, weights[0].detach())):
        found = results_and_gradients(FUNCTION, signless, {}, torch.float64, sign=torch.abs)
    return {name: size.detach() for name, size in found.items()}


@dtypes
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_function(options, dtype):
    """Without dropout, which draws other numbers; the next test is about it."""
    samples = function_samples(dtype)
    assert len(samples) == 193
    ours = mha_ext.nn.functional.multi_head_attention_forward
    for args, kwargs in samples:
        inputs = ((*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :]), {**kwargs, **options})
        runs = ((ours, dtype), (FUNCTION, dtype), (FUNCTION, torch.float64))
        found, plain, exact = (results_and_gradients(function, inputs, {}, at) for function, at in runs)
        size = magnitudes((inputs[0], {**inputs[1], "need_weights": True}))
        assert found.keys() == exact.keys()
        for name in exact:
            size[name].clamp_(min=torch.finfo(dtype).tiny / torch.finfo(dtype).eps)  # weights next to 0 become 0
            if dtype == torch.float64:  # exact is the plain formula's: an error of its own size is no measure
                torch.testing.assert_close(found[name], exact[name], rtol=0, atol=F64_TOLERANCE * largest(size[name]))
            else:
                assert_as_good_as_plain(found[name], plain[name], exact[name], size[name], what=name)


@dtypes
def test_function_with_dropout(dtype):
    """Each weight is dropped or grows by 1 / (1 - p), and these weights give the output."""
    kept, tolerance = [], 1e4 * torch.finfo(dtype).eps
    for args, kwargs in function_samples(dtype):
        if args[DROPOUT] == 0.0:
            continue
        kwargs = {**kwargs, "average_attn_weights": False}
        output, weights = mha_ext.nn.functional.multi_head_attention_forward(*args, **kwargs)
        _, exact = FUNCTION(*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :], **kwargs)
        grown = exact / (1 - args[DROPOUT])
        kept.append((weights != 0)[exact > 1e-6])
        torch.testing.assert_close(weights, torch.where(weights == 0, 0, grown), rtol=0, atol=tolerance)
        with mock.patch("torch.nn.functional.dropout", lambda x, p, weights=weights: weights.view(x.shape)):
            expected, _ = FUNCTION(*args, **kwargs)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert 0.45 < torch.cat(kept).double().mean() < 0.55


# --- The layers ---------------------------------------------------------------------------------------------------


class Errors:
    """Largest distances from the exact tensors of each sample, as parts of the largest of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ours: list[float] = []
        self.plain: list[float] = []

    def add(self, ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        assert ours.keys() == plain.keys() == exact.keys()
        assert all(ours[name].shape == exact[name].shape and ours[name].isfinite().all() for name in exact)
        scale = max(largest(y) for y in exact.values())
        for errors, found in ((self.ours, ours), (self.plain, plain)):
            errors.append(max(error(found[name], exact[name]) for name in exact) / scale)

    def assert_as_good_as_plain(self) -> None:
        """In the mean over the samples at most twice torch's in the same dtype and a few last places; no outlier."""
        epsilon = torch.finfo(self.dtype).eps
        ours, plain = torch.tensor(self.ours), torch.tensor(self.plain)
        if self.dtype == torch.float64:  # exact is torch's own: its error is unknown
            assert ours.max() <= F64_TOLERANCE
            return
        assert ours.mean() <= 2 * plain.mean() + 8 * epsilon
        assert ours.max() <= 4 * plain.max() + 64 * epsilon


MODULES = {
    entry.module_cls: entry
    for entry in module_db
    if entry.module_cls is nn.MultiheadAttention or entry.module_cls.__name__.startswith("Transformer")
}


def as_ours(module: nn.Module) -> nn.Module:
    """A copy with the same parameters whose attention layers are ours."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.MultiheadAttention:
            layer.__class__ = mha_ext.nn.MultiheadAttention
    return module


def test_the_database_has_the_layers():
    names = {module.__name__ for module in MODULES}
    transformers = ("", "EncoderLayer", "DecoderLayer", "Encoder")
    assert names >= {"MultiheadAttention", *(f"Transformer{name}" for name in transformers)}


@dtypes
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_layer(module, training, dtype):
    entry = MODULES[module]
    samples = entry.module_inputs_func(entry, "cpu", dtype, True, training)
    assert len(samples) >= 30
    errors, forward = Errors(dtype), mha_ext.nn.MultiheadAttention.forward
    for sample in samples:
        constructed, (args, kwargs) = sample.constructor_input, (sample.forward_input.args, sample.forward_input.kwargs)
        theirs = module(*constructed.args, **constructed.kwargs).to(dtype).train(training)
        with mock.patch.object(mha_ext.nn.MultiheadAttention, "forward", autospec=True, side_effect=forward) as called:
            runs = ((as_ours(theirs), dtype), (theirs, dtype), (copy.deepcopy(theirs).double(), torch.float64))
            errors.add(
                *(results_and_gradients(run, (args, kwargs), dict(run.named_parameters()), at) for run, at in runs)
            )
        assert called.call_count == sum(isinstance(layer, nn.MultiheadAttention) for layer in theirs.modules())
    errors.assert_as_good_as_plain()
