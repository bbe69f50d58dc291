"""What attention heads do, and how much they do the same, in numbers.

Sizes and names that all functions share:

    weights    (B, H, Lq, Lk) floating: rows are distributions over the keys
    outputs    (B, H, Lq, D) floating: what each head hands to W_o
    queries    bool (B, Lq): the valid tokens; None: all
    offset     query i stands at key position i + offset (Lk - Lq with a cache); None: cross-attention, the positions of
               queries and keys mean nothing to each other

A row counts if its query is valid and its weights have a finite sum above 0: a query that sees nothing has no say,
and neither has NaN. The mean over nothing is NaN. Results have the dtype of the input, at least float32; rows are
computed in it, means over rows in float64. What looks at weights or outputs is differentiable, with finite gradients at
weights of 0. Wrong shapes raise ValueError, wrong types TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 2**20  # weights that are looked at together: the temporaries of one block stay in the cache

# What the rows say: one public function for each question.


def entropy(weights: Tensor, queries: Tensor | None = None) -> Tensor:
    """How widely each head spreads its attention: the mean over rows of -sum_j w_j ln w_j, in nats, (H,).

    0 for one key only, ln Lk for all alike (Clark et al. 2019; Vig & Belinkov 2019). weights (B, H, Lq, Lk), queries
    bool (B, Lq).
    """
    check_weights("entropy", weights, queries)
    counts = counted(weights, queries)
    return Mean.of(row_entropy(weights, counts), counts).value(weights.dtype)


def relative_entropy(weights: Tensor, visible: Tensor | int | None = None, queries: Tensor | None = None) -> Tensor:
    """The entropy of each row over the most that it could be, ln(visible keys), mean over rows, 0 to 1, (H,).

    Comparable between lengths and between causal and other attention. Rows that see fewer than two keys have no choice
    and do not count. weights (B, H, Lq, Lk), visible int or integers that broadcast to (B, H, Lq), None: Lk; queries
    bool (B, Lq).
    """
    check_weights("relative_entropy", weights, queries)
    check_visible("relative_entropy", visible, weights)
    counts = counted(weights, queries)
    return relative_rows(row_entropy(weights, counts), counts, visible, weights.size(3)).value(weights.dtype)


def attention_distance(weights: Tensor, queries: Tensor | None = None, offset: int | None = 0) -> Tensor:
    """How far each head looks: the mean over rows of sum_j w_ij |i + offset - j|, in tokens, (H,).

    From 0 (only itself) to Lk - 1 (Vig & Belinkov 2019). NaN if offset is None. weights (B, H, Lq, Lk), queries bool
    (B, Lq).
    """
    check_weights("attention_distance", weights, queries)
    check_offset("attention_distance", offset)
    return distance_rows(weights, counted(weights, queries), offset).value(weights.dtype)


def position_shares(weights: Tensor, queries: Tensor | None = None, offset: int | None = 0) -> dict[str, Tensor]:
    """The mean weight on the previous token, the next, the token itself, and the first: four (H,), 0 to 1.

    The heads that Clark et al. (2019) find: keys p - 1, p + 1, p and 0 for a query at p = i + offset. Only rows that
    have such a key count: the first token has no previous one, the last no next. In self-attention without a cache
    (offset 0, Lq == Lk), `queries` tells about the keys too: a padded neighbour is none, and the first token is the
    first valid one, also with padding on the left. With a cache, it is key 0. All NaN if offset is None.
    weights (B, H, Lq, Lk), queries bool (B, Lq).
    """
    check_weights("position_shares", weights, queries)
    check_offset("position_shares", offset)
    shares = share_rows(weights, counted(weights, queries), queries, offset)
    return {name: share.value(weights.dtype) for name, share in shares.items()}


def jensen_shannon(weights: Tensor, queries: Tensor | None = None) -> Tensor:
    """How differently two heads distribute their attention: the Jensen-Shannon divergence, mean over rows, (H, H).

    JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, H the entropy: 0 for the same rows, ln 2 where no key is
    looked at by both (Lin 1991; between heads: Clark et al. 2019). A row counts for a pair if it counts for both.
    weights (B, H, Lq, Lk), queries bool (B, Lq).
    """
    check_weights("jensen_shannon", weights, queries)
    counts = counted(weights, queries)
    return divergence_rows(weights, counts, row_entropy(weights, counts)).value(weights.dtype)


def cosine_similarity(outputs: Tensor, queries: Tensor | None = None) -> Tensor:
    """The cosine between two heads' outputs for the same token, mean over tokens, -1 to 1, (H, H).

    <x_g, x_h> / (|x_g| |x_h|), the disagreement on outputs of Li et al. (2018) with the sign turned. Near 0 for
    unrelated heads. Tokens for which one of the two is zero do not count. outputs (B, H, Lq, D), queries bool (B, Lq).
    """
    check_outputs("cosine_similarity", outputs, queries)
    return cosine_rows(output_rows(outputs, queries)).value(outputs.dtype)


def linear_cka(outputs: Tensor, queries: Tensor | None = None) -> Tensor:
    """Whether two heads tell the same about the tokens, up to a rotation: linear CKA of their outputs, 0 to 1, (H, H).

    |X_g^T X_h|^2 / (|X_g^T X_g| |X_h^T X_h|), Frobenius norms, X_h (tokens, D) the centred outputs of head h (Kornblith
    et al. 2019). No change under orthogonal transformations, scaling and shifts of a head's outputs. With few tokens
    (not many more than D) unrelated heads are far above 0 too: compare with a random model. NaN for a head whose
    outputs are all the same. outputs (B, H, Lq, D), queries bool (B, Lq); memory O(H^2 D^2).
    """
    check_outputs("linear_cka", outputs, queries)
    return Moments.of(output_rows(outputs, queries)).linear_cka(outputs.dtype)


def effective_rank(similarity: Tensor) -> Tensor:
    """How many different heads a similarity matrix stands for: exp of the entropy of its eigenvalues / their sum, ().

    1 for heads that are all the same, H for heads that have nothing in common (Roy & Vetterli 2007; of a similarity
    matrix: the Vendi score, Friedman & Dieng 2023). similarity (H, H) floating, symmetric with ones on its diagonal;
    heads that have NaN there (nothing is known of them) are left out, other NaN is taken as 0. NaN if none are left.
    """
    _check_square("effective_rank", similarity)
    known = similarity.diagonal().isfinite()
    matrix = similarity[known][:, known].double().nan_to_num(nan=0.0)
    if matrix.numel() == 0:
        return similarity.new_full((), math.nan, dtype=at_least_float32(similarity.dtype))
    eigenvalues = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).clamp_min(0.0)
    shares = eigenvalues / eigenvalues.sum()
    return _entropy(shares + _tiny(shares)).exp().to(at_least_float32(similarity.dtype))


def subspace_overlap(w_q: Tensor, w_k: Tensor) -> Tensor:
    """How much the subspaces that two heads compare tokens in have in common, 0 to 1, (H, H).

    Head h scores x^T A_h y with A_h = W_q^T W_k. Its column space is what it sees of a query, its row space what it
    sees of a key. On each side: the mean squared cosine of the principal angles between the subspaces of g and h,

        tr(P_g P_h) / min(rank_g, rank_h),   P the orthogonal projection onto the subspace,

    then the mean of both sides. 1: the same subspaces, or one within the other; 0: orthogonal. Independent random
    heads: expected_overlap(D, E). Ranks count singular values of A_h above rounding, so that zero or repeated rows of
    W_q and W_k are no dimensions; a head of rank 0 overlaps with nothing, itself included. A head with NaN or infinite
    parameters has NaN. Biases and rotary positions are not looked at. w_q (H, D, E), w_k (H or Hkv, D, Ek) floating;
    Hkv divides H: query head h uses key head h // (H / Hkv).
    """
    _check_projections(w_q, w_k)
    heads = w_q.size(0)
    w_k = w_k.repeat_interleave(heads // w_k.size(0), 0)
    known = w_q.isfinite().all(2).all(1) & w_k.isfinite().all(2).all(1)
    broken = ~known[:, None, None]
    query_side, key_side, ranks = _subspaces(w_q.masked_fill(broken, 0.0), w_k.masked_fill(broken, 0.0))
    smaller = torch.minimum(ranks[:, None], ranks).clamp_min(1)
    overlap = (_shared_dimensions(query_side) + _shared_dimensions(key_side)) / (2 * smaller)
    overlap = overlap.clamp_max(1.0).masked_fill(~(known[:, None] & known), math.nan)
    return overlap.to(at_least_float32(torch.promote_types(w_q.dtype, w_k.dtype)))


def expected_overlap(head_dim: int, features: int) -> float:
    """The subspace overlap that independent random heads have on average: min(1, D / E).

    E[tr(P_g P_h)] = D D / E for random subspaces of D out of E dimensions, over D. With D >= E there is one subspace
    only.
    """
    for name, size in (("head_dim", head_dim), ("features", features)):
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"expected_overlap: expected {name} of type int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"expected_overlap: expected {name} >= 1, got {size}")
    return min(1.0, head_dim / features)


def output_share(w_o: Tensor) -> Tensor:
    """How much of W_o belongs to each head: |W_o of the head|^2 over the sum, Frobenius norms, sums to 1, (H,).

    w_o (E, H, D) floating: output features, heads, features of a head. NaN if W_o is zero.
    """
    _check_floating("output_share", "w_o", w_o, "(E, H, D)")
    squares = w_o.double().square().sum((0, 2))
    return (squares / squares.sum()).to(at_least_float32(w_o.dtype))


def attention_rollout(weights: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """How much of each input token reaches each token after all layers, (B, L, L), rows sum to 1.

    A_l = (1 - residual) mean over heads of W_l + residual I, rows divided by their sums; A_n ... A_2 A_1 (Abnar &
    Zuidema 2020). weights: (B, H_l, L, L) floating of each layer, first layer first. Rows that see nothing, or NaN,
    take no part in the mean; a token for which no head has one keeps what it is.
    """
    _check_layers(weights, residual)
    rollout: Tensor | None = None
    for layer in weights:
        counts = counted(layer, None)
        clean = torch.where(counts.unsqueeze(-1), layer, 0).double()
        mean = clean.sum(1) / counts.sum(1).clamp_min(1).unsqueeze(-1)
        identity = torch.eye(layer.size(2), dtype=mean.dtype, device=mean.device)
        mixed = torch.where(counts.any(1).unsqueeze(-1), (1 - residual) * mean + residual * identity, identity)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        rollout = mixed if rollout is None else mixed @ rollout
    assert rollout is not None
    return rollout.to(at_least_float32(weights[0].dtype))


def cluster_order(similarity: Tensor) -> list[int]:
    """The heads in an order that puts similar ones side by side: the leaves of average-linkage clustering.

    Again and again, the two clusters with the highest mean similarity are joined (UPGMA), each turned so that the ends
    that meet are as similar as possible. similarity (H, H), symmetric floating; NaN is as little as the least.
    """
    _check_square("cluster_order", similarity)
    values = similarity.detach().double().cpu()
    finite = values.isfinite()
    if bool(finite.any()):
        values = values.where(finite, values[finite].min())
    clusters = [[head] for head in range(values.size(0))]
    linkage = values.clone()  # mean similarity between clusters
    while len(clusters) > 1:
        a, b = _closest(linkage)
        sizes = [len(clusters[a]), len(clusters[b])]
        joined = _join(clusters[a], clusters[b], values)
        line = (sizes[0] * linkage[a] + sizes[1] * linkage[b]) / sum(sizes)
        linkage[a], linkage[:, a] = line, line
        kept = [i for i in range(len(clusters)) if i != b]
        linkage = linkage[kept][:, kept]
        clusters[a] = joined
        del clusters[b]
    return clusters[0] if clusters else []


# Sums over rows, of a single call here and of many in Statistics.


@dataclass(frozen=True)
class Mean:
    """A mean to which more can be added: sums and counts, float64, of one shape. Over nothing: NaN."""

    total: Tensor
    count: Tensor

    @staticmethod
    def of(values: Tensor, counts: Tensor) -> Mean:
        """Per head, over those rows of (B, H, Lq) that count."""
        total = torch.where(counts, values, 0).sum((0, 2), dtype=torch.float64)
        return Mean(total, counts.sum((0, 2), dtype=torch.float64))

    @staticmethod
    def of_nothing(*shape: int, device: torch.device) -> Mean:
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        return Mean(zeros, zeros)

    def __add__(self, other: Mean) -> Mean:
        device = self.total.device
        return Mean(self.total + other.total.to(device), self.count + other.count.to(device))

    def value(self, dtype: torch.dtype) -> Tensor:
        return (self.total / self.count).to(at_least_float32(dtype))


@dataclass(frozen=True)
class Moments:
    """Rows (N, H, D): how many, their mean (H * D,) and the scatter about it (H * D, H * D), float64."""

    rows: int
    heads: int
    mean: Tensor
    scatter: Tensor

    @staticmethod
    def of(outputs: Tensor) -> Moments:
        rows, heads = outputs.shape[:2]
        outputs = outputs.flatten(1)
        mean = outputs.sum(0, dtype=torch.float64) / max(rows, 1)
        centred, scale = _scaled((outputs - mean.to(outputs.dtype)).unflatten(1, (heads, -1)), (0, 2))
        scales = scale.expand(1, heads, centred.size(2)).flatten().double()
        return Moments(rows, heads, mean, _products(centred.flatten(1)).double() * scales * scales.unsqueeze(1))

    def __add__(self, other: Moments) -> Moments:
        """Of all rows: S = S_1 + S_2 + (n_1 n_2 / n) d d^T, d the difference of the means (Chan et al. 1983)."""
        device = self.mean.device
        rows = self.rows + other.rows
        share = other.rows / max(rows, 1)
        difference = other.mean.to(device) - self.mean
        scatter = self.scatter + other.scatter.to(device)
        scatter.addr_(difference, difference, alpha=self.rows * share)
        return Moments(rows, self.heads, self.mean + share * difference, scatter)

    def linear_cka(self, dtype: torch.dtype) -> Tensor:
        shared = _block_squares(self.scatter, self.heads)
        variation = self.scatter.diagonal().view(self.heads, -1).sum(1)
        level = self.rows * self.mean.view(self.heads, -1).square().sum(1)
        rounding = 4 * torch.finfo(at_least_float32(dtype)).eps
        varies = variation > rounding**2 * level  # less is the rounding of a constant
        norms = shared.diagonal().masked_fill(~varies, 1.0).sqrt()
        cka = shared / (norms[:, None] * norms)
        return cka.masked_fill(~(varies[:, None] & varies), math.nan).to(at_least_float32(dtype))


def counted(weights: Tensor, queries: Tensor | None) -> Tensor:
    """The rows that count, bool (B, H, Lq)."""
    sums = weights.detach().sum(-1)
    counts = (sums > 0) & sums.isfinite()
    return counts if queries is None else counts & queries.unsqueeze(1)


def row_entropy(weights: Tensor, counts: Tensor) -> Tensor:
    """Of every row, (B, H, Lq)."""
    rows = [_entropy(block + _tiny(block)) for _, block in _blocks(weights, counts)]
    return torch.cat(rows, 2)


def relative_rows(entropies: Tensor, counts: Tensor, visible: Tensor | int | None, keys: int) -> Mean:
    visible = torch.as_tensor(keys if visible is None else visible, device=entropies.device)
    most = visible.clamp_min(2).to(entropies.dtype).log()
    return Mean.of(entropies / most, counts & (visible >= 2))


def distance_rows(weights: Tensor, counts: Tensor, offset: int | None, rows: Tensor | None = None) -> Mean:
    """rows (R,): which queries of the sequence the rows of weights are; None: all."""
    if offset is None:
        return Mean.of_nothing(weights.size(1), device=weights.device)
    keys = torch.arange(weights.size(3), device=weights.device)
    positions = _positions(weights, offset, rows)
    found = []
    for start, block in _blocks(weights, counts):
        distances = (positions[start : start + block.size(2), None] - keys).abs().to(block.dtype)
        found.append((block * distances).sum(-1))
    return Mean.of(torch.cat(found, 2), counts)


def share_rows(
    weights: Tensor, counts: Tensor, queries: Tensor | None, offset: int | None, rows: Tensor | None = None
) -> dict[str, Mean]:
    """rows (R,): which queries the rows of weights are, while `queries` (B, Lq) is about them all; None: all."""
    names = {"previous": -1, "next": 1, "self": 0}
    batch, heads, count, kv_len = weights.shape
    if offset is None or weights.numel() == 0:
        return {name: Mean.of_nothing(heads, device=weights.device) for name in [*names, "first"]}
    q_len = count if queries is None else queries.size(1)
    of_keys = queries if offset == 0 and q_len == kv_len else None  # which keys are valid
    positions = _positions(weights, offset, rows)
    shares = {}
    for name, step in names.items():
        inside = (positions + step >= 0) & (positions + step < kv_len)
        i, j = inside.nonzero().squeeze(1), (positions + step)[inside]
        exists = counts[:, :, i]
        if of_keys is not None:
            exists = exists & of_keys[:, None, j]
        shares[name] = Mean.of(weights[:, :, i, j], exists)
    first = torch.zeros(batch, dtype=torch.int64, device=weights.device)
    if of_keys is not None:
        first = of_keys.int().argmax(1)
    column = first.view(batch, 1, 1, 1).expand(batch, heads, count, 1)
    shares["first"] = Mean.of(weights.gather(3, column).squeeze(3), counts)
    return shares


def _positions(weights: Tensor, offset: int, rows: Tensor | None) -> Tensor:
    """The key position (R,) at which each row of weights stands."""
    rows = torch.arange(weights.size(2), device=weights.device) if rows is None else rows.to(weights.device)
    return rows + offset


def divergence_rows(weights: Tensor, counts: Tensor, entropies: Tensor) -> Mean:
    heads = weights.size(1)
    above = torch.zeros(heads, heads, dtype=torch.float64, device=weights.device)  # the diagonal; below it: 0
    for start, block in _blocks(weights, counts):
        rows = slice(start, start + block.size(2))
        above = above + _divergences(block, counts[:, :, rows], entropies[:, :, rows])
    together = counts.transpose(0, 1).flatten(1).double()
    return Mean(above + above.mT, together @ together.mT)


def _divergences(weights: Tensor, counts: Tensor, entropies: Tensor) -> Tensor:
    """Sums over the rows that both heads have, (H, H), above the diagonal."""
    halves = weights / 2 + _tiny(weights)
    lines = []
    for h in range(weights.size(1)):  # head h with those after it: never (B, H, H, Lq, Lk)
        mixed = _entropy(halves[:, h : h + 1] + halves[:, h + 1 :])
        mean = (entropies[:, h : h + 1] + entropies[:, h + 1 :]) / 2
        both = counts[:, h : h + 1] & counts[:, h + 1 :]
        line = Mean.of((mixed - mean).clamp_min(0.0), both).total
        lines.append(F.pad(line, (h + 1, 0)))
    return torch.stack(lines)


def output_rows(outputs: Tensor, queries: Tensor | None) -> Tensor:
    """The outputs of valid queries, (N, H, D). A row with NaN or infinity in any head does not count."""
    rows = outputs.transpose(1, 2).to(at_least_float32(outputs.dtype))
    counts = rows.detach().sum((2, 3)).isfinite()
    if queries is not None:
        counts = counts & queries
    return rows.flatten(0, 1) if bool(counts.all()) else rows[counts]


def cosine_rows(rows: Tensor) -> Mean:
    products = _products(_scaled(rows, 2)[0].mT)  # (N, H, H)
    squares = products.diagonal(dim1=1, dim2=2)
    has_direction = (squares > 0) & squares.isfinite()
    norms = squares.masked_fill(~has_direction, 1.0).sqrt()
    cosines = (products / (norms.unsqueeze(2) * norms.unsqueeze(1))).clamp(-1.0, 1.0)
    both = has_direction.unsqueeze(2) & has_direction.unsqueeze(1)
    total = torch.where(both, cosines, 0).sum(0, dtype=torch.float64)
    return Mean(total, both.sum(0, dtype=torch.float64))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(weights: Tensor, counts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The weights in blocks of queries, each with its first query; at least float32, rows that do not count are 0."""
    batch, heads, q_len, kv_len = weights.shape
    step = max(1, _BLOCK // max(1, batch * heads * kv_len))
    for start in range(0, max(1, q_len), step):
        block = weights[:, :, start : start + step].to(at_least_float32(weights.dtype))
        rows = counts[:, :, start : start + step]
        yield start, block if bool(rows.all()) else block.masked_fill(~rows.unsqueeze(-1), 0.0)


def _tiny(x: Tensor) -> float:
    """Added to what is logarithmised: changes nothing but 0, which gets 0 ln 0 = 0 and a finite gradient."""
    return torch.finfo(x.dtype).tiny


def _entropy(p: Tensor) -> Tensor:
    """-sum p ln p over the last dimension, p > 0."""
    return -(p * p.log()).sum(-1)


def _scaled(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x over its greatest magnitude along dims, and that, constant to gradients: squares stay in the range of x."""
    greatest = (torch.amax if x.numel() else torch.sum)(x.detach().abs(), dims, keepdim=True)
    scale = greatest.masked_fill(greatest == 0, 1.0)
    return x / scale, scale


def _products(x: Tensor) -> Tensor:
    """x^T x in the precision of x, under autocast too."""
    with torch.autocast(x.device.type, enabled=False):
        return x.mT @ x


def _block_squares(matrix: Tensor, heads: int) -> Tensor:
    """(H * D, H * D) -> (H, H): the squared Frobenius norm of each pair's block."""
    squares = matrix.square().unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).sum((1, 3))
    return (squares + squares.mT) / 2  # symmetric to the last bit


def _subspaces(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal bases of the column and row spaces of W_q^T W_k, (H, E, r) and (H, Ek, r) with columns of 0 for the
    dimensions that are missing, and the ranks (H,)."""
    precision = torch.finfo(at_least_float32(torch.promote_types(w_q.dtype, w_k.dtype))).eps
    of_queries, r_q = torch.linalg.qr(w_q.mT.double())
    of_keys, r_k = torch.linalg.qr(w_k.mT.double())
    u, values, vh = torch.linalg.svd(r_q @ r_k.mT, full_matrices=False)
    rounding = precision * math.sqrt(max(w_q.size(2), w_k.size(2)))
    real = values > rounding * values.amax(1, keepdim=True)
    kept = real.unsqueeze(1).double()
    return of_queries @ u * kept, of_keys @ vh.mT * kept, real.sum(1)


def _shared_dimensions(bases: Tensor) -> Tensor:
    """tr(P_g P_h) = |B_g^T B_h|^2 of orthonormal bases (H, E, r), (H, H)."""
    side_by_side = bases.transpose(0, 1).flatten(1)
    return _block_squares(_products(side_by_side), bases.size(0))


def _closest(linkage: Tensor) -> tuple[int, int]:
    """The pair a < b with the highest value; the first of equal ones."""
    n = linkage.size(0)
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    a, b = divmod(int(linkage.masked_fill(~above, -math.inf).argmax()), n)
    return a, b


def _join(a: list[int], b: list[int], similarity: Tensor) -> list[int]:
    """a and b, each turned so that the ends that meet are as similar as they can be."""
    turned = [(x, y) for x in (a, a[::-1]) for y in (b, b[::-1])]
    x, y = max(turned, key=lambda pair: float(similarity[pair[0][-1], pair[1][0]]))
    return x + y


# What is allowed.


def check_weights(op: str, weights: Tensor, queries: Tensor | None) -> None:
    _check_floating(op, "weights", weights, "(B, H, Lq, Lk)")
    _check_queries(op, queries, weights)


def check_rows(op: str, rows: Tensor, queries: Tensor | None, weights: Tensor) -> None:
    """`rows` (R,) of weights (B, H, R, Lk), and `queries` (B, Lq) about all that they are some of."""
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{op}: expected rows to be a tensor of integers, got {got}")
    if tuple(rows.shape) != (weights.size(2),):
        raise ValueError(f"{op}: expected rows of shape ({weights.size(2)},), got {tuple(rows.shape)}")
    if queries is not None and (queries.dim() != 2 or queries.size(0) != weights.size(0)):
        raise ValueError(f"{op}: expected queries of shape (B, Lq), B = {weights.size(0)}, got {tuple(queries.shape)}")
    least, most = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
    if least < 0 or (queries is not None and rows.numel() and most >= queries.size(1)):
        limit = "" if queries is None else f" and below {queries.size(1)}"
        raise ValueError(f"{op}: expected rows from 0{limit}, got {least} to {most}")


def check_outputs(op: str, outputs: Tensor, queries: Tensor | None) -> None:
    _check_floating(op, "outputs", outputs, "(B, H, Lq, D)")
    _check_queries(op, queries, outputs)


def check_offset(op: str, offset: int | None) -> None:
    if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool)):
        raise TypeError(f"{op}: expected offset to be int or None, got {type(offset).__name__}")


def check_visible(op: str, visible: Tensor | int | None, weights: Tensor) -> None:
    if visible is None:
        return
    if isinstance(visible, Tensor):
        if visible.is_floating_point() or visible.is_complex() or visible.dtype == torch.bool:
            raise TypeError(f"{op}: expected visible of integers, got {visible.dtype}")
        shape = tuple(weights.shape[:3])
        fits = visible.dim() <= 3 and all(n in (1, m) for n, m in zip(visible.shape[::-1], shape[::-1], strict=False))
        if not fits:
            raise ValueError(f"{op}: expected visible that broadcasts to {shape}, got shape {tuple(visible.shape)}")
    elif not isinstance(visible, int) or isinstance(visible, bool):
        raise TypeError(f"{op}: expected visible to be int, a tensor or None, got {type(visible).__name__}")
    elif visible < 0:
        raise ValueError(f"{op}: expected visible >= 0, got {visible}")


def _check_queries(op: str, queries: Tensor | None, x: Tensor) -> None:
    if queries is None:
        return
    if not isinstance(queries, Tensor) or queries.dtype != torch.bool:
        got = queries.dtype if isinstance(queries, Tensor) else type(queries).__name__
        raise TypeError(f"{op}: expected queries to be a bool tensor, got {got}")
    shape = (x.size(0), x.size(2))
    if tuple(queries.shape) != shape:
        raise ValueError(f"{op}: expected queries of shape (B, Lq) = {shape}, got {tuple(queries.shape)}")


def _check_floating(op: str, name: str, x: Tensor, shape: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: expected {name} to be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{op}: expected {name} of a floating dtype, got {x.dtype}")
    sizes = shape.strip("()").split(", ")
    required = [size for size in sizes if size in ("H", "D", "E")]  # without tokens there are no rows, but no error
    if x.dim() != len(sizes) or any(x.size(sizes.index(size)) == 0 for size in required):
        raise ValueError(f"{op}: expected {name} of shape {shape}, {', '.join(required)} >= 1, got {tuple(x.shape)}")


def _check_square(op: str, similarity: Tensor) -> None:
    if not isinstance(similarity, Tensor):
        raise TypeError(f"{op}: expected similarity to be a tensor, got {type(similarity).__name__}")
    if not similarity.is_floating_point():
        raise TypeError(f"{op}: expected similarity of a floating dtype, got {similarity.dtype}")
    if similarity.dim() != 2 or similarity.size(0) != similarity.size(1):
        raise ValueError(f"{op}: expected similarity of shape (H, H), got {tuple(similarity.shape)}")


def _check_projections(w_q: Tensor, w_k: Tensor) -> None:
    _check_floating("subspace_overlap", "w_q", w_q, "(H, D, E)")
    _check_floating("subspace_overlap", "w_k", w_k, "(H, D, E)")
    if w_q.size(1) != w_k.size(1):
        raise ValueError(
            f"subspace_overlap: expected w_q and w_k with the same D, got {tuple(w_q.shape)} and {tuple(w_k.shape)}"
        )
    if w_q.size(0) % w_k.size(0) != 0:
        raise ValueError(
            f"subspace_overlap: expected heads of w_k that divide those of w_q, got {w_k.size(0)} and {w_q.size(0)}"
        )


def _check_layers(weights: Sequence[Tensor], residual: float) -> None:
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise TypeError(f"attention_rollout: expected a list of weights, got {type(weights).__name__}")
    if len(weights) == 0:
        raise ValueError("attention_rollout: expected at least one layer, got none")
    for layer in weights:
        _check_floating("attention_rollout", "weights", layer, "(B, H, L, L)")
        expected = (weights[0].size(0), weights[0].size(2), weights[0].size(2))
        if (layer.size(0), layer.size(2), layer.size(3)) != expected:
            raise ValueError(
                f"attention_rollout: expected weights of shape (B, H, L, L) with (B, L) = {expected[:2]}, "
                f"got {tuple(layer.shape)}"
            )
    if isinstance(residual, bool) or not isinstance(residual, (int, float)):
        raise TypeError(f"attention_rollout: expected residual to be a number, got {type(residual).__name__}")
    if not 0.0 <= residual <= 1.0:
        raise ValueError(f"attention_rollout: expected residual between 0 and 1, got {residual}")
