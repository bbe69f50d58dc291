"""Where runs live on disk: the checkpoint to go on from, and a folder in which nobody's files are lost."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .checkpoint import CHECKPOINT
from .errors import TrainError
from .heads import HeadMetrics
from .report import Metrics
from .run import HEADS, METRICS
from .settings import Settings
from .table import Table

RUNS = Path("runs")
TABLES: dict[str, type[Table[Any]]] = {METRICS: Metrics, HEADS: HeadMetrics}
ATOMICALLY_WRITTEN = "|".join(map(re.escape, (CHECKPOINT, *TABLES)))
HALF_WRITTEN = re.compile(rf"\.({ATOMICALLY_WRITTEN})\.\d+\.tmp")  # by a process that was killed


def find_checkpoint(where: str | None, out: str | None) -> Path:
    """What `--resume [PATH]` names: a checkpoint, a run's folder, or without PATH the run in --out or the latest."""
    if where or out:
        path = Path(where or str(out))
        return checkpoint_in(path) if os.path.isdir(path) else path
    found = list(RUNS.glob(f"*/{CHECKPOINT}"))
    if not found:
        raise TrainError(f"there is nothing to resume in {RUNS}/: name a run's folder, --resume PATH")
    return max(found, key=lambda path: path.stat().st_mtime)


def checkpoint_in(folder: Path) -> Path:
    path = folder / CHECKPOINT
    if not os.path.exists(path):
        start = f"start its run with --out {shlex.quote(str(folder))}" if is_free(folder) else "name a run's folder"
        raise TrainError(f"--resume: expected a folder with a checkpoint, got {folder}, which holds none: {start}")
    return path


def choose_folder(out: str | None, settings: Settings, resumed_from: Path | None) -> Path:
    """The run's own folder when it goes on in place, a new one otherwise."""
    if resumed_from is not None and resumed_from.name == CHECKPOINT:
        folder = resumed_from.parent
        if out is None or Path(out).absolute() == folder.absolute():
            return folder
    return create_run_folder(out, settings)


def create_run_folder(out: str | None, settings: Settings) -> Path:
    """A folder without anything to lose: `out`, or runs/MODEL-ATTENTION-N with the first free N."""
    if out is not None:
        folder = Path(out)
        make_folder(folder, exist_ok=True)
        if not is_free(folder):
            held = os.path.exists(folder / CHECKPOINT)
            go_on = f", or --resume {shlex.quote(str(folder))} to go on with its run" if held else ""
            raise TrainError(f"{folder} is not empty: name another --out{go_on}")
        return folder
    number = 1
    while True:
        folder = RUNS / f"{settings.model}-{settings.attention}-{number}"
        if make_folder(folder, exist_ok=False):
            return folder
        number += 1


def is_free(folder: Path) -> bool:
    """Whether the folder holds nothing, or only what a run leaves that ended before its first checkpoint."""
    try:
        return all(map(is_left_over, folder.iterdir()))
    except OSError as error:
        raise TrainError(f"cannot read the folder {folder}: {error.strerror or error}") from None


def is_left_over(path: Path) -> bool:
    if path.name not in TABLES:
        return HALF_WRITTEN.fullmatch(path.name) is not None
    try:
        TABLES[path.name].read(path, last_step=0)
        return True
    except TrainError:  # a file of the user's that has the same name
        return False


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other runs out while entered, and removes what killed ones had half written."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainError(f"cannot read the folder {folder}: {error.strerror or error}") from None
    try:
        lock(descriptor, folder)
        for path in list(folder.iterdir()):
            if HALF_WRITTEN.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, folder: Path) -> None:
    """The lock goes when the descriptor is closed, which the end of the process does however it comes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(f"expected no other run at work in {folder}, got one") from None
    except OSError:
        pass  # a file system without locks


def make_folder(folder: Path, exist_ok: bool) -> bool:
    """Creates `folder`; False when it exists and must not."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
        return True
    except FileExistsError:
        if not exist_ok and folder.is_dir():
            return False
        raise TrainError(f"cannot make the folder {folder}: a file has that name") from None
    except OSError as error:
        raise TrainError(f"cannot make the folder {folder}: {error.strerror or error}") from None
