"""What the user sees: a progress bar or a plain log, a table of numbers, a curve."""

from __future__ import annotations

import io
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import write_atomically
from .table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG_LINES = 20  # in a log that is not a terminal


def bits(loss: float) -> float:
    """A loss in nats per character as bits per character."""
    return loss / math.log(2)


def duration(seconds: float) -> str:
    """65.2 -> '1:05'"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def say(*lines: str) -> None:
    write("".join(line + "\n" for line in lines))


def write(text: str) -> None:
    """Prints at once. Output that cannot be written (a full disk, a closed terminal) does not end the run."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has gone (`| head`): nobody waits for the rest
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """One bar that is drawn again and again on a terminal, some lines in a log elsewhere."""

    def __init__(self, steps: int, quiet: bool = False) -> None:
        self.steps = steps
        self.quiet = quiet
        self.live = not quiet and sys.stdout.isatty()
        self.width = 0  # of the bar on the screen

    def step(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Shows that `step` steps are done, the last with `loss` in nats per character."""
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {duration(seconds_left)} left"
        count = f"step {step:>{len(str(self.steps))}}/{self.steps}"
        if self.live:
            columns = shutil.get_terminal_size().columns - 1
            room = columns - len(count) - len(numbers) - 6
            done = round(room * step / self.steps)
            bar = f"[{'#' * done}{'.' * (room - done)}]  " if room >= 10 else ""
            line = f"{count}  {bar}{numbers}"[:columns]
            self.show("\r" + line.ljust(self.width))
            self.width = len(line)
        elif not self.quiet and (step == 1 or step % max(1, self.steps // LOG_LINES) == 0):
            self.show(f"{count}  {numbers}\n")

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.live and self.width:
            self.show("\r" + " " * self.width + "\r")
            self.width = 0
        if not self.quiet:
            self.show(text + "\n")

    def show(self, text: str) -> None:
        """Prints until the reader has gone; SIGPIPE has then asked for a stop, and the step at hand is still saved."""
        try:
            write(text)
        except BrokenPipeError:
            self.quiet, self.live = True, False


@dataclass
class Row:
    """One step in metrics.csv; the losses are per character."""

    step: int
    loss: float  # nats
    bits: float
    tokens: int
    tokens_per_second: float
    learning_rate: float
    held_out_bits: float | None = None  # None: not evaluated after this step


class Metrics(Table[Row]):
    """metrics.csv: a row per step."""

    kind = Row


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def write_curve(path: Path, rows: Sequence[Row], title: str) -> str | None:
    """Draws training and held-out bits per character over the steps; returns why not when it cannot."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([row.step for row in rows], [row.bits for row in rows], alpha=0.6, linewidth=1, label="training")
        held_out = {row.step: row.held_out_bits for row in rows if row.held_out_bits is not None}
        axes.plot(list(held_out), list(held_out.values()), "o-", label="held out")
        axes.set(title=title, xlabel="step", ylabel="bits per character")
        axes.grid(alpha=0.3)
        axes.legend()

    return write_figure(path, (8, 4.5), draw)


def write_figure(path: Path, inches: tuple[float, float], draw: Callable[[Figure], None]) -> str | None:
    """Writes what `draw` puts on a figure as PNG; returns why not when it cannot."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "there are no curves because matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())
    return None
