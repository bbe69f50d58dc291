"""A trained model: every number that a report has of all-MiniLM-L6-v2, against Hugging Face's eager attention and plain
numpy; and heads that are known to be there."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from mha_ext.heads import metrics
from mha_ext.heads.analysis import analyse
from mha_ext.heads.recording import record
from mha_ext.heads.report import Attention, Report
from mha_ext.heads.sources import PretrainedSource, Sample, minilm_folder, open_source

TEXTS = ["The animal didn't cross the street because it was too tired", "A dog runs."]
LAYERS, HEADS, HEAD_DIM, FEATURES = 6, 12, 32, 384

Array = np.ndarray
Seen = list[tuple[Array, Array]]  # per layer the weights (H, L, L) and what the heads hand to W_o, (H, L, D); float64


@functools.cache
def source() -> PretrainedSource:
    opened = open_source("minilm")
    assert isinstance(opened, PretrainedSource)
    return opened


@functools.cache
def report() -> Report:
    return analyse(source(), TEXTS)


@functools.cache
def eager() -> Any:
    return transformers.AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager").eval()


@functools.cache
def random_twin() -> Any:
    config = transformers.AutoConfig.from_pretrained(minilm_folder(), attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BertModel(config).eval()


def see(model: Any, texts: list[str]) -> list[Seen]:
    """What eager attention does on each text, from the weights that it returns and the states that it reads."""
    inputs = transformers.AutoTokenizer.from_pretrained(minilm_folder())(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        results = model(**inputs, output_attentions=True, output_hidden_states=True)
    found: list[Seen] = []
    for item, valid in enumerate(inputs["attention_mask"].bool()):
        seen = []
        for layer, block in enumerate(model.encoder.layer):
            states = results.hidden_states[layer][item, valid]
            with torch.no_grad():
                values = block.attention.self.value(states).double().numpy()
            weights = results.attentions[layer][item][:, valid][:, :, valid].double().numpy()
            parts = [values[:, HEAD_DIM * head : HEAD_DIM * (head + 1)] for head in range(HEADS)]
            seen.append((weights, np.stack([w @ part for w, part in zip(weights, parts, strict=True)])))
        found.append(seen)
    return found


@functools.cache
def seen_by_eager() -> list[Seen]:
    return [see(eager(), [text])[0] for text in TEXTS]


# The metrics once more, as their formulas say, head by head.


def entropy_of(row: Array) -> float:
    return -sum(p * math.log(p) for p in row if p > 0)


def per_head(of_row: Callable[[Array, int], float], weights: Array, rows: slice = slice(None)) -> list[float]:
    """The mean of a function of a row and its position over some rows, for each head."""
    positions = range(weights.shape[1])[rows]
    return [float(np.mean([of_row(head[i], i) for i in positions])) for head in weights]


def per_pair(of_pair: Callable[[Array, Array], float], values: Array) -> Array:
    return np.array([[of_pair(a, b) for b in values] for a in values])


def divergence(a: Array, b: Array) -> float:
    """The mean over rows of (KL(p, m) + KL(q, m)) / 2, m = (p + q) / 2."""

    def kl(p: Array, m: Array) -> float:
        return sum(x * math.log(x / y) for x, y in zip(p, m, strict=True) if x > 0)

    return float(np.mean([(kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2 for p, q in zip(a, b, strict=True)]))


def cka(a: Array, b: Array) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with the centred Gram matrices of the tokens."""
    centre = np.eye(len(a)) - 1 / len(a)
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    return float((k * m).sum() / math.sqrt((k * k).sum() * (m * m).sum()))


def cosine(a: Array, b: Array) -> float:
    return float(np.mean([x @ y / math.sqrt((x @ x) * (y @ y)) for x, y in zip(a, b, strict=True)]))


def rank(similarity: Array) -> float:
    values = np.linalg.eigvalsh(similarity)
    return math.exp(entropy_of(np.clip(values, 0, None) / values.sum()))


def overlap(a: tuple[Array, Array], b: tuple[Array, Array]) -> float:
    """Of W_q^T W_k of two heads: the mean squared cosine of the principal angles between their column spaces, which are
    those of W_q^T, and between their row spaces, those of W_k^T."""
    bases = [[np.linalg.qr(projection.T)[0] for projection in head] for head in (a, b)]
    cosines = [np.linalg.svd(one.T @ other, compute_uv=False) for one, other in zip(*bases, strict=True)]
    return float(np.mean(np.square(cosines)))


def expected_of(weights: Array, outputs: Array) -> dict[str, Any]:
    """The fields of Attention."""
    length = weights.shape[1]
    similarity = per_pair(cka, outputs)
    return {
        "weights": weights,
        "entropy": per_head(lambda row, i: entropy_of(row), weights),
        "relative_entropy": per_head(lambda row, i: entropy_of(row) / math.log(length), weights),
        "distance": per_head(lambda row, i: sum(p * abs(i - j) for j, p in enumerate(row)), weights),
        "shares": {
            "previous": per_head(lambda row, i: row[i - 1], weights, slice(1, None)),
            "next": per_head(lambda row, i: row[i + 1], weights, slice(None, -1)),
            "self": per_head(lambda row, i: row[i], weights),
            "first": per_head(lambda row, i: row[0], weights),
        },
        "divergence": per_pair(divergence, weights),
        "similarity": similarity,
        "cosine": per_pair(cosine, outputs),
        "effective_rank": rank(similarity),
    }


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name], f"{what} {name}")
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=what)


def test_the_report_is_of_this_model() -> None:
    found = report()
    assert found.model == "all-MiniLM-L6-v2" and found.notes == []
    assert [layer.name for layer in found.layers] == [f"encoder.layer.{i}.attention.self" for i in range(LAYERS)]
    assert [len(text.sequences[0]) for text in found.inputs] == [15, 6]
    assert found.inputs[0].sequences == [
        [
            "[CLS]",
            "the",
            "animal",
            "didn",
            "'",
            "t",
            "cross",
            "the",
            "street",
            "because",
            "it",
            "was",
            "too",
            "tired",
            "[SEP]",
        ]
    ]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("text", range(len(TEXTS)))
def test_every_number_of_an_input(text: int, layer: int) -> None:
    found = report().inputs[text].attention[layer]
    for name, expected in expected_of(*seen_by_eager()[text][layer]).items():
        assert_close(getattr(found, name), expected, name)
    assert (found.queries, found.keys) == (0, 0)
    assert sorted(found.order) == list(range(HEADS))
    similarity = found.similarity.masked_fill(torch.eye(HEADS).bool(), -1.0)
    a, b = divmod(int(similarity.argmax()), HEADS)
    assert abs(found.order.index(a) - found.order.index(b)) == 1  # the two that are most alike stand side by side


@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_number_of_a_layer(layer: int) -> None:
    attention = eager().encoder.layer[layer].attention
    w_q, w_k, w_o = (
        module.weight.detach().double().numpy()
        for module in (attention.self.query, attention.self.key, attention.output.dense)
    )
    slices = [slice(HEAD_DIM * head, HEAD_DIM * (head + 1)) for head in range(HEADS)]
    found = report().layers[layer]
    squares = [float((w_o[:, part] ** 2).sum()) for part in slices]
    assert_close(found.output_share, [square / sum(squares) for square in squares])
    expected = [[overlap((w_q[a], w_k[a]), (w_q[b], w_k[b])) for b in slices[:4]] for a in slices[:4]]
    assert_close(found.subspace_overlap[:4, :4], expected)
    assert found.heads == HEADS and found.expected_overlap == HEAD_DIM / FEATURES


@pytest.mark.parametrize("text", range(len(TEXTS)))
def test_the_random_twin(text: int) -> None:
    seen = see(random_twin(), [TEXTS[text]])[0]
    for found, of_layer in zip(report().inputs[text].attention, seen, strict=True):
        for name in ("relative_entropy", "similarity", "effective_rank"):
            assert_close(getattr(found, f"random_{name}"), expected_of(*of_layer)[name], name)
        assert found.random_relative_entropy.min() > 0.99  # nothing was learnt: all tokens are alike
        assert found.relative_entropy.mean() < 0.85


def test_random_heads_are_more_alike_on_fewer_tokens() -> None:
    """Linear CKA is the higher the fewer tokens there are, so a model is compared with its twin on the same text."""
    long, short = (text.attention for text in report().inputs)
    for on_15, on_6 in zip(long, short, strict=True):
        assert on_6.random_similarity.mean() > on_15.random_similarity.mean()
        assert on_6.random_effective_rank < on_15.random_effective_rank


def test_importance_is_the_slope_of_the_embedding() -> None:
    """|d(u e)/d gate|, mean over directions u, by finite differences of the embedding e in float64."""
    model = type(eager())(eager().config).double().eval()
    model.load_state_dict(eager().state_dict())
    ids = transformers.AutoTokenizer.from_pretrained(minilm_folder())(TEXTS[0], return_tensors="pt")
    directions = torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0))
    directions = nn.functional.normalize(directions, dim=-1).double()

    def embedding(layer: int, head: int, factor: float) -> Tensor:
        def scale(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            factors = torch.ones(HEADS, HEAD_DIM, dtype=torch.float64)
            factors[head] = factor
            return (outputs[0] * factors.flatten(), *outputs[1:])

        hook = model.encoder.layer[layer].attention.self.register_forward_hook(scale)
        with torch.no_grad():
            states = model(**ids).last_hidden_state[0]
        hook.remove()
        return nn.functional.normalize(states.mean(0), dim=-1)

    for layer, head in [(0, 2), (2, 7), (4, 0), (5, 11)]:
        slope = (embedding(layer, head, 1 + 1e-4) - embedding(layer, head, 1 - 1e-4)) / 2e-4
        expected = float((directions @ slope).abs().mean())
        assert float(report().inputs[0].attention[layer].importance[head]) == pytest.approx(expected, rel=1e-3)


def test_a_padded_batch_has_the_numbers_of_each_text() -> None:
    """Padding has no say: the metrics of each sequence of a batch are those of the text alone."""
    batch = transformers.AutoTokenizer.from_pretrained(minilm_folder())(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad(), record(source().model) as recording:
        source().model(**batch)
    by_eager = see(eager(), TEXTS)
    assert list(recording) == [layer.name for layer in report().layers]
    for (layer, seen), item in itertools.product(enumerate(recording.values()), range(2)):
        call, alone = seen.calls[0], report().inputs[item].attention[layer]
        length = len(report().inputs[item].sequences[0])
        weights, outputs, valid = (x[item : item + 1] for x in (call.weights, call.outputs, call.queries))
        assert int(valid.sum()) == length and int(call.visible.expand(2, HEADS, 15)[item].unique()) == length
        assert bool((weights[..., length:] == 0).all())
        assert_close(weights[0, :, :length, :length], by_eager[item][layer][0])
        found = {
            "entropy": metrics.entropy(weights, valid),
            "relative_entropy": metrics.relative_entropy(weights, call.visible[item : item + 1], valid),
            "distance": metrics.attention_distance(weights, valid),
            "shares": metrics.position_shares(weights, valid),
            "divergence": metrics.jensen_shannon(weights, valid),
            "similarity": metrics.linear_cka(outputs, valid),
            "cosine": metrics.cosine_similarity(outputs, valid),
        }
        for name, value in found.items():
            assert_close(value, getattr(alone, name), name)


def heads_by(share: str, text: int) -> dict[tuple[int, int], float]:
    attention = report().inputs[text].attention
    return {(i, h): float(attention[i].shares[share][h]) for i in range(LAYERS) for h in range(HEADS)}


def test_there_is_a_head_for_the_previous_token() -> None:
    """Layer 0, head 2 looks at nothing else, in both texts; no head of the random twin does anything like it."""
    for text in range(2):
        shares = heads_by("previous", text)
        assert max(shares, key=shares.__getitem__) == (0, 2) and shares[0, 2] > 0.99
        seen = see(random_twin(), [TEXTS[text]])[0]
        assert max(np.diagonal(weights, -1, 1, 2).mean(1).max() for weights, _ in seen) < 0.3


def test_there_are_heads_for_the_first_token_and_for_the_end() -> None:
    """[CLS] takes most of the attention of many heads after layer 0; a head of layer 0 sends [CLS] itself to [SEP]."""
    for text in range(2):
        assert sum(share > 0.5 for share in heads_by("first", text).values()) >= 10
        assert max(heads_by("first", text).values()) > 0.8
    first: Attention = report().inputs[0].attention[0]
    assert float(first.weights[9, 0, -1]) > 0.9


def test_the_head_for_the_previous_token_is_unlike_the_others() -> None:
    attention = report().inputs[0].attention[0]
    others = [head for head in range(HEADS) if head != 2]
    assert attention.divergence[2, others].median() > 0.5 > 0.2 > attention.divergence[others][:, others].median()


def test_long_text_is_cut_with_a_note() -> None:
    sample: Sample = source().read("the committee postponed its decision " * 50, 20)
    assert len(sample.sequences[0]) == 20 and sample.sequences[0][-1] == "[SEP]"
    assert sample.note == "cut after 20 of 252 tokens"
