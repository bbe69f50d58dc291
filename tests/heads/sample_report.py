"""Made-up reports, with heads of which one knows what they do: what the page is drawn from in tests.

The numbers are computed here, in a few plain lines each, so that nothing depends on the code that fills real reports.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mha_ext.heads.report import Attention, Input, Layer, Report

SENTENCE = "The animal didn't cross the street because it was too tired"
TOKENS = ["[CLS]", "the", "animal", "didn", "'", "t", "cross", "the", "street"]
TOKENS += ["because", "it", "was", "too", "tired", ".", "[SEP]"]
OTHER = "The street wasn't crossed by the animal because it was too wide"
OTHER_TOKENS = ["[CLS]", "the", "street", "wasn", "'", "t", "crossed", "by", "the", "animal"]
OTHER_TOKENS += ["because", "it", "was", "too", "wide", ".", "[SEP]"]
KINDS = ("previous", "first", "diffuse", "link", "self", "next", "previous", "last")  # what head 0, 1, ... does


def pattern(kind: str, queries: int, keys: int, link: tuple[int, int]) -> Tensor:
    """(queries, keys) scores of a head of that kind."""
    scores = torch.zeros(queries, keys)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    if kind == "link":  # one token looks at one other, the rest at the last
        scores[:, -1] = 3.0
        scores[link[0]] = 0.0
        scores[link] = 5.0
        return scores
    places = {"previous": j == i - 1, "next": j == i + 1, "self": j == i, "first": j == 0, "last": j == keys - 1}
    return scores + 4.0 * places[kind] if kind in places else scores


def rows_of(kinds: list[str], queries: int, keys: int, link: tuple[int, int], noise: float) -> Tensor:
    """(H, queries, keys) weights: softmax of the patterns, a little blurred."""
    scores = torch.stack([pattern(kind, queries, keys, link) for kind in kinds])
    return (scores + noise * torch.randn(scores.shape)).softmax(-1)


def plogp(p: Tensor) -> Tensor:
    return -(p * p.clamp_min(1e-30).log())


def jensen_shannon(weights: Tensor) -> Tensor:
    """(H, H) mean over the queries."""
    a, b = weights[:, None], weights[None]
    return plogp((a + b) / 2).sum(-1).mean(-1) - (plogp(a).sum(-1) + plogp(b).sum(-1)).mean(-1) / 2


def linear_cka(outputs: Tensor) -> Tensor:
    """(H, H) of outputs (H, L, D); Kornblith et al. 2019."""
    x = outputs - outputs.mean(1, keepdim=True)
    products = torch.einsum("ald,bld->abl", x, x) if x.size(-1) == 1 else torch.einsum("ald,ble->abde", x, x).flatten(2)
    cross = products.square().sum(-1)
    own = cross.diagonal().sqrt()
    return (cross / (own[:, None] * own).clamp_min(1e-12)).clamp(0, 1)


def effective_rank(similarity: Tensor) -> float:
    values = torch.linalg.eigvalsh(similarity).clamp_min(0)
    return math.exp(plogp(values / values.sum()).sum().item())


def attention_of(weights: Tensor, queries: int, keys: int, importance: Tensor | None) -> Attention:
    heads, rows, columns = weights.shape
    outputs = weights @ torch.randn(columns, 8) + 0.2 * torch.randn(heads, rows, 8)
    similarity, entropy = linear_cka(outputs), plogp(weights).sum(-1).mean(-1)
    flat = torch.nn.functional.normalize(outputs.flatten(1), dim=-1)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    places = {"previous": j == i - 1, "next": j == i + 1, "self": j == i, "first": (j == 0).expand(rows, -1)}
    own = queries == keys
    random_similarity = linear_cka(torch.randn(heads, rows, 8) + 0.5 * torch.randn(rows, 8))
    return Attention(
        queries=queries,
        keys=keys,
        weights=weights,
        entropy=entropy,
        relative_entropy=entropy / math.log(max(columns, 2)),
        distance=(weights * (i - j).abs()).sum(-1).mean(-1) if own else None,
        shares={name: (weights * place).sum(-1).mean(-1) for name, place in places.items()} if own else {},
        divergence=jensen_shannon(weights),
        similarity=similarity,
        cosine=flat @ flat.T,
        effective_rank=effective_rank(similarity),
        importance=importance,
        order=similarity[0].argsort(descending=True).tolist(),
        random_relative_entropy=0.97 + 0.02 * torch.rand(heads),
        random_similarity=random_similarity,
        random_effective_rank=effective_rank(random_similarity),
    )


def layer_of(name: str, heads: int, head_dim: int = 4, features: int = 32) -> Layer:
    share = (1 + 2 * torch.rand(heads)).square()
    overlap = (0.1 + 0.5 * torch.rand(heads, heads)).triu(1)
    return Layer(
        name=name,
        heads=heads,
        output_share=share / share.sum(),
        subspace_overlap=overlap + overlap.T + torch.eye(heads),
        expected_overlap=head_dim / features,
    )


def input_of(text: str, tokens: list[str], layers: int, heads: int, link: tuple[int, int], note: str = "") -> Input:
    attention = []
    for layer in range(layers):
        kinds = [KINDS[(head + layer) % len(KINDS)] for head in range(heads)]
        weights = rows_of(kinds, len(tokens), len(tokens), link, noise=0.3 + 0.2 * layer)
        attention.append(attention_of(weights, 0, 0, torch.rand(heads).pow(4)))
    return Input(text=text, sequences=[tokens], attention=attention, note=note)


def sentence_report(layers: int = 4, heads: int = 8) -> Report:
    """Self-attention on two sentences. Of layer 0: head 0 looks at the token before, 1 at the first token, 2 at all
    alike, 3 from "it" at "animal", 4 at itself, 5 at the token after, 6 does what 0 does, 7 looks at the last token."""
    torch.manual_seed(0)
    return Report(
        model="sample-encoder",
        layers=[layer_of(f"encoder.layer.{layer}.attention.self", heads) for layer in range(layers)],
        inputs=[
            input_of(SENTENCE, TOKENS, layers, heads, (10, 2)),
            input_of(OTHER, OTHER_TOKENS, layers, heads, (11, 2), note="cut to 17 of 400 tokens"),
        ],
        loss="masked words, mean over the tokens",
        notes=["pooler.attention: runs no softmax", "encoder.extra: no weights in this mode"],
    )


def translation_report() -> Report:
    """Cross-attention after self-attention: three tokens of a target look at five of a text; no loss, no names."""
    torch.manual_seed(1)
    source, target = ["der", "Hund", "ist", "m\u00fcde", "."], ["<s>", "the", "dog"]
    cross = rows_of(["first", "link"], 3, 5, (2, 1), noise=0.2)
    own = rows_of(["previous", "self"], 3, 3, (2, 1), noise=0.2)
    return Report(
        model="sample-translator",
        layers=[layer_of("decoder.layers.0.self_attn", 2), layer_of("decoder.layers.0.cross_attn", 2)],
        inputs=[
            Input(
                text="der Hund ist m\u00fcde.",
                sequences=[source, target],
                attention=[attention_of(own, 1, 1, None), attention_of(cross, 1, 0, None)],
            )
        ],
    )


def smallest_report() -> Report:
    """One layer, one head, one token; nothing is known about the parameters, and what has no pairs is not a number."""
    none = torch.full((1,), math.nan)
    matrix = torch.ones(1, 1)
    attention = Attention(
        queries=0,
        keys=0,
        weights=torch.ones(1, 1, 1),
        entropy=torch.zeros(1),
        relative_entropy=none,
        distance=torch.zeros(1),
        shares={"previous": none, "next": none, "self": torch.ones(1), "first": torch.ones(1)},
        divergence=torch.zeros(1, 1),
        similarity=matrix * math.nan,
        cosine=matrix,
        effective_rank=math.nan,
        importance=None,
        order=[0],
        random_relative_entropy=None,
        random_similarity=None,
        random_effective_rank=None,
    )
    layer = Layer("attention", 1, None, None, None)
    return Report(model="smallest", layers=[layer], inputs=[Input("yes", [["yes"]], [attention])])


def unknown_report() -> Report:
    """Two heads and three tokens; every number that can be missing is, and one row of weights is, too."""
    none, matrix = torch.full((2,), math.nan), torch.full((2, 2), math.nan)
    weights = torch.tensor([[[0.5, 0.25, 0.25], [math.nan] * 3, [0.0, 0.0, 1.0]]]).repeat(2, 1, 1)
    attention = Attention(
        queries=0,
        keys=0,
        weights=weights,
        entropy=none,
        relative_entropy=none,
        distance=none,
        shares={},
        divergence=matrix,
        similarity=matrix,
        cosine=matrix,
        effective_rank=math.nan,
        importance=none,
        order=[1, 0],
        random_relative_entropy=none,
        random_similarity=matrix,
        random_effective_rank=math.inf,
    )
    layer = Layer("unknown", 2, None, None, None)
    return Report(model="unknown", layers=[layer], inputs=[Input("a b c", [["a", "b", "c"]], [attention])])


def large_report(layers: int = 12, heads: int = 12, tokens: int = 128) -> Report:
    """Two inputs of many tokens. Weights are each layer's own, the numbers about them the first one's."""
    torch.manual_seed(2)
    words = [f"word{i}" if i % 3 else "the" for i in range(tokens)]
    first = input_of("", words, 1, heads, (tokens // 2, tokens // 3)).attention[0]
    kinds = [KINDS[head % len(KINDS)] for head in range(heads)]

    def attention() -> Attention:
        return replace(first, weights=rows_of(kinds, tokens, tokens, (tokens // 2, tokens // 3), noise=0.5))

    return Report(
        model="large-sample",
        layers=[layer_of(f"h.{layer}.attn", heads) for layer in range(layers)],
        inputs=[Input(text, [words], [attention() for _ in range(layers)]) for text in ("a long text", "another")],
        loss="next words",
    )
