"""The encoder-decoder that restores case and punctuation, and its pairs of lines.

Sizes: B batch, Ls source length, Lt target length, E d_model, V vocabulary. The model scripts with torch.jit.script.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .attention import make_attention
from .data import HELD_OUT_BATCH, HELD_OUT_LIMIT, HELD_OUT_SAMPLE, Batch, encode, step_seed, vocabulary
from .errors import TrainError
from .model import (
    BEGIN,
    END,
    UNKNOWN,
    CharacterModel,
    Embedding,
    FeedForward,
    SelfAttentionBlock,
    choose,
    scale_residuals,
)


class CrossAttentionBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output, feed-forward; each added to its normalised input."""

    def __init__(self, attention: str, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(d_model)
        self.self_attention = make_attention(attention, d_model, heads)
        self.cross_attention_norm = nn.LayerNorm(d_model)
        self.cross_attention = make_attention(attention, d_model, heads)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, memory_lengths: Tensor | None) -> Tensor:
        """x (B, Lt, E), memory (B, Ls, E), memory_lengths (B,) int64 -> (B, Lt, E)"""
        h = self.self_attention_norm(x)
        h, _ = self.self_attention(h, h, h, is_causal=True, need_weights=False)
        x = x + self.dropout(h)
        h = self.cross_attention_norm(x)
        h, _ = self.cross_attention(h, memory, memory, need_weights=False, key_lengths=memory_lengths)
        x = x + self.dropout(h)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Seq2Seq(CharacterModel):
    """Writes a target line character by character while reading a padded source line."""

    def __init__(
        self, characters: str, *, attention: str, context: int, d_model: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__(characters, context)
        # One embedding for both sides: a character copied from source to target meets itself.
        self.embedding = Embedding(self.vocabulary_size, context, d_model, dropout)
        self.encoder = nn.ModuleList(
            [SelfAttentionBlock(attention, d_model, heads, dropout, is_causal=False) for _ in range(layers)]
        )
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder = nn.ModuleList([CrossAttentionBlock(attention, d_model, heads, dropout) for _ in range(layers)])
        self.decoder_norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, self.vocabulary_size)
        scale_residuals(self, 3 * layers)

    @torch.jit.export
    def read(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """The encoder: source (B, Ls) int64, padded beyond source_lengths (B,) int64 -> memory (B, Ls, E)."""
        x = self.embedding(source)
        for block in self.encoder:
            x = block(x, source_lengths)
        return self.encoder_norm(x)

    @torch.jit.export
    def write(self, target: Tensor, memory: Tensor, source_lengths: Tensor) -> Tensor:
        """The decoder: target (B, Lt) int64 that starts with BEGIN -> logits (B, Lt, V) of what comes after each."""
        x = self.embedding(target)
        for block in self.decoder:
            x = block(x, memory, source_lengths)
        return self.head(self.decoder_norm(x))

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """source (B, Ls), source_lengths (B,), target (B, Lt), all int64 -> logits (B, Lt, V)"""
        return self.write(target, self.read(source, source_lengths), source_lengths)

    @torch.jit.export
    def generate(self, source: Tensor, source_lengths: Tensor, temperature: float = 0.0) -> Tensor:
        """Target ids (B, L), L <= context, for source (B, Ls): BEGIN, characters, END, padding."""
        with torch.no_grad():
            memory = self.read(source, source_lengths)
            ids = torch.full([source.size(0), 1], 1, dtype=torch.long, device=source.device)
            ended = torch.zeros([source.size(0), 1], dtype=torch.bool, device=source.device)
            while ids.size(1) < self.context and not bool(ended.all()):
                logits = self.write(ids, memory, source_lengths)
                chosen = choose(logits[:, -1], temperature, 2).masked_fill(ended, 0)
                ids = torch.cat([ids, chosen], dim=1)
                ended = ended | (chosen == 2)
        return ids


def simplify(line: str) -> str:
    """Lower-case letters and digits with single spaces: what is left when case and punctuation are gone."""
    return " ".join(re.findall(r"[^\W_]+", line.lower()))


def line_pairs(text: str, longest: int) -> list[tuple[str, str]]:
    """Distinct (simplified, original) lines of at most `longest` characters; longer ones are broken between words."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        for piece in textwrap.wrap(line, longest):
            source = simplify(piece)
            if len(source) > 1 and len(source) <= longest:
                pairs.setdefault(source, piece.strip())
    return list(pairs.items())


def encode_lines(lines: Sequence[str], characters: str) -> Sequence[Tensor]:
    return encode("".join(lines), characters).split([len(line) for line in lines])


def pad(rows: Sequence[Tensor]) -> Tensor:
    """(B, longest), filled up with UNKNOWN."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=UNKNOWN)


class LinePairs:
    """Pairs of a line without case and punctuation, and the line itself."""

    def __init__(self, text: str, context: int, batch_size: int, seed: int) -> None:
        pairs = line_pairs(text, context - 1)
        held_out = len(pairs) // 10
        if held_out < 1:
            raise TrainError(f"seq2seq needs a text of at least 10 different lines, got {len(pairs)}")
        training, self.held_out_pairs = pairs[:-held_out], pairs[-held_out:]
        self.characters = vocabulary("".join(source + target for source, target in training))
        self.training = self.encode(training)
        self.held_out = self.encode(self.held_out_pairs)
        self.batch_size, self.seed = batch_size, seed

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
        """Per pair the ids of its source, and BEGIN, those of its target, END."""
        begin, end = torch.tensor([BEGIN]), torch.tensor([END])
        sources, targets = (encode_lines(lines, self.characters) for lines in zip(*pairs, strict=True))
        return [(source, torch.cat([begin, t, end])) for source, t in zip(sources, targets, strict=True)]

    def collate(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        """Inputs source (B, Ls), source_lengths (B,), target without its last (B, Lt); targets without their first."""
        lengths = torch.tensor([len(source) for source, _ in pairs])
        targets = pad([target for _, target in pairs])
        inputs = pad([target[:-1] for _, target in pairs])
        return Batch((pad([source for source, _ in pairs]), lengths, inputs), targets[:, 1:].contiguous())

    def training_batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step_seed(self.seed, step))
        chosen = torch.randint(len(self.training), (self.batch_size,), generator=generator)
        return self.collate([self.training[i] for i in chosen.tolist()])

    def held_out_batches(self) -> Iterator[Batch]:
        """The held-out lines, or as many of them, evenly spread, as the limit allows."""
        characters = sum(len(target) for _, target in self.held_out)
        every = max(1, -(-characters // HELD_OUT_LIMIT))
        rows = sorted(self.held_out[::every], key=lambda pair: len(pair[1]))  # little padding per batch
        for start in range(0, len(rows), HELD_OUT_BATCH):
            yield self.collate(rows[start : start + HELD_OUT_BATCH])

    def held_out_sample(self) -> Batch:
        """The longest held-out lines, targets cut to the same length: nothing in the decoder is padding."""
        rows = sorted(self.held_out, key=lambda pair: len(pair[1]))[-HELD_OUT_SAMPLE:]
        length = len(rows[0][1])
        return self.collate([(source, target[:length]) for source, target in rows])

    def describe(self) -> str:
        return (
            f"{len(self.training):,} different lines to train on, {len(self.characters)} distinct characters; "
            f"the {len(self.held_out):,} after them held out"
        )
