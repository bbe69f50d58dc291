"""`python -m mha_ext export`: a run's trained model in one of the formats of export.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..cli import CommandError, Parser, fail
from .checkpoint import CHECKPOINT, load, trained_model
from .errors import TrainError
from .export import FORMATS, export
from .report import say

PROGRAM = "python -m mha_ext export"

DESCRIPTION = """\
Writes the model that a run of `train` left behind, whatever its attention, as a file for programs without its Python
code. The vocabulary and the sizes go along. What is written was loaded, and its results compared with the model's."""

EPILOG = f"""\
formats, and the file each becomes in the run's folder:
  torchscript   model.pt     TorchScript with generate(), encode() and decode(); what `train` writes too
  export        program.pt2  the graph of torch.export, for PyTorch's other tools
  aoti          package.pt2  compiled by AOTInductor for this kind of processor; needs a C++ compiler, takes a minute
  onnx          model.onnx   for onnxruntime and others; needs onnx, onnxscript and onnxruntime

Programs that load one of the first three load the operators before: `import mha_ext` in Python, libmha_ext.so in C++.

examples:
  {PROGRAM} runs/decoder-mha_ext-1 --to aoti
  {PROGRAM} runs/decoder-mha_ext-1 --to onnx --out small.onnx

Exit code 0: done, 2: something to put right."""


def make_parser() -> Parser:
    parser = Parser(
        PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or a checkpoint")
    parser.add_argument("--to", choices=tuple(FORMATS), required=True, help="the format (see below)")
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: in the run's folder)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name); returns the exit code."""
    try:
        options = make_parser().parse_args(argv)
        if not options.run:  # to the system an empty name is the folder at hand
            raise TrainError("RUN: expected the folder of a run, got ''")
        run(Path(options.run), options.to, options.out)
        return 0
    except CommandError as error:
        return fail(PROGRAM, error)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped", file=sys.stderr)
        return 130


def run(where: Path, to: str, out: str | None) -> None:
    source = where / CHECKPOINT if os.path.isdir(where) else where
    checkpoint = load(source)
    path = choose_file(source, to, out)
    model = trained_model(checkpoint, source)
    s = checkpoint.settings
    say(f"model    {s.model}, attention {s.attention}, after step {checkpoint.step} ({source})")
    say(f"export   {export(to, model, s, path)}", f"file     {path} ({FORMATS[to].how_to_load})")


def choose_file(source: Path, to: str, out: str | None) -> Path:
    """The file to write: `out`, or the format's own beside the checkpoint `source`."""
    name = FORMATS[to].file_name
    if out is None:
        return source.with_name(name)
    path, suffix = Path(out), Path(name).suffix
    if path.suffix != suffix:  # PyTorch tells its archives by their names
        raise TrainError(f"--out: expected a name that ends in {suffix} with --to {to}, got {out!r}")
    if os.path.exists(path) and os.path.samefile(path, source):
        raise TrainError(f"--out: expected another file than the checkpoint, got {out!r}")
    return path
