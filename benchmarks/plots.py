"""A picture of a report: a bar per row, and how time and memory grow with the length."""

from __future__ import annotations

from pathlib import Path

from .peers import OURS


def plot(report: dict, path: Path) -> None:
    """Writes an image of the kind that the path's suffix names; ValueError for one that matplotlib cannot write."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_length = [row for row in report["rows"] if row["name"].startswith("length-")]
    compared = [row for row in report["rows"] if row["ratio"] and row not in by_length]
    panels = bool(compared) + 2 * bool(by_length)
    figure, axes = pyplot.subplots(1, panels, figsize=(6 * panels, max(3.5, 0.3 * len(compared))), squeeze=False)
    remaining = list(axes[0])
    if compared:
        _bars(remaining.pop(0), compared)
    if by_length:
        _growth(remaining[0], by_length, "seconds", "milliseconds", lambda figures: 1e3 * figures["seconds"][1])
        _growth(remaining[1], by_length, "bytes", "MiB above the inputs", lambda figures: figures["bytes"] / 2**20)
    figure.suptitle(f"{report['machine']['cpu']}, {report['machine']['threads']} threads", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes, rows: list[dict]) -> None:
    names = [row["name"] for row in rows]
    median = [row["ratio"][1] for row in rows]
    errors = zip(*((m - lo, hi - m) for lo, m, hi in (row["ratio"] for row in rows)), strict=True)
    axes.barh(names, median, xerr=list(errors), color="tab:blue", ecolor="tab:gray")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("best peer's time / ours (median, quartiles)")


def _growth(axes, rows: list[dict], field: str, label: str, value) -> None:
    """One line per implementation over the length, both axes logarithmic."""
    names = list(dict.fromkeys(name for row in rows for name in row["implementations"]))
    for name in names:
        points = [
            (row["length"], value(row["implementations"][name]))
            for row in rows
            if row["implementations"].get(name, {}).get(field) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2 if name == OURS else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length (core, forward and backward)")
    axes.set_ylabel(label)
    axes.legend()
