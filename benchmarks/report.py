"""Measures rows and reports them: text and markdown tables, JSON, comparison with an earlier run.

A report is what JSON holds:
    {"format": 1, "machine": {fields of Machine}, "rows": [row, ..]}
    row: {"name", "kind", "work", "feature", "shape", "length", "target": ratio or null, "share_target": share or null,
          "best_peer": name, "ratio": [low, median, high], "implementations": {name: figures},
          "fma_gflops", "read_gbytes" (of rows bound by it, or null), "linear_gain": timed in turns with the row}
    figures: {"seconds": [low, median, high], "gflops", "share" of the machine's peak, "bytes" above the inputs or null}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .machine import Machine, read_yardsticks, yardsticks
from .memory import peak_memory
from .peers import OURS, check_agreement, make_candidates, make_problem
from .rows import Row
from .timing import in_turns, quartiles, ratios

FORMAT = 1
SLOWER = 0.95  # a regression: the ratio falls below so much of the old one, and the quartiles do not overlap
LARGER = 1.10  # or memory grows beyond this and SLACK_BYTES
SLACK_BYTES = 2**21
MARKS = ("<!-- bench: begin -->", "<!-- bench: end -->")


def measure(row: Row, machine: Machine, budget: float, compiled: bool) -> dict:
    """One row of a report; takes about `budget` seconds, more where a single call is long.

    Raises RuntimeError if the implementations disagree.
    """
    candidates = make_candidates(make_problem(row), compiled)
    check_agreement(candidates)
    for candidate in candidates:
        candidate.prepare()
    sticks = yardsticks(reads=row.bound == "read")
    times = in_turns({candidate.name: candidate for candidate in candidates} | sticks, budget)
    pace = read_yardsticks({name: times.pop(name) for name in sticks})
    del candidates
    peers = {name: quartiles(taken).median for name, taken in times.items() if name != OURS}
    best_peer = min(peers, key=peers.__getitem__) if peers else None

    def figures(name: str) -> dict:
        seconds = quartiles(times[name])
        gflops = row.flops / seconds.median / 1e9
        gbytes = row.read_bytes / seconds.median / 1e9
        return {
            "seconds": seconds,
            "gflops": gflops,
            "share": gbytes / pace.read_gbytes if pace.read_gbytes else gflops / pace.fma_gflops,
            "bytes": peak_memory(row, name, machine.threads),
        }

    return {
        "name": row.name,
        "kind": row.kind,
        "work": row.work,
        "feature": row.feature,
        "shape": row.shape,
        "length": row.kv_len,
        "target": row.target.ratio(pace.linear_gain) if row.target else None,
        "share_target": row.share_target,
        "best_peer": best_peer,
        "ratio": ratios(times[best_peer], times[OURS]) if best_peer else None,
        "implementations": {name: figures(name) for name in times},
        **pace._asdict(),
    }


def make_report(machine: Machine, rows: Iterable[dict]) -> dict:
    return {"format": FORMAT, "machine": dataclasses.asdict(machine), "rows": list(rows)}


# Tables


HEADINGS = ("what", "shape", "ours ms", "best peer ms", "ratio (quartiles)", "GF/s", "of peak", "MiB ours / peer")


def cells(row: dict, targets: bool) -> list[str]:
    """The row's text under each of HEADINGS, and under 'target'."""
    ours, peer = row["implementations"][OURS], row["implementations"].get(row["best_peer"])
    what = f"{row['kind']} {row['work']}" + (f", {row['feature']}" if row["feature"] else "")
    ratio = "-"
    if row["ratio"]:
        low, median, high = row["ratio"]
        ratio = f"{median:.2f} ({low:.2f}-{high:.2f})"
    text = [
        what,
        row["shape"],
        _milliseconds(ours),
        f"{_milliseconds(peer)} {row['best_peer']}" if peer else "-",
        ratio,
        f"{ours['gflops']:.0f}",
        f"{ours['share']:.0%}",
        f"{_mebibytes(ours)} / {_mebibytes(peer)}",
    ]
    return [*text, _target(row)] if targets else text


def _target(row: dict) -> str:
    """Each target with its verdict."""
    wanted = []
    if row["target"] and row["ratio"]:
        wanted.append((f"ratio {row['target']:.2f} (g {row['linear_gain']:.2f})", row["ratio"][1] >= row["target"]))
    if row["share_target"]:
        wanted.append(
            (f"{row['share_target']:.0%} of peak", row["implementations"][OURS]["share"] >= row["share_target"])
        )
    return ", ".join(f"{text} {'met' if met else 'MISSED'}" for text, met in wanted)


def _milliseconds(figures: dict) -> str:
    milliseconds = 1e3 * figures["seconds"][1]
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _mebibytes(figures: dict | None) -> str:
    return "-" if figures is None or figures["bytes"] is None else f"{figures['bytes'] / 2**20:.1f}"


_WIDTHS = (27, 26, 9, 19, 18, 6, 7, 15)


def text_line(texts: Iterable[str], widths: tuple[int, ...] = _WIDTHS) -> str:
    """One line of the table on a terminal."""
    *first, last = (f"{text:<{width}}" for text, width in zip(texts, (*widths, 0), strict=False))
    return "  ".join([*first, last]).rstrip()


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *lines))


def headings(targets: bool) -> list[str]:
    return [*HEADINGS, "target"] if targets else list(HEADINGS)


def markdown(report: dict, targets: bool) -> str:
    """The table for the README, with the machine named under it."""
    table = markdown_table(headings(targets), (cells(row, targets) for row in report["rows"]))
    return f"{table}\n\n{Machine(**report['machine']).describe()}. {_LEGEND}"


_LEGEND = (
    "Layers are (batch, length, d_model, heads), cores (batch, heads, length, head size); train is forward and "
    "backward. The ratio is the best peer's time over ours, taken in turns: median and quartiles; the peak of the "
    "machine and g were timed in turns with each row, too. Memory is the peak above inputs and parameters."
)


def replace_marked(path: Path, table: str, marks: tuple[str, str] = MARKS) -> None:
    """Puts the table between the two marks of a file. Raises ValueError if they are not there."""
    text = path.read_text(encoding="utf-8")
    begin, end = (text.find(mark) for mark in marks)
    if not 0 <= begin < end:
        raise ValueError(f"bench: expected {path} to hold the lines {marks[0]} and {marks[1]}, got neither in order")
    path.write_text(f"{text[: begin + len(marks[0])]}\n{table}\n{text[end:]}", encoding="utf-8")


# Comparison


def load(path: Path) -> dict:
    """A report from JSON. Raises ValueError if the file holds none, OSError if it cannot be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"bench: expected {path} to be a report of --json, format {FORMAT}, got something else")
    return report


def compare(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Regressions of `new` against `old`, and notes on what makes the two hard to compare; one sentence each.

    Ratios are compared rather than times: they were taken in turns, so that they hold on a busy machine as well.
    """
    notes = [
        f"{field} was {old['machine'].get(field)}, is {new['machine'].get(field)}"
        for field in ("cpu", "threads", "capability", "torch", "projections")
        if old["machine"].get(field) != new["machine"].get(field)
    ]
    regressions = []
    before = {row["name"]: row for row in old["rows"]}
    for row in new["rows"]:
        earlier = before.get(row["name"])
        if earlier is None:
            notes.append(f"{row['name']} is new")
            continue
        if row["ratio"] and earlier["ratio"]:
            (low, median, _), (_, now, high) = earlier["ratio"], row["ratio"]
            if now < SLOWER * median and high < low:
                regressions.append(f"{row['name']}: the ratio fell from {median:.2f} to {now:.2f}")
        bytes_before, bytes_now = (each["implementations"][OURS]["bytes"] for each in (earlier, row))
        if bytes_before is not None and bytes_now is not None and bytes_now > LARGER * bytes_before + SLACK_BYTES:
            regressions.append(
                f"{row['name']}: memory grew from {bytes_before / 2**20:.1f} to {bytes_now / 2**20:.1f} MiB"
            )
    return regressions, notes
