"""Statistics of many calls: what the metrics tell about everything at once, however it was split."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mha_ext.heads import metrics
from mha_ext.heads.statistics import Statistics

HEADS, LENGTH, FEATURES = 3, 6, 4


def calls(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`count` sequences of 1 to 6 tokens, padded on either side: weights, outputs and queries. NaN where padded."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (count, 1))
    queries = torch.arange(LENGTH) < lengths
    queries[::2] = queries[::2].flip(1)
    scores = 2 * torch.randn(count, HEADS, LENGTH, LENGTH, dtype=dtype)
    weights = scores.masked_fill(~queries[:, None, None, :], -math.inf).softmax(-1)
    outputs = 5 + torch.randn(count, HEADS, LENGTH, FEATURES, dtype=dtype)
    outputs[:, 1] = outputs[:, 0].flip(-1) + 0.5 * outputs[:, 1]  # heads 0 and 1 are alike
    padding = ~queries[:, None, :, None]
    return weights.masked_fill(padding, math.nan), outputs.masked_fill(padding, math.nan), queries


def at_once(weights: Tensor, outputs: Tensor, queries: Tensor | None, visible: Tensor | None = None) -> dict:
    cka = metrics.linear_cka(outputs, queries)
    return {
        "entropy": metrics.entropy(weights, queries),
        "relative_entropy": metrics.relative_entropy(weights, visible, queries),
        "distance": metrics.attention_distance(weights, queries),
        "position_shares": metrics.position_shares(weights, queries),
        "jensen_shannon": metrics.jensen_shannon(weights, queries),
        "cosine_similarity": metrics.cosine_similarity(outputs, queries),
        "linear_cka": cka,
        "effective_rank": metrics.effective_rank(cka),
        "redundancy": (cka.sum(1) - 1) / (HEADS - 1),
    }


def results(statistics: Statistics) -> dict:
    return {name: getattr(statistics, name)() for name in at_once(*calls(1))}


def added(weights: Tensor, outputs: Tensor, queries: Tensor, sizes: list[int]) -> Statistics:
    statistics = Statistics()
    parts = zip(weights.split(sizes), outputs.split(sizes), queries.split(sizes), strict=True)
    for w, x, q in parts:
        statistics.add(w, x, queries=q, visible=q.sum(1)[:, None, None])
    return statistics


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4], [0, 5, 0, 2], [6, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_split_tells_the_same(sizes: list[int], dtype: torch.dtype) -> None:
    weights, outputs, queries = calls(7, dtype)
    statistics = added(weights, outputs, queries, sizes)
    expected = at_once(weights, outputs, queries, queries.sum(1)[:, None, None])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_close(results(statistics), expected, rtol=tolerance, atol=tolerance)
    assert statistics.rows == int(queries.sum())
    assert statistics.heads == HEADS


def test_redundancy_finds_the_heads_that_are_alike() -> None:
    weights, outputs, queries = calls(60)
    redundancy = added(weights, outputs, queries, [20] * 3).redundancy()
    assert redundancy[2] < 0.1 < 0.3 < redundancy[:2].min()


def test_queries_in_parts() -> None:
    """Of a cache: the same rows, a few at a time, each standing at its place."""
    torch.manual_seed(0)
    weights = torch.randn(2, HEADS, LENGTH, LENGTH, dtype=torch.float64).softmax(-1)
    outputs = torch.randn(2, HEADS, LENGTH, FEATURES, dtype=torch.float64)
    statistics = Statistics()
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        statistics.add(weights[:, :, start:stop], outputs[:, :, start:stop], offset=start)
    assert_close(results(statistics), at_once(weights, outputs, None))
    assert statistics.rows == 2 * LENGTH


def test_some_rows() -> None:
    """Rows 1, 4 and 6 alone, with what is known of their neighbours from the valid queries among all."""
    weights, outputs = torch.rand(2, 3, 7, 7).softmax(-1), torch.randn(2, 3, 7, 4)
    queries = torch.tensor([[True] * 7, [False, False, True, True, True, False, False]])  # padding on both sides
    weights = weights * queries[:, None, None, :]
    rows, visible = torch.tensor([1, 4, 6]), queries.sum(1)[:, None, None]
    found = Statistics()
    found.add(
        weights[:, :, rows], outputs[:, :, rows], queries=queries, visible=queries.sum(1)[:, None, None], rows=rows
    )
    kept = torch.zeros(7, dtype=torch.bool)
    kept[rows] = True
    expected = Statistics()
    expected.add(weights, outputs, queries=queries & kept, visible=visible)
    assert found.rows == expected.rows == 4
    for name in ("entropy", "relative_entropy", "distance", "jensen_shannon", "cosine_similarity", "linear_cka"):
        torch.testing.assert_close(getattr(found, name)(), getattr(expected, name)(), msg=name)
    shares = found.position_shares()
    first, second = weights
    torch.testing.assert_close(
        shares["previous"], (first[:, 1, 0] + first[:, 4, 3] + first[:, 6, 5] + second[:, 4, 3]) / 4
    )
    torch.testing.assert_close(shares["next"], (first[:, 1, 2] + first[:, 4, 5]) / 2)  # no valid token after the others
    torch.testing.assert_close(shares["self"], (first[:, 1, 1] + first[:, 4, 4] + first[:, 6, 6] + second[:, 4, 4]) / 4)
    torch.testing.assert_close(
        shares["first"], (first[:, 1, 0] + first[:, 4, 0] + first[:, 6, 0] + second[:, 4, 2]) / 4
    )


def test_some_rows_with_a_cache() -> None:
    weights = torch.rand(1, 2, 2, 9).softmax(-1)
    found = Statistics()
    found.add(weights, offset=4, rows=torch.tensor([0, 3]))  # of 5 queries, at positions 4 and 7
    positions = torch.tensor([4, 7])
    distances = (positions[:, None] - torch.arange(9)).abs()
    torch.testing.assert_close(found.distance(), (weights[0] * distances).sum(-1).mean(-1))
    torch.testing.assert_close(found.position_shares()["next"], (weights[0, :, 0, 5] + weights[0, :, 1, 8]) / 2)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ([0, 1], TypeError, "rows to be a tensor of integers, got list"),
        (torch.tensor([0.0, 1.0]), TypeError, "rows to be a tensor of integers, got torch.float32"),
        (torch.tensor([0]), ValueError, r"rows of shape \(2,\), got \(1,\)"),
        (torch.tensor([0, 5]), ValueError, "rows from 0 and below 5, got 0 to 5"),
        (torch.tensor([-1, 1]), ValueError, "rows from 0 and below 5, got -1 to 1"),
    ],
)
def test_wrong_rows(rows: Any, error: type[Exception], text: str) -> None:
    found = Statistics()
    with pytest.raises(error, match=text):
        found.add(torch.rand(1, 2, 2, 5), queries=torch.ones(1, 5, dtype=torch.bool), rows=rows)
    assert found.rows == 0


def test_lengths_may_differ() -> None:
    even = torch.full((1, 2, 2, 2), 0.5), torch.full((1, 2, 4, 4), 0.25)
    statistics = Statistics()
    for weights in even:
        statistics.add(weights)
    expected = torch.full((2,), (2 * math.log(2) + 4 * math.log(4)) / 6)
    assert_close(statistics.entropy(), expected)
    assert_close(statistics.relative_entropy(), torch.ones(2))
    assert statistics.rows == 6


def test_keeps_nothing_that_grows_with_the_tokens() -> None:
    sizes = []
    for length in (4, 64):
        statistics = Statistics()
        statistics.add(torch.full((1, HEADS, length, length), 1 / length), torch.randn(1, HEADS, length, FEATURES))
        sizes.append(sum(x.numel() for mean in statistics._means.values() for x in (mean.total, mean.count)))
        assert statistics._moments is not None
        sizes[-1] += statistics._moments.scatter.numel() + statistics._moments.mean.numel()
    per_pair, per_head = 2, 7  # means
    features = HEADS * FEATURES
    assert sizes == [2 * (per_pair * HEADS**2 + per_head * HEADS) + features**2 + features] * 2


def test_far_from_the_origin_float32_is_enough() -> None:
    """A second moment about 0 instead of the mean would lose all digits."""
    torch.manual_seed(0)
    outputs = 300 + torch.randn(8, HEADS, 32, FEATURES)
    outputs[:, 1] += outputs[:, 0]
    weights = torch.full((8, HEADS, 32, 32), 1 / 32)
    statistics = Statistics()
    for w, x in zip(weights.split(2), outputs.split(2), strict=True):
        statistics.add(w, x)
    assert_close(statistics.linear_cka(), metrics.linear_cka(outputs.double()).float(), atol=1e-5, rtol=0)


class TestMerge:
    def test_is_as_if_all_had_been_added_to_one(self) -> None:
        weights, outputs, queries = calls(8)
        first = added(weights[:3], outputs[:3], queries[:3], [3])
        second = added(weights[3:], outputs[3:], queries[3:], [4, 1])
        before = results(second)
        first.merge(second)
        assert_close(results(first), at_once(weights, outputs, queries, queries.sum(1)[:, None, None]))
        assert first.rows == int(queries.sum())
        assert_close(results(second), before, rtol=0, atol=0)

    def test_with_nothing(self) -> None:
        weights, outputs, queries = calls(4)
        statistics = added(weights, outputs, queries, [4])
        before = results(statistics)
        statistics.merge(Statistics())
        assert_close(results(statistics), before, rtol=0, atol=0)
        empty = Statistics()
        empty.merge(statistics)
        assert_close(results(empty), before, rtol=0, atol=0)
        empty.add(weights, outputs, queries=queries)  # does not reach the other
        assert_close(results(statistics), before, rtol=0, atol=0)

    def test_with_itself(self) -> None:
        weights, outputs, queries = calls(4)
        statistics = added(weights, outputs, queries, [4])
        before = results(statistics)
        statistics.merge(statistics)
        assert_close(results(statistics), before)
        assert statistics.rows == 2 * int(queries.sum())

    def test_of_other_sizes(self) -> None:
        statistics, other = Statistics(), Statistics()
        statistics.add(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 4))
        other.add(torch.ones(1, 3, 1, 1))
        with pytest.raises(ValueError, match="Statistics.merge: expected 2 heads as before, got 3"):
            statistics.merge(other)
        other = Statistics()
        other.add(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 5))
        with pytest.raises(ValueError, match="Statistics.merge: expected outputs with D = 4 as before, got 5"):
            statistics.merge(other)
        with pytest.raises(TypeError, match="Statistics.merge: expected Statistics, got dict"):
            statistics.merge({})  # type: ignore[arg-type]
        assert statistics.rows == 1


class TestWhatIsNotThere:
    def test_no_call(self) -> None:
        statistics = Statistics()
        assert statistics.rows == statistics.heads == 0
        for name in at_once(*calls(1)):
            with pytest.raises(ValueError, match="Statistics: expected at least one call of add, got none"):
                getattr(statistics, name)()

    def test_no_outputs(self) -> None:
        weights, outputs, queries = calls(2)
        statistics = Statistics()
        statistics.add(weights, queries=queries)
        assert not statistics.entropy().isnan().any()
        for name, shape in (("cosine_similarity", (3, 3)), ("linear_cka", (3, 3)), ("effective_rank", ())):
            value = getattr(statistics, name)()
            assert value.shape == shape and value.isnan().all()
        statistics.add(weights, outputs, queries=queries)
        assert_close(statistics.linear_cka(), metrics.linear_cka(outputs, queries))

    def test_no_positions(self) -> None:
        weights, outputs, queries = calls(2)
        statistics = Statistics()
        statistics.add(weights, outputs, queries=queries, offset=None)
        assert statistics.distance().isnan().all()
        assert all(share.isnan().all() for share in statistics.position_shares().values())
        statistics.add(weights, outputs, queries=queries)  # the other call had no part in it
        assert_close(statistics.distance(), metrics.attention_distance(weights, queries))
        assert_close(statistics.position_shares(), metrics.position_shares(weights, queries))
        assert_close(statistics.entropy(), metrics.entropy(weights, queries))

    def test_no_row(self) -> None:
        weights, outputs, _ = calls(2)
        statistics = Statistics()
        statistics.add(weights, outputs, queries=torch.zeros(2, LENGTH, dtype=torch.bool))
        assert statistics.rows == 0 and statistics.heads == HEADS
        assert statistics.entropy().isnan().all() and statistics.linear_cka().isnan().all()

    def test_one_head(self) -> None:
        torch.manual_seed(0)
        statistics = Statistics()
        statistics.add(torch.full((1, 1, 4, 4), 0.25), torch.randn(1, 1, 4, 2))
        assert statistics.redundancy().isnan().all()
        assert_close(statistics.effective_rank().item(), 1.0)

    def test_a_head_without_outputs(self) -> None:
        weights, outputs, queries = calls(8)
        outputs[:, 2] = 0
        statistics = added(weights, outputs, queries, [5, 3])
        redundancy = statistics.redundancy()
        assert redundancy[2].isnan()
        assert_close(redundancy[:2], statistics.linear_cka()[0, 1].expand(2))
        assert_close(statistics.effective_rank(), metrics.effective_rank(statistics.linear_cka()[:2, :2]))


def test_constant_outputs_stay_unknown_over_calls() -> None:
    statistics = Statistics()
    for batch in (1, 2, 3, 7):
        outputs = torch.tensor([0.1, 1e3, -1e-3, 0.7]).expand(batch, 2, 5, 4)
        statistics.add(torch.full((batch, 2, 5, 5), 0.2), outputs)
    assert statistics.linear_cka().isnan().all()


def test_is_pickled_and_copied() -> None:
    weights, outputs, queries = calls(5)
    statistics = added(weights[:3], outputs[:3], queries[:3], [3])
    copies = [pickle.loads(pickle.dumps(statistics)), copy.deepcopy(statistics)]
    before = results(statistics)
    for other in copies:
        assert_close(results(other), before, rtol=0, atol=0)
        other.add(weights[3:], outputs[3:], queries=queries[3:], visible=queries[3:].sum(1)[:, None, None])
        assert_close(results(other), at_once(weights, outputs, queries, queries.sum(1)[:, None, None]))
    assert_close(results(statistics), before, rtol=0, atol=0)


def test_results_have_no_graph_and_the_dtype_of_the_finest() -> None:
    weights, outputs, queries = calls(2, torch.float32)
    statistics = Statistics()
    statistics.add(weights.bfloat16().requires_grad_(), outputs.bfloat16().requires_grad_(), queries=queries)
    assert statistics.entropy().dtype == statistics.linear_cka().dtype == torch.float32
    assert not statistics.entropy().requires_grad and not statistics.linear_cka().requires_grad
    statistics.add(weights, outputs.double(), queries=queries)
    assert statistics.entropy().dtype == statistics.effective_rank().dtype == torch.float64


def test_under_autocast() -> None:
    weights, outputs, queries = calls(6, torch.float32)
    expected = results(added(weights, outputs, queries, [6]))
    with torch.autocast("cpu", torch.bfloat16):
        result = results(added(weights, outputs, queries, [6]))
    assert_close(result, expected, rtol=0, atol=0)


WEIGHTS, OUTPUTS = torch.full((2, 3, 4, 4), 0.25), torch.ones(2, 3, 4, 5)


@pytest.mark.parametrize(
    "arguments, options, error, text",
    [
        ((None,), {}, TypeError, "weights to be a tensor, got NoneType"),
        ((WEIGHTS[0],), {}, ValueError, r"weights of shape \(B, H, Lq, Lk\), H >= 1, got \(3, 4, 4\)"),
        ((WEIGHTS, OUTPUTS[0]), {}, ValueError, r"outputs of shape \(B, H, Lq, D\), H, D >= 1, got \(3, 4, 5\)"),
        ((WEIGHTS, OUTPUTS.int()), {}, TypeError, "outputs of a floating dtype, got torch.int32"),
        ((WEIGHTS, OUTPUTS[:, :2]), {}, ValueError, r"B, H, Lq of the weights, \(2, 3, 4\), got \(2, 2, 4, 5\)"),
        ((WEIGHTS, OUTPUTS[:, :, :3]), {}, ValueError, r"got \(2, 3, 3, 5\)"),
        ((WEIGHTS,), {"queries": torch.ones(2, 4)}, TypeError, "queries to be a bool tensor, got torch.float32"),
        ((WEIGHTS,), {"queries": torch.ones(4, 2, dtype=torch.bool)}, ValueError, r"\(2, 4\), got \(4, 2\)"),
        ((WEIGHTS,), {"visible": torch.ones(2, 3, dtype=torch.int64)}, ValueError, r"\(2, 3, 4\), got shape \(2, 3\)"),
        ((WEIGHTS,), {"offset": 1.0}, TypeError, "offset to be int or None, got float"),
        ((WEIGHTS[:, :2], OUTPUTS[:, :2]), {}, ValueError, "3 heads as before, got 2"),
        ((WEIGHTS, OUTPUTS[..., :4]), {}, ValueError, "outputs with D = 5 as before, got 4"),
    ],
)
def test_errors_add_nothing(arguments: tuple, options: dict, error: type[Exception], text: str) -> None:
    statistics = Statistics()
    statistics.add(WEIGHTS, OUTPUTS)
    before = pickle.dumps(statistics)
    with pytest.raises(error, match=f"Statistics.add: expected .*{text}"):
        statistics.add(*arguments, **options)
    assert pickle.dumps(statistics) == before
