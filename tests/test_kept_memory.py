"""Memory of large tensors that is kept for later calls (csrc/cpu/kept_memory.cpp)."""

import copy
import io
import os
import sys
import threading

import pytest
import torch

from mha_ext import _C, MultiHeadAttention, ops
from tests.commands import run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is kept on Linux only")

LARGE = (1, 8, 128, 64)  # 256 KB in float32


@pytest.fixture(autouse=True)
def nothing_kept():
    _C.release_kept_memory()
    assert _C.kept_memory()[0] == 0
    yield
    _C.release_kept_memory()


def attend(*shape, **options):
    return ops.attention(*torch.randn(3, *shape), **options)


def python(script, **environment):
    """The last line that a program prints, run with these environment variables."""
    return run(sys.executable, "-c", script, **environment).splitlines()[-1]


# Part of a program: from here on there are 64 MB more than are in use.
LITTLE_MEMORY = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
"""


def test_the_next_call_gets_the_memory_of_a_freed_tensor():
    output, _, _ = attend(*LARGE)
    place, size = output.data_ptr(), output.nbytes
    assert _C.kept_memory()[0] == 0  # it has an owner
    del output
    assert size <= _C.kept_memory()[0] <= 1.5 * size
    again, _, _ = attend(*LARGE)
    assert again.data_ptr() == place
    assert _C.kept_memory()[0] == 0


def test_a_tensor_that_is_alive_keeps_its_memory():
    query, key, value = torch.randn(3, *LARGE)
    outputs = [ops.attention(query * i, key, value)[0] for i in range(6)]
    copies = [output.clone() for output in outputs]
    views = [output[0, :, 3:5] for output in outputs[:3]]  # of storage that its tensor has let go
    arrays = [output.numpy() for output in outputs[3:]]
    del outputs
    for i in range(12):
        ops.attention(query * -i, key, value)
    for view, kept in zip(views, copies[:3], strict=True):
        assert torch.equal(view, kept[0, :, 3:5])
    for array, kept in zip(arrays, copies[3:], strict=True):
        assert torch.equal(torch.from_numpy(array), kept)


def test_small_tensors_are_not_kept():
    attend(1, 2, 16, 16)
    assert _C.kept_memory()[0] == 0


def test_memory_of_another_size_is_taken_only_if_little_is_wasted():
    attend(1, 8, 256, 64)
    kept = _C.kept_memory()[0]
    small, _, _ = attend(1, 8, 128, 64)
    assert _C.kept_memory()[0] == kept
    near, _, _ = attend(1, 8, 250, 64)
    assert _C.kept_memory()[0] == 0
    assert small.isfinite().all() and near.isfinite().all()


def test_no_more_than_the_limit_is_kept():
    script = """
import torch
from mha_ext import _C, ops
tensors = [ops.attention(*torch.randn(3, 1, 8, 128 + 64 * i, 64))[0] for i in range(12)]
total = sum(t.nbytes for t in tensors)
last = tensors[-1].data_ptr()
tensors.reverse()
while tensors: tensors.pop()
large = ops.attention(*torch.randn(3, 1, 8, 8192, 64), need_logsumexp=False)[0]
del large
kept, most = _C.kept_memory()
again = ops.attention(*torch.randn(3, 1, 8, 832, 64))[0]
print(most == 4 << 20, 3 << 20 < kept <= most < total, again.data_ptr() == last)
"""
    assert python(script, MHA_EXT_KEEP_MB="4") == "True True True"


def test_memory_that_nobody_wants_is_given_back():
    attend(1, 8, 1024, 64)
    kept = _C.kept_memory()[0]
    query, key, value = torch.randn(1, 8, 64, 64), torch.randn(1, 8, 1, 64), torch.randn(1, 8, 1, 64)
    for _ in range(4000):
        ops.attention(query, key, value)
    assert _C.kept_memory()[0] > kept
    for _ in range(200):
        ops.attention(query, key, value)
    assert _C.kept_memory()[0] < kept


def test_nothing_is_kept_if_so_wished():
    script = """
import torch
from mha_ext import _C, ops
ops.attention(*torch.randn(3, 1, 8, 512, 64))
print(_C.kept_memory())
"""
    assert python(script, MHA_EXT_KEEP_MB="0") == "(0, 0)"
    assert python(script, MHA_EXT_KEEP_MB="") != "(0, 0)"


def test_a_wrong_limit():
    script = """
import os, torch
from mha_ext import ops
errors = []
for value in WRONG:
    os.environ["MHA_EXT_KEEP_MB"] = value
    try:
        ops.attention(*torch.randn(3, 1, 8, 512, 64))
    except ValueError as error:
        errors.append(str(error))
print(errors)
"""
    wrong = ["-1", "1.5", "many", "12MB", "99999999999999999999", " 1", "+1"]
    assert python(script.replace("WRONG", str(wrong))) == str(
        [f"MHA_EXT_KEEP_MB: expected an integer from 0 to 1048576, got {value}" for value in wrong]
    )


def test_results_are_those_without_kept_memory():
    torch.manual_seed(0)
    layer = MultiHeadAttention(128, 4)
    x = torch.randn(4, 200, 128, requires_grad=True)
    bias = torch.randn(4, 200, 200, requires_grad=True)

    def step():
        output, weights = layer(x, x, x, bias=bias)
        (output.square().sum() + (weights * bias).sum()).backward()
        results = [output.detach(), weights.detach(), *(p.grad for p in (x, bias, *layer.parameters()))]
        x.grad = bias.grad = None
        layer.zero_grad()
        return [result.clone() for result in results]

    fresh = step()
    assert _C.kept_memory()[0] > 0
    for size in (1.0, float("nan")):  # whatever the memory holds
        held = [torch.full_like(attend(4, 4, length, 32, need_weights=True)[1], size) for length in (200, 100, 200)]
        held += [attend(4, 4, 200, 32, need_weights=True)[1].fill_(size) for _ in range(2)]
        del held
        for result, expected in zip(step(), fresh, strict=True):
            assert torch.equal(result, expected)


def test_storage_may_be_resized_copied_shared_and_saved():
    output, _, _ = attend(*LARGE)
    expected = output.clone()
    assert torch.equal(copy.deepcopy(output), expected)
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    assert torch.equal(torch.load(file), expected)
    lazily = torch._lazy_clone(output)
    lazily.add_(1)
    output.add_(0)  # no longer lazy: PyTorch cannot resize and share what is
    assert torch.equal(output, expected) and torch.equal(lazily, expected + 1)
    output.untyped_storage().resize_(2 * output.nbytes)
    assert torch.equal(output, expected)
    output.share_memory_()
    assert output.is_shared() and torch.equal(output, expected)
    output.resize_(0).untyped_storage().resize_(0)


def test_storage_cannot_be_resized_to_negative_numbers():
    storage = attend(*LARGE)[0].untyped_storage()
    for size in (-5, -(2**40)):
        with pytest.raises(RuntimeError, match="negative number"):
            storage.resize_(size)


def test_the_profiler_sees_what_is_allocated_and_freed():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(3):
            attend(*LARGE)
    (event,) = (e for e in profile.key_averages() if e.key == "mha_ext::attention")
    assert event.self_cpu_memory_usage >= 3 * 4 * torch.Size(LARGE).numel()
    freed = [e for e in profile.key_averages() if e.key == "[memory]"]
    assert freed and freed[0].self_cpu_memory_usage <= -3 * 4 * torch.Size(LARGE).numel()


def test_threads_allocate_and_free_at_once():
    query, key, value = torch.randn(3, *LARGE)
    expected = [ops.attention(query, key + i, value)[0] for i in range(4)]
    wrong = []

    def run(i):
        for _ in range(200):
            if not torch.equal(ops.attention(query, key + i, value)[0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    kept, most = _C.kept_memory()
    assert kept <= most


def test_a_forked_process_has_its_own():
    query, key, value = torch.randn(3, *LARGE)
    expected = ops.attention(query, key, value)[0]
    attend(*LARGE)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        good = torch.equal(ops.attention(query, key, value)[0], expected)
        attend(*LARGE)[0].fill_(7)
        os.write(writer, b"good" if good else b"bad ")
        os._exit(0)
    assert os.read(reader, 4) == b"good"
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert torch.equal(ops.attention(query, key, value)[0], expected)


def test_a_fork_while_threads_allocate_does_not_hang():
    script = """
import os, signal, threading, torch
from mha_ext import _C, ops
torch.set_num_threads(1)
query, key = torch.randn(1, 8, 64, 64), torch.randn(1, 8, 1, 64)
many = [ops.attention(query, key, key)[0] for _ in range(800)]  # to be searched while the mutex is held
del many
done = False
def work():
    while not done: ops.attention(query, key, key)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
good = 0
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        _C.kept_memory()
        ops.attention(query, key, key)
        kept = _C.kept_memory()[0]
        _C.release_kept_memory()
        os._exit(3 if kept > 0 and _C.kept_memory()[0] == 0 else 4)
    good += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
done = True
for thread in threads: thread.join()
print(good)
"""
    assert python(script) == "100"


def test_kept_memory_is_given_up_for_a_call_that_needs_more():
    script = f"""
import torch
from mha_ext import _C, ops
def call(batch): return ops.attention(*torch.randn(3, batch, 8, 512, 64), need_weights=True)
alive = [call(1) for _ in range(20)]
del alive
query, key, value = torch.randn(3, 16, 8, 512, 64)
{LITTLE_MEMORY}
kept = _C.kept_memory()[0]
weights = ops.attention(query, key, value, need_weights=True)[1]
print(kept > weights.nbytes, _C.kept_memory()[0] < kept)
"""
    assert python(script, MHA_EXT_KEEP_MB="256") == "True True"


def test_a_system_without_memory_says_so():
    script = f"""
import torch
from mha_ext import ops
query, key, value = torch.randn(3, 1, 8, 4096, 64)
ops.attention(query, key, value)
{LITTLE_MEMORY}
try:
    ops.attention(query, key, value, need_weights=True)
except RuntimeError as error:
    print("allocate memory" in str(error))
"""
    assert python(script) == "True"
