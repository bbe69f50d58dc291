"""Checkpoints and where runs live on disk. A file is either the old one or the new one whole, never half of each."""

from __future__ import annotations

import dataclasses
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import TrainError
from .model import CharacterModel, Decoder
from .seq2seq import Seq2Seq
from .settings import SETTING_NAMES, Settings

RUNS = Path("runs")
CHECKPOINT = "checkpoint.pt"
FORMAT = "mha_ext train checkpoint 1"


@dataclass
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    settings: Settings
    step: int  # steps done
    characters: str
    fingerprint: str  # of the text
    model: dict[str, Any]
    optimizer: dict[str, Any]


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` in one move, once the content is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainError(f"cannot write {path}: {error.strerror or error}") from None


def save(path: Path, checkpoint: Checkpoint) -> None:
    content = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint)}
    content["settings"] = dataclasses.asdict(checkpoint.settings)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its tensors on the CPU."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    try:
        fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if fields.pop("format") != FORMAT:
            raise ValueError
        settings = {name: value for name, value in fields.pop("settings").items() if name in SETTING_NAMES}
        checkpoint = Checkpoint(Settings(**settings), **fields)
        checkpoint.settings.check()
        return checkpoint
    except Exception:  # torch.load raises many kinds for a file that is damaged or something else
        raise TrainError(f"{path} is damaged or not a checkpoint of `python -m mha_ext train`") from None


def build_model(settings: Settings, characters: str) -> CharacterModel:
    """A new model with the settings' sizes and attention, its values drawn from PyTorch's default generator."""
    kind = {"decoder": Decoder, "seq2seq": Seq2Seq}[settings.model]
    return kind(
        characters,
        attention=settings.attention,
        context=settings.context,
        d_model=settings.d_model,
        heads=settings.heads,
        layers=settings.layers,
        dropout=settings.dropout,
    )


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, path: Path) -> None:
    try:
        model.load_state_dict(checkpoint.model)
        optimizer.load_state_dict(checkpoint.optimizer)
    except (RuntimeError, ValueError, KeyError, TypeError):
        raise TrainError(f"{path} is the checkpoint of another model than its settings describe") from None


def find_checkpoint(where: str, out: str | None) -> Path:
    """What `--resume [PATH]` names: a checkpoint, a run's folder, or without PATH the run in --out or the latest."""
    if where or out:
        path = Path(where or str(out))
        return path / CHECKPOINT if path.is_dir() else path
    found = list(RUNS.glob(f"*/{CHECKPOINT}"))
    if not found:
        raise TrainError(f"there is nothing to resume in {RUNS}/: name a run's folder, --resume PATH")
    return max(found, key=lambda path: path.stat().st_mtime)


def create_run_folder(out: str | None, settings: Settings) -> Path:
    """A folder that held no run before: `out`, or runs/MODEL-ATTENTION-N with the first free N."""
    if out is not None:
        folder = Path(out)
        make_folder(folder, exist_ok=True)
        if any(folder.iterdir()):
            raise TrainError(f"{folder} is not empty: name another --out, or --resume {folder} to go on with its run")
        return folder
    number = 1
    while True:
        folder = RUNS / f"{settings.model}-{settings.attention}-{number}"
        if make_folder(folder, exist_ok=False):
            return folder
        number += 1


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
