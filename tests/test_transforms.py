"""Derivatives of every order, forward and reverse, and torch.func.vmap: each equal to the formula in ATen calls or to a
loop. The first derivative that autograd takes is the engine's, everything else the composite form's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import mha_ext
from tests import documents, reference
from tests.cases import Case, all_pairs, make
from tests.checks import composite, plain_attention, plain_multi_head_attention

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.* is deprecated")

ops = torch.ops.mha_ext
Loss = Callable[[Tensor], Tensor]

# --- What is differentiated: scalars of one flat vector -------------------------------------------------------------


@dataclass
class Subject:
    """The same scalar function of a vector x twice, ours and in torch's own calls, and a direction v."""

    ours: Loss
    plain: Loss
    x: Tensor
    v: Tensor


def subject(ours: Callable[..., Any], plain: Callable[..., Any], tensors: list[Tensor]) -> Subject:
    """Out of two functions of `tensors` to one result or several."""
    sizes, shapes = [x.numel() for x in tensors], [x.shape for x in tensors]
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    coefficients: list[Tensor] = []

    def loss(function: Callable[..., Any], x: Tensor) -> Tensor:
        results = function(*(part.view(shape) for part, shape in zip(x.split(sizes), shapes, strict=True)))
        results = results if isinstance(results, tuple) else (results,)
        if not coefficients:
            coefficients.extend(draw(y.shape) for y in results)
        return sum((y * c).sin().sum() for y, c in zip(results, coefficients, strict=True))

    x = torch.cat([t.detach().flatten() for t in tensors])
    loss(plain, x)  # (makes the coefficients)
    return Subject(functools.partial(loss, ours), functools.partial(loss, plain), x, draw(x.shape))


def core(case: Case) -> Subject:
    """`attention`, through all three results."""
    inputs = make(case, torch.float64, seed=1)
    leaves = inputs.leaves()

    def function(op: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *bias = tensors
        output, weights, logsumexp = op(query, key, value, **{**inputs.options, "bias": bias[0] if bias else None})
        finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)
        return (output, weights, finite) if case.need_weights else (output, finite)

    return subject(
        functools.partial(function, ops.attention),
        functools.partial(function, plain_attention),
        list(leaves.values()),
    )


def layer(**options: Any) -> Subject:
    """`multi_head_attention` of 4 heads on 2, as a function of its eleven tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 3), (1, 3, 3), (1, 3, 3), (4, 3), (2, 3), (2, 3), (2, 4), (4,), (2,), (2,), (2,)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    kept = slice(None) if options.get("need_weights", True) else slice(1)
    return subject(
        lambda *x: ops.multi_head_attention(*x, 4, **options)[kept],
        lambda *x: plain_multi_head_attention(*x, 4, **options)[kept],
        tensors,
    )


def modules(ours: torch.nn.Module, plain: torch.nn.Module, **options: Any) -> Subject:
    """Two modules with the same parameters, as functions of these and of one input."""
    names = [name for name, _ in ours.named_parameters()]
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def call(module: torch.nn.Module, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x, x, x), options)

    return subject(functools.partial(call, ours), functools.partial(call, plain), [x, *ours.parameters()])


def document_layer() -> Subject:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    ours, document = mha_ext.MultiHeadAttention(4, 2).double(), documents.MultiHeadAttention(4, 2).double()
    return modules(ours, document, mask=mask)


def torch_layer() -> Subject:
    padding = torch.tensor([[False, False, True], [False, False, False]])
    ours, theirs = (nn.MultiheadAttention(4, 2, batch_first=True).double() for nn in (mha_ext.nn, torch.nn))
    return modules(ours, theirs, key_padding_mask=padding)


def torch_function() -> Subject:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2), (3, 3)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def plain(*x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*x, enable_gqa=True)

    return subject(lambda *x: mha_ext.scaled_dot_product_attention(*x, enable_gqa=True), plain, tensors)


SMALL = {"batch": 1, "head_dim": 2}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "attention": lambda: core(Case("", **SMALL, q_len=2, kv_len=3, need_weights=True)),
    "causal": lambda: core(Case("", **SMALL, q_len=3, kv_len=2, causal="bottom_right", need_weights=True)),
    "masked, biased, capped": lambda: core(
        Case("", **SMALL, q_len=3, kv_len=3, mask="plane", bias="full", uniform_dead_rows=True, softcap=0.8)
    ),
    "grouped, dropped, averaged": lambda: core(
        Case(
            "",
            **{**SMALL, "batch": 2},
            heads=4,
            kv_heads=2,
            q_len=2,
            kv_len=3,
            value_dim=3,
            key_lengths=True,
            bias="heads",
            dropout_p=0.4,
            need_weights=True,
            average_weights=True,
            weights_before_dropout=True,
        )
    ),
    "layer": lambda: layer(),
    "layer with options": lambda: layer(
        mask=torch.tensor([[True, True, False], [False, False, False]]),
        dropout_p=0.4,
        seed=torch.tensor(5),
        softcap=1.5,
        uniform_dead_rows=True,
        need_weights=False,
    ),
    "MultiHeadAttention": document_layer,
    "nn.MultiheadAttention": torch_layer,
    "scaled_dot_product_attention": torch_function,
}


@functools.cache
def known(name: str) -> tuple[Subject, dict[str, Tensor]]:
    """The subject, and the derivatives of its plain form: value, g, g v, H v, H and the third, d(v H v)/dx."""
    torch.manual_seed(0)
    it = SUBJECTS[name]()
    x = it.x.clone().requires_grad_()
    value = it.plain(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first @ it.v, x, create_graph=True)
    (third,) = torch.autograd.grad(second @ it.v, x, retain_graph=True)
    rows = [torch.autograd.grad(entry, x, retain_graph=True)[0] for entry in first]
    found = {"g": first, "gv": first @ it.v, "Hv": second, "H": torch.stack(rows), "third": third}
    return it, {name: derivative.detach() for name, derivative in found.items()}


# --- The ways to take a derivative: functions of (f, x, v) ----------------------------------------------------------


def reverse(f: Loss, x: Tensor, create_graph: bool = False) -> tuple[Tensor, Tensor]:
    """x as a leaf, and the gradient that autograd finds for it."""
    x = x.clone().requires_grad_()
    return x, torch.autograd.grad(f(x), x, create_graph=create_graph)[0]


def twice(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    x, first = reverse(f, x, create_graph=True)
    return torch.autograd.grad((first * v).sum(), x)[0]


def three_times(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    x, first = reverse(f, x, create_graph=True)
    (second,) = torch.autograd.grad(first @ v, x, create_graph=True)
    return torch.autograd.grad(second @ v, x)[0]


def dual(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent


def dual_of_gradient(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x.clone().requires_grad_(), v)
        return forward_ad.unpack_dual(torch.autograd.grad(f(x), x)[0]).tangent


def gradient_of_dual(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
        return torch.autograd.grad(tangent, x)[0]


def batched_gradients(f: Loss, x: Tensor, create_graph: bool = False) -> tuple[Tensor, Tensor]:
    """A leaf x, and 1, 2 and 3 times the gradient in one pass of the backward."""
    x = x.clone().requires_grad_()
    factors = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    return x, torch.autograd.grad(f(x), x, factors, is_grads_batched=True, create_graph=create_graph)[0]


def batched_twice(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    x, each = batched_gradients(f, x, create_graph=True)
    return torch.autograd.grad(each.sum(0) @ v / 6, x)[0]


def checkpointed(f: Loss) -> Loss:
    return functools.partial(checkpoint, f, use_reentrant=False)


def hooked(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    """Whatever is saved for the backward lies elsewhere in between."""
    with torch.autograd.graph.save_on_cpu():
        return twice(f, x, v)


def with_constant(f: Loss) -> Loss:
    """f by the product rule, one factor without gradient."""

    def product(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = f(x)
        return f(x) * constant / constant.detach()

    return product


def in_inference_mode(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        return jvp(f, (x.clone(),), (v.clone(),))[1]


def without_grad_mode(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return grad(f)(x)


TRANSFORMS: dict[str, tuple[str, Callable[[Loss, Tensor, Tensor], Tensor]]] = {
    "autograd.grad": ("g", lambda f, x, v: reverse(f, x)[1]),
    "create_graph": ("g", lambda f, x, v: reverse(f, x, create_graph=True)[1]),
    "is_grads_batched": ("g", lambda f, x, v: batched_gradients(f, x)[1].sum(0) / 6),
    "checkpoint": ("g", lambda f, x, v: reverse(checkpointed(f), x)[1]),
    "functional.jacobian": ("g", lambda f, x, v: functional.jacobian(f, x, vectorize=True)),
    "forward functional.jacobian": (
        "g",
        lambda f, x, v: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    ),
    "func.grad": ("g", lambda f, x, v: grad(f)(x)),
    "func.grad without grad mode": ("g", without_grad_mode),
    "func.vjp": ("g", lambda f, x, v: vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0]),
    "func.jacrev": ("g", lambda f, x, v: jacrev(f)(x)),
    "func.jacfwd": ("g", lambda f, x, v: jacfwd(f)(x)),
    "func.jvp": ("gv", lambda f, x, v: jvp(f, (x,), (v,))[1]),
    "func.jvp in inference mode": ("gv", in_inference_mode),
    "functional.jvp": ("gv", lambda f, x, v: functional.jvp(f, x, v)[1]),
    "forward_ad": ("gv", dual),
    "double backward": ("Hv", twice),
    "batched double backward": ("Hv", batched_twice),
    "checkpointed double backward": ("Hv", lambda f, x, v: twice(checkpointed(f), x, v)),
    "double backward with hooks": ("Hv", hooked),
    "double backward of no_grad": ("Hv", lambda f, x, v: twice(with_constant(f), x, v)),
    "functional.hvp": ("Hv", lambda f, x, v: functional.hvp(f, x, v)[1]),
    "functional.vhp": ("Hv", lambda f, x, v: functional.vhp(f, x, v)[1]),
    "forward over reverse": ("Hv", lambda f, x, v: jvp(grad(f), (x,), (v,))[1]),
    "reverse over forward": ("Hv", lambda f, x, v: grad(lambda x: jvp(f, (x,), (v,))[1])(x)),
    "reverse over reverse": ("Hv", lambda f, x, v: grad(lambda x: grad(f)(x) @ v)(x)),
    "autograd over func.grad": ("Hv", lambda f, x, v: reverse(lambda x: grad(f)(x) @ v, x)[1]),
    "forward_ad over autograd": ("Hv", dual_of_gradient),
    "autograd over forward_ad": ("Hv", gradient_of_dual),
    "func.hessian": ("H", lambda f, x, v: hessian(f)(x)),
    "jacfwd of jacfwd": ("H", lambda f, x, v: jacfwd(jacfwd(f))(x)),
    "jacrev of jacrev": ("H", lambda f, x, v: jacrev(jacrev(f))(x)),
    "jacrev of jacfwd": ("H", lambda f, x, v: jacrev(jacfwd(f))(x)),
    "functional.hessian": ("H", lambda f, x, v: functional.hessian(f, x)),
    "vectorized functional.hessian": ("H", lambda f, x, v: functional.hessian(f, x, vectorize=True)),
    "forward functional.hessian": (
        "H",
        lambda f, x, v: functional.hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
    ),
    "third by autograd": ("third", three_times),
    "third by func": ("third", lambda f, x, v: grad(lambda x: jvp(grad(f), (x,), (v,))[1] @ v)(x)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_derivatives(name, transform):
    it, derivatives = known(name)
    which, compute = TRANSFORMS[transform]
    torch.testing.assert_close(compute(it.ours, it.x, it.v), derivatives[which])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_hidden_keys_reach_no_derivative(transform):
    """NaN behind a mask, as if it were not there."""
    keep = torch.tensor([True, True, False])
    memory = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    hidden = memory.masked_fill(~keep[:, None], torch.nan)

    def loss(memory: Tensor, x: Tensor) -> Tensor:
        output, weights, _ = ops.attention(x.view(1, 2, 2, 4), memory, memory, mask=keep, need_weights=True)
        return output.sin().sum() + weights.cos().sum()

    x, v = torch.randn(2, 16, dtype=torch.float64)
    _, compute = TRANSFORMS[transform]
    found, expected = (compute(functools.partial(loss, keys), x, v) for keys in (hidden, memory))
    torch.testing.assert_close(found, expected)


HIDING = {
    "lengths": {"key_lengths": torch.tensor([3, 0])},
    "dead rows that take the mean": {"key_lengths": torch.tensor([3, 1]), "uniform_dead_rows": True},
    "mask": {"mask": torch.tensor([True, True, True, False, False])},
    "bias": {"bias": torch.tensor([0, 1, 0, -torch.inf, -torch.inf])},
    "causal": {"is_causal": True},
    "causal and mask": {"is_causal": True, "mask": torch.tensor([True, False, True, True, True])},
    "causal from the bottom": {"is_causal": True, "causal_bottom_right": True},
}


@pytest.mark.parametrize("how", ["autograd", "create_graph", "func.grad", "composite", "second"])
@pytest.mark.parametrize("hide", HIDING)
def test_hidden_rows_reach_no_weight(hide, how):
    """NaN in rows of a layer's inputs that no result depends on, as if there were zeros."""
    options = HIDING[hide]
    q_len = 7 if hide == "causal from the bottom" else 3
    inputs = [torch.randn(2, length, 4, dtype=torch.float64) for length in (q_len, 5, 5)]
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    spoiled = [x.clone() for x in inputs]
    seen = reference.visible((2, 2, q_len, 5), **{k: v for k, v in options.items() if k != "uniform_dead_rows"})
    seen = torch.from_numpy(seen).expand(2, 2, q_len, 5)
    spoiled[0][~seen.any(3).any(1)] = torch.nan
    for x in spoiled[1:]:
        x[~seen.any(2).any(1)] = torch.nan
    assert any(x.isnan().any() for x in spoiled)

    def loss(weights: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        op = functools.partial(composite, ops.multi_head_attention) if how == "composite" else None
        arguments = (query, key, value, *weights, None, None, None, None, 2)
        return (op or ops.multi_head_attention)(*arguments, need_weights=False, **options)[0].sin().sum()

    def gradients(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if how == "func.grad":
            return grad(loss)(tuple(weights), *inputs)
        first = torch.autograd.grad(loss(weights, *inputs), weights, create_graph=how in ("create_graph", "second"))
        return torch.autograd.grad(sum(g.square().sum() for g in first), weights) if how == "second" else first

    for found, expected in zip(gradients(spoiled), gradients(inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_hidden_score_that_overflows_reaches_no_derivative():
    q, k, v = torch.randn(3, 1, 1, 3, 2)
    q[0, 0, 2], k[0, 0, 2] = torch.tensor([3e19, 3e19]), torch.tensor([3e19, -3e19])  # their product is inf - inf

    def loss(q: Tensor) -> Tensor:
        return ops.attention(q, k, v, key_lengths=torch.tensor([2]), softcap=5.0)[0][:, :, :2].square().sum()

    expected = torch.autograd.grad(loss(q.requires_grad_()), q)[0]
    torch.testing.assert_close(grad(loss)(q.detach()), expected)


@pytest.mark.parametrize("name", ["masked, biased, capped", "layer with options"])
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize(name):
    it, derivatives = known(name)
    value, tangent_of = linearize(it.ours, it.x)
    torch.testing.assert_close(value, it.plain(it.x))
    for direction in (it.v, 2 * it.v):
        torch.testing.assert_close(tangent_of(direction), derivatives["g"] @ direction)


@pytest.mark.parametrize("wanted", range(11))
def test_second_derivative_of_one_tensor_alone(wanted):
    """The others need no gradient, and the engine computes none; the graph of the first backward is still complete."""
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in [(2, 3, 4)] * 3 + [(4, 4)] * 4 + [(4,)] * 4]
    x = tensors[wanted].requires_grad_()
    seconds = []
    for op in (ops.multi_head_attention, plain_multi_head_attention):
        loss = sum(y.sin().sum() for y in op(*tensors, 2, is_causal=True))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("name", ["attention", "layer"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_second_derivative_of_torchscript(name, how):
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    layer, x = mha_ext.MultiHeadAttention(4, 2).double(), torch.randn(2, 3, 4, dtype=torch.float64)

    def core(x: Tensor) -> Tensor:
        return torch.ops.mha_ext.attention(x, x * 2, x + 1, is_causal=True)[0]

    eager, x = (core, q) if name == "attention" else (layer, x)
    arguments = (x,) if name == "attention" else (x, x, x)
    compiled = torch.jit.script(eager) if how == "script" else torch.jit.trace(eager, arguments)

    def loss(module: Callable[..., Any], x: Tensor) -> Tensor:
        results = module(*[x for _ in arguments])
        return sum(y.sin().sum() for y in (results if isinstance(results, tuple) else (results,)))

    v = torch.randn_like(x)
    for transform in (twice, dual, lambda f, x, v: jvp(grad(f), (x,), (v,))[1]):
        for _ in range(3):  # profiled, then optimised
            found = transform(functools.partial(loss, compiled), x, v)
            torch.testing.assert_close(found, transform(functools.partial(loss, eager), x, v))


@pytest.mark.parametrize("name", ["masked, biased, capped", "layer"])
def test_compiled_transforms(name):
    """Transforms of ours compile with it; through a graph that is compiled already there is no second backward."""
    it, derivatives = known(name)
    torch._dynamo.reset()

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def run(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return grad(it.ours)(x), jvp(grad(it.ours), (x,), (v,))[1], vmap(it.ours)(torch.stack([x, v]))

    expected = (derivatives["g"], derivatives["Hv"], torch.stack([it.plain(it.x), it.plain(it.v)]))
    torch.testing.assert_close(run(it.x, it.v), expected)
    compiled = torch.compile(it.ours, backend="aot_eager", fullgraph=True)
    _, first = reverse(compiled, it.x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (first @ it.v).backward()
    torch._dynamo.reset()


def test_operator_of_somebody_that_calls_ours():
    """It decomposes inside a transform, at a level of its own."""
    with torch.library._scoped_library("mha_ext_test", "FRAGMENT") as library:
        library.define("self_attention(Tensor x) -> Tensor")
        library.impl("self_attention", lambda x: ops.attention(x, x, x)[0], "CompositeImplicitAutograd")
        x, v = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)
        found, expected = [], []
        for results, op in (
            (found, torch.ops.mha_ext_test.self_attention),
            (expected, lambda x: plain_attention(x, x, x)[0]),
        ):

            def loss(x: Tensor, op: Callable[[Tensor], Tensor] = op) -> Tensor:
                return op(x).sin().sum()

            results += [reverse(loss, x)[1], twice(loss, x, v), grad(loss)(x), *jvp(grad(loss), (x,), (v,))]
            results.append(vmap(grad(loss))(torch.stack([x, v])))
    torch.testing.assert_close(found, expected)


# --- vmap: equal to a loop --------------------------------------------------------------------------------------------

SAMPLES = 3
IN_DIMS = (None, 0, -1)  # not mapped, or where the samples lie


def map_randomly(tensors: dict[str, Tensor], in_dims: dict[str, int | None]) -> dict[str, Tensor]:
    """Those that are mapped, stacked from as many different tensors as there are samples."""

    def other(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn_like(x)
        return torch.rand(x.shape) < 0.7 if x.dtype == torch.bool else torch.randint_like(x, 4)

    return {
        name: x if in_dims[name] is None else torch.stack([x, other(x), other(x)], in_dims[name])
        for name, x in tensors.items()
    }


def sample(tensors: dict[str, Tensor], in_dims: dict[str, int | None], i: int) -> dict[str, Tensor]:
    return {name: x if in_dims[name] is None else x.select(in_dims[name], i) for name, x in tensors.items()}


def check_against_loop(function, tensors: dict[str, Tensor], in_dims: dict[str, int | None]) -> None:
    """Results and gradients of vmap, and per-sample gradients, against autograd of each sample by itself."""
    mapped = map_randomly(tensors, in_dims)
    wanted = [name for name, x in tensors.items() if x.is_floating_point()]

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        return sum(y.sin().sum() for y in function(tensors))

    def gradient(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        constants = {name: x for name, x in tensors.items() if name not in wanted}
        return grad(lambda leaves: loss({**leaves, **constants}))({name: tensors[name] for name in wanted})

    found, gradients = (vmap(f, in_dims=(in_dims,))(mapped) for f in (function, gradient))
    for i in range(SAMPLES):
        one = sample(mapped, in_dims, i)
        leaves = [one[name].clone().requires_grad_() for name in wanted]
        results = function({**one, **dict(zip(wanted, leaves, strict=True))})
        expected = torch.autograd.grad(sum(y.sin().sum() for y in results), leaves)
        torch.testing.assert_close(tuple(y[i] for y in found), results)
        torch.testing.assert_close(tuple(gradients[name][i] for name in wanted), expected)


CORE_TENSORS = {
    "query": (2, 4, 3, 2),
    "key": (2, 2, 4, 2),
    "value": (2, 2, 4, 3),
    "mask": (3, 4),
    "bias": (4, 1, 4),
    "key_lengths": (2,),
    "seed": (),
}
PROJECTED = {"query": (2, 3, 5), "key": (2, 4, 5), "value": (2, 4, 5)}
PROJECTIONS = {
    "w_q": (8, 5),
    "w_k": (4, 5),
    "w_v": (4, 5),
    "w_o": (5, 8),
    "b_q": (8,),
    "b_k": (4,),
    "b_v": (4,),
    "b_o": (5,),
}
LAYER_TENSORS = {
    **PROJECTED,
    **PROJECTIONS,
    **{name: CORE_TENSORS[name] for name in ("mask", "bias", "key_lengths", "seed")},
}


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors by name, in float64; every query sees the first key."""
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["mask"] = torch.rand(shapes["mask"]) < 0.7
    tensors["key_lengths"] = torch.tensor([3, 4])
    tensors["seed"] = torch.tensor(7)
    return tensors


def finite(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(y.masked_fill(y == -torch.inf, 0.0) for y in results)


def run_core(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return finite(ops.attention(**tensors, dropout_p=0.3, need_weights=True))


def run_layer(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return finite(ops.multi_head_attention(**tensors, num_heads=4, dropout_p=0.3, is_causal=True))


def subsets(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, int | None]]:
    """Which tensors are mapped and where: every pair of choices for any two; no sample lies inside a scalar."""
    rows = all_pairs(**{name: IN_DIMS if shape else IN_DIMS[:2] for name, shape in shapes.items()})
    return [row for row in rows if any(dim is not None for dim in row.values())]


def subset_id(in_dims: dict[str, int | None]) -> str:
    return "-".join(name for name, dim in in_dims.items() if dim is not None)


@pytest.mark.parametrize("in_dims", subsets(CORE_TENSORS), ids=subset_id)
def test_vmap_of_attention(in_dims):
    check_against_loop(run_core, draw(CORE_TENSORS), in_dims)


@pytest.mark.parametrize("in_dims", subsets(LAYER_TENSORS), ids=subset_id)
def test_vmap_of_layer(in_dims):
    check_against_loop(run_layer, draw(LAYER_TENSORS), in_dims)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_vmap_in_chunks(chunk_size):
    q = torch.randn(3, 1, 2, 5, 4)
    found = vmap(lambda q: ops.attention(q, q, q)[0], chunk_size=chunk_size)(q)
    torch.testing.assert_close(found, torch.stack([ops.attention(x, x, x)[0] for x in q]))


def test_nested_vmap():
    """Over queries, then over keys, values and masks; the outer samples lie behind the inner ones."""
    q, k = torch.randn(1, 2, 5, 4, 2, 3), torch.randn(2, 1, 2, 6, 4)
    keep = torch.rand(5, 6, 2) < 0.7

    def run(q, k, keep):
        return ops.attention(q, k, k, mask=keep)[0]

    found = vmap(vmap(run, in_dims=(4, 0, 2)), in_dims=(5, None, None))(q, k, keep)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(found[i, j], run(q[..., j, i], k[j], keep[..., j]))


def test_vmap_of_the_backward_operators():
    core = {name: torch.randn(3, *shape) for name, shape in CORE_TENSORS.items() if name in ("query", "key", "value")}
    results = ops.attention(*(x.flatten(0, 1) for x in core.values()))
    output, logsumexp = (y.unflatten(0, (3, 2)) for y in (results[0], results[2]))
    upstream = torch.randn_like(output)

    def backward(upstream, query, key, value, output, logsumexp):
        weights = torch.empty(0)
        return ops.attention_backward(upstream, None, None, query, key, value, output, weights, logsumexp)[:3]

    arguments = (upstream, *core.values(), output, logsumexp)
    found = vmap(backward)(*arguments)
    for i in range(3):
        torch.testing.assert_close(tuple(y[i] for y in found), backward(*(x[i] for x in arguments)))


def test_ensemble():
    """Layers of different weights on one input."""
    layers = [mha_ext.MultiHeadAttention(8, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(2, 5, 8)

    def run(parameters, buffers):
        return functional_call(layers[0], (parameters, buffers), (x, x, x), {"is_causal": True})

    output, weights = vmap(run)(parameters, buffers)
    for i, layer in enumerate(layers):
        torch.testing.assert_close((output[i], weights[i]), layer(x, x, x, is_causal=True))


# --- vmap: dropout ----------------------------------------------------------------------------------------------------

P, LENGTH = 0.3, 64


def kept_by_core(q: Tensor, **options: Any) -> Tensor:
    """Which weights dropout leaves, (H, Lq, Lk)."""
    return ops.attention(q, q, q, dropout_p=P, need_weights=True, **options)[1][0] != 0


def kept_by_layer(q: Tensor, **options: Any) -> Tensor:
    x, w = q.flatten(1, 2)[:, :LENGTH], torch.eye(q.shape[-1]) / 4
    return ops.multi_head_attention(x, x, x, w, w, w, w, None, None, None, None, 2, dropout_p=P, **options)[1][0] != 0


def kept_by_gradient(q: Tensor) -> Tensor:
    """From the gradient of values that are 1 in turns: dV = P^T dO."""

    def loss(value: Tensor) -> Tensor:
        return ops.attention(q, q, value, dropout_p=P)[0].diagonal(dim1=-2, dim2=-1).sum()

    value = torch.zeros(1, 2, LENGTH, LENGTH)
    return grad(loss)(value)[0].transpose(-2, -1) != 0


@pytest.mark.parametrize("kept_by", [kept_by_core, kept_by_layer, kept_by_gradient])
@pytest.mark.parametrize("mapped", [False, True])
def test_randomness_of_dropout(kept_by, mapped):
    """As of torch.nn.functional.dropout, also where nothing that the operator takes is mapped."""
    q = torch.randn(1, 2, LENGTH, 4) / 4
    samples = torch.zeros(4)

    def run(zero: Tensor) -> Tensor:
        return kept_by(q + zero if mapped else q)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(run)(samples)
    same = vmap(run, randomness="same")(samples)
    assert all(torch.equal(kept, same[0]) for kept in same)
    different = vmap(run, randomness="different")(samples)
    for kept in (same[0], *different):
        assert kept.float().mean() == pytest.approx(1 - P, abs=0.02)
    for i in range(4):
        for j in range(i):
            both = (different[i] & different[j]).float().mean()
            assert both == pytest.approx((1 - P) ** 2, abs=0.02)  # independent


@pytest.mark.parametrize("kept_by", [kept_by_core, kept_by_layer])
@pytest.mark.parametrize("mapped", [False, True])
def test_seeds_under_vmap(kept_by, mapped):
    """A seed that is given draws nothing, so no randomness has to be chosen."""
    q, seeds = torch.randn(3, 1, 2, LENGTH, 4), torch.tensor([1, 2, 3])
    each = [kept_by(x, seed=seeds[i if mapped else 0]) for i, x in enumerate(q)]
    found = vmap(lambda q, seed: kept_by(q, seed=seed), in_dims=(0, 0 if mapped else None))(
        q, seeds if mapped else seeds[0]
    )
    assert torch.equal(found, torch.stack(each))
    alone = vmap(lambda seed: kept_by(q[0], seed=seed))(seeds)
    assert torch.equal(alone, torch.stack([kept_by(q[0], seed=seed) for seed in seeds]))


def test_autocast_caches_nothing_of_a_transform():
    """The weights that a transform casts are its own; those that autograd sees afterwards are still the parameters."""
    layer, x = mha_ext.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grad(lambda x: layer(x, x, x)[0].float().sum())(x)
        layer(x, x, x)[0].float().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


# --- Under autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["attention", "layer"])
def test_transforms_under_autocast(name, dtype):
    """The same casts as without a transform, under vmap too."""
    layer = mha_ext.MultiHeadAttention(8, 2).to(dtype).float()  # so that the casts round nothing
    x, v = torch.randn((2, 3, 2, 5, 8) if name == "attention" else (2, 3, 5, 8)).to(dtype).float()

    def run(x: Tensor) -> Tensor:
        return ops.attention(x, x, x)[0] if name == "attention" else layer(x, x, x)[0]

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return run(x)

    def loss(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x).float().square().sum()

    cast_loss, exact_loss = functools.partial(loss, cast), functools.partial(loss, run)
    value, tangent = jvp(cast, (x,), (v,))
    mapped = vmap(cast)(x[None])[0]
    assert value.dtype == tangent.dtype == mapped.dtype == cast(x).dtype == dtype
    exact_value, exact_tangent = jvp(run, (x,), (v,))
    for found, exact in (
        (cast(x), exact_value),
        (value, exact_value),
        (mapped, exact_value),
        (tangent, exact_tangent),
        (reverse(cast_loss, x)[1], grad(exact_loss)(x)),
        (grad(cast_loss)(x), grad(exact_loss)(x)),
        (vmap(grad(cast_loss))(x[None])[0], grad(exact_loss)(x)),
        (twice(cast_loss, x, v), twice(exact_loss, x, v)),
        (jvp(grad(cast_loss), (x,), (v,))[1], twice(exact_loss, x, v)),
    ):
        atol = 8 * torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(found.float(), exact, atol=atol, rtol=0.0)
