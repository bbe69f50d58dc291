"""How work is cut into tasks: whole, and balanced on more threads than this machine has. Nothing is timed."""

from __future__ import annotations

import heapq
from collections import defaultdict

import pytest
import torch

from mha_ext import _C

THREADS = 64
SHAPES = {  # batch, heads, kv_heads, length
    "many heads": (16, 16, 16, 512),
    "few heads": (1, 8, 8, 4096),
    "groups": (4, 32, 8, 2048),
    "long": (1, 8, 8, 16384),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
causal = pytest.mark.parametrize("is_causal", [False, True])


def tasks_of(backward, shape, is_causal, threads=THREADS):
    batch, heads, kv_heads, length = shape
    return _C.work_list(backward, batch, heads, kv_heads, length, length, is_causal, threads)


LINEAR_SHAPES = {  # rows of x, features in, features out
    "512 features": (8192, 512, 512),
    "768 features": (16384, 768, 768),
    "1024 features": (8192, 1024, 1024),
    "wide": (4096, 4096, 4096),
    "narrow keys": (32768, 2048, 1024),
}
kinds = pytest.mark.parametrize("kind", ["forward", "grad_input", "grad_weight"])


def linear_tasks(kind, shape, threads=THREADS):
    """Rows and columns of the result, and the tasks."""
    rows, inputs, outputs = shape
    sizes = {
        "forward": (rows, outputs, inputs),
        "grad_input": (rows, inputs, outputs),
        "grad_weight": (outputs, inputs, rows),
    }[kind]
    return *sizes[:2], _C.linear_work_list(kind, *sizes, threads)


def visible_area(rows, keys, length, is_causal):
    """Scores of a tile, 0 if the causal limit hides all of it; rows are numbered over the heads of a group."""
    last_query = (rows[1] - 1) % length
    return 0 if is_causal and keys[0] > last_query else (rows[1] - rows[0]) * (keys[1] - keys[0])


def tiles(first, last, step):
    return [(i, min(i + step, last)) for i in range(first, last, step)]


@shapes
@causal
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_every_score_is_in_one_task(shape, is_causal, backward, threads):
    batch, heads, kv_heads, length = shape
    areas = defaultdict(set)
    for b, h, first_row, last_row, first_key, last_key in tasks_of(backward, shape, is_causal, threads):
        rectangle = (first_row, last_row, first_key, last_key)
        assert rectangle not in areas[b, h]
        areas[b, h].add(rectangle)
    assert len(areas) == batch * kv_heads
    for rectangles in areas.values():
        assert sum((b - a) * (d - c) for a, b, c, d in rectangles) == heads // kv_heads * length * length


@shapes
@causal
def test_forward_is_balanced(shape, is_causal):
    length = shape[3]
    step_rows, step_keys, _, _ = _C.tile_size()
    free = [0] * THREADS
    for _, _, first_row, last_row, first_key, last_key in tasks_of(False, shape, is_causal):
        rows, keys = tiles(first_row, last_row, step_rows), tiles(first_key, last_key, step_keys)
        cost = sum(visible_area(r, k, length, is_causal) for r in rows for k in keys)
        heapq.heapreplace(free, free[0] + cost)
    assert max(free) <= 1.1 * sum(free) / THREADS


@shapes
@causal
def test_backward_is_balanced(shape, is_causal):
    """Waiting included: key block k of a head adds to the gradient of a query block after key block k - 1 did, by the
    last of the five products of a tile."""
    batch, heads, kv_heads, length = shape
    _, _, step_queries, step_keys = _C.tile_size()
    free, work = [0] * THREADS, 0
    passed = defaultdict(int)  # (batch, key head, query block): when the last key block has added to it
    for b, h, first_row, last_row, first_key, last_key in tasks_of(True, shape, is_causal):
        now = heapq.heappop(free)
        for block in reversed(tiles(first_row, last_row, step_queries)):
            for keys in tiles(first_key, last_key, step_keys):
                cost = visible_area(block, keys, length, is_causal)
                if cost == 0:
                    continue
                work += cost
                now = max(now + 0.8 * cost, passed[b, h, block[0]]) + 0.2 * cost
                passed[b, h, block[0]] = now
        heapq.heappush(free, now)
    assert max(free) <= 1.1 * work / THREADS


@kinds
@pytest.mark.parametrize(
    "shape", [*LINEAR_SHAPES.values(), (1, 1, 1), (1, 512, 513), (1025, 65, 17), (33, 1, 1030), (100, 511, 1)], ids=str
)
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_every_element_of_a_projection_is_in_one_task(kind, shape, threads):
    rows, columns, tasks = linear_tasks(kind, shape, threads)
    times = torch.zeros(rows, columns, dtype=torch.uint8)
    for first_row, last_row, first_column, last_column in tasks:
        assert 0 <= first_row < last_row <= rows and 0 <= first_column < last_column <= columns
        times[first_row:last_row, first_column:last_column] += 1
    assert (times == 1).all()


@kinds
@pytest.mark.parametrize("shape", LINEAR_SHAPES.values(), ids=LINEAR_SHAPES)
def test_projections_are_balanced(kind, shape):
    free = [0] * THREADS
    for first_row, last_row, first_column, last_column in linear_tasks(kind, shape)[2]:
        heapq.heapreplace(free, free[0] + (last_row - first_row) * (last_column - first_column))
    assert max(free) <= 1.1 * sum(free) / THREADS
