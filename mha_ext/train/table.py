"""Tables as CSV files: a row is on the disk as soon as it is known, and a run that goes on keeps its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from .checkpoint import write_atomically
from .errors import TrainError, shown


class HasStep(Protocol):
    step: int
    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=HasStep)

NUMBER, NAME = r"[\d.e+\-naif]*", r"[\w.]*"  # cells, and what a full disk leaves of them


def read_count(cell: str) -> int:
    if not re.fullmatch(r"\d{1,18}", cell):
        raise ValueError
    return int(cell)


def read_name(cell: str) -> str:
    if not re.fullmatch(NAME, cell):
        raise ValueError
    return cell


# annotation of a column -> how its cells are read
READ: dict[str, Callable[[str], object]] = {
    "int": read_count,
    "float": float,
    "str": read_name,
    "float | None": lambda cell: float(cell) if cell else None,
}


class Table(Generic[R]):
    """A CSV file whose columns are the fields of a dataclass: int (from 0), float, str (a name), or float | None."""

    kind: type[R]  # the dataclass

    def __init__(self, path: Path, kept: Sequence[R]) -> None:
        """Starts the file with `kept`, the rows of the steps before."""
        self.path = path
        self.rows = list(kept)
        write_atomically(path, "".join(line + "\n" for line in (self.header(), *map(format_row, kept))).encode())
        self.file = open(path, "a", encoding="utf-8")

    def add(self, *rows: R) -> None:
        self.rows.extend(rows)
        try:
            self.file.write("".join(format_row(row) + "\n" for row in rows))
            self.file.flush()
        except OSError as error:
            raise TrainError(f"cannot write {self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        with suppress(OSError):  # it tries once more to write what add() could not, and said so
            self.file.close()

    @classmethod
    def header(cls) -> str:
        return ",".join(f.name for f in fields(cls.kind))

    @classmethod
    def read(cls, path: Path, last_step: int) -> list[R]:
        """The rows up to `last_step`; none when there is no file. One with something else is the user's to move."""
        try:
            text = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TrainError(f"cannot read {path}: {error.strerror or error}") from None
        *lines, last = text.replace("\r\n", "\n").split("\n")
        if last and not (lines and cls.is_half_row(last)):
            lines.append(last)
        rows: list[R] = []
        for number, line in enumerate(lines, 1):
            try:
                if number > 1:
                    rows.append(cls.parse_row(line))
                elif line != cls.header():
                    raise ValueError
            except ValueError:
                raise TrainError(
                    f"{path}: expected the numbers of this run, got {shown(line)} in line {number}: "
                    "move the file away to go on without it"
                ) from None
        return [row for row in rows if row.step <= last_step]

    @classmethod
    def parse_row(cls, line: str) -> R:
        columns = fields(cls.kind)
        return cls.kind(*(READ[str(f.type)](cell) for f, cell in zip(columns, line.split(","), strict=True)))

    @classmethod
    def is_half_row(cls, line: str) -> bool:
        """Whether a full disk leaves this of a row: some of its cells, of which the last may be cut off."""
        cells, columns = line.split(","), fields(cls.kind)
        return (
            line[0].isdecimal()
            and len(cells) < len(columns)
            and all(
                re.fullmatch(NAME if f.type == "str" else NUMBER, cell) for f, cell in zip(columns, cells, strict=False)
            )
        )


def format_row(row: HasStep) -> str:
    return ",".join(map(format_cell, astuple(row)))


def format_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.8g}" if isinstance(value, float) else str(value)
