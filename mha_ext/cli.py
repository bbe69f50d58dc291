"""The command line: `python -m mha_ext COMMAND ...`, the same as `mha-ext COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# command -> the module whose main(arguments) -> exit code runs it, and a line for --help
COMMANDS = {
    "info": ("mha_ext.info", "versions, the instruction set in use, backends and threads"),
    "train": ("mha_ext.train.cli", "train a Transformer end to end on text, export it, and show how well it does"),
    "bench": ("mha_ext.bench", "measure mha_ext side by side with PyTorch on this machine"),
}

EXAMPLES = """\
examples:
  mha-ext train                      train on text that ships with Python; takes minutes
  mha-ext train --text book.txt      train on your own text
  mha-ext train --attention sdpa     the same run with PyTorch's attention, to compare
  mha-ext train --help               what else it takes; every command has its own --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that argv (default: the command line) names; returns its exit code, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        module = importlib.import_module(COMMANDS[arguments[0]][0])
        return module.main(arguments[1:])
    parser().parse_args(arguments or ["--help"])  # prints and exits
    return 2


def parser() -> argparse.ArgumentParser:
    from . import __version__

    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
    result = argparse.ArgumentParser(
        prog="mha-ext",
        usage="%(prog)s COMMAND [options]",
        description=f"Multi-head attention for PyTorch on the CPU.\n\ncommands:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="one of the commands above")
    result.add_argument("--version", action="version", version=f"mha-ext {__version__}")
    return result
