"""Layers inside the tools that train them: checkpoints, several processes and threads, deterministic mode, autocast,
copies and files, meta tensors, optimizers, hooks, pruning."""

from __future__ import annotations

import collections
import copy
import functools
import io
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

import mha_ext
from mha_ext.train.model import SelfAttentionBlock
from tests import documents

E, HEADS = 16, 2
SECONDS = 120  # after which something counts as hanging


def replaced_document() -> nn.Module:
    layer = documents.MultiHeadAttention(E, HEADS)
    assert mha_ext.replace_attention(layer)
    return layer


FRONTS: dict[str, Callable[..., nn.Module]] = {
    "document": functools.partial(mha_ext.MultiHeadAttention, E, HEADS),
    "torch": functools.partial(mha_ext.nn.MultiheadAttention, E, HEADS, batch_first=True),
    "replaced": replaced_document,
}
fronts = pytest.mark.parametrize("build", FRONTS.values(), ids=FRONTS)
classes = pytest.mark.parametrize("build", [FRONTS["document"], FRONTS["torch"]], ids=("document", "torch"))


def loss_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0].square().mean()


def train(layer: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(layer, torch.randn(3, 6, E, generator=generator)).backward()
        optimizer.step()


def sgd(layer: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(layer.parameters(), lr=0.5, **options)


def gradients(layer: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    layer.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def assert_same_parameters(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


# --- Checkpoints --------------------------------------------------------------------------------------------------

SAVED = [torch.ops.mha_ext.multi_head_attention_forward.default, torch.ops.mha_ext.attention.default]


@pytest.mark.parametrize("called", [False, True], ids=("layer", "core"))
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_checkpoints_drop_the_same_again(how, called):
    layer = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.5)
    if called:
        layer.W_q.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 30, E, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        output, weights = layer(x, x, x)
        return output.square().sum() + weights.square().sum()

    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, SAVED)
    found = []
    for use in (run, lambda x: checkpoint(run, x, **options)):
        torch.manual_seed(3)
        x.grad = None
        found.append([*gradients(layer, lambda use=use: use(x)).values(), x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Counter(TorchDispatchMode):
    """Counts the kernels that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("selective", [False, True])
def test_selective_checkpoints_do_not_compute_attention_twice(selective):
    layer, x = mha_ext.MultiHeadAttention(E, HEADS), torch.randn(2, 6, E, requires_grad=True)
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, SAVED)} if selective else {}
    with Counter() as counter:
        checkpoint(lambda x: layer(x, x, x)[0], x.sin(), use_reentrant=False, **options).sum().backward()
    assert counter.counts[SAVED[0]] == (1 if selective else 2)


# --- Two processes ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A block of ours, a layer of torch's in ours, and a layer that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.block = SelfAttentionBlock("mha_ext", E, HEADS, dropout=0.0, is_causal=True)
        self.layer = mha_ext.nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.extra = mha_ext.MultiHeadAttention(E, HEADS)

    def forward(self, x: Tensor, lengths: Tensor, use_extra: bool) -> Tensor:
        x = self.block(x, lengths)
        if use_extra:
            x = x + self.extra(x, x, x)[0]
        return x + self.layer(x, x, x)[0]


def sharded(model: Model) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2,))
    for part in (model.block, model.layer, model.extra, model):
        fully_shard(part, mesh=mesh)
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


WRAPS: dict[str, tuple[Callable[[Model], nn.Module], bool]] = {  # and whether every parameter is used
    "DDP": (DistributedDataParallel, True),
    "unused": (lambda model: DistributedDataParallel(model, find_unused_parameters=True), False),
    "static": (lambda model: DistributedDataParallel(model, static_graph=True), False),
    "views": (lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True), True),
    "compiled": (lambda model: compiled(DistributedDataParallel(model)), True),
    "FSDP": (sharded, True),
}


def seeded_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 7, E, generator=generator), torch.tensor([7, 3, 5, 1])


def whole(x: Tensor | Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def two_steps(model: nn.Module, x: Tensor, lengths: Tensor, use_extra: bool) -> list[Tensor | None]:
    """The gradients of the second of two steps: DDP rebuilds its buckets in between."""
    for _ in range(2):
        model.zero_grad()
        model(x, lengths, use_extra).square().mean().backward()
    return [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]


def work_as_one_of_two(rank: int, folder: str) -> None:
    """Writes the gradients that each wrap finds, or its traceback, into folder/NAME.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    x, lengths = (t.chunk(2)[rank] for t in batch())
    for name, (wrap, use_extra) in WRAPS.items():
        found: Any
        try:
            found = two_steps(wrap(seeded_model()), x, lengths, use_extra)
        except Exception:
            found = traceback.format_exc()
        if rank == 0:
            torch.save(found, f"{folder}/{name}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gradients_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(work_as_one_of_two, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("name", WRAPS)
def test_two_processes_find_the_gradients_of_one(name, gradients_of_two):
    found = torch.load(gradients_of_two / f"{name}.pt")
    assert not isinstance(found, str), found
    expected = two_steps(seeded_model(), *batch(), use_extra=WRAPS[name][1])
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b)


def train_shared(layer: nn.Module, seed: int) -> None:
    torch.set_num_threads(1)
    train(layer, sgd(layer), steps=40, seed=seed)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_train_shared_memory(start):
    """Hogwild: both write into the same parameters."""
    layer = mha_ext.MultiHeadAttention(E, HEADS).share_memory()
    x = torch.randn(20, 6, E)
    before = loss_of(layer, x).item()
    context = torch.multiprocessing.get_context(start)
    workers = [context.Process(target=train_shared, args=(layer, seed)) for seed in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert all(p.is_shared() for p in layer.parameters())
    assert loss_of(layer, x).item() < 0.5 * before


class Gradients(Dataset):
    """Runs attention where its items are asked for: forward and backward."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        x = torch.randn(1, 90, E, generator=torch.Generator().manual_seed(i)).requires_grad_()
        return torch.autograd.grad(loss_of(self.layer, x), x)[0][0]


def test_workers_of_a_loader_attend():
    """Forked after this process has attended with several threads; a worker has one."""
    torch.set_num_threads(3)
    data = Gradients(mha_ext.MultiHeadAttention(E, HEADS))
    expected = torch.stack([data[i] for i in range(4)])
    found = torch.cat(list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(found, expected)


def exit_code_of_fork(child: Callable[[], None]) -> int | str:
    """Of a process that os.fork makes to run `child`: 0 if it returned."""
    process = os.fork()
    if process == 0:
        try:
            child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "hangs"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("threads, length", [(1, 90), (3, 6)], ids=("one thread", "small"))
def test_forked_processes_attend(threads, length):
    """After a fork PyTorch's own operators run with one thread only. So do ours, which take one for small problems."""
    torch.set_num_threads(3)
    q = torch.randn(1, 2, length, 8, requires_grad=True)

    def attend() -> tuple[Tensor, ...]:
        output = mha_ext.attention(q, q, q)
        return output.detach(), *torch.autograd.grad(output, q, output.detach())

    big = torch.randn(2, 4, 200, 16)
    mha_ext.attention(big, big, big)  # with all threads
    expected = attend()

    def child() -> None:
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(attend(), expected, strict=True))

    assert exit_code_of_fork(child) == 0


# --- Threads ------------------------------------------------------------------------------------------------------


def test_threads_train_at_once():
    """Forward and backward in several Python threads, each with a number of threads of its own."""
    layer = mha_ext.MultiHeadAttention(E, HEADS)
    inputs = [torch.randn(2, 130, E) for _ in range(4)]

    def run(i: int) -> list[Tensor]:
        x = inputs[i].clone().requires_grad_()
        output, weights = layer(x, x, x)
        loss = output.square().sum() + weights.square().sum()
        return [output.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    expected, equal = [run(i) for i in range(4)], []

    def work(i: int) -> None:
        torch.set_num_threads(1 + i % 3)
        for _ in range(5):
            equal.append(all(torch.equal(a, b) for a, b in zip(run(i), expected[i], strict=True)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 20


def test_number_of_threads_may_change_before_the_backward():
    layer, x = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.3), torch.randn(2, 130, E, requires_grad=True)
    found = []
    for forward, backward in ((1, 1), (3, 1), (1, 3), (2, 5)):
        torch.manual_seed(0)
        torch.set_num_threads(forward)
        loss = loss_of(layer, x)
        torch.set_num_threads(backward)
        found.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


# --- Deterministic mode, autocast ---------------------------------------------------------------------------------


@pytest.fixture
def deterministic():
    """In this mode fresh memory holds NaN: what reads it before writing it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def every_gradient(order: int, threads: int) -> list[Tensor]:
    """Of first or second order, of a layer with dropout, padding and a learned bias."""
    torch.set_num_threads(threads)
    torch.manual_seed(7)
    layer = mha_ext.MultiHeadAttention(E, HEADS, dropout=0.3)
    x = torch.randn(3, 40, E, requires_grad=True)
    bias = torch.randn(HEADS, 40, 40, requires_grad=True)
    leaves = [x, bias, *layer.parameters()]
    output, weights = layer(x, x, x, bias=bias, key_lengths=torch.tensor([40, 7, 0]))
    found = torch.autograd.grad(output.square().sum() + weights.square().sum(), leaves, create_graph=order == 2)
    if order == 2:
        found = torch.autograd.grad(sum(g.square().sum() for g in found), leaves)
    return [output.detach(), *found]


@pytest.mark.parametrize("order", [1, 2])
def test_deterministic_mode(order, request):
    expected = every_gradient(order, threads=1)
    request.getfixturevalue("deterministic")
    for threads in (1, 2, 3):
        for a, b in zip(every_gradient(order, threads), expected, strict=True):
            assert torch.equal(a, b)


@fronts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_gradient_scaler(build, dtype):
    layer = build()
    twin, x = copy.deepcopy(layer), torch.randn(3, 6, E)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for module, use in ((layer, True), (twin, False)):
        optimizer = sgd(module)
        with torch.autocast("cpu", dtype=dtype, enabled=use):
            output = module(x, x, x)[0]
        assert output.dtype == (dtype if use else torch.float32)
        loss = output.float().square().mean()
        if use:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.5 * torch.finfo(dtype).eps)


@fronts
def test_gradient_scaler_skips_an_overflow(build):
    layer = build()
    twin, x, scaler = copy.deepcopy(layer), torch.randn(3, 6, E), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(layer, x)
    scaler.scale(loss.float()).backward()
    scaler.step(sgd(layer))
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    assert_same_parameters(layer, twin)


@fronts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_modules_of_another_dtype_train(build, dtype):
    layer = build()
    exact = copy.deepcopy(layer).double()
    layer = layer.to(dtype)
    x = torch.randn(3, 6, E, dtype=dtype)
    found = gradients(layer, lambda: loss_of(layer, x))
    expected = gradients(exact, lambda: loss_of(exact, x.double()))
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(
            gradient.double(), expected[name], rtol=0, atol=max(8 * torch.finfo(dtype).eps * largest, 1e-4), msg=name
        )


# --- Copies and files ---------------------------------------------------------------------------------------------


def double(module: nn.Module, inputs: Any, output: Any) -> Any:
    return 2 * output


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.load(saved(x), weights_only=False),
}


def saved(x: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@fronts
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["new", "trained", "hooked", "compiled"])
def test_copies_train_alike(build, how, when):
    layer = build()
    if when != "new":
        train(layer, sgd(layer))
    if when == "hooked":
        (layer.out_proj if hasattr(layer, "out_proj") else layer.W_o).register_forward_hook(double)
    if when == "compiled":
        layer.compile(backend="eager")
        loss_of(layer, torch.randn(2, 3, E))
    twin = COPIES[how](layer)
    assert type(twin) is type(layer)
    for module in (layer, twin):
        train(module, sgd(module))
    assert_same_parameters(layer, twin)


@classes
def test_files_of_weights_only(build):
    """A state_dict always; a whole module once its classes are declared safe."""
    layer, x = build(), torch.randn(3, 6, E)
    other = build()
    other.load_state_dict(torch.load(saved(layer.state_dict()), weights_only=True))
    assert torch.equal(loss_of(other, x), loss_of(layer, x))
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch.load(saved(layer), weights_only=True)
    parts = {type(module) for module in layer.modules()}
    with torch.serialization.safe_globals([*parts, set]):
        whole = torch.load(saved(layer), weights_only=True)
    assert torch.equal(loss_of(whole, x), loss_of(layer, x))


@classes
def test_meta_modules_become_real(build):
    layer, x = build(), torch.randn(3, 6, E)
    with torch.device("meta"):
        assigned, filled = build(), build()
    y = x.to("meta").requires_grad_()
    loss_of(filled, y).backward()
    assert y.grad.is_meta and all(p.grad.is_meta for p in filled.parameters())
    assigned.load_state_dict(layer.state_dict(), assign=True)
    filled.zero_grad()
    filled.to_empty(device="cpu").load_state_dict(layer.state_dict())
    for module in (assigned, filled):
        assert not any(p.is_meta for p in module.parameters())
        module.requires_grad_()
        found, expected = (gradients(m, lambda m=m: loss_of(m, x)) for m in (module, layer))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@classes
def test_skip_init(build):
    layer = nn.utils.skip_init(build.func, *build.args, **build.keywords)
    assert not any(p.is_meta for p in layer.parameters())
    layer.load_state_dict(build().state_dict())
    train(layer, sgd(layer))


@fronts
def test_swapped_parameters(build):
    """With parameters that are exchanged in place, not only their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = build()
        twin, parameters = copy.deepcopy(layer), list(layer.parameters())
        train(layer, sgd(layer))
        layer.zero_grad()
        layer.to(torch.float64)
        assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
        x = torch.randn(3, 6, E, dtype=torch.float64)
        layer.load_state_dict(twin.double().state_dict())
        assert torch.equal(loss_of(layer, x), loss_of(twin, x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_swapped_tensors():
    layer, x = mha_ext.MultiHeadAttention(E, HEADS), torch.randn(3, 6, E)
    other = copy.deepcopy(layer.W_v.weight.detach() + 1).requires_grad_()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.W_v.weight += 1
    torch.utils.swap_tensors(layer.W_v.weight, nn.Parameter(other))
    found, expected = (gradients(m, lambda m=m: loss_of(m, x)) for m in (layer, twin))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- Parameters: calls with others, hooks, optimizers, pruning ----------------------------------------------------


@fronts
def test_functional_call(build):
    layer, x = build(), torch.randn(3, 6, E)
    twin = copy.deepcopy(layer)
    others = {name: (2 * p).detach().requires_grad_() for name, p in layer.named_parameters()}
    twin.load_state_dict(others)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Tensor:
            return loss_of(self.layer, x)

    loss = torch.func.functional_call(Loss(), {f"layer.{name}": p for name, p in others.items()}, ())
    found = torch.autograd.grad(loss, list(others.values()))
    expected = gradients(twin, lambda: loss_of(twin, x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected.values(), strict=True))
    assert all(p.grad is None for p in layer.parameters())


@fronts
def test_optimizer_inside_the_backward(build):
    """Each parameter is updated, and its gradient freed, as soon as that is complete."""
    layer = build()
    twin = copy.deepcopy(layer)
    train(twin, sgd(twin))
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in layer.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        loss_of(layer, torch.randn(3, 6, E, generator=generator)).backward()
        assert all(p.grad is None for p in optimizers)
    assert_same_parameters(layer, twin)


@fronts
def test_hooks_of_parameters_see_and_change_gradients(build):
    layer, x, seen = build(), torch.randn(3, 6, E), []
    expected = gradients(layer, lambda: loss_of(layer, x))
    for p in layer.parameters():
        p.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    found = gradients(layer, lambda: loss_of(layer, x))
    assert len(seen) == len(expected)
    assert all(torch.equal(found[name], 2 * expected[name]) for name in expected)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
}


@fronts
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers(build, optimizer, kind):
    layer = build()
    twin = copy.deepcopy(layer)
    train(layer, OPTIMIZERS[optimizer](layer.parameters(), **{kind: True}))
    train(twin, OPTIMIZERS[optimizer](twin.parameters(), foreach=False))
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@fronts
def test_averaged_model(build):
    layer = build()
    average = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    expected, optimizer = copy.deepcopy(layer), sgd(layer)
    for step in range(3):
        train(layer, optimizer, steps=1)
        average.update_parameters(layer)
        for p, new in zip(expected.parameters(), layer.parameters(), strict=True):
            p.data = new.detach().clone() if step == 0 else p.data.lerp(new.detach(), 0.5)
    x = torch.randn(3, 6, E)
    torch.testing.assert_close(loss_of(average, x), loss_of(expected, x))


def pruned_and_normalised(layer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    prune.l1_unstructured(layer.W_q, "weight", amount=0.5)
    prune.random_structured(layer.W_o, "weight", amount=0.25, dim=0)
    parametrizations.weight_norm(layer.W_k)
    parametrizations.orthogonal(layer.W_v)
    return layer


@pytest.mark.parametrize("how", ["ours", "replaced"])
def test_pruned_and_parametrised_layers_train(how):
    """As the document's class does that is pruned and parametrised alike."""
    theirs = pruned_and_normalised(documents.MultiHeadAttention(E, HEADS))
    if how == "ours":
        ours = mha_ext.MultiHeadAttention(E, HEADS)
        pruned_and_normalised(ours)
        ours.load_state_dict(theirs.state_dict())
    else:
        ours = documents.MultiHeadAttention(E, HEADS)
        assert mha_ext.replace_attention(ours)
        pruned_and_normalised(ours)
        ours.load_state_dict(theirs.state_dict())
    for layer in (ours, theirs):
        train(layer, sgd(layer))
    assert (ours.W_q.weight == 0).sum() == E * E // 2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    prune.remove(ours.W_q, "weight")
    x = torch.randn(3, 6, E)
    torch.testing.assert_close(loss_of(ours, x), loss_of(theirs, x))
