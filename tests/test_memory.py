"""No temporary of the size of the scores: peak memory of long sequences, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LENGTH = 8192
SCORES_MB = LENGTH * LENGTH / 2**20  # one byte for each score: a bool mask of one head
WITHIN_MB = SCORES_MB / 3

FEATURES = {
    "plain": "",
    "causal": "is_causal=True",
    "key mask": "mask=torch.rand(1, 1, 1, L) < 0.7",
    "row mask": "mask=torch.rand(L, 1) < 0.7",
    "key bias": "bias=torch.randn(1, 1, 1, L, requires_grad=True)",
    "head bias": "bias=torch.randn(2, 1, 1, requires_grad=True)",
    "lengths": "key_lengths=torch.tensor([L - 100])",
    "dropout": "dropout_p=0.2",
    "softcap": "softcap=20.0",
    "dead rows": "key_lengths=torch.tensor([0]), uniform_dead_rows=True",
}

SCRIPT = """
import json
import torch, mha_ext
from benchmarks.memory import peak, reset_peak

L = {length}
torch.set_num_threads(2)

def call(length, dtype=torch.float32, backward=True, **options):
    q, k, v = (torch.randn(1, 2, length, 8, dtype=dtype, requires_grad=backward) for _ in range(3))
    output, _, logsumexp = torch.ops.mha_ext.attention(q, k, v, **options)
    if backward:
        (output.sum() + logsumexp.masked_fill(logsumexp == -torch.inf, 0).sum()).backward()

def layer(length):
    module = mha_ext.MultiHeadAttention(16, 2)
    x = torch.randn(1, length, 16, requires_grad=True)
    module(x, x, x, is_causal=True, need_weights=False)[0].sum().backward()

def called(length):  # padding, and projections that are called as modules
    module = mha_ext.MultiHeadAttention(16, 2)
    module.W_o.register_forward_hook(lambda *_: None)
    x = torch.randn(1, length, 16, requires_grad=True)
    lengths = torch.tensor([length - 1])
    module(x, x, x, is_causal=True, key_lengths=lengths, need_weights=False)[0].sum().backward()

call(300), layer(300), called(300)  # whatever is allocated once
found = {{}}
def measure(name, f):
    before = reset_peak()
    f()
    found[name] = (peak() - before) / 2**20

{calls}
measure("layer", lambda: layer(L))
measure("called projections", lambda: called(L))
measure("no grad", lambda: call(L, backward=False))
for dtype in (torch.float64, torch.bfloat16, torch.float16):
    measure(str(dtype), lambda: call(L, dtype))
# The measure itself: the weights, when they are asked for, do show.
measure("weights", lambda: call(L, backward=False, need_weights=True))
measure("mean weights", lambda: call(L, backward=False, need_weights=True, average_weights=True))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def growth() -> dict[str, float]:
    """Megabytes that each call needed at its peak, beyond what was resident before it."""
    calls = "\n".join(f'measure("{name}", lambda: call(L, {options}))' for name, options in FEATURES.items())
    script = SCRIPT.format(length=LENGTH, calls=calls)
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


OTHERS = ("layer", "called projections", "no grad", "torch.float64", "torch.bfloat16", "torch.float16")


@pytest.mark.parametrize("name", [*FEATURES, *OTHERS])
def test_memory_is_linear_in_length(growth, name):
    assert growth[name] < WITHIN_MB, f"{name}: peak grew by {growth[name]:.0f} MB"


def test_the_measure_sees_the_weights(growth):
    assert growth["weights"] > 2 * 4 * SCORES_MB * 0.5  # float32, two heads


def test_mean_weights_take_no_more_than_they_are(growth):
    assert growth["mean weights"] < 4 * SCORES_MB + WITHIN_MB  # float32, for all heads together
