"""Diversity losses: values known by hand, gradients through the fused operator, and what must not count."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.heads import diversity, metrics
from mha_ext.heads.diversity import LOSSES, diversity_loss
from mha_ext.heads.recording import record

NAN = math.nan
ON_VECTORS = [diversity.outputs, diversity.subspaces]  # cosines
ON_WEIGHTS = [diversity.positions, diversity.jensen_shannon]
BY_ROWS = [*ON_VECTORS, *ON_WEIGHTS]  # means over rows; redundancy is about all of them at once
ALL = [*BY_ROWS, diversity.redundancy]


def one_hot(*keys: int, length: int = 4) -> Tensor:
    """Weights (1, H, 1, length) of heads that look at one key each."""
    return nn.functional.one_hot(torch.tensor(keys), length).double()[None, :, None]


def vectors(*heads: list[float]) -> Tensor:
    """One token's outputs (1, H, 1, D)."""
    return torch.tensor(heads, dtype=torch.float64)[None, :, None]


def tokens(*heads: list[float]) -> Tensor:
    """Outputs (1, H, tokens, 1) of heads of size 1."""
    return torch.tensor(heads, dtype=torch.float64)[None, :, :, None]


def input_of(loss: Callable[..., Tensor], shape: tuple[int, ...] = (2, 3, 5, 4)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.softmax(-1) if loss in ON_WEIGHTS else x


def pair_by_pair(loss: Callable[..., Tensor], x: Tensor) -> float:
    """The formulas of the docstrings, one pair and one row at a time, for rows without zeros."""
    batch, heads, length, _ = x.shape
    values = []
    for g in range(heads):
        for h in range(heads):
            for b in range(batch if g != h else 0):
                for i in range(length):
                    p, q = x[b, g, i].tolist(), x[b, h, i].tolist()
                    product = sum(s * t for s, t in zip(p, q, strict=True))
                    if loss in ON_VECTORS:
                        product /= math.hypot(*p) * math.hypot(*q)
                    if loss is diversity.jensen_shannon:
                        middle = [(s + t) / 2 for s, t in zip(p, q, strict=True)]
                        to_middle = (
                            s * math.log(s / m) / 2 for row in (p, q) for s, m in zip(row, middle, strict=True)
                        )
                        product = math.log(2) - sum(to_middle)
                    values.append(product)
    return sum(values) / len(values)


def by_gram_matrices(x: Tensor) -> float:
    """The mean over pairs of linear CKA, by the tokens' inner products where `metrics` has those of the features."""
    rows = x.transpose(0, 1).flatten(1, 2)  # (H, tokens, D)
    rows = rows - rows.mean(1, keepdim=True)
    grams = (rows @ rows.mT).flatten(1)
    grams = grams / grams.norm(dim=1, keepdim=True)
    cka = grams @ grams.mT
    return ((cka.sum() - cka.trace()) / (cka.numel() - len(cka))).item()


def expected_value(loss: Callable[..., Tensor], x: Tensor) -> float:
    return by_gram_matrices(x) if loss is diversity.redundancy else pair_by_pair(loss, x)


# Values


@pytest.mark.parametrize("loss", ON_VECTORS)
@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (([3.0, 4.0], [3.0, 4.0], [3.0, 4.0]), 1.0),
        (([3.0, 4.0], [6.0, 8.0]), 1.0),  # length says nothing
        (([1.0, 0.0], [0.0, 5.0]), 0.0),
        (([1.0, 2.0], [-1.0, -2.0]), -1.0),
        (([1.0, 0.0], [1.0, 0.0], [0.0, 1.0]), 1 / 3),  # one pair of three
        (([1.0, 0.0], [1.0, 1.0]), math.sqrt(0.5)),
        (([1e-30, 0.0], [1e-30, 0.0]), 1.0),
        (([1e30, 0.0], [1e30, 0.0]), 1.0),
        (([1.0, 0.0], [1.0, 0.0], [0.0, 0.0]), 1.0),  # a head of nothing is like none
        (([0.0, 0.0], [0.0, 0.0]), 0.0),
    ],
)
def test_cosines(loss: Callable[..., Tensor], heads: tuple[list[float], ...], expected: float) -> None:
    assert loss(vectors(*heads)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("weights", "expected", "overlap"),
    [
        (one_hot(2, 2, 2), 1.0, math.log(2)),
        (one_hot(0, 1, 3), 0.0, 0.0),
        (one_hot(0, 0, 3), 1 / 3, math.log(2) / 3),
        (torch.full((1, 2, 1, 4), 0.25, dtype=torch.float64), 0.25, math.log(2)),
        # H((0.75, 0.25)) - ln 2 / 2 = 0.2157616 is the divergence of (1, 0) and (0.5, 0.5)
        (torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]]]]).double(), 0.5, math.log(2) - 0.2157615543388357),
    ],
)
def test_weights(weights: Tensor, expected: float, overlap: float) -> None:
    assert diversity.positions(weights).item() == pytest.approx(expected, abs=1e-12)
    assert diversity.jensen_shannon(weights).item() == pytest.approx(overlap, abs=1e-12)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (([1.0, -1.0, 0.0], [1.0, -1.0, 0.0]), 1.0),
        (([1.0, -1.0, 0.0], [-2.0, 2.0, 0.0]), 1.0),  # the opposite tells the same
        (([1.0, -1.0, 0.0], [6.0, 4.0, 5.0]), 1.0),  # and so does what is shifted
        (([1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]), 0.0),
        (([1.0, -1.0, 0.0], [1.0, 0.0, -1.0]), 0.25),  # the correlation, 1 / 2, squared
        (([1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [1.0, 1.0, -2.0]), 1 / 3),
        (([1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [3.0, 3.0, 3.0]), 1.0),  # a head that always says the same is like none
        (([3.0, 3.0, 3.0], [3.0, 3.0, 3.0]), 0.0),
    ],
)
def test_redundancy(heads: tuple[list[float], ...], expected: float) -> None:
    assert diversity.redundancy(tokens(*heads)).item() == pytest.approx(expected, abs=1e-12)


def test_turned_heads_are_redundant_but_need_not_point_the_same_way() -> None:
    x = input_of(diversity.redundancy, (1, 1, 50, 4))
    turn = torch.tensor([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]], dtype=torch.float64)
    turned = torch.cat([x, x @ turn], 1)
    assert diversity.redundancy(turned).item() == pytest.approx(1.0, rel=1e-12)
    assert diversity.outputs(turned).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("loss", ALL)
def test_mean_over_pairs_rows_and_sequences(loss: Callable[..., Tensor]) -> None:
    x = input_of(loss)
    assert loss(x).item() == pytest.approx(expected_value(loss, x), rel=1e-12)


@pytest.mark.parametrize("loss", ALL)
def test_value_does_not_depend_on_the_length_or_the_batch(loss: Callable[..., Tensor]) -> None:
    x = input_of(loss)
    assert loss(x.repeat(3, 1, 7, 1)).item() == pytest.approx(loss(x).item(), rel=1e-12)


@pytest.mark.parametrize("loss", ALL)
def test_one_head_is_like_none(loss: Callable[..., Tensor]) -> None:
    x = input_of(loss, (2, 1, 5, 4)).requires_grad_()
    value = loss(x)
    assert value.item() == 0.0
    (gradient,) = torch.autograd.grad(value, x)
    assert not gradient.any()


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = input_of(loss).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        value = loss(x)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected_value(loss, x.detach().double()), abs=1e-5)
    value.backward()
    assert x.grad is not None and x.grad.dtype == dtype


# What counts


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("hidden", [NAN, math.inf, 1e300])
def test_rows_that_do_not_count(loss: Callable[..., Tensor], hidden: float) -> None:
    x = input_of(loss)
    counts = torch.tensor([[True, True, False, True, False], [True, False, False, False, False]])
    x = torch.where(counts[:, None, :, None], x, hidden).requires_grad_()
    value = loss(x, counts)
    only = torch.cat([x.detach()[0, :, counts[0]], x.detach()[1, :, counts[1]]], 1).unsqueeze(0)
    assert value.item() == pytest.approx(loss(only).item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient.isfinite().all()
    assert gradient.any(-1).any(1).eq(counts).all()


@pytest.mark.parametrize("loss", ALL)
def test_nothing_counts(loss: Callable[..., Tensor]) -> None:
    x = torch.full((2, 3, 5, 4), NAN, requires_grad=True)
    value = loss(x, torch.zeros(2, 5, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == 0.0 and not gradient.any()
    assert loss(torch.zeros(2, 3, 0, 4)).item() == 0.0


@pytest.mark.parametrize("loss", ALL)
def test_gradients_are_finite_at_zeros(loss: Callable[..., Tensor]) -> None:
    x = input_of(loss)
    x[0, 1, 2] = 0.0  # a dead row, a vector without direction
    x[:, :, :, 1] = 0.0  # a hidden key
    x[1, 0, 3] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    x[1, 1, 3] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    assert gradient.isfinite().all() and gradient.abs().max() < 100
    assert not gradient[0, 1, 2].any() or loss not in ON_VECTORS


# Gradients


@pytest.mark.parametrize("loss", [*ON_VECTORS, diversity.redundancy])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-70, 2.0**60, 2.0**100])
def test_small_and_large_vectors(loss: Callable[..., Tensor], scale: float) -> None:
    """Directions and redundancy have no scale, and their gradients have the inverse one."""
    x = input_of(loss).float()
    small = (x * scale).requires_grad_()
    x.requires_grad_()
    found, expected = loss(small), loss(x)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(value, y)[0] for value, y in ((found, small), (expected, x)))
    torch.testing.assert_close(next(gradients) * scale, next(gradients))


@pytest.mark.parametrize("loss", ALL)
def test_gradcheck_through_the_operator(loss: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([4, 2])
    valid = torch.arange(4) < lengths.unsqueeze(1)

    def of_projections(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, weights, _ = torch.ops.mha_ext.attention(
            q, k, v, is_causal=True, key_lengths=lengths, need_weights=True
        )
        return loss(weights if loss in ON_WEIGHTS else outputs, valid)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(of_projections, inputs)
    gradients = torch.autograd.grad(of_projections(*inputs), inputs, allow_unused=True)
    assert gradients[0].any() and gradients[1].any()


def test_descent_parts_the_heads() -> None:
    """Each loss, minimised alone, takes heads that are almost the same to what its formula calls different."""
    reached = {}
    for loss in ALL:
        start = torch.full((1, 3, 1, 4), 0.3, dtype=torch.float64)
        x = (start + 0.01 * input_of(diversity.outputs, (1, 3, 1, 4))).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.05)
        for _ in range(400):
            optimizer.zero_grad()
            loss(x.softmax(-1) if loss in ON_WEIGHTS else x).backward()
            optimizer.step()
        reached[loss] = loss(x.softmax(-1) if loss in ON_WEIGHTS else x).item()
    assert reached[diversity.outputs] == pytest.approx(
        -0.5, abs=0.01
    )  # -1 / (H - 1): they point to a triangle's corners
    assert reached[diversity.subspaces] == pytest.approx(-0.5, abs=0.01)
    assert reached[diversity.redundancy] == 0.0  # of one token nothing varies
    assert reached[diversity.positions] < 0.01 and reached[diversity.jensen_shannon] < 0.01


# Recordings


class Two(nn.Module):
    """Two layers, the first of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mha_ext.MultiHeadAttention(16, 4)
        self.second = mha_ext.MultiHeadAttention(16, 2)

    def forward(self, x: Tensor, lengths: Tensor | None = None, is_causal: bool = False) -> Tensor:
        for layer in (self.first, self.first, self.second):
            x = layer(x, x, x, is_causal=is_causal, need_weights=False, key_lengths=lengths)[0]
        return x


def two_layers() -> tuple[Two, Tensor]:
    torch.manual_seed(0)
    model = Two().double()
    return model, torch.randn(3, 6, 16, dtype=torch.float64)


def test_mean_over_layers_of_the_mean_over_calls() -> None:
    model, x = two_layers()
    with record(model, keep_graph=True) as recording:
        model(x)
    once, again = recording["first"].calls
    (last,) = recording["second"].calls
    for kind, of_call in {
        "redundancy": lambda call: metrics.linear_cka(call.outputs),
        "outputs": lambda call: metrics.cosine_similarity(call.outputs),
        "subspaces": lambda call: metrics.cosine_similarity(call.values),
        "js": lambda call: math.log(2) - metrics.jensen_shannon(call.weights),
    }.items():
        means = [
            (matrix.sum() - matrix.trace()) / (matrix.numel() - len(matrix))
            for matrix in map(of_call, (once, again, last))
        ]
        expected = ((means[0] + means[1]) / 2 + means[2]) / 2
        assert diversity_loss(recording, kind).item() == pytest.approx(expected.item(), rel=1e-9)
    expected = (diversity.positions(once.weights) + diversity.positions(again.weights)) / 2
    expected = (expected + diversity.positions(last.weights)) / 2
    assert diversity_loss(recording, "positions").item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_reach_the_parameters(kind: str) -> None:
    model, x = two_layers()
    with record(model, keep_graph=True) as recording:
        model(x, torch.tensor([6, 4, 2]))
    diversity_loss(recording, kind).backward()
    names = ["W_v"] if kind == "subspaces" else ["W_q", "W_k"]
    for name in names:
        for layer in (model.first, model.second):
            assert getattr(layer, name).weight.grad.any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_padding_does_not_count(kind: str, is_causal: bool) -> None:
    model, x = two_layers()
    lengths = torch.tensor([6, 4, 1])
    hidden = torch.arange(6) >= lengths.unsqueeze(1)
    values = []
    for padding in (0.0, 7.0):
        with record(model, keep_graph=True) as recording:
            model(x.masked_fill(hidden.unsqueeze(-1), padding), lengths, is_causal)
        values.append(diversity_loss(recording, kind).item())
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_nan_in_hidden_keys_reaches_neither_loss_nor_gradients(kind: str) -> None:
    model, x = two_layers()
    lengths = torch.tensor([6, 4, 1])
    hidden = torch.arange(6) >= lengths.unsqueeze(1)
    memory = x.flip(0).masked_fill(hidden.unsqueeze(-1), NAN).requires_grad_()
    with record(model, keep_graph=True) as recording:
        model.second(x, memory, memory, key_lengths=lengths, need_weights=False)
    value = diversity_loss(recording, kind)
    value.backward()
    assert value.isfinite() and value != 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in (*model.second.parameters(), memory))


# What the user can get wrong


@pytest.mark.parametrize("loss", ALL)
def test_wrong_input(loss: Callable[..., Tensor]) -> None:
    x = input_of(loss)
    name = loss.__name__
    with pytest.raises(TypeError, match=f"^{name}: expected .* floating dtype, got torch.int64$"):
        loss(x.long())
    with pytest.raises(TypeError, match=f"^{name}: expected .* tensor, got list$"):
        loss([1.0])
    with pytest.raises(ValueError, match=f"^{name}: expected .* got \\(3, 5, 4\\)$"):
        loss(x[0])
    with pytest.raises(ValueError, match=f"^{name}: expected .* got \\(2, 4\\)$"):
        loss(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=f"^{name}: expected .* bool tensor, got torch.float32$"):
        loss(x, torch.ones(2, 5))


def test_wrong_recordings() -> None:
    model, x = two_layers()
    with record(model, keep_graph=True) as recording:
        pass
    with pytest.raises(
        ValueError, match="^diversity_loss: expected a recording of at least one layer, got an empty one$"
    ):
        diversity_loss(recording)
    for options in ({}, {"streaming": True}):
        with record(model, **options) as recording:
            model(x)
        with pytest.raises(ValueError, match="^diversity_loss: expected a recording with keep_graph=True, got first w"):
            diversity_loss(recording)
    with record(model, keep_graph=True) as recording:
        model(x)
    with pytest.raises(
        ValueError, match="^diversity_loss: expected a kind of redundancy, outputs, positions, subspaces, js, got 'x'$"
    ):
        diversity_loss(recording, "x")
