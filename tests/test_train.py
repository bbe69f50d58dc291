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

import pytest
import torch

from mha_ext import cli
from mha_ext.train import checkpoint as checkpoints
from mha_ext.train import report, run, sample
from mha_ext.train.attention import ATTENTION_NAMES
from mha_ext.train.cli import main
from mha_ext.train.data import Windows, python_topics
from mha_ext.train.loop import Trainer, evaluate
from mha_ext.train.model import END, UNKNOWN, CharacterModel
from mha_ext.train.seq2seq import LinePairs, line_pairs, simplify
from mha_ext.train.settings import Settings

WORDS = "The cat sat, on: Monday; at a mat! Was it (really) there? Yes. No 42 'times' of Paris.".split()
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
COMMAND = [sys.executable, "-m", "mha_ext", "train"]
SIZES = ["--d-model", "16", "--heads", "2", "--layers", "1", "--context", "24", "--batch-size", "4", "--threads", "1"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with text.txt of 200 different lines; curves and long samples take too long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "write_curve", lambda path, rows, title: None)
    monkeypatch.setattr(sample, "SAMPLE_CHARACTERS", 20)
    lines = (" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(2 + i % 4)) + f" {i}" for i in range(200))
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def with_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "write_curve", report.write_curve)


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
    names = {"checkpoint.pt", "metrics.csv", "curve.png", "sample.txt", "model.pt"}
    assert set(contents(str(folder))) == names and all(name in output for name in names)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
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
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not Path("out/curve.png").exists()


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


def test_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_full_disk(self: report.Metrics, path: Path, kept: object) -> None:
        self.path, self.rows, self.file = path, [], open("/dev/full", "a")

    monkeypatch.setattr(report.Metrics, "__init__", on_a_full_disk)
    assert train("--out", "out") == 2
    assert capsys.readouterr().err == "python -m mha_ext train: cannot write out/metrics.csv: No space left on device\n"


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
    assert set(contents("out")) == {"checkpoint.pt", "metrics.csv", "sample.txt", "model.pt"}


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
