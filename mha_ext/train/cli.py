"""`python -m mha_ext train`: options, and a run from the first line to the closing summary."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from ..cli import CommandError, Parser, fail
from .attention import ATTENTION_NAMES
from .checkpoint import Checkpoint, build_model, load, restore
from .data import Windows, fingerprint, read_text
from .errors import TrainError
from .folder import choose_folder, claimed, find_checkpoint
from .heads import HeadMetrics
from .loop import Trainer, make_optimizer
from .report import Metrics
from .run import HEADS, METRICS, PROGRAM, Run
from .seq2seq import LinePairs
from .settings import DIVERSITY_KINDS, FIXED, MODEL_DEFAULTS, MODEL_NAMES, SETTING_NAMES, Settings, option

DESCRIPTION = """\
Trains a Transformer on text, character by character, and shows how well it predicts text that it never saw. Every
attention in it is mha_ext.MultiHeadAttention, or what --attention names instead."""

EXAMPLES = f"""\
examples:
  {PROGRAM}
      a decoder on the language reference that ships with Python: a few minutes on two cores
  {PROGRAM} --text book.txt notes.txt --steps 3000
      the same on your own UTF-8 text
  {PROGRAM} --attention reference
      only the attention is another: same seed, same data, so metrics.csv of both runs shows the same
      losses, and the summaries tell which was faster
  {PROGRAM} --head-diversity 0.1
      heads that are pushed to differ; heads.png shows how much they do, curve.png at what price
  {PROGRAM} --model seq2seq
      an encoder-decoder that restores case and punctuation
  {PROGRAM} --resume runs/decoder-mha_ext-1 --steps 2000
      goes on where that run stopped, up to step 2000

A run writes into a folder of its own: checkpoint.pt, metrics.csv, curve.png, heads.csv, heads.png,
sample.txt, and the exported model.pt.
Ctrl-C saves first. Exit code 0: done, 2: something to put right, 130: stopped, 141: nobody reads the output."""


def make_parser() -> Parser:
    parser = Parser(
        PROGRAM,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given comes from the checkpoint or from the defaults
        allow_abbrev=False,
    )
    default = Settings()
    task = parser.add_argument_group("what is trained on what")
    task.add_argument("--model", choices=MODEL_NAMES, help="a language model, or a restorer of case and punctuation")
    task.add_argument("--attention", choices=ATTENTION_NAMES, help=ATTENTION_HELP)
    task.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 files instead of Python's language reference")

    sizes = parser.add_argument_group("sizes")
    add = sizes.add_argument
    add("--context", type=int, metavar="N", help=f"characters that a prediction sees {defaults('context')}")
    add("--d-model", type=int, metavar="N", help=f"width of the model {defaults('d_model')}")
    add("--heads", type=int, metavar="N", help=f"attention heads, which divide the width {defaults('heads')}")
    add("--layers", type=int, metavar="N", help=f"blocks, in seq2seq of encoder and decoder each {defaults('layers')}")
    add("--dropout", type=float, metavar="P", help=f"on the embeddings and what blocks add {defaults('dropout')}")

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--steps", type=int, metavar="N", help=f"optimizer steps in all {defaults('steps')}")
    add("--batch-size", type=int, metavar="N", help=f"sequences per step {defaults('batch_size')}")
    add("--lr", type=float, metavar="X", help=f"peak learning rate of AdamW; a cosine follows {defaults('lr')}")
    add("--seed", type=int, metavar="N", help=f"of initial values, batches and dropout {defaults('seed')}")
    add("--head-diversity", type=float, metavar="X", help=DIVERSITY_HELP)
    add("--head-diversity-kind", choices=DIVERSITY_KINDS, help=DIVERSITY_KIND_HELP)
    add("--threads", type=int, metavar="N", help="CPU threads (default: as PyTorch chooses)")
    add("--device", metavar="NAME", help=f"cpu, cuda, cuda:1, ... (default: {default.device})")

    output = parser.add_argument_group("where it goes")
    add = output.add_argument
    add("--out", metavar="DIR", help="a new or empty folder (default: runs/MODEL-ATTENTION-N)")
    add("--eval-every", type=int, metavar="N", help=f"steps between looks at held-out text {defaults('eval_every')}")
    add("--checkpoint-every", type=int, metavar="N", help=f"steps between checkpoints {defaults('checkpoint_every')}")
    add("--resume", nargs="?", const="", metavar="PATH", help=RESUME_HELP)
    add("--no-export", action="store_true", help="no TorchScript model at the end")
    add("--quiet", action="store_true", help="only the closing summary")
    return parser


ATTENTION_HELP = (
    "mha_ext (default); reference: softmax(QK^T/sqrt(d))V in plain PyTorch; sdpa: F.scaled_dot_product_attention; "
    "torch: what nn.MultiheadAttention computes. Parameters and checkpoints are the same for all"
)
DIVERSITY_HELP = (
    "adds X times how alike the heads of a layer are, at most 1, to the loss in nats per character that is optimised; "
    "losses are shown without it. Only with --attention mha_ext; may change on --resume (default: 0)"
)
DIVERSITY_KIND_HELP = (
    "alike in what: redundancy (default) in what they tell, by linear CKA; outputs, positions, subspaces: in "
    "directions, in the characters they look at, in directions of values, by Li et al. 2018; js: in their weights, by "
    "Jensen-Shannon divergence"
)
RESUME_HELP = (
    "go on from a run's folder or checkpoint, or without PATH from the latest run (from --out if given); "
    "options not given again are those of the run"
)


def defaults(name: str) -> str:
    """'(default: 128)', or both values where the models differ."""
    value = getattr(Settings(), name)
    other = MODEL_DEFAULTS["seq2seq"].get(name, value)
    return f"(default: {value})" if other == value else f"(default: {value}; seq2seq: {other})"


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name); returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a run
    try:
        return run(vars(make_parser().parse_args(argv)))
    except CommandError as error:
        return fail(PROGRAM, error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"{PROGRAM}: not enough memory: try a smaller --batch-size, --context or --d-model", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped before training began", file=sys.stderr)
        return 130


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def run(options: dict[str, Any]) -> int:
    """A new run, or with options["resume"] the rest of an old one."""
    resumed_from = find_checkpoint(options["resume"], options.get("out")) if "resume" in options else None
    checkpoint = load(resumed_from) if resumed_from else None
    settings = merge(options, checkpoint, resumed_from)
    device = settings.torch_device()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    text = read_text(settings.text)
    if checkpoint and fingerprint(text) != checkpoint.fingerprint:
        raise TrainError(f"the text is not the one that {resumed_from} was trained on: name that one with --text")
    data = make_data(settings, text)
    torch.manual_seed(settings.seed)
    model = build_model(settings, data.characters).to(device)
    optimizer = make_optimizer(model, settings.lr)
    kept, kept_heads = [], []
    if checkpoint and resumed_from:
        restore(model, optimizer, checkpoint, resumed_from)
        kept = Metrics.read(resumed_from.parent / METRICS, checkpoint.step)
        kept_heads = HeadMetrics.read(resumed_from.parent / HEADS, checkpoint.step)

    step = checkpoint.step if checkpoint else 0
    trainer = Trainer(settings, model, optimizer, data, device, step)
    folder = choose_folder(options.get("out"), settings, resumed_from)
    quiet, with_export = "quiet" in options, "no_export" not in options
    with claimed(folder):
        return Run(settings, folder, model, trainer, text, quiet, with_export).execute(kept, kept_heads)


def merge(options: dict[str, Any], checkpoint: Checkpoint | None, path: Path | None) -> Settings:
    """The settings of a run: its options, then those of the checkpoint, then the defaults."""
    given = {name: options[name] for name in SETTING_NAMES if name in options}
    if checkpoint is None:
        settings = Settings(**{**MODEL_DEFAULTS[given.get("model", "decoder")], **given})
        settings.check()
        return settings
    for name in FIXED:
        old = getattr(checkpoint.settings, name)
        if given.get(name, old) != old:
            raise TrainError(f"{path} belongs to a run with {option(name)} {old}, it cannot go on with {given[name]}")
    settings = dataclasses.replace(checkpoint.settings, **given)
    settings.check()
    if settings.steps < checkpoint.step:
        raise TrainError(f"{path} has done {checkpoint.step} steps already: --steps {settings.steps} would go back")
    return settings


def make_data(settings: Settings, text: str) -> Windows | LinePairs:
    if settings.model == "seq2seq":
        return LinePairs(text, settings.context, settings.batch_size, settings.seed)
    return Windows(text, settings.context, settings.batch_size, settings.seed)
