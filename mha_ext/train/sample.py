"""What the trained model writes, for people to read."""

from __future__ import annotations

import torch

from .data import Windows
from .model import Decoder
from .seq2seq import LinePairs, Seq2Seq, pad

PROMPT_CHARACTERS = 40
SAMPLE_CHARACTERS = 400
SAMPLE_LINES = 5
TEMPERATURE = 0.8


def continuation(model: Decoder, data: Windows, seed: int) -> str:
    """The first held-out characters and what the model makes of them."""
    prompt = data.held_out_text[: min(PROMPT_CHARACTERS, model.context)]
    torch.manual_seed(seed)
    ids = data.held_out[: len(prompt)].unsqueeze(0).to(next(model.parameters()).device)
    written = model.generate(ids, SAMPLE_CHARACTERS, TEMPERATURE)[0, len(prompt) :]
    return f"{prompt}|{model.decode(written)}"


def restored_lines(model: Seq2Seq, data: LinePairs) -> str:
    """Held-out lines as the model reads them, as it writes them, and as they were."""
    count = len(data.held_out)
    chosen = [i * count // SAMPLE_LINES for i in range(SAMPLE_LINES)] if count >= SAMPLE_LINES else range(count)
    rows = [data.held_out[i][0] for i in chosen]
    device = next(model.parameters()).device
    ids = model.generate(pad(rows).to(device), torch.tensor([len(row) for row in rows], device=device))
    blocks = []
    for i, written in zip(chosen, ids, strict=True):
        source, original = data.held_out_pairs[i]
        blocks.append(f"reads     {source}\nwrites    {model.decode(written)}\noriginal  {original}")
    return "\n\n".join(blocks)
