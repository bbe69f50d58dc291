"""Checkpoints. A file is either the old one or the new one whole, never half of each."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import TrainError, shown
from .model import CharacterModel, Decoder
from .seq2seq import Seq2Seq
from .settings import ADDED_LATER, SETTING_NAMES, Settings

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
        raise TrainError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # there if something went wrong


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as the one about a TorchScript file, which is no checkpoint either
            fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if fields.pop("format") != FORMAT:
                raise ValueError
            settings = {**ADDED_LATER, **fields.pop("settings")}
            checkpoint = Checkpoint(Settings(**{name: settings[name] for name in SETTING_NAMES}), **fields)
    except Exception:  # torch.load raises many kinds for a file that is damaged or something else
        raise TrainError(f"{path} is damaged or not a checkpoint of `python -m mha_ext train`") from None
    check(checkpoint, path)
    return checkpoint


def check(checkpoint: Checkpoint, path: Path) -> None:
    """Raises TrainError for a field that no run has saved; `restore` compares states with the model."""
    c = checkpoint
    try:
        c.settings.check()
    except TrainError as error:
        raise TrainError(f"{path} is damaged: {error}") from None
    steps = c.settings.steps
    rules = [
        ("step", f"a whole number from 0 to {steps}", type(c.step) is int and 0 <= c.step <= steps),
        ("characters", "a string", isinstance(c.characters, str)),
        ("fingerprint", "64 hexadecimal digits", re.fullmatch("[0-9a-f]{64}", str(c.fingerprint))),
        ("model", "tensors by name", isinstance(c.model, dict) and all(map(is_named_tensor, c.model.items()))),
        ("optimizer", "a state by name", isinstance(c.optimizer, dict)),
    ]
    for name, rule, holds in rules:
        if not holds:
            raise TrainError(f"{path} is damaged: {name}: expected {rule}, got {shown(getattr(c, name))}")


def is_named_tensor(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


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


def trained_model(checkpoint: Checkpoint, path: Path) -> CharacterModel:
    """The model of the checkpoint at `path`, as it was saved."""
    model = build_model(checkpoint.settings, checkpoint.characters)
    restore_values(model, checkpoint, path)
    return model


def restore(model: CharacterModel, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, path: Path) -> None:
    """Brings model and optimizer to where the checkpoint was saved."""
    restore_values(model, checkpoint, path)
    if not loads(restore_optimizer, optimizer, checkpoint):
        raise TrainError(f"{path} is damaged: its optimizer is not that of this model after step {checkpoint.step}")


def restore_values(model: CharacterModel, checkpoint: Checkpoint, path: Path) -> None:
    if not loads(restore_model, model, checkpoint):
        raise TrainError(f"{path} is the checkpoint of another model than its settings describe")


def loads(restore_part: Callable[[Any, Checkpoint], bool], part: object, checkpoint: Checkpoint) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return restore_part(part, checkpoint)
    except Exception:  # PyTorch warns of and raises many kinds of things for a state that does not fit
        return False


def restore_model(model: CharacterModel, checkpoint: Checkpoint) -> bool:
    """False when the checkpoint is another model's; a tensor of another dtype would be cast without a word."""
    model.load_state_dict(checkpoint.model)
    same_types = all(checkpoint.model[name].dtype == value.dtype for name, value in model.state_dict().items())
    return same_types and checkpoint.characters == "".join(model.characters)


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> bool:
    """False when the state is not that of this optimizer, which PyTorch would only notice in its next step."""
    expected = [hyperparameters(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint.optimizer)
    for group, own in zip(optimizer.param_groups, expected, strict=True):
        group.update({name: own[name] for name in ("lr", "foreach", "fused")})  # set by each step, and by the device
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        [hyperparameters(group) for group in optimizer.param_groups] == expected
        and all(is_state_of(p, optimizer.state[p], checkpoint.step) for p in parameters)
        and len(optimizer.state) == len(parameters)
    )


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def is_state_of(parameter: Tensor, state: dict[str, Any], step: int) -> bool:
    """Whether AdamW has this state of the parameter after that many steps."""
    if step == 0:
        return not state
    shapes = {name: value.shape for name, value in state.items()}
    expected = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    return shapes == expected and state["step"].item() == step
