"""The command line: `python -m mha_ext COMMAND ...`, the same as `mha-ext COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

# command -> the module whose main(arguments) -> exit code runs it, and a line for --help
COMMANDS = {
    "info": ("mha_ext.info", "versions, the instruction set in use, backends and threads"),
    "train": ("mha_ext.train.cli", "train a Transformer end to end on text, export it, and show how well it does"),
    "export": ("mha_ext.train.export_cli", "write a trained model as a file for C++, ONNX and other programs"),
    "heads": ("mha_ext.heads.cli", "show what the attention heads of a model look at, and which do the same"),
    "bench": ("mha_ext.bench", "measure mha_ext side by side with PyTorch on this machine"),
    "cmake-dir": ("mha_ext.cmake_dir", "print where CMake finds the C++ library: find_package(mha_ext)"),
}

EXAMPLES = """\
examples:
  mha-ext train                      train on text that ships with Python; takes minutes
  mha-ext train --text book.txt      train on your own text
  mha-ext train --attention sdpa     the same run with PyTorch's attention, to compare
  mha-ext export runs/decoder-mha_ext-1 --to aoti
                                     compile the trained model for a C++ program
  mha-ext heads runs/decoder-mha_ext-1
                                     heads.html: what its heads look at
  mha-ext train --help               what else it takes; every command has its own --help
"""


class CommandError(Exception):
    """Something the user can put right; its text is one sentence, printed without a traceback (exit code 2)."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without argparse's lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} ({self.prog} --help lists the options)")


def fail(program: str, error: Exception) -> int:
    """Prints the sentence of an error; returns the exit code."""
    print(f"{program}: {error}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that argv (default: the command line) names; returns its exit code, 2 for wrong usage."""
    replace_missing_streams()
    try:
        try:
            return run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # a reader who has gone (`| head`) shows here at the latest
    except BrokenPipeError:
        discard_output()
        return 128 + signal.SIGPIPE  # what a shell reports of programs that the signal ends


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        module = importlib.import_module(COMMANDS[arguments[0]][0])
        return module.main(arguments[1:])
    listing = parser()
    try:
        listing.parse_args(arguments or ["--help"])  # prints and exits
    except CommandError as error:
        return fail(listing.prog, error)
    return 2


def replace_missing_streams() -> None:
    """Python has None for a stream that the caller closed (`>&-`): what is printed there goes nowhere instead."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def discard_output() -> None:
    """Sends what nobody reads any more nowhere; Python would try to print it once more at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parser() -> Parser:
    from . import __version__

    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
    result = Parser(
        prog="mha-ext",
        usage="%(prog)s COMMAND [options]",
        description=f"Multi-head attention for PyTorch on the CPU.\n\ncommands:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="one of the commands above")
    result.add_argument("--version", action="version", version=f"mha-ext {__version__}")
    return result
