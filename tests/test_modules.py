"""mha_ext.MultiHeadAttention against the documents' classes; what it must never bypass; TorchScript."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as pruning

import mha_ext
from mha_ext import modules
from tests import reference
from tests.documents import MultiHeadAttention as Document
from tests.documents import NumpyMultiHeadAttention

D_MODEL, HEADS, BATCH, LENGTH = 32, 4, 3, 10


def pair(**options) -> tuple[mha_ext.MultiHeadAttention, Document]:
    """Ours and the document's class with the same parameters."""
    ours, document = mha_ext.MultiHeadAttention(D_MODEL, HEADS, **options), Document(D_MODEL, HEADS)
    document.load_state_dict(ours.state_dict())
    return ours, document


def inputs(kv_len: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, D_MODEL), torch.randn(BATCH, kv_len, D_MODEL), torch.randn(BATCH, kv_len, D_MODEL)


def mask_of(kind: str, q_len: int = LENGTH, kv_len: int = LENGTH) -> Tensor | None:
    seen = torch.rand(BATCH, HEADS, q_len, kv_len) < 0.6
    masks = {
        "none": lambda: None,
        "causal": lambda: torch.ones(q_len, kv_len).tril(),
        "padding": lambda: seen[:, :1, :1],
        "int": lambda: seen[:, :1].int(),
        "float": lambda: seen.float() * 2.5,
        "uint8": lambda: seen[:1].byte(),
        "negative": lambda: -seen.long(),  # whatever is not 0 shows
        "nothing": lambda: torch.zeros(q_len, kv_len, dtype=torch.bool),
        "dead rows": lambda: seen & (torch.arange(q_len) % 3 != 1).unsqueeze(-1),
    }
    return masks[kind]()


MASKS = ("none", "causal", "padding", "int", "float", "uint8", "negative", "nothing", "dead rows")


def results_and_gradients(module: nn.Module, tensors: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], **options):
    """Output, weights and the gradients of the inputs and parameters, by name."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output, weights = module(*leaves, **options)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad([output, weights], [*leaves, *parameters.values()], grads)
    return dict(
        zip(["output", "weights", "query", "key", "value", *parameters], [output, weights, *found], strict=True)
    )


# --- The document's class -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kv_len", (LENGTH, 7))
def test_agrees_with_the_document(kind, kv_len):
    ours, document = pair()
    tensors, mask = inputs(kv_len), mask_of(kind, kv_len=kv_len)
    grads = (torch.randn(BATCH, LENGTH, D_MODEL), torch.randn(BATCH, HEADS, LENGTH, kv_len))
    found = results_and_gradients(ours, tensors, grads, mask=mask)
    plain = results_and_gradients(document, tensors, grads, mask=mask)
    exact = results_and_gradients(
        copy.deepcopy(document).double(), [x.double() for x in tensors], [x.double() for x in grads], mask=mask
    )
    for name in exact:
        error, allowed = (found[name] - exact[name]).abs().max(), (plain[name] - exact[name]).abs().max()
        # The gradient of W_k's bias is 0 (a softmax does not feel a shift): its rounding errors are those of its terms.
        scale = exact["W_k.weight" if name == "W_k.bias" else name].abs().max()
        epsilon = 4 * torch.finfo(torch.float32).eps * scale
        assert error <= 2 * allowed + epsilon, f"{name}: error {error:.3g}, the document's {allowed:.3g}"


def test_rows_that_see_nothing_are_uniform():
    ours, _ = pair()
    _, weights = ours(*inputs(kv_len=5), mask=torch.zeros(LENGTH, 5))
    assert torch.equal(weights, torch.full_like(weights, 0.2))


def test_state_dict_initial_values_and_random_numbers_are_the_documents():
    torch.manual_seed(7)
    ours = mha_ext.MultiHeadAttention(D_MODEL, HEADS)
    after_ours = torch.get_rng_state()
    torch.manual_seed(7)
    document = Document(D_MODEL, HEADS)
    assert torch.equal(after_ours, torch.get_rng_state())
    assert list(ours.state_dict()) == list(document.state_dict())
    for name, value in document.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    ours.load_state_dict(document.state_dict(), strict=True)
    document.load_state_dict(ours.state_dict(), strict=True)
    assert (ours.d_model, ours.num_heads, ours.d_k) == (document.d_model, document.num_heads, document.d_k)
    defaults = mha_ext.MultiHeadAttention()
    assert (defaults.d_model, defaults.num_heads, defaults.d_k) == (512, 8, 64)


def test_constructor_errors():
    with pytest.raises(AssertionError) as error:
        mha_ext.MultiHeadAttention(10, 3)
    assert str(error.value) == "d_model must be divisible by num_heads"
    with pytest.raises(ValueError, match="expected num_heads >= 1, got 0"):
        mha_ext.MultiHeadAttention(8, 0)
    with pytest.raises(ValueError, match="expected dropout between 0 and 1, got 1.5"):
        mha_ext.MultiHeadAttention(8, 2, dropout=1.5)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
def test_dtypes(dtype):
    ours, document = pair()
    tensors = inputs()
    expected, expected_weights = document.double()(*(x.double() for x in tensors))
    output, weights = ours.to(dtype)(*(x.to(dtype) for x in tensors))
    assert output.dtype == weights.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(weights.double(), expected_weights, atol=tolerance, rtol=tolerance)


# --- Keywords -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bottom_right", (False, True))
def test_is_causal_and_key_lengths_are_masks(bottom_right):
    ours, _ = pair()
    tensors, lengths = inputs(kv_len=12), torch.tensor([3, 12, 0])
    mask = mha_ext.masks.causal(LENGTH, 12, bottom_right) & mha_ext.masks.padding(lengths, 12)
    expected = ours(*tensors, mask=mask)
    found = ours(*tensors, is_causal=True, causal_bottom_right=bottom_right, key_lengths=lengths)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_need_weights():
    ours, _ = pair()
    tensors = inputs()
    output, weights = ours(*tensors, need_weights=False)
    assert weights is None
    torch.testing.assert_close(output, ours(*tensors)[0])


def test_bias_is_added_and_has_a_gradient():
    ours, _ = pair()
    bias = torch.randn(HEADS, LENGTH, LENGTH, requires_grad=True)
    tensors = inputs()
    _, shifted = ours(*tensors, bias=bias)
    _, weights = ours(*tensors)
    expected = (weights * bias.exp()) / (weights * bias.exp()).sum(-1, keepdim=True)
    torch.testing.assert_close(shifted, expected)
    found, wanted = (torch.autograd.grad((x * x).sum(), bias, retain_graph=True)[0] for x in (shifted, expected))
    torch.testing.assert_close(found, wanted)


def test_dropout_in_training_only():
    ours, document = pair(dropout=0.5)
    tensors = inputs()
    ours.eval()
    torch.testing.assert_close(ours(*tensors)[0], document(*tensors)[0])
    ours.train()
    output, weights = ours(*tensors)
    dropped = (weights == 0).float().mean()
    assert 0.4 < dropped < 0.6
    # The returned weights are those that were used.
    value = document.split_heads(ours.W_v(tensors[2]), BATCH)
    context = (weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, D_MODEL)
    torch.testing.assert_close(output, ours.W_o(context))
    torch.manual_seed(3)
    first = ours(*tensors)[1]
    second = ours(*tensors)[1]
    torch.manual_seed(3)
    assert torch.equal(first, ours(*tensors)[1]) and not torch.equal(first, second)


def test_wrong_input_is_one_error():
    ours, _ = pair()
    query, key, value = inputs()
    with pytest.raises(ValueError, match="multi_head_attention: expected value of key's length 10, got 9"):
        ours(query, key, value[:, :9])
    with pytest.raises(ValueError, match="expected mask that broadcasts"):
        ours(query, key, value, mask=torch.ones(LENGTH, 3))
    with pytest.raises(TypeError, match="expected query of dtype"):
        ours(query.long(), key, value)
    with pytest.raises(ValueError, match="got 11 at index 1"):
        ours(query, key, value, key_lengths=torch.tensor([1, 11, 2]))


def test_self_attention_of_one_tensor():
    ours, document = pair()
    x, y = (inputs()[0].requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    ours(x, x, x)[0].square().sum().backward()
    document(y, y, y)[0].square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_copies():
    ours, _ = pair(dropout=0.1)
    tensors = inputs()
    ours.eval()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(*tensors)[0], ours(*tensors)[0])


# --- The NumPy class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (np.float64, np.float32))
@pytest.mark.parametrize("kind", ("none", "float", "bool", "dead rows"))
def test_from_numpy(dtype, kind):
    np.random.seed(0)
    document = NumpyMultiHeadAttention(D_MODEL, HEADS)
    matrices = {name: getattr(document, name).astype(dtype) for name in ("W_q", "W_k", "W_v", "W_o")}
    for name, matrix in matrices.items():
        setattr(document, name, matrix)
    q, k, v = (x.numpy().astype(dtype) for x in inputs(kv_len=7))
    hidden = np.random.rand(BATCH, 1, LENGTH, 7) < 0.4
    mask = {"none": None, "float": hidden.astype(dtype), "bool": hidden, "dead rows": np.ones((LENGTH, 7))}[kind]
    ours = mha_ext.MultiHeadAttention.from_numpy(**matrices, num_heads=HEADS)
    output, weights = ours(*map(torch.from_numpy, (q, k, v)), mask=None if mask is None else torch.as_tensor(mask))
    expected, expected_weights = document.call(q, k, v, mask)
    assert output.dtype == ours.W_q.weight.dtype == torch.from_numpy(q).dtype
    tolerance = {np.float64: 1e-6 if kind == "dead rows" else 1e-12, np.float32: 1e-5}[dtype]
    np.testing.assert_allclose(weights.detach().numpy(), expected_weights, atol=tolerance)
    np.testing.assert_allclose(output.detach().numpy(), expected, atol=10 * tolerance)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"key_lengths": torch.tensor([3, 5])}], ids=str)
def test_from_numpy_beside_other_masks(options):
    """A row whose seen keys are all masked is the softmax of their scores, whatever the keys it cannot see are."""
    rng = np.random.default_rng(4)
    matrices = rng.standard_normal((4, D_MODEL, D_MODEL)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((2, 6, D_MODEL)).astype(np.float32))
    mask = torch.zeros(2, 1, 6, 6)
    mask[..., 3, :5] = 1
    exact = mha_ext.MultiHeadAttention.from_numpy(*matrices.astype(np.float64), num_heads=HEADS)
    ours = mha_ext.MultiHeadAttention.from_numpy(*matrices, num_heads=HEADS)
    expected = exact(*[x.double()] * 3, mask, **options)[1]
    assert expected[:, :, 3].std() > 0.01
    torch.testing.assert_close(ours(x, x, x, mask, **options)[1].double(), expected, rtol=1e-4, atol=1e-6)


def test_from_numpy_copies_and_checks():
    matrices = [np.asfortranarray(np.random.randn(8, 8)) for _ in range(4)]
    ours = mha_ext.MultiHeadAttention.from_numpy(*matrices, num_heads=2)
    before = ours.W_q.weight.detach().clone()
    matrices[0][:] = 0
    assert torch.equal(ours.W_q.weight, before) and ours.W_q.weight.is_contiguous() and ours.W_q.bias is None
    with pytest.raises(ValueError, match="expected W_k of shape"):
        mha_ext.MultiHeadAttention.from_numpy(matrices[0], matrices[1][:4], *matrices[2:], num_heads=2)
    with pytest.raises(TypeError, match="one floating dtype"):
        mha_ext.MultiHeadAttention.from_numpy(*(m.astype(int) for m in matrices), num_heads=2)


# --- Nothing is bypassed --------------------------------------------------------------------------------------------

PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoublingParameter(nn.Parameter):
    """A tensor subclass with a linear function of its own, as quantised weights have one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return 2 * result if function is nn.functional.linear else result


class Adapter(nn.Module):
    """A low-rank addition to a projection, as LoRA makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def add_doubling_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_hook(lambda module, args, output: 2 * output)


def add_doubling_pre_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_pre_hook(lambda module, args: (2 * args[0],))


def add_backward_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_full_backward_hook(lambda module, grads, _: tuple(2 * grad for grad in grads))


def add_backward_pre_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_full_backward_pre_hook(lambda module, grads: tuple(2 * grad for grad in grads))


def parametrize(module: nn.Module, name: str) -> None:
    nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", Twice())


def normalize(module: nn.Module, name: str) -> None:
    linear = nn.utils.parametrizations.weight_norm(getattr(module, name))
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(2)


def prune(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    keep = torch.arange(linear.weight.numel()).view_as(linear.weight) % 2
    pruning.custom_from_mask(linear, "weight", keep)


def replace_by_subclass(module: nn.Module, name: str) -> None:
    linear = Doubled(D_MODEL, D_MODEL)
    linear.load_state_dict(getattr(module, name).state_dict())
    setattr(module, name, linear)


def adapt(module: nn.Module, name: str) -> None:
    torch.manual_seed(5)
    setattr(module, name, Adapter(getattr(module, name)))


def override_forward(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight, linear.bias)


def override_call_impl(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear._call_impl = lambda x: 2 * linear.forward(x)


def shadow_weight(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear.__dict__["weight"] = 2 * linear.weight  # found before the parameter


def shadow_bias(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear.__dict__["bias"] = 2 * linear.bias


def freeze_weight(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    weight = 2 * linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)


def freeze_bias(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    bias = 2 * linear.bias.detach()
    del linear.bias
    linear.register_buffer("bias", bias)


def subclass_weight(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear.weight = DoublingParameter(linear.weight.detach())


def subclass_bias(module: nn.Module, name: str) -> None:
    linear = getattr(module, name)
    linear.bias = DoublingParameter(linear.bias.detach())


CHANGES = (
    add_doubling_hook,
    add_doubling_pre_hook,
    add_backward_hook,
    add_backward_pre_hook,
    parametrize,
    normalize,
    prune,
    replace_by_subclass,
    adapt,
    override_forward,
    override_call_impl,
    shadow_weight,
    shadow_bias,
    freeze_weight,
    freeze_bias,
    subclass_weight,
    subclass_bias,
)


def replaced(owner: object, attribute: str) -> Callable[[nn.Linear], contextlib.AbstractContextManager]:
    """The function that all modules are called by, replaced by one that doubles the results of one module."""

    def replace(linear: nn.Linear) -> contextlib.AbstractContextManager:
        original = getattr(owner, attribute)

        def double(*args, **kwargs):
            result = original(*args, **kwargs)
            return 2 * result if any(x is linear or x is linear.weight for x in args) else result

        return mock.patch.object(owner, attribute, double)

    return replace


def hooked(kind: str) -> Callable[[nn.Linear], contextlib.AbstractContextManager]:
    """A hook for all modules that doubles what it is given of one module."""

    def hook(linear: nn.Linear) -> contextlib.AbstractContextManager:
        def double(module, *given):
            if module is not linear:
                return None
            what = given[1 if kind == "forward" else 0]  # a forward hook changes the second, the output
            return 2 * what if isinstance(what, Tensor) else tuple(2 * x for x in what)

        return getattr(nn.modules.module, f"register_module_{kind}_hook")(double)

    return hook


# How the modules of a whole process may be called otherwise, until the returned context ends.
REPLACEMENTS = {
    "functional.linear": replaced(nn.functional, "linear"),
    "Linear.forward": replaced(nn.Linear, "forward"),
    "Linear.__call__": replaced(nn.Linear, "__call__"),
    "Module.__call__": replaced(nn.Module, "__call__"),
    "Module._call_impl": replaced(nn.Module, "_call_impl"),
    **{f"{kind} hook": hooked(kind) for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")},
}


def assert_as_the_document(ours: nn.Module, document: nn.Module, change: Callable[[nn.Module], object]) -> None:
    """Output, weights and gradients of both after the same change, which must have an effect."""
    tensors, mask = inputs(), mask_of("padding")
    grads = (torch.randn(BATCH, LENGTH, D_MODEL), torch.randn(BATCH, HEADS, LENGTH, LENGTH))
    before = results_and_gradients(ours, tensors, grads, mask=mask)
    for module in (ours, document):
        change(module)
    found = results_and_gradients(ours, tensors, grads, mask=mask)
    expected = results_and_gradients(document, tensors, grads, mask=mask)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")
    assert any(not torch.allclose(expected[key], before[key], atol=1e-4) for key in before.keys() & expected.keys()), (
        "the change has no effect: the test shows nothing"
    )


@pytest.mark.parametrize(
    "change, name",
    [
        pytest.param(change, name, id=f"{change.__name__}-{name}")
        for change, name in itertools.product(CHANGES, PROJECTIONS)
        if not (change in (shadow_bias, freeze_bias) and name == "W_k")  # a softmax does not feel a shift
    ],
)
def test_a_projection_that_is_not_plain_is_called(change, name):
    ours, document = pair()
    assert_as_the_document(ours, document, lambda module: change(module, name))


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_replaced_way_to_call_modules_is_taken(replacement, name):
    ours, document = pair()
    with contextlib.ExitStack() as undone:
        assert_as_the_document(
            ours, document, lambda module: undone.enter_context(REPLACEMENTS[replacement](getattr(module, name)))
        )
    assert len(ours._plain_parameters()[0]) == 4


def test_plain_projections_are_one_node():
    ours, _ = pair()
    x = inputs()[0].requires_grad_()
    output, weights = ours(x, x, x)
    assert output.grad_fn is weights.grad_fn
    leaves = {type(function).__name__ for function, _ in output.grad_fn.next_functions if function is not None}
    assert leaves == {"AccumulateGrad"}


def test_removed_hook_leaves_it_plain_again():
    ours, _ = pair()
    assert len(ours._plain_parameters()[0]) == 4
    handle = ours.W_k.register_forward_hook(lambda module, args, output: None)
    assert len(ours._plain_parameters()[0]) == 0
    handle.remove()
    assert len(ours._plain_parameters()[0]) == 4


# --- TorchScript, tracing, the compiler -----------------------------------------------------------------------------


def reloaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("change", (None, adapt), ids=("plain", "adapted"))
def test_script_saves_loads_and_trains(change):
    ours, _ = pair()
    if change:
        change(ours, "W_k")
    tensors, mask = inputs(), mask_of("int")
    scripted = reloaded(torch.jit.script(ours))
    for options in ({}, {"need_weights": False}, {"is_causal": True}, {"key_lengths": torch.tensor([1, 10, 4])}):
        found, expected = scripted(*tensors, mask, **options), ours(*tensors, mask, **options)
        torch.testing.assert_close(found[0], expected[0])
        assert (found[1] is None) == (expected[1] is None)
    for _ in range(3):  # the profiling executor changes the graph after the first runs
        scripted.zero_grad()
        ours.zero_grad()
        for module in (scripted, ours):
            module(*tensors, mask)[0].square().sum().backward()
        parameters = dict(ours.named_parameters())
        for name, parameter in scripted.named_parameters():
            torch.testing.assert_close(parameter.grad, parameters[name].grad)


def test_script_with_dropout_and_from_numpy():
    ours, _ = pair(dropout=0.5)
    scripted = torch.jit.script(ours)
    tensors = inputs()
    assert 0.3 < (scripted(*tensors)[1] == 0).float().mean() < 0.7
    scripted.eval()
    torch.testing.assert_close(scripted(*tensors)[0], ours.eval()(*tensors)[0])
    numpy = mha_ext.MultiHeadAttention.from_numpy(*np.random.randn(4, D_MODEL, D_MODEL), num_heads=HEADS)
    tensors, mask = [x.double() for x in tensors], mask_of("float")
    torch.testing.assert_close(torch.jit.script(numpy)(*tensors, mask)[0], numpy(*tensors, mask)[0])


@pytest.mark.parametrize("change", (None, parametrize), ids=("plain", "parametrized"))
def test_trace(change):
    ours, _ = pair()
    if change:
        change(ours, "W_q")
    tensors, mask = inputs(), mask_of("int")
    traced = reloaded(torch.jit.trace(ours, (*tensors, mask)))
    others = inputs()
    torch.testing.assert_close(traced(*others, mask), ours(*others, mask))


@pytest.mark.parametrize("change", (None, adapt, add_doubling_hook), ids=("plain", "adapted", "hooked"))
def test_compiles_as_one_graph(change):
    ours, _ = pair()
    if change:
        change(ours, "W_q")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    tensors, mask = inputs(), mask_of("int")
    for module in (compiled, ours):
        module(*tensors, mask=mask)[0].square().sum().backward()
    torch.testing.assert_close(compiled(*tensors, mask=mask), ours(*tensors, mask=mask))
    torch._dynamo.reset()


def test_functorch_transforms():
    ours, _ = pair()
    parameters = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    samples = torch.randn(4, 1, LENGTH, D_MODEL)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, parameters, (x, x, x), {"is_causal": True})[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    for i, x in enumerate(samples):
        ours.zero_grad()
        ours(x, x, x, is_causal=True)[0].square().sum().backward()
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(each[name][i], parameter.grad, atol=1e-4, rtol=1e-4)


def test_autocast():
    ours, document = pair()
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = ours(*tensors)
        hooked = copy.deepcopy(ours)
        hooked.W_q.register_forward_hook(lambda module, args, output: None)
        called = hooked(*tensors)
    assert output.dtype == weights.dtype == called[0].dtype == torch.bfloat16
    expected = document(*tensors)
    for found in ((output, weights), called):
        torch.testing.assert_close(found[0].float(), expected[0], atol=0.02, rtol=0.02)
        torch.testing.assert_close(found[1].float(), expected[1], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("option", [{"mask": torch.tensor(1)}, {"bias": torch.tensor(0.5)}], ids=str)
def test_options_without_dimensions(option):
    layer, x = mha_ext.MultiHeadAttention(16, 2), torch.randn(2, 3, 16)
    expected = layer(x, x, x, **option)
    layer.W_q.__class__ = type("Called", (nn.Linear,), {})
    for found, right in zip(layer(x, x, x, **option), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_the_numpy_layer_without_keys():
    layer = mha_ext.MultiHeadAttention.from_numpy(*[torch.randn(8, 8)] * 4, 2)
    x, nothing = torch.randn(1, 3, 8), torch.randn(1, 0, 8)
    mask, lengths = torch.zeros(1, 1, 3, 1), torch.tensor([0])
    output, weights = layer(x, nothing, nothing, mask=mask, key_lengths=lengths)
    assert (output == 0).all() and weights.shape == (1, 2, 3, 0)


@pytest.mark.parametrize("plain", ["W_q", "W_k", "W_v", "W_o"])
@pytest.mark.parametrize("hide", ["mask", "bias", "key_lengths", "is_causal"])
def test_nan_that_no_query_sees_reaches_no_projection(hide, plain):
    """Nor its gradient, whether all projections are fused or one of them is called."""
    layer = mha_ext.MultiHeadAttention(16, 2)
    setattr(layer, plain, type("Called", (nn.Linear,), {})(16, 16))
    key = torch.randn(2, 6, 16)
    key[:, 4:] = torch.nan
    seen = torch.arange(6) < 4
    option = {
        "mask": seen,
        "bias": torch.zeros(6).masked_fill(~seen, -torch.inf),
        "key_lengths": torch.tensor([4, 4]),
        "is_causal": True,
    }[hide]
    output, weights = layer(torch.randn(2, 4, 16), key, key, **{hide: option})
    (output.sum() + weights.square().sum()).backward()
    assert output.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("corner", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("q_len, kv_len", [(1, 3), (3, 1), (2, 5), (5, 2), (4, 4)])
def test_keys_that_no_query_uses(q_len, kv_len, corner):
    """Found without (Lq, Lk) where no option has it, they are those of the whole mask."""
    options = {"is_causal": corner != "none", "bottom_right": corner == "bottom_right"}
    query, key = torch.randn(2, q_len, 4), torch.randn(2, kv_len, 4)
    shapes = [(), (kv_len,), (2, 1, 1, kv_len), (2, 1, kv_len), (q_len, 1), (q_len, kv_len)]
    for mask_shape, hides_bias, lengths in itertools.product(shapes, (False, True), ((kv_len, kv_len), (1, 0))):
        mask = torch.rand(mask_shape) < 0.6
        bias = torch.zeros(kv_len).masked_fill(torch.rand(kv_len) < 0.3 * hides_bias, -torch.inf)
        key_lengths = torch.tensor(lengths)
        found = modules._hidden_keys(query, key, key, 2, mask, bias, key_lengths=key_lengths, **options)
        seen = torch.from_numpy(
            reference.visible(
                (2, 2, q_len, kv_len),
                mask=mask,
                bias=bias,
                key_lengths=key_lengths,
                is_causal=options["is_causal"],
                causal_bottom_right=options["bottom_right"],
            )
        ).expand(2, 2, q_len, kv_len)
        unseen = ~seen.any(2).any(1)
        dead = ~seen.any(3).all(2).all(1)
        for actual, expected in zip(found, (unseen, unseen & ~dead[:, None]), strict=True):
            assert torch.equal(actual.squeeze(-1).expand(2, kv_len), expected)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((2, 1, 1, 5, 5), {"key_lengths": torch.tensor([3, 5])}),
        ((2, 2, 2, 5, 1), {"is_causal": True}),
        ((2, 2, 2, 5, 5), {"key_lengths": torch.tensor([3, 5, 1])}),
        ((2, 2, 2, 5, 5), {"mask": torch.ones(3, 4)}),
        ((2, 2, 2, 5, 5), {"mask": torch.ones(3, 4), "is_causal": True}),
        ((2, 2, 2, 5, 5), {"bias": torch.ones(1, 1, 1, 3, 5)}),
        ((2, 2, 2, 5, 5), {"mask": torch.ones(3, 5, device="meta")}),
    ],
)
def test_called_projections_change_no_error(sizes, options):
    """Batches of query, key and value, lengths of key and value."""
    layer = mha_ext.MultiHeadAttention(16, 2)
    arguments = [torch.randn(b, length, 16) for b, length in zip(sizes[:3], (3, *sizes[3:]), strict=True)]
    texts = []
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)) as error:
            layer(*arguments, **options)
        texts.append(str(error.value).split(": expected ")[1].split()[0])
        layer.W_o.register_forward_hook(lambda *_: None)
    assert texts[0] == texts[1]


def test_the_numpy_layer_takes_a_mask_without_dimensions():
    layer, x = mha_ext.MultiHeadAttention.from_numpy(*[torch.randn(8, 8)] * 4, 2), torch.randn(2, 3, 8)
    for found, expected in zip(layer(x, x, x, torch.tensor(1)), layer(x, x, x), strict=True):
        torch.testing.assert_close(found, expected)
