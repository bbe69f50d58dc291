"""patch_sdpa: code that calls torch.nn.functional.scaled_dot_product_attention runs on mha_ext, and later no longer."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaConfig, LlamaModel, ViTConfig, ViTModel

from mha_ext.sdpa_patch import patch_sdpa
from tests.checks import assert_as_good_as_plain, largest
from tests.test_sdpa import Halved, Recorder

TORCHS = (F.scaled_dot_product_attention,)  # in a tuple, which the patch does not look into
"""What must be back at the end."""


def engine_calls(function: Callable[[], object]) -> int:
    with Recorder() as recorder:
        function()
    return len(recorder.calls)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def is_patched() -> bool:
    return engine_calls(lambda: attend(torch.ones(1, 1, 2, 4))) == 1


@pytest.fixture(autouse=True)
def unpatched_afterwards():
    yield
    assert F.scaled_dot_product_attention is TORCHS[0]


# --- On and off -----------------------------------------------------------------------------------------------------


def test_with_statement_nests_and_ends_with_an_exception():
    assert not is_patched()
    with pytest.raises(KeyError), patch_sdpa():
        with patch_sdpa():
            assert is_patched()
        assert is_patched()
        raise KeyError
    assert not is_patched()


def test_another_patch_that_ends_later():
    patch = patch_sdpa()
    patch.enable()
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention):
        patch.disable()
        assert not is_patched()
    assert not is_patched()  # though the other patch has put ours back
    with patch_sdpa():
        assert is_patched()
    assert F.scaled_dot_product_attention is TORCHS[0]


def test_a_causal_bias_keeps_its_meaning_in_a_function_that_outlived_the_patch():
    with patch_sdpa():
        held = (F.scaled_dot_product_attention,)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    bias = causal_lower_right(3, 5)
    expected = TORCHS[0](q, k, k, attn_mask=torch.ones(3, 5, dtype=torch.bool).tril(2))
    torch.testing.assert_close(held[0](q, k, k, attn_mask=bias), expected)


async def later():
    attend(torch.ones(1, 1, 2, 4))


def one_by_one():
    yield attend(torch.ones(1, 1, 2, 4))


@pytest.mark.parametrize("function", [later, one_by_one, functools.partial(later)])
def test_decorator_of_what_runs_later_is_an_error(function):
    with pytest.raises(TypeError, match="patch_sdpa: expected a function that is done when it returns, got"):
        patch_sdpa()(function)


def test_decorator():
    @patch_sdpa()
    def recursive(depth: int) -> bool:
        return is_patched() and (depth == 0 or recursive(depth - 1))

    assert recursive(2)
    assert not is_patched()


def test_enable_and_disable_count_and_overlap():
    one, other = patch_sdpa(), patch_sdpa()
    one.enable()
    one.enable()
    other.enable()
    one.disable()
    one.disable()
    one.disable()  # one too many takes nothing from the other
    assert is_patched()
    other.disable()
    assert not is_patched()


def test_a_thread_that_leaves_does_not_unpatch_another():
    seen, inside, leave = [], threading.Barrier(5), threading.Event()

    def early() -> None:
        with patch_sdpa():
            inside.wait()

    def late() -> None:
        with patch_sdpa():
            inside.wait()
            leave.wait()
            seen.append(is_patched())

    threads = [threading.Thread(target=target) for target in (early, early, early, late)]
    for thread in threads:
        thread.start()
    inside.wait()
    for thread in threads[:3]:
        thread.join()
    seen.append(is_patched())
    leave.set()
    threads[3].join()
    assert seen == [True, True]


def test_many_threads_at_once():
    def work() -> None:
        for _ in range(20):
            with patch_sdpa():
                assert F.scaled_dot_product_attention is not TORCHS[0]

    errors: list[object] = []
    threads = [threading.Thread(target=lambda: errors.append(guarded(work))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * 4


def guarded(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error


# --- Who is reached -------------------------------------------------------------------------------------------------


def module_with(monkeypatch, name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_names_imported_before_and_during_are_restored(monkeypatch):
    before = module_with(monkeypatch, "imported_before", sdpa=F.scaled_dot_product_attention, other=len)
    with patch_sdpa():
        during = module_with(monkeypatch, "imported_during", sdpa=F.scaled_dot_product_attention)
        assert before.sdpa is during.sdpa is F.scaled_dot_product_attention is not TORCHS[0]
    assert before.sdpa is during.sdpa is TORCHS[0]
    assert before.other is len


def test_lazy_modules_stay_asleep(monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"asked for {name}")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "blocked", None)
    with patch_sdpa():
        assert is_patched()


def test_a_patch_of_someone_else_is_kept():
    def theirs(*args, **options) -> Tensor:
        return TORCHS[0](*args, **options)

    try:
        with patch_sdpa():
            F.scaled_dot_product_attention = theirs
        assert F.scaled_dot_product_attention is theirs
        with patch_sdpa():
            assert is_patched()
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = TORCHS[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_the_engine_does_not_take_goes_to_torch():
    def nested() -> tuple[Tensor, Tensor]:
        x = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        output = F.scaled_dot_product_attention(heads, heads, heads)
        output.values().sum().backward()
        return output.values(), x.grad.values()

    sequences = [torch.randn(3, 16), torch.randn(5, 16)]
    expected = nested()
    with patch_sdpa():
        torch.testing.assert_close(nested(), expected)
        assert engine_calls(lambda: attend(torch.empty(2, 4, 5, 8, device="meta"))) == 0


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_causal_bias(device):
    query, key = torch.randn(2, 4, 5, 8, device=device), torch.randn(2, 4, 7, 8, device=device)
    expected = F.scaled_dot_product_attention(query, key, key, causal_lower_right(5, 7))
    with patch_sdpa():
        found = F.scaled_dot_product_attention(query, key, key, causal_lower_right(5, 7))
    torch.testing.assert_close(found, expected)


def test_a_subclass_is_asked_about_the_function_it_finds():
    x = torch.randn(2, 4, 5, 8)
    with patch_sdpa():
        output = F.scaled_dot_product_attention(x.as_subclass(Halved), x, x)
    torch.testing.assert_close(output.as_subclass(Tensor), F.scaled_dot_product_attention(x, x, x) / 2)


# --- Compiled, scripted, exported -----------------------------------------------------------------------------------


def test_compile_follows_the_patch():
    targets: list[set[str]] = []

    def backend(graph, inputs):
        targets.append({str(node.target) for node in graph.graph.nodes})
        return graph

    compiled, x = torch.compile(attend, backend=backend, fullgraph=True), torch.randn(2, 4, 5, 8)
    for patched in (False, True, False):
        with patch_sdpa() if patched else nullcontext():
            torch.testing.assert_close(compiled(x), attend(x))
    assert ["mha_ext.attention" in names for names in targets[:2]] == [False, True]
    assert len(targets) <= 3


def test_script_and_export_keep_the_patch():
    x, module = torch.randn(2, 4, 5, 8), nn.Module()
    module.forward = attend
    with patch_sdpa():
        scripted, exported = torch.jit.script(attend), torch.export.export(module, (x,)).module()
    for function in (scripted, exported):
        torch.testing.assert_close(function(x), attend(x))
        assert engine_calls(lambda function=function: function(x)) == 1


# --- Models ---------------------------------------------------------------------------------------------------------


def results(model: nn.Module, *inputs, **options) -> list[Tensor]:
    """The output of a model, and the gradients of its parameters."""
    output = model(*inputs, **options)
    output = output if isinstance(output, Tensor) else output[0]
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    return [output.detach(), *(p.grad for p in model.parameters())]


def compare(make: Callable[[], nn.Module], calls: int, *inputs: Tensor, **options) -> None:
    """A model under the patch against torch's own attention in float32, both against its unfused path in float64."""

    def seeded(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        model = make().to(dtype)
        cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        return results(model, *cast, **options)

    with sdpa_kernel(SDPBackend.MATH):
        plain, exact = seeded(torch.float32), seeded(torch.float64)
    with Recorder() as recorder, patch_sdpa():
        found = seeded(torch.float32)
    assert len(recorder.calls) == calls
    for i, (a, b, c) in enumerate(zip(found, plain, exact, strict=True)):
        # A bias of the keys changes no weights: its gradient cancels to 0. What is summed up has the size of the
        # gradient of the matrix before it.
        magnitude = exact[i - 1] if largest(c) < 1e-12 * largest(exact[i - 1]) else c
        assert_as_good_as_plain(a, b, c, magnitude=magnitude, what=f"result {i}")


LAYER = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def test_transformer_encoder_in_training():
    compare(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2, enable_nested_tensor=False),
        2,
        torch.randn(2, 6, 16),
        src_key_padding_mask=PADDING,
    )


def test_transformer_decoder_in_training():
    compare(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2),
        4,
        torch.randn(2, 5, 16),
        torch.randn(2, 6, 16),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
        tgt_is_causal=True,
        memory_key_padding_mask=PADDING,
    )


SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "attn_implementation": "sdpa",
}


def test_vit_of_hugging_face():
    config = ViTConfig(image_size=16, patch_size=4, num_channels=1, **SIZES)
    compare(lambda: ViTModel(config, add_pooling_layer=False), 2, torch.randn(2, 1, 16, 16))


@pytest.mark.parametrize("padded", (False, True))
def test_llama_of_hugging_face(padded):
    config = LlamaConfig(vocab_size=32, num_key_value_heads=2, use_cache=False, **SIZES)
    compare(
        lambda: LlamaModel(config),
        2,
        torch.randint(0, 32, (2, 6)),
        attention_mask=(~PADDING).long() if padded else None,
    )
