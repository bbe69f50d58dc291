"""A trained model as a file for programs without this Python code, and the proof that it computes the same.

Whatever the format, the file holds the model in eval mode on the CPU, for batches and lengths of any size up to the
context, and says which model it is: the settings that made it, and its vocabulary as one string `characters`, whose
i-th character has the id FIRST_CHARACTER + i. The models are called as in Python:

    decoder     ids (B, L) int64 -> logits (B, L, V)
    seq2seq     source (B, Ls), source_lengths (B,), target (B, Lt), all int64 -> logits (B, Lt, V)
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim

from .checkpoint import write_atomically
from .errors import TrainError
from .model import CharacterModel, Decoder
from .settings import Settings

SETTINGS = ("model", "attention", "context", "d_model", "heads", "layers", "dropout")  # those that go along
EXTRA_FILE = "settings.json"  # where they stand in the formats that are archives of PyTorch's
RUNS_COMPARED = 3  # TorchScript optimises after it has seen a few calls
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True)
class Format:
    """One kind of file: its name in a run's folder, how to load it, and the two directions."""

    file_name: str
    how_to_load: str
    serialize: Callable[[CharacterModel, dict[str, object]], bytes]  # of a model and what describes it
    load: Callable[[Path], Callable[..., Tensor]]  # -> logits as a function of the model's inputs


def export(to: str, model: CharacterModel, settings: Settings, path: Path) -> str:
    """Writes `model` to `path` in the format that `to` names, one of FORMATS, once it is shown to compute the same.

    Returns what the comparison found, for people to read.
    """
    with without_warnings():
        content = FORMATS[to].serialize(eager(model), description(model, settings))
    # Loaded from a folder of its own, under its own name: PyTorch tells its archives by their names.
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as error:
        raise TrainError(f"an export needs a temporary folder, and none can be made: {error.strerror}") from None
    with folder:
        copy_of_it = Path(folder.name, path.name)
        write_atomically(copy_of_it, content)
        difference, largest = compare(to, model, copy_of_it)
    write_atomically(path, content)
    sizes = len(sizes_compared(model))
    return f"loaded again; logits (up to {largest:.3g}) equal eager's within {difference:.2g} at {sizes} sizes"


def compare(to: str, model: CharacterModel, path: Path) -> tuple[float, float]:
    """Loads the export and runs both at several sizes: the largest difference between logits, and the largest logit."""
    model = eager(model)
    difference = largest = 0.0
    with without_warnings(), torch.no_grad():
        exported = FORMATS[to].load(path)
        for batch, length in sizes_compared(model) * RUNS_COMPARED:
            inputs = example_inputs(model, batch, length)
            expected = model(*inputs)
            if not expected.isfinite().all():
                raise TrainError("the model gives logits that are not finite; there is nothing to export")
            # One that is not a number must not get lost in max().
            difference = max((exported(*inputs) - expected).abs().nan_to_num(float("inf")).max().item(), difference)
            largest = max(expected.abs().max().item(), largest)
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise TrainError(f"the export to {to} differs from the model by {difference:.3g} in logits up to {largest:.3g}")
    return difference, largest


@contextmanager
def without_warnings() -> Iterator[None]:
    """PyTorch warns of its own plans and of what it skips, which says nothing about the file."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def eager(model: CharacterModel) -> CharacterModel:
    return copy.deepcopy(model).cpu().eval()


def description(model: CharacterModel, settings: Settings) -> dict[str, object]:
    return {**{name: getattr(settings, name) for name in SETTINGS}, "characters": "".join(model.characters)}


def as_strings(described: dict[str, object]) -> dict[str, str]:
    """The same for formats that keep strings only: numbers as JSON has them."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in described.items()}


# Inputs


def sizes_compared(model: CharacterModel) -> list[tuple[int, int]]:
    """(batch, length): the least, the longest, and several sequences."""
    return [(1, 1), (1, model.context), (4, model.context // 2 + 1)]


def example_inputs(model: CharacterModel, batch: int, length: int) -> tuple[Tensor, ...]:
    """Inputs of the model's forward, always the same: sequences of `length` ids, lengths from 1 to that."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary_size, (batch, length), generator=generator)
    if isinstance(model, Decoder):
        return (ids,)
    target = torch.randint(model.vocabulary_size, (batch, (length + 1) // 2), generator=generator)
    return ids, torch.arange(batch) % length + 1, target


def dynamic_shapes(model: CharacterModel) -> dict[str, dict[int, Dim]]:
    """Which dimensions of which input may have any size."""
    batch = Dim("batch")
    if isinstance(model, Decoder):
        return {"ids": {0: batch, 1: Dim("length", max=model.context)}}
    return {
        "source": {0: batch, 1: Dim("source_length", max=model.context)},
        "source_lengths": {0: batch},
        "target": {0: batch, 1: Dim("target_length", max=model.context)},
    }


# TorchScript


def to_torchscript(model: CharacterModel, described: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer, _extra_files={EXTRA_FILE: json.dumps(described)})
    return buffer.getvalue()


def load_torchscript(path: Path) -> Callable[..., Tensor]:
    return torch.jit.load(str(path))


# torch.export and AOTInductor


def traced(model: CharacterModel) -> torch.export.ExportedProgram:
    inputs = example_inputs(model, 3, min(7, model.context))
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes(model))


def to_program(model: CharacterModel, described: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(traced(model), buffer, extra_files={EXTRA_FILE: json.dumps(described)})
    return buffer.getvalue()


def load_program(path: Path) -> Callable[..., Tensor]:
    return torch.export.load(path).module()


def to_package(model: CharacterModel, described: dict[str, object]) -> bytes:
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    buffer = io.BytesIO()
    metadata = {"aot_inductor.metadata": as_strings(described)}
    try:
        torch._inductor.aoti_compile_and_package(traced(model), package_path=buffer, inductor_configs=metadata)
    except InductorError as error:
        if isinstance(error.inner_exception, InvalidCxxCompiler):
            raise TrainError(
                "AOTInductor needs a C++ compiler, g++ or the one that CXX names, and found none"
            ) from None
        if isinstance(error.inner_exception, CppCompileError):
            raise TrainError(f"the C++ compiler failed: {first_error(error.inner_exception.output)}") from None
        raise
    return buffer.getvalue()


def first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line]
    return lines[0] if lines else output.strip()


def load_package(path: Path) -> Callable[..., Tensor]:
    return torch._inductor.aoti_load_package(str(path))


# ONNX


def to_onnx(model: CharacterModel, described: dict[str, object]) -> bytes:
    need("onnx", "onnxscript", "onnxruntime")
    from ..integrations import onnx

    shapes = dynamic_shapes(model)
    inputs = example_inputs(model, 3, min(7, model.context))
    program = onnx.export(
        model, inputs, dynamic_shapes=shapes, input_names=list(shapes), output_names=["logits"], verbose=False
    )
    program.model.metadata_props.update(as_strings(described))
    return program.model_proto.SerializeToString()


def load_onnx(path: Path) -> Callable[..., Tensor]:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        arrays = [x.numpy() for x in inputs]
        return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return run


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(f"an ONNX export needs {', '.join(missing)}: pip install {' '.join(missing)}")


FORMATS = {
    "torchscript": Format("model.pt", "import mha_ext; torch.jit.load", to_torchscript, load_torchscript),
    "export": Format("program.pt2", "import mha_ext; torch.export.load", to_program, load_program),
    "aoti": Format("package.pt2", "import mha_ext; torch._inductor.aoti_load_package", to_package, load_package),
    "onnx": Format("model.onnx", "onnxruntime.InferenceSession", to_onnx, load_onnx),
}
