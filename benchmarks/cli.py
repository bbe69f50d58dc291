"""The command `python -m mha_ext bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import torch

from mha_ext.cli import CommandError, Parser, fail

from . import compiled, heads, machine, models, plots, report
from .peers import OURS
from .rows import ROWS, select

TABLES = {"models": models, "compiled": compiled, "heads": heads}  # others than that of the rows, by their options

BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 4.0, 0.5

_EPILOG = """\
examples:
  python -m mha_ext bench                              every row that runs by default, a few minutes
  python -m mha_ext bench --quick --rows 'plain-*'     a first impression of some rows
  python -m mha_ext bench --json new.json --compare old.json
  python -m mha_ext bench --rows 'length-*' --plot length.png

exit codes: 0 done; 1 a regression against --compare, or implementations that disagree; 2 wrong arguments
"""


def main(argv: list[str]) -> int:
    """Runs the command with the arguments after `bench`; returns its exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except CommandError as error:
        return fail(parser.prog, error)
    try:
        rows = select(arguments.rows)
        old = report.load(arguments.compare) if arguments.compare else None
        _check_writable(arguments)
        _check_alone(arguments)
    except (ValueError, OSError) as error:
        return _fail(error)
    if arguments.list:
        for row in ROWS:
            print(f"{row.name:<36} {row.shape}{'' if row.by_default else '   by name only'}")
        return 0
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    probed = machine.probe()
    _say(arguments, probed.describe())
    for name, table in TABLES.items():
        if getattr(arguments, name):
            return _table(arguments, probed, table)

    measured = []
    _say(arguments, report.text_line(report.headings(arguments.targets)))
    budget = QUICK_BUDGET_SECONDS if arguments.quick else BUDGET_SECONDS
    for row in rows:
        try:
            measured.append(report.measure(row, probed, budget, arguments.compile))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        _say(arguments, report.text_line(report.cells(measured[-1], arguments.targets)))
    if any(row["implementations"][OURS]["share"] > 1 for row in measured):
        _say(arguments, "note: shares of the peak above 100%: the machine was busy while its peak was measured")
    peaks = [row["fma_gflops"] for row in measured]
    if min(peaks) < 0.85 * max(peaks):
        _say(arguments, f"note: the machine's peak went from {max(peaks):.0f} to {min(peaks):.0f} GF/s: it was busy")
    return _finish(arguments, report.make_report(probed, measured), old)


def _table(arguments: argparse.Namespace, probed: machine.Machine, what: ModuleType) -> int:
    """One of TABLES."""
    _say(arguments, what.text_line(list(what.HEADINGS)))
    budget = QUICK_BUDGET_SECONDS if arguments.quick else 3 * BUDGET_SECONDS
    lines = []
    try:
        for line in what.measurements(arguments.quick, budget):
            lines.append(line)
            _say(arguments, what.text_line(line))
        table = what.markdown(lines, probed.describe())
        if arguments.markdown == "-":
            print(table)
        elif arguments.markdown:
            report.replace_marked(Path(arguments.markdown), table, what.MARKS)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        return _fail(error)
    return 0


def _finish(arguments: argparse.Namespace, new: dict, old: dict | None) -> int:
    try:
        if arguments.json:
            arguments.json.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
        if arguments.plot:
            plots.plot(new, arguments.plot)
        if arguments.markdown not in (None, "-"):
            report.replace_marked(Path(arguments.markdown), report.markdown(new, arguments.targets))
    except (ValueError, OSError) as error:
        return _fail(error)
    if arguments.markdown == "-":
        print(report.markdown(new, arguments.targets))
    if old is None:
        return 0
    regressions, notes = report.compare(old, new)
    for note in notes:
        print(f"note: {note}")
    for regression in regressions:
        print(f"regression: {regression}")
    if not regressions:
        print(f"no regression against {arguments.compare}")
    return 1 if regressions else 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m mha_ext bench",
        description="Times mha_ext and its peers (the documents' class, scaled_dot_product_attention, "
        "nn.MultiheadAttention) in turns on this machine, float32.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", metavar="NAME,..", help="only these rows; globs such as 'plain-*' are understood")
    add("--models", action="store_true", help="whole models before and after replace_attention instead of rows")
    add("--compiled", action="store_true", help="training under torch.compile against eager mode instead of rows")
    add("--heads", action="store_true", help="what recording and gating heads costs instead of rows")
    add("--list", action="store_true", help="list the rows and stop")
    add("--quick", action="store_true", help="half a second of timing a row: a first impression")
    add("--threads", type=_positive, metavar="N", help="threads to compute with (default: torch's choice)")
    add("--compile", action="store_true", help="torch.compile of the documents' class as one more peer (slow to start)")
    add("--targets", action="store_true", help="show what each row should reach on this machine")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    add(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="name rows whose ratio to the best peer, or memory, got worse since that --json",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the ratios, and time and memory of 'length-*' rows")
    add(
        "--markdown",
        nargs="?",
        const="-",
        metavar="FILE",
        help=f"print the table as markdown, or put it into FILE between {report.MARKS[0]} and {report.MARKS[1]} "
        "(--models, --compiled and --heads: between such marks with their names)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of threads >= 1, got {text!r}")
    return int(text)


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raises for options that the other tables have no use for."""
    for table in TABLES:
        for name in ("rows", "json", "compare", "plot", "targets", "compile", *TABLES):
            if name != table and getattr(arguments, table) and getattr(arguments, name):
                raise ValueError(f"bench: expected --{table} without --{name}, got both")


def _check_writable(arguments: argparse.Namespace) -> None:
    """Raises before the measuring rather than after it."""
    for path in (arguments.json, arguments.plot):
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"bench: expected a file in a folder that exists, got {path}")
    if arguments.markdown not in (None, "-") and not Path(arguments.markdown).is_file():
        raise ValueError(f"bench: expected --markdown to name a file that exists, got {arguments.markdown}")
    if arguments.plot:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("bench: expected matplotlib to be installed for --plot, got none")


def _say(arguments: argparse.Namespace, text: str) -> None:
    """Progress; kept out of the way of a markdown table on stdout."""
    print(text, file=sys.stderr if arguments.markdown == "-" else sys.stdout, flush=True)


def _fail(error: Exception) -> int:
    print(error, file=sys.stderr)
    return 2
