"""`python -m mha_ext train`: whole runs at toy size, what they leave behind, and what a user can get wrong."""

from __future__ import annotations

import csv
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mha_ext import cli
from mha_ext.heads.recording import record
from mha_ext.train import checkpoint as checkpoints
from mha_ext.train import heads, report, run, sample
from mha_ext.train.attention import ATTENTION_NAMES
from mha_ext.train.cli import main
from mha_ext.train.data import Batch, Windows, python_topics
from mha_ext.train.folder import is_free
from mha_ext.train.loop import Trainer, evaluate
from mha_ext.train.model import END, UNKNOWN, CharacterModel
from mha_ext.train.seq2seq import LinePairs, line_pairs, simplify
from mha_ext.train.settings import DIVERSITY_KINDS, Settings

WORDS = "The cat sat, on: Monday; at a mat! Was it (really) there? Yes. No 42 'times' of Paris.".split()
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
COMMAND = [sys.executable, "-m", "mha_ext", "train"]
SIZES = ["--d-model", "16", "--heads", "2", "--layers", "1", "--context", "24", "--batch-size", "4", "--threads", "1"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with text.txt of 200 different lines; curves and long samples take too long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "write_curve", lambda path, rows, title: None)
    monkeypatch.setattr(run, "write_heads", lambda path, rows, title: None)
    monkeypatch.setattr(sample, "SAMPLE_CHARACTERS", 20)
    lines = (" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(2 + i % 4)) + f" {i}" for i in range(200))
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def with_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "write_curve", report.write_curve)
    monkeypatch.setattr(run, "write_heads", heads.write_heads)


def train(*options: object) -> int:
    """A toy run of 6 steps on text.txt; later options win."""
    common = ["--text", "text.txt", "--steps", 6, "--eval-every", 3, "--no-export", *SIZES]
    return main([str(option) for option in [*common, *options]])


def resume(*options: object) -> int:
    return main(["--no-export", *(str(option) for option in options)])


def metrics(folder: str) -> dict[str, list[float]]:
    """The columns of a run's metrics.csv; nan where nothing stands."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}


def head_rows(folder: str) -> list[dict[str, str]]:
    with open(Path(folder) / "heads.csv", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tiny_model(model: str, attention: str, characters: str = "abcdefgh .") -> CharacterModel:
    settings = Settings(model=model, attention=attention, context=24, d_model=16, heads=2, layers=2)
    torch.manual_seed(0)
    return checkpoints.build_model(settings, characters).eval()


def fail_after(step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the error where the step after the given one would be made."""
    original = Trainer.train_step

    def failing(self: Trainer) -> object:
        if self.step == step:
            raise error
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", failing)


def pipe_without_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout becomes a pipe whose reader has gone, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))


def edit_checkpoint(path: Path, where: tuple[object, ...], value: object) -> None:
    whole = content = torch.load(path, weights_only=True)
    for key in where[:-1]:
        content = content[key]
    content[where[-1]] = value
    torch.save(whole, path)


def environment() -> dict[str, str]:
    """For a process that must find the package under test from any folder."""
    return {**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[2])}


def stop_after(step: int, signal_number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a signal while the given step is being made."""
    original = Trainer.train_step

    def interrupted(self: Trainer) -> object:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal_number)
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)


# Whole runs


@pytest.mark.parametrize("model", ["decoder", "seq2seq"])
def test_run_leaves_everything(model: str, with_curve: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--text", "text.txt", "--steps", "6", "--eval-every", "3", *SIZES]
    assert main(["--model", model, *options]) == 0
    folder = Path(f"runs/{model}-mha_ext-1")
    output = capsys.readouterr().out
    assert "bits per character" in output and "tokens/s" in output and str(folder) in output and "\r" not in output
    names = {"checkpoint.pt", "metrics.csv", "curve.png", "heads.csv", "heads.png", "sample.txt", "model.pt"}
    assert set(contents(str(folder))) == names and all(name in output for name in names)
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("curve.png", "heads.png"))
    columns = metrics(str(folder))
    assert columns["step"] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for loss in columns["loss"])
    assert [not math.isnan(bits) for bits in columns["held_out_bits"]] == [False, False, True] * 2
    assert checkpoints.load(folder / "checkpoint.pt").step == 6


def test_runs_never_share_a_folder() -> None:
    assert train() == 0
    before = contents("runs/decoder-mha_ext-1")
    assert train("--seed", 1) == 0
    assert contents("runs/decoder-mha_ext-1") == before
    assert metrics("runs/decoder-mha_ext-1")["loss"] != metrics("runs/decoder-mha_ext-2")["loss"]


def test_same_seed_same_losses_whatever_the_evaluations() -> None:
    assert train("--out", "a", "--dropout", 0.1) == 0
    assert train("--out", "b", "--dropout", 0.1, "--eval-every", 1, "--checkpoint-every", 1) == 0
    assert metrics("a")["loss"] == metrics("b")["loss"]


@pytest.mark.parametrize("model", ["decoder", "seq2seq"])
def test_attentions_differ_only_in_rounding(model: str) -> None:
    for name in ATTENTION_NAMES:
        assert train("--model", model, "--attention", name, "--out", name, "--lr", 0.01) == 0
    expected = metrics("reference")
    for name in ATTENTION_NAMES:
        assert metrics(name)["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics(name)["held_out_bits"][-1] == pytest.approx(expected["held_out_bits"][-1], rel=1e-5)


@pytest.mark.parametrize("model", ["decoder", "seq2seq"])
def test_attentions_start_from_the_same_values(model: str) -> None:
    expected = tiny_model(model, "reference").state_dict()
    for name in ATTENTION_NAMES:
        state = tiny_model(model, name).state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_seq2seq_learns() -> None:
    assert train("--model", "seq2seq", "--steps", 40, "--lr", 0.02, "--out", "out", "--eval-every", 40) == 0
    columns = metrics("out")
    assert columns["loss"][-1] < 0.75 * columns["loss"][0]
    assert columns["held_out_bits"][-1] < 0.75 * columns["bits"][0]


def test_quiet_says_only_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--quiet") == 0
    assert capsys.readouterr().out.startswith("trained ")


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    progress = report.Progress(steps=200)
    progress.step(50, 1.5, 12345.0, 65.0)
    progress.note("held out")
    drawn = capsys.readouterr().out
    assert drawn.startswith("\rstep  50/200  [###") and drawn.endswith("held out\n")
    assert "loss 1.500  12,345 tokens/s  1:05 left" in drawn and len(drawn.split("\r")[1]) < 100


def test_no_curve_without_matplotlib(
    with_curve: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train("--out", "out") == 0
    assert capsys.readouterr().out.count("matplotlib is not installed") == 1
    assert not Path("out/curve.png").exists() and not Path("out/heads.png").exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "--resume" in text and "reference" in text


# Stopping and going on


@pytest.mark.parametrize("model", ["decoder", "seq2seq"])
def test_resumed_run_is_the_uninterrupted_one(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", model, "--dropout", 0.1)
    assert train(*options, "--out", "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(4, signal.SIGTERM, patch)
        assert train(*options, "--out", "parts") == 128 + signal.SIGTERM
    assert "--resume parts" in capsys.readouterr().out
    assert len(metrics("parts")["loss"]) == 4
    assert resume("--resume", "parts") == 0
    assert metrics("parts")["loss"] == metrics("whole")["loss"]
    assert metrics("parts")["held_out_bits"][-1] == metrics("whole")["held_out_bits"][-1]
    parts, whole = (checkpoints.load(Path(folder) / "checkpoint.pt").model for folder in ("parts", "whole"))
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


def test_resume_after_a_crash_repeats_what_was_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--out", "whole") == 0
    with monkeypatch.context() as patch:
        fail_after(5, ZeroDivisionError(), patch)
        with pytest.raises(ZeroDivisionError):
            train("--out", "run", "--checkpoint-every", 2)
    assert checkpoints.load(Path("run/checkpoint.pt")).step == 4 and len(metrics("run")["step"]) == 5
    assert resume("--resume", "run") == 0
    assert metrics("run")["step"] == [1, 2, 3, 4, 5, 6]
    assert metrics("run")["loss"] == metrics("whole")["loss"]


def test_run_that_saved_nothing_starts_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_after(2, ZeroDivisionError(), patch)
        with pytest.raises(ZeroDivisionError):
            train("--out", "run")
    Path("run/.checkpoint.pt.123.tmp").write_bytes(b"half of it")  # as after `kill -9`
    assert resume("--resume", "run") == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "got run, which holds none: start its run with --out run" in errors
    assert train("--out", "run") == 0
    assert metrics("run")["step"] == [1, 2, 3, 4, 5, 6]
    assert not any(name.endswith(".tmp") for name in contents("run"))


def test_one_run_at_a_time_in_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    descriptor = os.open("run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert train("--out", "run") == 2
    assert "expected no other run at work in run, got one" in capsys.readouterr().err
    os.close(descriptor)
    assert train("--out", "run") == 0


def test_interrupted_before_the_first_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(2, KeyboardInterrupt(), monkeypatch)
    assert train("--out", "out") == 130
    output = capsys.readouterr().out
    assert "there is no checkpoint yet" in output and "start again with: python -m mha_ext train --out out" in output


def test_resume_finds_the_latest_run_and_goes_further() -> None:
    assert train() == 0
    assert resume("--resume", "--steps", 9) == 0
    assert metrics("runs/decoder-mha_ext-1")["step"] == list(range(1, 10))
    assert resume("--resume", "--quiet") == 0  # nothing left to do but the results


def test_resume_into_another_folder_leaves_the_first_alone() -> None:
    assert train("--out", "first") == 0
    before = contents("first")
    assert resume("--resume", "first", "--out", "second", "--steps", 8) == 0
    assert contents("first") == before
    assert metrics("second")["step"] == list(range(1, 9))
    assert metrics("second")["loss"][:6] == metrics("first")["loss"]


def test_checkpoints_fit_every_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--attention", "reference", "--out", "whole") == 0
    for name in ATTENTION_NAMES:
        with monkeypatch.context() as patch:
            stop_after(3, signal.SIGINT, patch)
            assert train("--attention", "reference", "--out", name) == 130
        assert resume("--resume", name, "--attention", name) == 0
        assert metrics(name)["loss"] == pytest.approx(metrics("whole")["loss"], rel=1e-5)


def test_ctrl_c_in_a_terminal() -> None:
    options = ["--text", "text.txt", "--out", "out", "--steps", "100000", *SIZES]
    process = subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        while process.poll() is None and not (Path("out/metrics.csv").exists() and len(metrics_lines("out")) > 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and errors == ""
    assert "stopped and saved" in output and "--resume out" in output
    assert checkpoints.load(Path("out/checkpoint.pt")).step == len(metrics("out")["step"])


def metrics_lines(folder: str) -> list[str]:
    return (Path(folder) / "metrics.csv").read_text().splitlines()


def test_failed_write_keeps_the_last_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--out", "out") == 0
    before = contents("out")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert resume("--resume", "out", "--steps", 8) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert contents("out") == before


@pytest.mark.parametrize(("table", "name"), [(report.Metrics, "metrics.csv"), (heads.HeadMetrics, "heads.csv")])
def test_full_disk_is_one_sentence(
    table: type, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_full_disk(self: Any, path: Path, kept: object) -> None:
        self.path, self.rows, self.file = path, [], open("/dev/full", "a")

    monkeypatch.setattr(table, "__init__", on_a_full_disk)
    assert train("--out", "out") == 2
    assert capsys.readouterr().err == f"python -m mha_ext train: cannot write out/{name}: No space left on device\n"


# Heads

LAYERS = {
    "decoder": ["blocks.0.attention", "blocks.1.attention"],
    "seq2seq": [
        "encoder.0.attention",
        "encoder.1.attention",
        "decoder.0.self_attention",
        "decoder.0.cross_attention",
        "decoder.1.self_attention",
        "decoder.1.cross_attention",
    ],
}


@pytest.mark.parametrize("model", LAYERS)
def test_every_head_is_measured_whatever_the_attention(model: str) -> None:
    for name in ATTENTION_NAMES:
        assert train("--model", model, "--layers", 2, "--attention", name, "--out", name) == 0
    rows = head_rows("mha_ext")
    expected = [(step, layer, head) for step in "36" for layer in LAYERS[model] for head in "01"]
    assert [(row["step"], row["layer"], row["head"]) for row in rows] == expected
    for column in ("relative_entropy", "redundancy"):
        values = [float(row[column]) for row in rows]
        assert all(0 < value < 1 for value in values)
        for name in ATTENTION_NAMES:
            assert [float(row[column]) for row in head_rows(name)] == pytest.approx(values, rel=1e-3)


def test_measured_heads_are_those_of_the_formulas() -> None:
    """Of a model whose attention gives its weights itself."""
    data = Windows(Path("text.txt").read_text(), 24, 4, 0)
    batch = data.held_out_sample()
    model = tiny_model("decoder", "reference", data.characters)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in model.blocks:
        attention = block.attention
        attention.W_o.register_forward_pre_hook(lambda _, inputs: kept.append((weights.pop(), inputs[0])))
    weights: list[torch.Tensor] = []
    original = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda *args, **options: weights.append(original(*args, **options)) or weights[-1]
    try:
        with torch.no_grad():
            model(*batch.inputs)
    finally:
        torch.nn.functional.softmax = original
    settings = Settings(attention="reference", context=24, d_model=16, heads=2, layers=2)
    rows = heads.look_at_heads(heads.recordable(model, settings), batch, 5)
    visible = torch.arange(1, 25, dtype=torch.float64)
    for layer, (attended, merged) in enumerate(kept):
        attended = attended.double()  # (B, 2, 24, 24)
        entropy = -(attended * attended.clamp_min(1e-30).log()).sum(-1)
        relative = (entropy[:, :, 1:] / visible[1:].log()).mean((0, 2))
        first, second = (x - x.mean(0) for x in merged.double().flatten(0, 1).split(8, -1))
        cka = (first.T @ second).square().sum() / ((first.T @ first).norm() * (second.T @ second).norm())
        for row in rows[2 * layer : 2 * layer + 2]:
            assert (row.step, row.layer) == (5, f"blocks.{layer}.attention")
            assert row.relative_entropy == pytest.approx(relative[row.head].item(), rel=1e-4)
            assert row.redundancy == pytest.approx(cka.item(), rel=1e-4)


@pytest.mark.parametrize("attention", ATTENTION_NAMES)
def test_looking_at_heads_changes_nothing(attention: str) -> None:
    data = LinePairs(Path("text.txt").read_text(), 24, 4, 0)
    settings = Settings(model="seq2seq", attention=attention, context=24, d_model=16, heads=2, layers=2, dropout=0.5)
    model = checkpoints.build_model(settings, data.characters).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    recordable = heads.recordable(model, settings)
    rows = heads.look_at_heads(recordable, data.held_out_sample(), 1)
    assert rows == heads.look_at_heads(recordable, data.held_out_sample(), 1)  # no dropout
    assert torch.equal(torch.rand(3), expected)
    assert model.training and not any(p.grad is not None for p in recordable.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():  # what an optimizer does in place is seen
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert rows != heads.look_at_heads(recordable, data.held_out_sample(), 1)


def test_held_out_sample_has_no_padding_in_the_decoder() -> None:
    text = Path("text.txt").read_text()
    batch = LinePairs(text, 24, 4, 0).held_out_sample()
    source, lengths, target = batch.inputs
    assert target.shape == batch.targets.shape and 1 < len(target) <= 16 and int(lengths.max()) == source.size(1)
    assert (target != UNKNOWN).all() and torch.equal(target[:, 1:], batch.targets[:, :-1])
    batch = Windows(text, 24, 4, 0).held_out_sample()
    assert batch.inputs[0].shape == (16, 24) and torch.equal(batch.inputs[0][:, 1:], batch.targets[:, :-1])


def test_one_head_has_nobody_to_be_like(with_curve: None) -> None:
    assert train("--heads", 1, "--out", "out", "--head-diversity", 0.1) == 0
    assert all(row["redundancy"] == "nan" and 0 < float(row["relative_entropy"]) < 1 for row in head_rows("out"))
    assert Path("out/heads.png").exists()
    assert resume("--resume", "out", "--steps", 8) == 0
    assert {row["step"] for row in head_rows("out")} == {"3", "6", "8"}


@pytest.mark.parametrize("kind", DIVERSITY_KINDS)
@pytest.mark.parametrize("model", LAYERS)
def test_diversity_is_optimised_but_not_counted(model: str, kind: str) -> None:
    options = ("--model", model, "--head-diversity-kind", kind)
    assert train(*options, "--out", "without") == 0
    assert train(*options, "--out", "with", "--head-diversity", 0.5) == 0
    first, other = metrics("without")["loss"], metrics("with")["loss"]
    assert first[0] == pytest.approx(other[0], rel=1e-6)  # the same model, before its first step
    assert first[1:] != other[1:] and all(map(math.isfinite, other))


def test_no_diversity_is_the_same_to_the_bit() -> None:
    assert train("--out", "a") == 0
    assert train("--out", "b", "--head-diversity", 0, "--head-diversity-kind", "js") == 0
    assert metrics("a")["loss"] == metrics("b")["loss"]


def mean_redundancy(folder: str, step: int) -> float:
    values = [float(row["redundancy"]) for row in head_rows(folder) if row["step"] == str(step)]
    return sum(values) / len(values)


@pytest.mark.parametrize("model", LAYERS)
def test_diversity_lowers_redundancy(model: str) -> None:
    sizes = ["--model", model, "--d-model", 32, "--heads", 4, "--layers", 2, "--steps", 60, "--lr", 0.01]
    for x in (0, 0.1):
        assert train(*sizes, "--eval-every", 60, "--out", f"x{x}", "--head-diversity", x) == 0
    assert mean_redundancy("x0.1", 60) < 0.4 * mean_redundancy("x0", 60)
    assert metrics("x0.1")["held_out_bits"][-1] < metrics("x0.1")["bits"][0]  # it learns all the same


@pytest.mark.parametrize("kind", DIVERSITY_KINDS)
def test_padding_does_not_count_in_diversity(kind: str) -> None:
    data = LinePairs(Path("text.txt").read_text(), 24, 4, 0)
    model = tiny_model("seq2seq", "mha_ext", data.characters).train()
    batch = data.collate(sorted(data.training, key=lambda pair: len(pair[1]))[:: len(data.training) // 4])
    source, lengths, target = batch.inputs
    padding = batch.targets == UNKNOWN
    assert padding.any()
    values = []
    for filling in (UNKNOWN, 5):
        inputs = (source, lengths, target.masked_fill(padding, filling))
        with record(model, keep_graph=True) as recording:
            model(*inputs)
        values.append(heads.diversity(recording, Batch(inputs, batch.targets), kind).item())
    assert values[0] == pytest.approx(values[1], rel=1e-6) and values[0] != 0


def test_diversity_is_the_runs_own_and_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--head-diversity", 0.3, "--head-diversity-kind", "positions")
    assert train(*options, "--out", "whole") == 0
    for name in ("same", "changed"):
        with monkeypatch.context() as patch:
            stop_after(3, signal.SIGTERM, patch)
            assert train(*options, "--out", name) == 128 + signal.SIGTERM
    assert resume("--resume", "same") == 0
    assert metrics("same")["loss"] == metrics("whole")["loss"] and head_rows("same") == head_rows("whole")
    assert resume("--resume", "changed", "--head-diversity", 0, "--attention", "sdpa") == 0
    assert metrics("changed")["loss"][:4] == pytest.approx(metrics("whole")["loss"][:4], rel=1e-6)
    assert metrics("changed")["loss"][4:] != pytest.approx(metrics("whole")["loss"][4:], rel=1e-6)
    settings = checkpoints.load(Path("changed/checkpoint.pt")).settings
    assert (settings.head_diversity, settings.head_diversity_kind) == (0, "positions")


def test_diversity_cannot_go_on_with_another_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--head-diversity", 0.1, "--out", "out") == 0
    assert resume("--resume", "out", "--steps", 8, "--attention", "reference") == 2
    assert "--head-diversity: expected 0 with --attention reference, got 0.1" in capsys.readouterr().err


def test_checkpoint_from_before_there_was_diversity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--out", "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(3, signal.SIGTERM, patch)
        assert train("--out", "old") == 128 + signal.SIGTERM
    content = torch.load("old/checkpoint.pt", weights_only=True)
    for name in ("head_diversity", "head_diversity_kind"):
        del content["settings"][name]
    torch.save(content, "old/checkpoint.pt")
    Path("old/heads.csv").unlink()
    assert (
        checkpoints.load(Path("old/checkpoint.pt")).settings == checkpoints.load(Path("whole/checkpoint.pt")).settings
    )
    assert resume("--resume", "old") == 0
    assert metrics("old")["loss"] == metrics("whole")["loss"]
    assert head_rows("old") == [row for row in head_rows("whole") if row["step"] == "6"]


def test_old_run_with_nothing_left_to_do(with_curve: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    Path("out/heads.csv").unlink()
    Path("out/heads.png").unlink()
    capsys.readouterr()
    assert resume("--resume", "out") == 0
    output = capsys.readouterr().out
    assert head_rows("out") == [] and not Path("out/heads.png").exists()
    assert "curve.png" in output and "heads.png" not in output


def test_left_over_tables_are_no_run() -> None:
    Path("out").mkdir()
    for name, header in (("metrics.csv", report.Metrics.header()), ("heads.csv", heads.HeadMetrics.header())):
        Path("out", name).write_text(header + "\n")
        Path("out", f".{name}.123.tmp").write_text("half of it")
    assert is_free(Path("out"))
    Path("out/heads.csv").write_text("name,hat\n")
    assert not is_free(Path("out"))


def test_numbers_of_long_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [report.Row(step, 1.5, 2.25, 2**40, 1e10, 0.001, bits) for step, bits in ((123_456_789, None), (2**31, 0.5))]
    table = report.Metrics(tmp_path / "metrics.csv", rows[:1])
    table.add(rows[1])
    table.close()
    assert report.Metrics.read(tmp_path / "metrics.csv", 2**31) == rows
    assert report.Metrics.read(tmp_path / "metrics.csv", 2**31 - 1) == rows[:1]


def test_rows_that_somebody_took_out_of_heads(with_curve: None) -> None:
    assert train("--out", "out") == 0
    lines = Path("out/heads.csv").read_text().splitlines(keepends=True)
    Path("out/heads.csv").write_text("".join(lines[:1] + lines[2:3] + lines[4:]))
    assert resume("--resume", "out", "--steps", 8) == 0
    assert [(row["step"], row["head"]) for row in head_rows("out")] == [("3", "1"), ("6", "1"), ("8", "0"), ("8", "1")]
    assert Path("out/heads.png").exists()


def test_drawn_heads(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [
        heads.HeadRow(step, layer, head, 0.1 * head + 0.001 * step, math.nan if layer == "b" and head else 0.5)
        for step in (10, 20)
        for layer in ("a", "b")
        for head in (0, 1)
    ]
    axes = Figure().add_subplot()
    heads.draw_heads(axes, rows, "relative_entropy")
    lines = {line.get_label(): line for line in axes.lines}
    assert len(axes.lines) == 6 and list(lines["a"].get_xdata()) == [10, 20]
    assert list(lines["a"].get_ydata()) == pytest.approx([0.06, 0.07])
    assert heads.write_heads(tmp_path / "heads.png", rows, "title") is None
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


# A reader who has gone


def test_reader_who_goes_stops_the_run_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--text", "text.txt", "--steps", "6", "--no-export", *SIZES]
    assert main([*options, "--out", "whole"]) == 0
    original = Trainer.train_step

    with monkeypatch.context() as patch:

        def leaving(self: Trainer) -> object:
            if self.step == 3:
                pipe_without_reader(patch)
            return original(self)

        patch.setattr(Trainer, "train_step", leaving)
        assert cli.main(["train", *options, "--out", "parts"]) == 128 + signal.SIGPIPE
    assert checkpoints.load(Path("parts/checkpoint.pt")).step == 4 and metrics("parts")["step"] == [1, 2, 3, 4]
    assert resume("--resume", "parts") == 0
    assert metrics("parts")["loss"] == metrics("whole")["loss"]


def test_nobody_reads_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_without_reader(monkeypatch)
    options = ["--text", "text.txt", "--steps", "3", "--quiet", "--out", "out", *SIZES]
    assert cli.main(["train", *options]) == 141
    assert set(contents("out")) == {"checkpoint.pt", "metrics.csv", "heads.csv", "sample.txt", "model.pt"}


def test_reader_who_has_gone_sees_no_traceback() -> None:
    variables = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*COMMAND[:-1], "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141 and errors == ""


def test_no_stdout_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # Python's way of saying that the caller closed it
    assert cli.main(["train", "--text", "text.txt", "--steps", "3", "--no-export", "--out", "out", *SIZES]) == 0
    assert metrics("out")["step"] == [1, 2, 3]


# What the user can get wrong


def join_options(value: object) -> str | None:
    return " ".join(map(str, value)) if isinstance(value, list) else None


def write_bad_files() -> None:
    Path("empty.txt").write_text("")
    Path("blank.txt").write_text(" \n\n")
    Path("tiny.txt").write_text("abc")
    Path("short.txt").write_text("abcdefghijk" * 2)
    Path("latin.txt").write_bytes("f\xfcr alle ".encode("latin-1") * 50)
    Path("folder").mkdir()
    Path("taken").mkdir()
    Path("taken/mine.txt").write_text("precious")
    Path("notes").mkdir()
    Path("notes/metrics.csv").write_text("ours,theirs\n1,2\n")
    Path("minds").mkdir()
    Path("minds/heads.csv").write_text("name,hat\nAda,yes\n")
    Path("loop").symlink_to("loop")
    Path("noise.pt").write_bytes(b"\x80\x02 not a checkpoint")
    torch.save({"weight": torch.ones(2)}, "other.pt")


ERRORS = [
    (["--text", "empty.txt"], "empty"),
    (["--text", "blank.txt"], "empty"),
    (["--text", "tiny.txt"], "too short for --context 24"),
    (["--text", "tiny.txt", "--model", "seq2seq"], "10 different lines"),
    (["--text", "short.txt"], "too short for --context 24: it has 20 characters to train on and 2 held out"),
    (["--text", "missing.txt"], "cannot read missing.txt: No such file"),
    (["--text", "text.txt", "missing.txt"], "cannot read missing.txt"),
    (["--text", "folder"], "cannot read folder: Is a directory"),
    (["--text", "latin.txt"], "latin.txt is not UTF-8 text (byte 0xfc at 1)"),
    (["--text", "loop"], "cannot read loop: Too many levels of symbolic links"),
    (["--text", ""], "--text: expected the name of a file, got ''"),
    (["--text"], "expected at least one argument"),
    (["--context", 100_000], "too short for --context 100000"),
    (["--context", 1], "--context: expected at least 2, got 1"),
    (["--heads", 3], "--d-model 16 is not divisible by --heads 3"),
    (["--heads", 0], "--heads: expected at least 1, got 0"),
    (["--d-model", -16], "--d-model: expected at least 1"),
    (["--layers", 0], "--layers: expected at least 1"),
    (["--steps", 0], "--steps: expected at least 1"),
    (["--steps", "many"], "--steps"),
    (["--batch-size", 0], "--batch-size: expected at least 1"),
    (["--batch-size", 10**30], "--batch-size: expected at most 2147483647"),
    (["--eval-every", 0], "--eval-every: expected at least 1"),
    (["--checkpoint-every", -1], "--checkpoint-every: expected at least 1"),
    (["--threads", 0], "--threads: expected at least 1"),
    (["--dropout", 1], "--dropout: expected at least 0 and below 1"),
    (["--lr", "nan"], "--lr: expected above 0"),
    (["--lr", 0], "--lr: expected above 0"),
    (["--seed", -1], "--seed: expected at least 0"),
    (["--model", "rnn"], "invalid choice"),
    (["--attention", "none"], "invalid choice"),
    (["--no-such-option"], "unrecognized arguments"),
    (["--device", "toaster"], "--device toaster is not available"),
    (["--device", "meta"], "--device meta is not available"),
    (["--out", "text.txt"], "cannot make the folder text.txt"),
    (["--out", "text.txt/x"], "cannot make the folder text.txt/x"),
    (["--out", "loop/x"], "cannot make the folder loop/x: Too many levels of symbolic links"),
    (["--out", "taken"], "taken is not empty: name another --out\n"),
    (["--out", "notes"], "notes is not empty: name another --out\n"),
    (["--out", "minds"], "minds is not empty: name another --out\n"),
    (["--head-diversity", -0.1], "--head-diversity: expected at least 0 and finite, got -0.1"),
    (["--head-diversity", "nan"], "--head-diversity: expected at least 0 and finite, got nan"),
    (["--head-diversity", "inf"], "--head-diversity: expected at least 0 and finite, got inf"),
    (["--head-diversity", "much"], "--head-diversity"),
    (["--head-diversity-kind", "minds"], "invalid choice"),
    (
        ["--head-diversity", 0.1, "--attention", "sdpa"],
        "--head-diversity: expected 0 with --attention sdpa, got 0.1",
    ),
    (
        ["--head-diversity", 1e300],
        "the loss became inf at step 1: try a smaller --lr than 0.006 or --head-diversity than 1e+300\n",
    ),
    (["--resume"], "nothing to resume"),
    (["--resume", "nowhere"], "cannot read the checkpoint nowhere"),
    (["--resume", "loop"], "cannot read the checkpoint loop: Too many levels of symbolic links"),
    (["--resume", "folder"], "got folder, which holds none: start its run with --out folder"),
    (["--resume", "taken"], "got taken, which holds none: name a run's folder"),
    (["--resume", "--out", "folder"], "got folder, which holds none"),
    (["--resume", "noise.pt"], "noise.pt is damaged or not a checkpoint"),
    (["--resume", "other.pt"], "other.pt is damaged or not a checkpoint"),
    (["--lr", 1e30], "at step 2: try a smaller --lr than 1e+30\n"),
    (["--lr", 1e30, "--steps", 1], ": try a smaller --lr than 1e+30\n"),
    (["--lr", 1e30, "--out", "out", "--checkpoint-every", 1], "the last checkpoint, out/checkpoint.pt, is as it was\n"),
]
if not torch.cuda.is_available():
    ERRORS.append((["--device", "cuda"], "--device cuda is not available"))


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=join_options)
def test_one_clear_sentence(options: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_bad_files()
    assert train(*options) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("python -m mha_ext train: ") and errors.count("\n") == 1 and message in errors
    assert Path("taken/mine.txt").read_text() == "precious"
    assert Path("notes/metrics.csv").read_text() == "ours,theirs\n1,2\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint.pt", "cannot read the checkpoint out/checkpoint.pt: Is a directory"),
        ("metrics.csv", "cannot read out/metrics.csv: Is a directory"),
        ("heads.csv", "cannot read out/heads.csv: Is a directory"),
        ("sample.txt", "cannot write out/sample.txt: Is a directory"),
    ],
)
def test_folder_where_a_file_belongs(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stops root too, who may read and write every file."""
    assert train("--out", "out") == 0
    Path("out", name).unlink()
    Path("out", name).mkdir()
    assert resume("--resume", "out", "--steps", 8) == 2
    assert capsys.readouterr().err == f"python -m mha_ext train: {message}\n"


@pytest.mark.parametrize(
    "arguments", [["info", "--what"], ["bench", "--what"], ["train", "--what"], ["what"], ["--what"]]
)
def test_wrong_usage_is_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.endswith(" --help lists the options)\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--d-model", 32], "belongs to a run with --d-model 16, it cannot go on with 32"),
        (["--model", "seq2seq"], "belongs to a run with --model decoder"),
        (["--seed", 5], "belongs to a run with --seed 0"),
        (["--steps", 3], "has done 6 steps already"),
        (["--text", "other.txt"], "the text is not the one"),
        (["--heads", 0], "--heads"),
        (["--head-diversity", -1], "--head-diversity: expected at least 0"),
    ],
    ids=join_options,
)
def test_resume_of_another_run(options: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    Path("other.txt").write_text("something else entirely\n" * 50)
    before = contents("out")
    capsys.readouterr()
    assert resume("--resume", "out", *options) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and message in errors
    assert contents("out") == before


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_damaged_checkpoint(kept: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    path = Path("out/checkpoint.pt")
    path.write_bytes(path.read_bytes()[:kept])
    before = contents("out")
    assert resume("--resume", "out", "--steps", 8) == 2
    assert "is damaged" in capsys.readouterr().err
    assert contents("out") == before


def test_export_is_not_a_checkpoint(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    torch.jit.script(tiny_model("decoder", "mha_ext")).save("model.pt")
    recwarn.clear()
    assert resume("--resume", "model.pt") == 2
    assert "model.pt is damaged or not a checkpoint" in capsys.readouterr().err
    assert not recwarn.list  # each would be two more lines


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["step"], "x", "step: expected a whole number from 0 to 6, got 'x'"),
        (["step"], -5, "step: expected a whole number from 0 to 6, got -5"),
        (["step"], 7, "step: expected a whole number from 0 to 6, got 7"),
        (["step"], 3, "its optimizer is not that of this model after step 3"),
        (["format"], "another", "is damaged or not a checkpoint"),
        (["surplus"], 1, "is damaged or not a checkpoint"),
        (["settings"], {"d_model": 16}, "is damaged or not a checkpoint"),
        (["settings", "context"], 24.0, "--context: expected a value of type int, got 24.0"),
        (["settings", "layers"], True, "--layers: expected a value of type int, got True"),
        (["settings", "text"], [None], "--text: expected names of files, got [None]"),
        (["settings", "head_diversity"], math.inf, "--head-diversity: expected at least 0 and finite, got inf"),
        (["settings", "head_diversity"], "0.1", "--head-diversity: expected a value of type float, got '0.1'"),
        (["settings", "head_diversity_kind"], "minds", "--head-diversity-kind: expected one of redundancy, outputs, "),
        (["settings", "lr"], math.nan, "--lr: expected above 0 and finite, got nan"),
        (["characters"], "abc", "is the checkpoint of another model"),
        (["fingerprint"], None, "fingerprint: expected 64 hexadecimal digits, got None"),
        (["model"], [], "model: expected tensors by name, got []"),
        (["model", "norm.weight"], torch.ones(16, dtype=torch.float64), "is the checkpoint of another model"),
        (["optimizer"], None, "optimizer: expected a state by name, got None"),
        (["optimizer", "state", 0, "exp_avg"], torch.ones(2), "its optimizer is not that of this model"),
        (["optimizer", "param_groups", 1, "betas"], "x", "its optimizer is not that of this model"),
    ],
    ids=join_options,
)
def test_edited_checkpoint(
    where: list[object], value: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--out", "out") == 0
    edit_checkpoint(Path("out/checkpoint.pt"), tuple(where), value)
    before = contents("out")
    assert resume("--resume", "out", "--steps", 8) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "out/checkpoint.pt" in errors and message in errors
    assert contents("out") == before


@pytest.mark.parametrize("content", [b"my notes", b"\xff\x00" * 9, b"my notes\n1,2,3,4,5,6,7\n", None])
def test_metrics_that_are_something_else(content: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    path = Path("out/metrics.csv")
    path.write_bytes(path.read_bytes() + b"a remark\n" if content is None else content)
    before = contents("out")
    assert resume("--resume", "out", "--steps", 8) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and f"in line {8 if content is None else 1}: move the file away" in errors
    assert contents("out") == before
    path.rename("kept.csv")
    assert resume("--resume", "out", "--steps", 8) == 0
    assert metrics("out")["step"] == [7, 8]


@pytest.mark.parametrize(
    "content",
    [
        b"step,layer\n",
        b"\xff\x00" * 9,
        b"a remark\n",
        b"6,blocks.0.attention,1,0.5\n",
        b"6,$\\x$,1,0.5,0.5\n",
        b"-6,blocks.0.attention,1,0.5,0.5\n",
        b"6,blocks.0.attention,1,0.5,x\n",
        b"6,blocks.0.attention," + b"9" * 400 + b",0.5,0.5\n",
    ],
    ids=range(8),
)
def test_heads_that_are_something_else(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    path = Path("out/heads.csv")
    path.write_bytes(content if content.startswith((b"step", b"\xff")) else path.read_bytes() + content)
    before = contents("out")
    assert resume("--resume", "out", "--steps", 8) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "out/heads.csv: expected the numbers of this run" in errors
    assert "move the file away" in errors and contents("out") == before
    path.rename("kept.csv")
    assert resume("--resume", "out", "--steps", 8) == 0
    assert {row["step"] for row in head_rows("out")} == {"8"}


@pytest.mark.parametrize("end", ["", "\n7", "\n7,blo", "\n7,blocks.0.attention,0,0.", "\n7,blocks.0.attention,0,nan"])
def test_heads_that_a_full_disk_cut_off(end: str) -> None:
    assert train("--out", "out") == 0
    before = head_rows("out")
    path = Path("out/heads.csv")
    path.write_text(path.read_text().rstrip() + end)
    assert resume("--resume", "out", "--steps", 8) == 0
    assert head_rows("out")[: len(before)] == before and {row["step"] for row in head_rows("out")} == {"3", "6", "8"}


@pytest.mark.parametrize("end", ["", "\n7,2.9"])
def test_metrics_that_a_full_disk_cut_off(end: str) -> None:
    assert train("--out", "out") == 0
    path = Path("out/metrics.csv")
    path.write_text(path.read_text().rstrip() + end)
    assert resume("--resume", "out", "--steps", 8) == 0
    assert metrics("out")["step"] == list(range(1, 9))


def test_checkpoint_with_weights_of_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "out") == 0
    saved = checkpoints.load(Path("out/checkpoint.pt"))
    saved.model = {name: value[:1] for name, value in saved.model.items()}
    checkpoints.save(Path("out/checkpoint.pt"), saved)
    assert resume("--resume", "out", "--steps", 8) == 2
    assert "checkpoint of another model" in capsys.readouterr().err


def test_command_line_errors_have_no_traceback() -> None:
    command = [*COMMAND, "--text", "missing.txt"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "python -m mha_ext train: cannot read missing.txt: No such file or directory\n"


# Data


def test_default_text_holds_out_what_is_not_trained_on() -> None:
    text = python_topics()
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    assert len(text) > 200_000 and len(paragraphs) == len(set(paragraphs))
    data = Windows(text, 128, 2, 0)
    assert len(data.training) + len(data.held_out) == len(text)
    assert sum(batch.tokens for batch in data.held_out_batches()) > 0.95 * len(data.held_out) - 128


def test_windows_are_the_text_and_its_next_characters() -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(400))
    data = Windows(text, 10, 3, 0)
    batch, same, other = (data.training_batch(step) for step in (5, 5, 6))
    (inputs,) = batch.inputs
    assert torch.equal(inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(same.targets, batch.targets) and not torch.equal(other.targets, batch.targets)
    held_out = torch.cat([batch.targets for batch in data.held_out_batches()]).flatten()
    assert torch.equal(held_out, data.held_out[1 : 1 + len(held_out)])


def test_characters_that_training_never_saw_are_not_scored() -> None:
    Path("text.txt").write_text("plain words " * 50 + "\u00df\u2026 words" * 5, encoding="utf-8")
    data = Windows(Path("text.txt").read_text(encoding="utf-8"), 16, 4, 0)
    assert "do not occur in it and are not scored" in data.describe()
    assert int((data.held_out == UNKNOWN).sum()) > 0
    assert train("--out", "out") == 0
    assert all(0 < bits < 10 for bits in metrics("out")["held_out_bits"] if not math.isnan(bits))


def test_untrained_model_knows_nothing() -> None:
    data = Windows(Path("text.txt").read_text(), 24, 4, 0)
    model = tiny_model("decoder", "mha_ext", data.characters)
    uniform = math.log2(model.vocabulary_size)
    assert evaluate(model, data, torch.device("cpu")) == pytest.approx(uniform, rel=0.1)


def test_line_pairs() -> None:
    assert simplify("  It's *so* good, Mr. X_1!") == "it s so good mr x 1"
    assert line_pairs("***\nHello, World!\nhello world\n   Two words.  \n", 20) == [
        ("hello world", "Hello, World!"),
        ("two words", "Two words."),
    ]
    assert all(len(target) <= 12 for _, target in line_pairs("One long line that has to be broken, " * 3, 12))


# Models


@pytest.mark.parametrize("attention", ATTENTION_NAMES)
def test_decoder_does_not_look_ahead(attention: str) -> None:
    model = tiny_model("decoder", attention)
    ids = torch.randint(3, model.vocabulary_size, (2, 20))
    changed = ids.clone()
    changed[:, 12:] = 3
    with torch.no_grad():
        assert torch.equal(model(ids)[:, :12], model(changed)[:, :12])
        assert not torch.equal(model(ids)[:, 12:], model(changed)[:, 12:])


@pytest.mark.parametrize("attention", ATTENTION_NAMES)
def test_seq2seq_ignores_padding_and_batch_mates(attention: str) -> None:
    text = Path("text.txt").read_text()
    data = LinePairs(text, 24, 4, 0)
    model = tiny_model("seq2seq", attention, data.characters)
    rows = sorted(data.training, key=lambda pair: len(pair[0]))
    short, long = rows[0], rows[-1]
    assert len(short[0]) < len(long[0])
    with torch.no_grad():
        together, alone = data.collate([short, long]), data.collate([short])
        logits = model(*together.inputs)[:1, : alone.targets.size(1)]
        torch.testing.assert_close(logits, model(*alone.inputs), rtol=1e-5, atol=1e-5)
        refilled = together.inputs[0].clone()
        refilled[0, len(short[0]) :] = 5  # other padding
        torch.testing.assert_close(model(refilled, *together.inputs[1:]), model(*together.inputs), rtol=0, atol=0)


def test_seq2seq_reads_its_source() -> None:
    data = LinePairs(Path("text.txt").read_text(), 24, 4, 0)
    model = tiny_model("seq2seq", "mha_ext", data.characters)
    batch = data.collate(data.training[:2])
    source, lengths, target = batch.inputs
    with torch.no_grad():
        assert not torch.allclose(model(source, lengths, target), model(source.flip(0), lengths.flip(0), target))


@pytest.mark.parametrize("attention", ATTENTION_NAMES)
@pytest.mark.parametrize("model", ["decoder", "seq2seq"])
def test_export_is_the_model(model: str, attention: str, tmp_path: Path) -> None:
    eager = tiny_model(model, attention, "ab\u00e9\u4e2d\U0001f600\n")
    torch.jit.script(eager).save(str(tmp_path / "model.pt"))
    loaded = torch.jit.load(str(tmp_path / "model.pt"))
    text = "ab\u00e9\u4e2d\U0001f600\n?"
    ids = loaded.encode(text)
    assert ids.tolist() == eager.encode(text).tolist() == [3, 4, 5, 6, 7, 8, UNKNOWN]
    assert loaded.decode(ids) == eager.decode(ids) == text[:-1]
    assert list(loaded.characters) == eager.characters
    arguments = (ids.unsqueeze(0),) if model == "decoder" else (ids.unsqueeze(0), torch.tensor([7]), ids.unsqueeze(0))
    for _ in range(3):  # TorchScript optimises after a few calls
        torch.testing.assert_close(loaded(*arguments), eager(*arguments), rtol=1e-5, atol=1e-6)


def test_generate() -> None:
    decoder = tiny_model("decoder", "mha_ext")
    prompt = decoder.encode("abc").repeat(2, 1)
    torch.manual_seed(0)
    written = decoder.generate(prompt, 30, 0.8)  # beyond its context of 24
    assert written.shape == (2, 33) and torch.equal(written[:, :3], prompt) and int(written.min()) > END
    assert torch.equal(decoder.generate(prompt, 30, 0.0), decoder.generate(prompt, 30, 0.0))
    scripted = torch.jit.script(decoder)
    torch.manual_seed(0)
    assert torch.equal(scripted.generate(prompt, 30, 0.8), written)

    seq2seq = tiny_model("seq2seq", "mha_ext")
    lengths = torch.tensor([3, 2])
    lines = seq2seq.generate(prompt, lengths)
    assert lines.size(0) == 2 and lines.size(1) <= 24
    assert torch.equal(torch.jit.script(seq2seq).generate(prompt, lengths), lines)
