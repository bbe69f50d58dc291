"""What the user sees: a progress bar or a plain log, a table of numbers, a curve."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .checkpoint import write_atomically
from .errors import TrainError, shown

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


HEADER = ",".join(f.name for f in fields(Row))
HALF_ROW = re.compile(r"\d[\d.e+\-naif]*(,[\d.e+\-naif]*){0,5}")  # what a full disk leaves of a row of 7 numbers


class Metrics:
    """metrics.csv: a row per step, on the disk as soon as the step is done."""

    def __init__(self, path: Path, kept: Sequence[Row]) -> None:
        """Starts the file with `kept`, the rows of the steps before."""
        self.path = path
        self.rows = list(kept)
        write_atomically(path, "\n".join([HEADER, *map(format_row, kept), ""]).encode())
        self.file = open(path, "a", encoding="utf-8")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        try:
            self.file.write(format_row(row) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainError(f"cannot write {self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        with suppress(OSError):  # it tries once more to write what add() could not, and said so
            self.file.close()


def format_row(row: Row) -> str:
    return ",".join("" if value is None else f"{value:.8g}" for value in astuple(row))


def read_metrics(path: Path, last_step: int) -> list[Row]:
    """The rows up to `last_step`; none when there is no file. One that holds something else is the user's to move."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror or error}") from None
    *lines, last = text.replace("\r\n", "\n").split("\n")
    if last and not (lines and HALF_ROW.fullmatch(last)):
        lines.append(last)
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            if number > 1:
                rows.append(parse_row(line))
            elif line != HEADER:
                raise ValueError
        except ValueError:
            raise TrainError(
                f"{path}: expected the numbers of this run, got {shown(line)} in line {number}: "
                "move the file away to go on without it"
            ) from None
    return [row for row in rows if row.step <= last_step]


def parse_row(line: str) -> Row:
    step, loss, bit, tokens, speed, rate, held_out = line.split(",")
    row = Row(int(step), float(loss), float(bit), int(tokens), float(speed), float(rate))
    row.held_out_bits = float(held_out) if held_out else None
    return row


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def write_curve(path: Path, rows: Sequence[Row], title: str) -> str | None:
    """Draws training and held-out bits per character over the steps; returns why not when it cannot."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "there is no loss curve because matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.bits for row in rows], alpha=0.6, linewidth=1, label="training")
    held_out = {row.step: row.held_out_bits for row in rows if row.held_out_bits is not None}
    axes.plot(list(held_out), list(held_out.values()), "o-", label="held out")
    axes.set(title=title, xlabel="step", ylabel="bits per character")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())
    return None
