"""Each metric on inputs whose value is known by hand, and on random ones against loops in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mha_ext
from mha_ext.heads import metrics
from mha_ext.heads.recording import record

NAN = math.nan
LN2 = math.log(2)


def heads_of(*rows: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights (1, H, Lq, Lk) of one matrix per head."""
    return torch.tensor([rows], dtype=dtype)


def random_weights(batch: int, heads: int, q_len: int, kv_len: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(batch, heads, q_len, kv_len, dtype=dtype)).softmax(-1)


def padded(left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (3, 3, 5, 5), outputs (3, 3, 5, 2), queries (3, 5): sequences of 5, 3 and 1 tokens.

    Padded keys have weight 0, padded queries anything, NaN too; one head of one valid query sees nothing.
    """
    torch.manual_seed(0)
    queries = torch.arange(5) < torch.tensor([[5], [3], [1]])
    if left:
        queries = queries.flip(1)
    scores = 3 * torch.randn(3, 3, 5, 5, dtype=torch.float64)
    weights = scores.masked_fill(~queries[:, None, None, :], -math.inf).softmax(-1)
    weights[1, :, ~queries[1]] = NAN
    weights[0, 1, 2] = 0
    outputs = torch.randn(3, 3, 5, 2, dtype=torch.float64)
    outputs[2, :, ~queries[2]] = NAN
    return weights, outputs, queries


# References: one row, one pair, one key at a time.


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else NAN


def plain_entropy(row: list[float]) -> float:
    return -sum(w * math.log(w) for w in row if w > 0)


def rows_of(weights: Tensor, queries: Tensor, head: int) -> list[tuple[int, int, list[float]]]:
    """(sequence, query, weights) of the rows that count."""
    rows = []
    for b in range(weights.size(0)):
        for i in range(weights.size(2)):
            row = weights[b, head, i].tolist()
            if queries[b, i] and sum(row) > 0:
                rows.append((b, i, row))
    return rows


def plain_shares(weights: Tensor, queries: Tensor, head: int, offset: int, of_keys: bool) -> dict[str, float]:
    kv_len = weights.size(3)
    found: dict[str, list[float]] = {"previous": [], "next": [], "self": [], "first": []}
    for b, i, row in rows_of(weights, queries, head):
        valid = [bool(queries[b, j]) if of_keys else True for j in range(kv_len)]
        for name, j in (("previous", i + offset - 1), ("next", i + offset + 1), ("self", i + offset)):
            if 0 <= j < kv_len and valid[j]:
                found[name].append(row[j])
        found["first"].append(row[valid.index(True)])
    return {name: mean(values) for name, values in found.items()}


def plain_divergence(weights: Tensor, queries: Tensor, g: int, h: int) -> float:
    """Half the Kullback-Leibler divergence to the middle, from both sides."""
    of_h = {(b, i): row for b, i, row in rows_of(weights, queries, h)}
    values = []
    for b, i, p in rows_of(weights, queries, g):
        if (b, i) in of_h:
            pairs = list(zip(p, of_h[b, i], strict=True))
            to_middle = [x * math.log(2 * x / (x + y)) for x, y in pairs if x > 0]
            to_middle += [y * math.log(2 * y / (x + y)) for x, y in pairs if y > 0]
            values.append(sum(to_middle) / 2)
    return mean(values)


def plain_cosine(outputs: Tensor, queries: Tensor, g: int, h: int) -> float:
    values = []
    for b, i in queries.nonzero().tolist():
        x, y = outputs[b, g, i].tolist(), outputs[b, h, i].tolist()
        dot = sum(p * q for p, q in zip(x, y, strict=True))
        values.append(dot / math.sqrt(sum(p * p for p in x) * sum(q * q for q in y)))
    return mean(values)


def plain_cka(outputs: Tensor, queries: Tensor, g: int, h: int) -> float:
    """By the similarities between tokens: the cosine of the centred kernels K_g and K_h."""
    tokens = queries.nonzero().tolist()

    def kernel(head: int) -> list[list[float]]:
        rows = [outputs[b, head, i].tolist() for b, i in tokens]
        centre = [mean(list(column)) for column in zip(*rows, strict=True)]
        rows = [[x - c for x, c in zip(row, centre, strict=True)] for row in rows]
        return [[sum(x * y for x, y in zip(a, b, strict=True)) for b in rows] for a in rows]

    def product(a: list[list[float]], b: list[list[float]]) -> float:
        return sum(x * y for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))

    k_g, k_h = kernel(g), kernel(h)
    return product(k_g, k_h) / math.sqrt(product(k_g, k_g) * product(k_h, k_h))


def per_head(function, heads: int = 3) -> Tensor:
    return torch.tensor([function(h) for h in range(heads)], dtype=torch.float64)


def per_pair(function, heads: int = 3) -> Tensor:
    return torch.tensor([[function(g, h) for h in range(heads)] for g in range(heads)], dtype=torch.float64)


@pytest.mark.parametrize("left", [False, True], ids=["padding right", "padding left"])
class TestAgainstLoops:
    def test_rows(self, left: bool) -> None:
        weights, _, queries = padded(left)
        expected = per_head(lambda h: mean([plain_entropy(row) for _, _, row in rows_of(weights, queries, h)]))
        assert_close(metrics.entropy(weights, queries), expected)
        expected = per_head(
            lambda h: mean(
                [sum(w * abs(i - j) for j, w in enumerate(row)) for _, i, row in rows_of(weights, queries, h)]
            )
        )
        assert_close(metrics.attention_distance(weights, queries), expected)

    def test_relative_entropy(self, left: bool) -> None:
        weights, _, queries = padded(left)
        visible = queries.sum(1)
        expected = per_head(
            lambda h: mean(
                [
                    plain_entropy(row) / math.log(int(visible[b]))
                    for b, _, row in rows_of(weights, queries, h)
                    if visible[b] > 1
                ]
            )
        )
        assert_close(metrics.relative_entropy(weights, visible[:, None, None], queries), expected)

    def test_position_shares(self, left: bool) -> None:
        weights, _, queries = padded(left)
        shares = metrics.position_shares(weights, queries)
        assert list(shares) == ["previous", "next", "self", "first"]
        for name, share in shares.items():
            assert_close(share, per_head(lambda h, name=name: plain_shares(weights, queries, h, 0, True)[name]))

    def test_pairs(self, left: bool) -> None:
        weights, outputs, queries = padded(left)
        divergence = metrics.jensen_shannon(weights, queries)
        assert_close(divergence, per_pair(lambda g, h: plain_divergence(weights, queries, g, h)))
        cosine = metrics.cosine_similarity(outputs, queries)
        assert_close(cosine, per_pair(lambda g, h: plain_cosine(outputs, queries, g, h)))
        cka = metrics.linear_cka(outputs, queries)
        assert_close(cka, per_pair(lambda g, h: plain_cka(outputs, queries, g, h)))
        for matrix in (divergence, cosine, cka):
            assert torch.equal(matrix, matrix.mT)

    def test_cached_keys(self, left: bool) -> None:
        torch.manual_seed(int(left))
        weights = random_weights(2, 3, 3, 5)
        queries = torch.tensor([[True, True, True], [False, True, True]])
        for offset in (2, 0, -1, 4):
            shares = metrics.position_shares(weights, queries, offset)
            for name, share in shares.items():
                plain = per_head(lambda h, o=offset, name=name: plain_shares(weights, queries, h, o, False)[name])
                assert_close(share, plain, equal_nan=True)
            distance = per_head(
                lambda h, o=offset: mean(
                    [sum(w * abs(i + o - j) for j, w in enumerate(row)) for _, i, row in rows_of(weights, queries, h)]
                )
            )
            assert_close(metrics.attention_distance(weights, queries, offset), distance)


class TestEntropy:
    def test_uniform_one_hot_and_half(self) -> None:
        weights = heads_of([[0.25] * 4], [[0, 1, 0, 0]], [[0.5, 0, 0.5, 0]])
        expected = torch.tensor([math.log(4), 0, LN2], dtype=torch.float64)
        assert_close(metrics.entropy(weights), expected)
        assert_close(metrics.relative_entropy(weights), expected / math.log(4))

    def test_relative_to_what_is_visible(self) -> None:
        weights = heads_of([[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]])
        visible = torch.tensor([1, 2, 3])  # the first row has no choice
        assert_close(metrics.relative_entropy(weights, visible), torch.tensor([0.5], dtype=torch.float64))
        assert_close(metrics.relative_entropy(weights, 2), torch.tensor([1 / 3], dtype=torch.float64))
        assert metrics.relative_entropy(weights, 1).isnan().all()
        assert metrics.relative_entropy(weights, 0).isnan().all()

    def test_of_a_random_model_is_high(self) -> None:
        torch.manual_seed(0)
        q, k = torch.randn(2, 2, 4, 64, 16)
        weights = (q @ k.mT / 16**0.5 * 0.1).softmax(-1)  # scores of small initial weights
        assert (metrics.relative_entropy(weights) > 0.99).all()


class TestDistance:
    def test_own_and_shifted(self) -> None:
        eye = torch.eye(4, dtype=torch.float64)
        weights = torch.stack([eye, eye.roll(1, 1), torch.full((4, 4), 0.25, dtype=torch.float64)]).unsqueeze(0)
        expected = [0, (1 + 1 + 1 + 3) / 4, (6 + 4 + 4 + 6) / 16]
        assert_close(metrics.attention_distance(weights), torch.tensor(expected, dtype=torch.float64))

    def test_with_a_cache(self) -> None:
        weights = heads_of([[0, 0, 0, 1], [1, 0, 0, 0]])  # tokens 2 and 3
        assert_close(metrics.attention_distance(weights, offset=2), torch.tensor([2.0], dtype=torch.float64))

    def test_between_sequences_there_is_none(self) -> None:
        assert metrics.attention_distance(heads_of([[1.0]], [[1.0]]), offset=None).isnan().tolist() == [True, True]


class TestPositionShares:
    def test_heads_that_do_one_thing(self) -> None:
        previous = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
        following = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
        itself = torch.eye(4).tolist()
        first = [[1, 0, 0, 0]] * 4
        shares = metrics.position_shares(heads_of(previous, following, itself, first))
        # the first row of `first` looks at itself, the second at the previous one
        assert_close(shares["previous"], torch.tensor([1, 0, 0, 1 / 3], dtype=torch.float64))
        assert_close(shares["next"], torch.tensor([0, 1, 0, 0], dtype=torch.float64))
        assert_close(shares["self"], torch.tensor([1 / 4, 1 / 4, 1, 1 / 4], dtype=torch.float64))
        assert_close(shares["first"], torch.tensor([1 / 2, 0, 1 / 4, 1], dtype=torch.float64))

    def test_padding_has_no_neighbours(self) -> None:
        weights = heads_of([[0, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0.75, 0.25, 0], [0, 0, 0, 0]])
        queries = torch.tensor([[False, True, True, False]])
        shares = metrics.position_shares(weights, queries)
        expected = {"previous": 0.75, "next": 0.5, "self": (0.5 + 0.25) / 2, "first": (0.5 + 0.75) / 2}
        assert {name: share.item() for name, share in shares.items()} == expected

    def test_one_token(self) -> None:
        shares = metrics.position_shares(heads_of([[1.0]]))
        assert shares["previous"].isnan().all() and shares["next"].isnan().all()
        assert shares["self"].item() == shares["first"].item() == 1

    def test_between_sequences_there_are_none(self) -> None:
        shares = metrics.position_shares(random_weights(1, 2, 3, 3), offset=None)
        assert all(share.shape == (2,) and share.isnan().all() for share in shares.values())

    def test_with_a_cache_queries_do_not_tell_about_keys(self) -> None:
        weights = heads_of([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [1, 0, 0]])  # tokens 1, 2 and one without a key
        shares = metrics.position_shares(weights, torch.tensor([[False, True, False]]), offset=1)
        assert [shares[name].item() for name in ("previous", "self", "first")] == [0.25, 0.5, 0.25]

    def test_positions_beyond_the_keys(self) -> None:
        shares = metrics.position_shares(random_weights(1, 2, 3, 3), offset=100)
        assert shares["self"].isnan().all() and not shares["first"].isnan().any()


class TestJensenShannon:
    def test_equal_disjoint_and_half(self) -> None:
        weights = heads_of([[1, 0, 0]], [[1, 0, 0]], [[0, 1, 0]], [[0.5, 0.5, 0]])
        half = 0.75 * math.log(4 / 3) + 0.25 * math.log(4) - LN2 / 2
        expected = [[0, 0, LN2, half], [0, 0, LN2, half], [LN2, LN2, 0, half], [half, half, half, 0]]
        assert_close(metrics.jensen_shannon(weights), torch.tensor(expected, dtype=torch.float64))

    def test_rows_count_for_a_pair_if_they_count_for_both(self) -> None:
        weights = heads_of([[1, 0], [1, 0]], [[0, 1], [0, 0]], [[0, 0], [1, 0]])
        expected = [[0, LN2, 0], [LN2, 0, NAN], [0, NAN, 0]]
        result = metrics.jensen_shannon(weights)
        assert_close(result, torch.tensor(expected, dtype=torch.float64), equal_nan=True)

    def test_in_float32_never_negative(self) -> None:
        torch.manual_seed(0)
        base = random_weights(1, 1, 16, 64, torch.float32)
        noise = 1 + 1e-6 * torch.rand(1, 4, 16, 64)
        assert (metrics.jensen_shannon(base * noise) >= 0).all()

    def test_no_temporary_for_all_pairs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Largest(TorchDispatchMode):
            numel = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if not func.is_view:
                    sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
                    self.numel = max([self.numel, *sizes])
                return result

        monkeypatch.setattr(metrics, "_BLOCK", 2 * 4 * 64 * 3)  # three rows
        weights = random_weights(2, 4, 64, 64)
        with Largest() as largest:
            metrics.jensen_shannon(weights)
        assert 0 < largest.numel <= metrics._BLOCK


class TestCosine:
    def test_known_directions(self) -> None:
        outputs = heads_of([[1, 0], [2, 0]], [[3, 0], [0, 1]], [[-1, 0], [-5, 0]])
        expected = [[1, 0.5, -1], [0.5, 1, -0.5], [-1, -0.5, 1]]
        assert_close(metrics.cosine_similarity(outputs), torch.tensor(expected, dtype=torch.float64))

    def test_zero_has_no_direction(self) -> None:
        outputs = heads_of([[1, 0], [1, 0]], [[0, 0], [1, 0]], [[0, 0], [0, 0]])
        expected = [[1, 1, NAN], [1, 1, NAN], [NAN, NAN, NAN]]
        result = metrics.cosine_similarity(outputs)
        assert_close(result, torch.tensor(expected, dtype=torch.float64), equal_nan=True)

    def test_never_above_1(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(1, 64, 1, 16)
        outputs[:, 32:] = -3 * outputs[:, :32]
        assert 0.999 < metrics.cosine_similarity(outputs).abs().max() <= 1

    def test_of_random_heads_is_near_0(self) -> None:
        torch.manual_seed(0)
        cosine = metrics.cosine_similarity(torch.randn(4, 6, 256, 32))
        assert (cosine - torch.eye(6)).abs().max() < 0.02


class TestLinearCKA:
    def test_two_known_heads(self) -> None:
        # one feature each: the squared correlation
        outputs = heads_of([[1], [1], [-1], [-1]], [[5], [3], [5], [3]], [[2], [2], [2], [-6]])
        third = (1 * 1 + 1 * 1 - 1 * 1 + 1 * 3) ** 2 / (4 * (3 + 9))
        expected = [[1, 0, third], [0, 1, third], [third, third, 1]]
        assert_close(metrics.linear_cka(outputs), torch.tensor(expected, dtype=torch.float64))

    def test_rotation_scale_and_shift_change_nothing(self) -> None:
        torch.manual_seed(0)
        first, other = torch.randn(2, 2, 1, 32, 4, dtype=torch.float64)
        rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
        skewed = first @ torch.diag(torch.tensor([10.0, 1, 1, 1], dtype=torch.float64))
        cka = metrics.linear_cka(torch.cat([first, -3 * first @ rotation + 7, other, skewed], 1))
        assert_close(cka[0, 1].item(), 1.0)
        assert_close(cka[0, 2], cka[1, 2])
        assert cka[0, 2] < 0.5 and cka[0, 3] < 0.9

    def test_far_from_the_origin(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(2, 3, 64, 8)
        near = metrics.linear_cka(outputs.double()).float()
        assert_close(metrics.linear_cka(outputs + 64), near, atol=1e-4, rtol=0)

    def test_constant_and_zero_heads_are_unknown(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(2, 3, 8, 4)
        outputs[:, 1] = torch.tensor([0.1, 1e3, -1e-3, 0.7])
        outputs[:, 2] = 0
        known = torch.zeros(3, 3, dtype=torch.bool)
        known[0, 0] = True
        assert torch.equal(~metrics.linear_cka(outputs).isnan(), known)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rounding_is_no_variation(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(1, 3, 16, 4, dtype=dtype)
        same = outputs[:, 2, :1].expand(1, 16, 4)
        outputs[:, 2] = torch.where(torch.rand(1, 16, 4) < 0.5, same, same.nextafter(2 * same))
        assert metrics.linear_cka(outputs).isnan().tolist() == [[False, False, True]] * 2 + [[True] * 3]

    def test_of_random_heads(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(4, 3, 1024, 8)
        others = ~torch.eye(3, dtype=torch.bool)
        assert metrics.linear_cka(outputs)[others].max() < 0.01
        assert metrics.linear_cka(outputs[:1, :, :8])[others].min() > 0.3  # few tokens: high for unrelated heads

    def test_under_autocast(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(2, 3, 64, 8)
        expected = metrics.linear_cka(outputs), metrics.cosine_similarity(outputs)
        with torch.autocast("cpu", torch.bfloat16):
            result = metrics.linear_cka(outputs), metrics.cosine_similarity(outputs)
        assert_close(result, expected)


class TestEffectiveRank:
    def test_known_matrices(self) -> None:
        assert_close(metrics.effective_rank(torch.eye(5)).item(), 5.0)
        assert_close(metrics.effective_rank(torch.ones(5, 5)).item(), 1.0)
        assert_close(metrics.effective_rank(torch.ones(1, 1)).item(), 1.0)
        pair_and_one = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.float64)
        assert_close(metrics.effective_rank(pair_and_one).item(), 3 / 2 ** (2 / 3))  # eigenvalues 2, 1, 0
        half = torch.tensor([[1.0, 0.5], [0.5, 1]], dtype=torch.float64)
        assert_close(metrics.effective_rank(half).item(), math.exp(plain_entropy([0.75, 0.25])))

    def test_negative_eigenvalues_are_none(self) -> None:
        similarity = torch.full((3, 3), -0.9).fill_diagonal_(1.0)  # 1.9, 1.9, -0.8
        assert_close(metrics.effective_rank(similarity).item(), 2.0)

    def test_unknown_heads_are_left_out(self) -> None:
        similarity = torch.eye(4)
        similarity[1], similarity[:, 1] = NAN, NAN
        similarity[0, 2] = similarity[2, 0] = NAN
        assert_close(metrics.effective_rank(similarity).item(), 3.0)
        assert metrics.effective_rank(torch.full((2, 2), NAN)).isnan()
        assert metrics.effective_rank(torch.zeros(0, 0)).isnan()


def plain_overlap(w_q: Tensor, w_k: Tensor) -> Tensor:
    """By the projections onto the column and row spaces of the whole (E, E) matrices, double, full rank or not."""
    group = w_q.size(0) // w_k.size(0)
    matrices = [w_q[h].mT @ w_k[h // group] for h in range(w_q.size(0))]
    ranks = [int(torch.linalg.matrix_rank(a)) for a in matrices]
    sides = [
        [a @ torch.linalg.pinv(a, rtol=1e-10) for a in matrices],
        [torch.linalg.pinv(a, rtol=1e-10) @ a for a in matrices],
    ]

    def overlap(g: int, h: int) -> float:
        smaller = min(ranks[g], ranks[h])
        return mean([float((p[g] @ p[h]).trace()) / smaller for p in sides]) if smaller else 0.0

    return per_pair(overlap, len(matrices))


class TestSubspaceOverlap:
    def test_axes(self) -> None:
        e = torch.eye(6, dtype=torch.float64)
        turn = torch.tensor([[3.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
        w_q = torch.stack([e[:2], turn @ e[:2], e[1:3], e[4:]])
        w_k = torch.stack([e[:2], e[:2], e[:2], e[4:]])
        expected = [[1, 1, 0.75, 0], [1, 1, 0.75, 0], [0.75, 0.75, 1, 0], [0, 0, 0, 1]]
        assert_close(metrics.subspace_overlap(w_q, w_k), torch.tensor(expected, dtype=torch.float64))

    def test_an_angle(self) -> None:
        angle = 0.3
        w_q = torch.tensor([[[1.0, 0]], [[math.cos(angle), math.sin(angle)]]], dtype=torch.float64)
        w_k = torch.tensor([[[1.0, 0]], [[1.0, 0]]], dtype=torch.float64)
        overlap = metrics.subspace_overlap(w_q, w_k)
        assert_close(overlap[0, 1].item(), (math.cos(angle) ** 2 + 1) / 2)

    @pytest.mark.parametrize("heads, kv_heads, e_k", [(4, 4, 12), (4, 2, 12), (4, 1, 9)])
    def test_against_projections(self, heads: int, kv_heads: int, e_k: int) -> None:
        torch.manual_seed(0)
        w_q = torch.randn(heads, 3, 12, dtype=torch.float64)
        w_k = torch.randn(kv_heads, 3, e_k, dtype=torch.float64)
        w_q[0, 2] = 0  # a pruned row
        w_q[1, 1] = 2 * w_q[1, 0]  # a repeated one
        overlap = metrics.subspace_overlap(w_q, w_k)
        assert_close(overlap, plain_overlap(w_q, w_k))
        assert_close(metrics.subspace_overlap(w_q.float(), w_k.float()), overlap.float())

    def test_of_rank_0_is_0(self) -> None:
        torch.manual_seed(0)
        w_q, w_k = torch.randn(2, 3, 4, 8)
        w_q[1] = 0
        w_k[2] = 0
        overlap = metrics.subspace_overlap(w_q, w_k)
        assert_close(overlap, torch.zeros(3, 3).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0)))

    def test_a_subspace_within_another(self) -> None:
        e = torch.eye(6)
        inner = torch.stack([e[0], torch.zeros(6), e[0]])
        overlap = metrics.subspace_overlap(torch.stack([e[:3], inner]), torch.stack([e[:3], inner]))
        assert_close(overlap, torch.ones(2, 2))

    def test_never_above_1(self) -> None:
        torch.manual_seed(0)
        w_q, w_k = torch.randn(2, 1, 8, 16, dtype=torch.float64).repeat(1, 16, 1, 1)
        assert 0.999 < metrics.subspace_overlap(w_q, w_k).max() <= 1

    def test_rounding_is_no_dimension(self) -> None:
        torch.manual_seed(0)
        w_q, w_k = torch.randn(2, 4, 3, 16)
        w_q[:, 2] = w_q[:, 0] / 3 + w_q[:, 1] / 7  # two dimensions
        overlap = metrics.subspace_overlap(w_q, w_k)
        exact = w_q.double()
        exact[:, 2] = exact[:, 0] / 3 + exact[:, 1] / 7
        assert_close(overlap, plain_overlap(exact, w_k.double()).float())

    @pytest.mark.parametrize("head_dim, features", [(8, 64), (16, 32), (8, 8), (12, 8)])
    def test_of_random_heads(self, head_dim: int, features: int) -> None:
        torch.manual_seed(0)
        w_q, w_k = torch.randn(2, 12, head_dim, features)
        others = ~torch.eye(12, dtype=torch.bool)
        expected = metrics.expected_overlap(head_dim, features)
        assert expected == min(1, head_dim / features)
        assert abs(float(metrics.subspace_overlap(w_q, w_k)[others].mean()) - expected) < 0.01

    def test_a_head_with_nan(self) -> None:
        torch.manual_seed(0)
        w_q, w_k = torch.randn(2, 3, 2, 8)
        w_q[1, 0, 0] = NAN
        w_k[2, 1, 1] = math.inf
        unknown = metrics.subspace_overlap(w_q, w_k).isnan()
        assert unknown.tolist() == [[False, True, True], [True, True, True], [True, True, True]]


class TestOutputShare:
    def test_known(self) -> None:
        w_o = torch.zeros(3, 3, 2)
        w_o[0, 0] = torch.tensor([1.0, 2.0])
        w_o[:, 1] = 1
        assert_close(metrics.output_share(w_o), torch.tensor([5 / 11, 6 / 11, 0]))

    def test_of_random_heads_is_even(self) -> None:
        torch.manual_seed(0)
        assert (metrics.output_share(torch.randn(256, 4, 64)) - 0.25).abs().max() < 0.01

    def test_of_zero(self) -> None:
        assert metrics.output_share(torch.zeros(2, 3, 1)).isnan().all()


class TestRollout:
    def test_two_layers_by_hand(self) -> None:
        head = [[1, 0], [0.5, 0.5]]
        layer = heads_of(head, head)
        expected = torch.tensor([[[1, 0], [0.25 + 0.75 * 0.25, 0.75 * 0.75]]], dtype=torch.float64)
        assert_close(metrics.attention_rollout([layer, layer]), expected)

    def test_order_of_layers_and_mean_over_heads(self) -> None:
        first = heads_of([[1, 0], [1, 0]], [[1, 0], [0, 1]])  # mean: rows (1, 0), (0.5, 0.5)
        second = heads_of([[0, 1], [0, 1]])
        rollout = metrics.attention_rollout([first, second], residual=0.0)
        assert_close(rollout, torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64))

    def test_residual_only(self) -> None:
        torch.manual_seed(0)
        rollout = metrics.attention_rollout([random_weights(2, 3, 4, 4)], residual=1.0)
        assert_close(rollout, torch.eye(4, dtype=torch.float64).expand(2, 4, 4))

    @pytest.mark.parametrize("residual", [0.0, 0.5])
    def test_rows_of_nothing(self, residual: float) -> None:
        layer = heads_of([[0, 0], [NAN, NAN]], [[0, 0], [1, 0]])
        rollout = metrics.attention_rollout([layer], residual)
        expected = torch.tensor([[[1, 0], [1 - residual, residual]]], dtype=torch.float64)
        assert_close(rollout, expected)

    def test_rows_sum_to_1(self) -> None:
        torch.manual_seed(0)
        rollout = metrics.attention_rollout([random_weights(2, h, 6, 6, torch.float32) for h in (1, 2, 4)])
        assert rollout.shape == (2, 6, 6) and rollout.dtype == torch.float32
        assert_close(rollout.sum(-1), torch.ones(2, 6))


def symmetric(size: int, pairs: dict[tuple[int, int], float]) -> Tensor:
    matrix = torch.eye(size)
    for (a, b), value in pairs.items():
        matrix[a, b] = matrix[b, a] = value
    return matrix


class TestClusterOrder:
    def test_groups_end_up_side_by_side(self) -> None:
        group = [0, 1, 2, 0, 1, 2, 0]
        same = torch.tensor([[float(g == h) for h in group] for g in group])
        order = metrics.cluster_order(0.5 * same + 0.5 * torch.eye(7))
        assert sorted(order) == list(range(7))
        changes = [group[a] != group[b] for a, b in zip(order, order[1:], strict=False)]
        assert sum(changes) == 2

    def test_ends_that_meet_are_similar(self) -> None:
        assert metrics.cluster_order(symmetric(3, {(0, 1): 0.9, (1, 2): 0.5, (0, 2): 0.1})) == [0, 1, 2]
        assert metrics.cluster_order(symmetric(3, {(0, 1): 0.9, (1, 2): 0.1, (0, 2): 0.5})) == [1, 0, 2]

    def test_linkage_is_the_average(self) -> None:
        # 2 is as near to {0, 1} as 0.8 (nearest), 0 (farthest), 0.4 (average): it joins 3
        unlike_nearest = symmetric(4, {(0, 1): 0.9, (0, 2): 0.8, (2, 3): 0.5, (1, 3): 0.6})
        assert metrics.cluster_order(unlike_nearest) == [1, 0, 2, 3]
        # 0.8, 0.1, 0.45: it joins {0, 1}
        unlike_farthest = symmetric(4, {(0, 1): 0.9, (0, 2): 0.8, (1, 2): 0.1, (2, 3): 0.4, (1, 3): 0.5})
        assert metrics.cluster_order(unlike_farthest) == [2, 0, 1, 3]

    def test_average_counts_heads_not_clusters(self) -> None:
        # {0, 1, 2} to 4: (0.9 + 0 + 0) / 3 = 0.3; the mean of {0, 1} and {2} would be 0.225, below 3 to 4
        pairs = {(0, 1): 0.99, (0, 2): 0.98, (1, 2): 0.98, (0, 4): 0.9, (3, 4): 0.27, (2, 3): 0.28}
        assert metrics.cluster_order(symmetric(5, pairs)) == [4, 0, 1, 2, 3]

    def test_unknown_is_last(self) -> None:
        similarity = symmetric(4, {(0, 2): 0.9, (2, 3): 0.8, (0, 3): 0.7})
        similarity[1], similarity[:, 1] = NAN, NAN
        assert metrics.cluster_order(similarity) in ([0, 2, 3, 1], [1, 0, 2, 3], [3, 2, 0, 1])

    def test_small(self) -> None:
        assert metrics.cluster_order(torch.zeros(0, 0)) == []
        assert metrics.cluster_order(torch.ones(1, 1)) == [0]
        assert sorted(metrics.cluster_order(torch.full((3, 3), NAN))) == [0, 1, 2]
        assert sorted(metrics.cluster_order(torch.ones(4, 4))) == [0, 1, 2, 3]


def all_of(weights: Tensor, outputs: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
    return {
        "entropy": metrics.entropy(weights, queries),
        "relative": metrics.relative_entropy(weights, None, queries),
        "distance": metrics.attention_distance(weights, queries),
        **metrics.position_shares(weights, queries),
        "divergence": metrics.jensen_shannon(weights, queries),
        "cosine": metrics.cosine_similarity(outputs, queries),
        "cka": metrics.linear_cka(outputs, queries),
    }


class TestAll:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_float32(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        weights, outputs = random_weights(2, 3, 5, 5).to(dtype), torch.randn(2, 3, 5, 4).to(dtype)
        queries = torch.rand(2, 5) < 0.8
        result, expected = all_of(weights, outputs, queries), all_of(weights.float(), outputs.float(), queries)
        for name, value in result.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, expected[name]), name

    def test_all_queries_are_no_queries(self) -> None:
        torch.manual_seed(0)
        weights, outputs = random_weights(2, 3, 5, 5), torch.randn(2, 3, 5, 4)
        result, expected = all_of(weights, outputs, torch.ones(2, 5, dtype=torch.bool)), all_of(weights, outputs, None)
        for name, value in result.items():
            assert torch.equal(value, expected[name]), name

    @pytest.mark.parametrize("shape", [(0, 2, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 2, 0, 0)])
    def test_nothing_has_no_mean(self, shape: tuple[int, ...]) -> None:
        for value in all_of(torch.zeros(shape), torch.zeros(*shape[:3], 4), None).values():
            assert value.size(0) == 2 and value.isnan().all()

    def test_no_valid_query(self) -> None:
        weights, outputs = random_weights(1, 2, 3, 3), torch.randn(1, 2, 3, 4)
        for value in all_of(weights, outputs, torch.zeros(1, 3, dtype=torch.bool)).values():
            assert value.isnan().all()

    def test_one_head_one_token(self) -> None:
        result = all_of(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 4), None)
        known = {"entropy": 0, "distance": 0, "self": 1, "first": 1, "divergence": 0, "cosine": 1}
        for name, value in result.items():
            assert value.isnan().all() if name not in known else value.item() == known[name], name

    def test_blocks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights, outputs, queries = padded(left=True)
        expected = all_of(weights, outputs, queries)
        for block in (1, 90, 10**9):  # one row, two, all
            monkeypatch.setattr(metrics, "_BLOCK", block)
            assert_close(all_of(weights, outputs, queries), expected, rtol=1e-14, atol=1e-14)


class TestGradients:
    @pytest.mark.parametrize("function", [metrics.entropy, metrics.relative_entropy, metrics.jensen_shannon])
    def test_of_weights(self, function) -> None:
        torch.manual_seed(0)
        scores = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: function(s.softmax(-1)), scores)

    @pytest.mark.parametrize("function", [metrics.attention_distance, lambda w: metrics.position_shares(w)["next"]])
    def test_of_positions(self, function) -> None:
        torch.manual_seed(0)
        scores = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: function(s.softmax(-1)), scores)

    @pytest.mark.parametrize("function", [metrics.cosine_similarity, metrics.linear_cka])
    def test_of_outputs(self, function) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
        queries = torch.tensor([[True, True, True, False], [True, True, False, False]])
        off = ~torch.eye(3, dtype=torch.bool)
        assert torch.autograd.gradcheck(lambda x: function(x, queries)[off], outputs)

    def test_of_the_effective_rank(self) -> None:
        torch.manual_seed(0)
        outputs = torch.randn(2, 3, 8, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: metrics.effective_rank(metrics.linear_cka(x)), outputs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("function", [metrics.entropy, metrics.relative_entropy, metrics.jensen_shannon])
    def test_at_zero_weights(self, function, dtype: torch.dtype) -> None:
        weights = heads_of([[1, 0], [0.5, 0.5]], [[1, 0], [0, 1]], [[0, 0], [NAN, NAN]], dtype=dtype).requires_grad_()
        function(weights).nansum().backward()
        assert weights.grad is not None
        assert weights.grad.isfinite().all()
        assert (weights.grad[0, 2] == 0).all()  # rows that do not count
        assert (weights.grad[0, :2] != 0).any()

    def test_at_zero_outputs(self) -> None:
        for function in (metrics.cosine_similarity, metrics.linear_cka):
            outputs = heads_of([[1, 2], [3, 1]], [[1, 0], [0, 1]], [[0, 0], [0, 0]]).requires_grad_()
            function(outputs)[0, 1].backward()
            assert outputs.grad is not None
            assert outputs.grad.isfinite().all() and (outputs.grad[0, 2] == 0).all()


WEIGHTS, OUTPUTS = torch.full((2, 3, 4, 4), 0.25), torch.ones(2, 3, 4, 5)
QUERIES = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    "name, arguments, error, text",
    [
        ("entropy", ([[1.0]],), TypeError, "weights to be a tensor, got list"),
        ("entropy", (torch.ones(1, 1, 1, 1, dtype=torch.int64),), TypeError, "floating dtype, got torch.int64"),
        ("entropy", (WEIGHTS.to(torch.complex64),), TypeError, "floating dtype, got torch.complex64"),
        ("entropy", (WEIGHTS[0],), ValueError, r"shape \(B, H, Lq, Lk\), H >= 1, got \(3, 4, 4\)"),
        ("entropy", (WEIGHTS[:, :0],), ValueError, r"got \(2, 0, 4, 4\)"),
        ("entropy", (WEIGHTS, QUERIES.int()), TypeError, "queries to be a bool tensor, got torch.int32"),
        ("entropy", (WEIGHTS, [True]), TypeError, "queries to be a bool tensor, got list"),
        ("entropy", (WEIGHTS, QUERIES[:1]), ValueError, r"\(B, Lq\) = \(2, 4\), got \(1, 4\)"),
        ("jensen_shannon", (WEIGHTS, QUERIES.mT), ValueError, r"\(B, Lq\) = \(2, 4\), got \(4, 2\)"),
        ("relative_entropy", (WEIGHTS, 2.0), TypeError, "visible to be int, a tensor or None, got float"),
        ("relative_entropy", (WEIGHTS, True), TypeError, "got bool"),
        ("relative_entropy", (WEIGHTS, -1), ValueError, "visible >= 0, got -1"),
        ("relative_entropy", (WEIGHTS, QUERIES), TypeError, "visible of integers, got torch.bool"),
        ("relative_entropy", (WEIGHTS, torch.ones(4)), TypeError, "visible of integers, got torch.float32"),
        (
            "relative_entropy",
            (WEIGHTS, torch.ones(5, dtype=torch.int64)),
            ValueError,
            r"to \(2, 3, 4\), got shape \(5,\)",
        ),
        ("relative_entropy", (WEIGHTS, torch.ones(1, 2, 3, 4).int()), ValueError, r"got shape \(1, 2, 3, 4\)"),
        ("attention_distance", (WEIGHTS, None, 0.5), TypeError, "offset to be int or None, got float"),
        ("position_shares", (WEIGHTS, None, True), TypeError, "offset to be int or None, got bool"),
        ("position_shares", (WEIGHTS, QUERIES[:, :3]), ValueError, r"got \(2, 3\)"),
        (
            "cosine_similarity",
            (OUTPUTS[0],),
            ValueError,
            r"outputs of shape \(B, H, Lq, D\), H, D >= 1, got \(3, 4, 5\)",
        ),
        ("linear_cka", (OUTPUTS[..., :0],), ValueError, r"got \(2, 3, 4, 0\)"),
        ("linear_cka", (OUTPUTS.int(),), TypeError, "floating dtype, got torch.int32"),
        ("linear_cka", (OUTPUTS, QUERIES[:1]), ValueError, r"got \(1, 4\)"),
        ("effective_rank", (1.0,), TypeError, "similarity to be a tensor, got float"),
        ("effective_rank", (torch.ones(2, 3),), ValueError, r"shape \(H, H\), got \(2, 3\)"),
        ("effective_rank", (torch.ones(2, 2).int(),), TypeError, "floating dtype, got torch.int32"),
        ("cluster_order", (torch.ones(2),), ValueError, r"shape \(H, H\), got \(2,\)"),
        ("subspace_overlap", (torch.ones(2, 3), torch.ones(2, 3)), ValueError, r"w_q of shape \(H, D, E\)"),
        ("subspace_overlap", (torch.ones(2, 3, 4), torch.ones(2, 3, 0)), ValueError, r"w_k of .* got \(2, 3, 0\)"),
        ("subspace_overlap", (torch.ones(2, 3, 4), torch.ones(2, 2, 4)), ValueError, "the same D, got"),
        (
            "subspace_overlap",
            (torch.ones(4, 3, 4), torch.ones(3, 3, 4)),
            ValueError,
            "divide those of w_q, got 3 and 4",
        ),
        ("subspace_overlap", (torch.ones(2, 3, 4), None), TypeError, "w_k to be a tensor, got NoneType"),
        ("expected_overlap", (0, 4), ValueError, "head_dim >= 1, got 0"),
        ("expected_overlap", (4, 4.0), TypeError, "features of type int, got float"),
        ("output_share", (torch.ones(2, 3),), ValueError, r"w_o of shape \(E, H, D\)"),
        ("attention_rollout", (WEIGHTS,), TypeError, "a list of weights, got Tensor"),
        ("attention_rollout", ([],), ValueError, "at least one layer, got none"),
        ("attention_rollout", ([WEIGHTS, WEIGHTS[:1]],), ValueError, r"\(B, L\) = \(2, 4\), got \(1, 3, 4, 4\)"),
        ("attention_rollout", ([WEIGHTS[:, :, :3]],), ValueError, r"got \(2, 3, 3, 4\)"),
        ("attention_rollout", ([WEIGHTS], 1.5), ValueError, "residual between 0 and 1, got 1.5"),
        ("attention_rollout", ([WEIGHTS], NAN), ValueError, "residual between 0 and 1, got nan"),
        ("attention_rollout", ([WEIGHTS], "1"), TypeError, "residual to be a number, got str"),
    ],
)
def test_errors(name: str, arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"{name}: expected .*{text}"):
        getattr(metrics, name)(*arguments)


class TestBesideARandomLayer:
    """A layer of the usual initial values, on random tokens: what chance gives; and heads with a task."""

    LENGTH = 24

    def seen(self) -> tuple[Tensor, Tensor]:
        """Weights (B, H, L, L) and outputs (B, H, L, D) of the random layer."""
        layer, x = mha_ext.MultiHeadAttention(64, 4), torch.randn(16, self.LENGTH, 64)
        with torch.no_grad(), record(layer) as recording:
            layer(x, x, x)
        return recording[""].weights, recording[""].outputs

    def with_tasks(self) -> Tensor:
        """(1, 4, L, L): heads that look at the token itself, the one before, the one after, the first."""
        eye = torch.eye(self.LENGTH)
        first = torch.zeros(self.LENGTH, self.LENGTH)
        first[:, 0] = 1.0
        return torch.stack([eye, eye.roll(-1, 1), eye.roll(1, 1), first]).unsqueeze(0)

    def test_distance(self) -> None:
        positions = torch.arange(self.LENGTH)
        chance = (positions[:, None] - positions).abs().float().mean()
        found = metrics.attention_distance(self.seen()[0])
        torch.testing.assert_close(found, chance.expand(4), rtol=0.05, atol=0)
        assert metrics.attention_distance(self.with_tasks())[0] == 0

    def test_shares(self) -> None:
        random, tasks = metrics.position_shares(self.seen()[0]), metrics.position_shares(self.with_tasks())
        for name, head in (("self", 0), ("previous", 1), ("next", 2), ("first", 3)):
            torch.testing.assert_close(random[name], torch.full((4,), 1 / self.LENGTH), rtol=0.2, atol=0)
            assert tasks[name][head] == 1.0

    def test_divergence(self) -> None:
        pairs = ~torch.eye(4, dtype=torch.bool)
        assert 0 < metrics.jensen_shannon(self.seen()[0])[pairs].max() < 0.05  # all look at everything alike
        assert metrics.jensen_shannon(self.with_tasks())[0, 1] == pytest.approx(math.log(2))

    def test_effective_rank(self) -> None:
        """Independent heads are nearly as many as there are, up to what the same tokens make them share."""
        outputs = self.seen()[1]
        found = metrics.effective_rank(metrics.linear_cka(outputs))
        assert 2 < found < 4
        copies = outputs[:, :1].expand(-1, 4, -1, -1)
        assert metrics.effective_rank(metrics.linear_cka(copies)) == pytest.approx(1.0, abs=1e-3)

    def test_rollout(self) -> None:
        """Two layers that mix everything leave a quarter of the token itself, and the rest to all alike."""
        weights = self.seen()[0]
        rollout = metrics.attention_rollout([weights, weights])
        expected = 0.25 * torch.eye(self.LENGTH) + 0.75 / self.LENGTH
        torch.testing.assert_close(rollout.mean(0), expected, rtol=0.15, atol=1e-3)
