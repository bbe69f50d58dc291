"""`python -m mha_ext export`: each format holds the model, and what a user can get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mha_ext import cli
from mha_ext.train import checkpoint as checkpoints
from mha_ext.train import export
from mha_ext.train.checkpoint import CHECKPOINT, Checkpoint, build_model
from mha_ext.train.errors import TrainError
from mha_ext.train.export_cli import main
from mha_ext.train.loop import make_optimizer
from mha_ext.train.model import CharacterModel
from mha_ext.train.settings import Settings

CHARACTERS = '\n "\\abc\u00e9\u4e2d\U0001f600'
FILES = {"torchscript": "model.pt", "export": "program.pt2", "aoti": "package.pt2", "onnx": "model.onnx"}
DESCRIPTION = {"context": 24, "d_model": 16, "heads": 2, "layers": 1, "dropout": 0.1, "characters": CHARACTERS}
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(kind: str = "decoder", attention: str = "mha_ext", characters: str = CHARACTERS) -> CharacterModel:
    """The folder `run` with the checkpoint of a tiny model, as a run leaves it before its first step; -> the model."""
    sizes = {name: DESCRIPTION[name] for name in ("context", "d_model", "heads", "layers", "dropout")}
    settings = Settings(model=kind, attention=attention, **sizes)
    model = build_model(settings, characters)
    optimizer = make_optimizer(model, settings.lr)
    checkpoint = Checkpoint(settings, 0, characters, "0" * 64, model.state_dict(), optimizer.state_dict())
    Path("run").mkdir()
    checkpoints.save(Path("run", CHECKPOINT), checkpoint)
    return model.eval()


def inputs_of(kind: str, batch: int, length: int) -> tuple[Tensor, ...]:
    ids = torch.randint(3, 3 + len(CHARACTERS), (batch, length))
    return (ids,) if kind == "decoder" else (ids, torch.arange(batch) % length + 1, ids[:, : length // 2 + 1].clone())


def of_archive(load: Callable[..., object]) -> Callable[[str], dict[str, object]]:
    """Reads the settings from the extra file of one of PyTorch's archives."""

    def read(path: str) -> dict[str, object]:
        files = {"settings.json": ""}
        load(path, files)
        return json.loads(files["settings.json"])

    return read


def of_package(path: str) -> dict[str, object]:
    return torch._inductor.aoti_load_package(path).get_metadata()


def of_onnx(path: str) -> dict[str, object]:
    import onnx

    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


READ_DESCRIPTION = {
    "torchscript": of_archive(lambda path, files: torch.jit.load(path, _extra_files=files)),
    "export": of_archive(lambda path, files: torch.export.load(path, extra_files=files)),
    "aoti": of_package,
    "onnx": of_onnx,
}


@pytest.mark.parametrize(
    "kind, to",
    [
        ("decoder", "torchscript"),
        ("decoder", "export"),
        ("decoder", "aoti"),
        ("decoder", "onnx"),
        ("seq2seq", "torchscript"),
        ("seq2seq", "export"),
        ("seq2seq", "onnx"),
    ],
)
def test_the_file_is_the_model_and_describes_it(kind: str, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_run(kind)
    assert main(["run", "--to", to]) == 0
    path = Path("run", FILES[to])
    assert {file.name for file in Path("run").iterdir()} == {CHECKPOINT, FILES[to]}
    assert "equal eager's within" in (output := capsys.readouterr().out) and str(path) in output

    loaded = export.FORMATS[to].load(path)
    with torch.no_grad():
        for size in ((1, 1), (2, 9), (5, 24)):
            inputs = inputs_of(kind, *size)
            torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)

    description = READ_DESCRIPTION[to](str(path))
    expected = {**DESCRIPTION, "model": kind, "attention": "mha_ext"}
    if to in ("aoti", "onnx"):
        expected = {name: str(value) for name, value in expected.items()}
    assert {name: description[name] for name in expected} == expected


@pytest.mark.parametrize("kind, attention", [("decoder", "reference"), ("seq2seq", "sdpa"), ("decoder", "torch")])
def test_any_attention(kind: str, attention: str) -> None:
    make_run(kind, attention)
    assert main(["run", "--to", "export"]) == 0


def test_longer_than_the_context_is_an_error() -> None:
    make_run()
    assert main(["run", "--to", "export"]) == 0
    with pytest.raises(AssertionError, match="<= 24"):
        export.FORMATS["export"].load(Path("run/program.pt2"))(*inputs_of("decoder", 1, 25))


def test_context_of_two() -> None:
    """The least that a run can have; nothing is taken to be of that size only."""
    settings = Settings(context=2, d_model=16, heads=2, layers=1)
    model = build_model(settings, "ab")
    export.export("export", model, settings, Path("program.pt2"))
    export.compare("export", model, Path("program.pt2"))


def test_out_and_a_checkpoint_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert cli.main(["export", "run/checkpoint.pt", "--to", "torchscript", "--out", "other.pt"]) == 0
    assert torch.jit.load("other.pt").generate(torch.tensor([[3]]), 5).shape == (1, 6)
    assert not Path("run/model.pt").exists()
    assert "other.pt" in capsys.readouterr().out


def test_what_is_not_the_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_run()
    export.export("torchscript", model, Settings(), Path("model.pt"))
    for value, message in ((1.0, "the export to torchscript differs"), (float("nan"), "logits that are not finite")):
        with torch.no_grad():
            model.head.bias[3] += value
        with pytest.raises(TrainError, match=message):
            export.compare("torchscript", model, Path("model.pt"))


def test_what_is_not_the_model_is_not_written() -> None:
    model = make_run()
    Path("model.pt").write_text("the one before")
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(TrainError, match="logits that are not finite"):
        export.export("torchscript", model, Settings(), Path("model.pt"))
    assert Path("model.pt").read_text() == "the one before"


@pytest.mark.parametrize(
    "options, message",
    [
        (["nowhere", "--to", "export"], "cannot read the checkpoint nowhere: No such file or directory"),
        ([".", "--to", "export"], "cannot read the checkpoint checkpoint.pt: No such file or directory"),
        (["run/notes.txt", "--to", "export"], "is damaged or not a checkpoint"),
        (["run", "--to", "pickle"], "argument --to: invalid choice: 'pickle'"),
        (["run"], "the following arguments are required: --to"),
        (["run", "--to", "aoti", "--out", "model.so"], "--out: expected a name that ends in .pt2 with --to aoti, got"),
        (["run", "--to", "torchscript", "--out", "run/../run/checkpoint.pt"], "expected another file than the check"),
        (["run", "--to", "torchscript", "--out", "a/b.pt"], "cannot write a/b.pt: No such file or directory"),
    ],
)
def test_one_clear_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    Path("run/notes.txt").write_text("none")
    before = Path("run", CHECKPOINT).read_bytes()
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m mha_ext export: ") and error.count("\n") == 1 and message in error
    assert Path("run", CHECKPOINT).read_bytes() == before


def test_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert main(["run", "--to", "aoti"]) == 2
    assert "AOTInductor needs a C++ compiler" in capsys.readouterr().err
    assert not Path("run/package.pt2").exists()


def test_without_onnx(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_run()
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    assert main(["run", "--to", "onnx"]) == 2
    assert "an ONNX export needs onnxscript: pip install onnxscript" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and all(f"{to} " in shown and file in shown for to, file in FILES.items())
