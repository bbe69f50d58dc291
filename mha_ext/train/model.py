"""The character-level language model: a pre-norm Transformer decoder, and the parts that both models are made of.

Sizes: B batch, L length, E d_model, V vocabulary. Everything here scripts with torch.jit.script.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import make_attention

# Ids that stand for no character; those of the vocabulary's characters follow.
UNKNOWN = 0  # a character that the training text does not hold; also what fills padding
BEGIN = 1  # stands before a sequence
END = 2  # stands after it
FIRST_CHARACTER = 3

EMBEDDING_SCALE = 0.5  # initial standard deviation of token embeddings, amplitude of position embeddings


class CharacterModel(nn.Module):
    """A model that carries its vocabulary: an exported one turns text into ids and back wherever it is loaded."""

    def __init__(self, characters: str, context: int) -> None:
        super().__init__()
        self.context = context  # the longest sequence that it takes
        self.characters: list[str] = list(characters)
        self.character_ids: dict[str, int] = {c: FIRST_CHARACTER + i for i, c in enumerate(characters)}
        self.vocabulary_size = FIRST_CHARACTER + len(characters)

    @torch.jit.export
    def encode(self, text: str) -> Tensor:
        """The ids (L,) int64 of the characters of `text`; 0 for those that the vocabulary lacks."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            width = 1
            if torch.jit.is_scripting():  # TorchScript sees UTF-8 bytes; the first tells how many make the character
                lead = ord(text[start])
                width = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            ids.append(self.character_ids.get(text[start : start + width], 0))
            start += width
        return torch.tensor(ids, dtype=torch.long)

    @torch.jit.export
    def decode(self, ids: Tensor) -> str:
        """The text of ids (L,) without those that stand for no character."""
        pieces: list[str] = []
        values: list[int] = ids.tolist()
        for value in values:
            if value >= 3:
                pieces.append(self.characters[value - 3])
        return "".join(pieces)


class Embedding(nn.Module):
    """Token plus position embedding, both learned: ids (B, L) -> (B, L, E)."""

    def __init__(self, vocabulary_size: int, context: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, d_model)
        self.position = nn.Embedding(context, d_model)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=EMBEDDING_SCALE)
        with torch.no_grad():
            self.position.weight.copy_(EMBEDDING_SCALE * sinusoids(context, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device)
        return self.dropout(self.token(ids) + self.position(positions))


def sinusoids(context: int, d_model: int) -> Tensor:
    """(context, E): sines and cosines of the position with wavelengths from 2 pi to 2 pi * context.

    Positions that start out like this let attention find the characters close by much sooner than random ones.
    """
    half = (d_model + 1) // 2
    angles = torch.arange(context).unsqueeze(1) * context ** -(torch.arange(half) / half)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :d_model]


class FeedForward(nn.Module):
    """(B, L, E) -> (B, L, E) through 4 E hidden units and GELU."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, 4 * d_model)
        self.contract = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x)))


class SelfAttentionBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); causal in a decoder, padding hidden in an encoder."""

    def __init__(self, attention: str, d_model: int, heads: int, dropout: float, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = make_attention(attention, d_model, heads)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x (B, L, E); lengths (B,) int64 where x is padded -> (B, L, E)"""
        h = self.attention_norm(x)
        h, _ = self.attention(h, h, h, is_causal=self.is_causal, need_weights=False, key_lengths=lengths)
        x = x + self.dropout(h)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(CharacterModel):
    """Predicts the next character from up to `context` characters before it."""

    def __init__(
        self, characters: str, *, attention: str, context: int, d_model: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__(characters, context)
        self.embedding = Embedding(self.vocabulary_size, context, d_model, dropout)
        self.blocks = nn.ModuleList(
            [SelfAttentionBlock(attention, d_model, heads, dropout, is_causal=True) for _ in range(layers)]
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, self.vocabulary_size)
        scale_residuals(self, 2 * layers)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, L) int64, L <= context -> logits (B, L, V) of the character after each."""
        return self.write(ids)

    @torch.jit.export
    def write(self, ids: Tensor) -> Tensor:
        """What forward computes; `generate` calls this, as torch.jit.trace has no forward to call."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.jit.export
    def generate(self, ids: Tensor, length: int, temperature: float = 1.0) -> Tensor:
        """Continues ids (B, L), L >= 1, by `length` characters -> (B, L + length); temperature 0: the likeliest."""
        with torch.no_grad():
            for _ in range(length):
                logits = self.write(ids[:, -self.context :])
                ids = torch.cat([ids, choose(logits[:, -1], temperature, 3)], dim=1)
        return ids


def choose(logits: Tensor, temperature: float, first: int) -> Tensor:
    """One id (B, 1), none below `first`, drawn from logits (B, V) / temperature, or the likeliest at temperature 0."""
    logits = logits[:, first:]
    if temperature <= 0.0:
        return first + logits.argmax(dim=1, keepdim=True)
    return first + torch.multinomial(F.softmax(logits / temperature, dim=1), 1)


def scale_residuals(model: nn.Module, residual_branches: int) -> None:
    """Scales what the residual branches add down, so that the depth does not widen the sum."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("W_o.weight", "contract.weight")):
                parameter.div_(math.sqrt(residual_branches))
