"""The trained model as TorchScript, for programs without this Python code, and the proof that it is the same."""

from __future__ import annotations

import copy
import io
import json
import warnings
from pathlib import Path

import torch

from .checkpoint import write_atomically
from .data import Batch
from .errors import TrainError
from .model import CharacterModel

RUNS_COMPARED = 3  # TorchScript optimises after it has seen a few calls
TOLERANCE = 1e-4  # of the largest logit


def export(model: CharacterModel, settings: dict[str, object], path: Path) -> None:
    """Scripts a copy of `model` on the CPU in eval mode; `settings` goes along as the extra file settings.json."""
    eager = copy.deepcopy(model).cpu().eval()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is what LibTorch programs load
        torch.jit.save(torch.jit.script(eager), buffer, _extra_files={"settings.json": json.dumps(settings)})
    write_atomically(path, buffer.getvalue())


def compare(model: CharacterModel, path: Path, batch: Batch) -> tuple[float, float]:
    """Loads the export and runs both on `batch`: the largest difference between their logits, and the largest logit."""
    eager = copy.deepcopy(model).cpu().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.load(str(path))
        expected = eager(*batch.inputs)
        difference = max((scripted(*batch.inputs) - expected).abs().max().item() for _ in range(RUNS_COMPARED))
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise TrainError(f"the export {path} differs from the model by {difference:.3g} in logits up to {largest:.3g}")
    return difference, largest
