"""The benchmark harness: its rows are right and its command works. No times are asserted."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compiled, heads, models, peers, report
from benchmarks.machine import Machine, read_yardsticks, yardsticks
from benchmarks.rows import ROWS, Target, select
from benchmarks.timing import in_turns, quartiles, ratios
from mha_ext import cli
from mha_ext.bench import main
from tests import documents

ROOT = Path(__file__).resolve().parents[1]
ROW = "example-2x10x512x8-train"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mha_ext", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def make_report(ratio: tuple[float, float, float] = (1.4, 1.5, 1.6), memory: int | None = 2**24) -> dict:
    machine = Machine("a CPU", 2, 2, "AVX2", "2.13.0", "0.1", 100.0, 1.0, 10.0, 1.2, "tiles")
    row = {
        "name": ROW, "kind": "layer", "work": "train", "feature": "", "shape": "(2, 10, 512, 8)", "length": 10,
        "target": 1.62, "share_target": None, "best_peer": "sdpa", "ratio": ratio,
        "implementations": {
            name: {"seconds": (1e-3, 2e-3, 3e-3), "gflops": 50.0, "share": 0.5, "bytes": memory}
            for name in ("ours", "sdpa")
        },
        "fma_gflops": 90.0, "read_gbytes": None, "linear_gain": 1.25,
    }  # fmt: skip
    return json.loads(json.dumps(report.make_report(machine, [row])))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_implementations_agree_on_every_row(row):
    candidates = peers.make_candidates(peers.make_problem(row.small()))
    assert candidates[0].name == "ours" and len(candidates) >= 2
    peers.check_agreement(candidates)
    for candidate in candidates:
        candidate.prepare()
        candidate()


def test_disagreement_is_an_error():
    candidates = peers.make_candidates(peers.make_problem(select(ROW)[0].small()))
    with torch.no_grad():
        candidates[1].module.W_o.bias[3] += 1
    with pytest.raises(RuntimeError, match="expected ours and document to agree, got a difference of 1 in output"):
        peers.check_agreement(candidates)


def test_document_is_the_documents_class():
    torch.manual_seed(0)
    theirs = documents.MultiHeadAttention(16, 4)
    ours = peers.Document(16, 4)
    ours.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(2, 5, 16), torch.ones(5, 5).tril()
    for a, b in zip(ours(x, x, x, mask), theirs(x, x, x, mask), strict=True):
        assert torch.equal(a, b)


def test_flops_count_what_is_visible():
    plain, causal, padding = (select(name)[0] for name in ("plain-4x512*train", "causal-*", "padding-*"))
    core, linear = 4 * 4 * 512 * 512 * 512, 8 * 4 * 512 * 512 * 512
    assert plain.flops == 3.5 * core + 3 * linear
    assert causal.flops == 3.5 * 4 * 512 * (2048 * 2049 / 2) + 3 * 8 * 2048 * 512 * 512
    assert padding.flops == 3.5 * 4 * 4 * 512 * 1024 * 512 + 3 * 8 * 4 * 1024 * 512 * 512


def test_targets_follow_the_linear_gain():
    assert Target(1.1, 0.9).ratio(2.0) == pytest.approx(2.0)
    assert Target(1.1, 0.9).ratio(0.9) == 1.1  # noise does not lower the bar


def test_yardsticks_tell_the_peak_and_the_linear_gain():
    sticks = yardsticks(reads=True)
    pace = read_yardsticks(in_turns(sticks, budget=0.2))
    assert pace.fma_gflops > 1 and pace.read_gbytes > 0.1 and 0.2 < pace.linear_gain < 20
    times = {name: [2.0, 2.0, 3.0] for name in sticks} | {"torch linear": [3.0, 3.0, 3.0]}
    pace = read_yardsticks(times)
    assert pace.linear_gain == (1.5 if "oneDNN linear" in sticks else 1.0)
    assert pace.read_gbytes == pytest.approx(2**28 / 2e9)
    without = read_yardsticks({name: times[name] for name in yardsticks(reads=False)} | {"FMA": [4.0]})
    assert without.read_gbytes is None and without.fma_gflops == pytest.approx(pace.fma_gflops / 2)


def test_a_row_is_held_against_the_machine_at_that_time():
    row = make_report()["rows"][0]
    assert report.cells(row, targets=True)[-1] == "ratio 1.62 (g 1.25) MISSED"
    measured = report.measure(select(ROW)[0], Machine(**make_report()["machine"]), budget=0.05, compiled=False)
    ours = measured["implementations"]["ours"]
    assert ours["share"] == pytest.approx(ours["gflops"] / measured["fma_gflops"])
    assert measured["target"] == pytest.approx(select(ROW)[0].target.ratio(measured["linear_gain"]))
    assert set(measured["implementations"]) == {"ours", "document", "sdpa", "torch"}


def test_turns_and_quartiles():
    seen = []
    times = in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, budget=0.02)
    assert len(times["a"]) == len(times["b"]) >= 5 and set(seen) == {"a", "b"}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert ratios([2.0, 6.0], [1.0, 2.0]).median == 2.5


def test_rows_are_selected_by_glob():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.by_default for row in select(None))
    assert [row.name for row in select("example*weights*, causal-*")] == [
        "example-weights-2x10x512x8-train",
        "causal-1x2048x512x8-train",
    ]


def test_compare_names_regressions():
    old = make_report()
    assert report.compare(old, make_report()) == ([], [])
    assert report.compare(old, make_report(ratio=(1.3, 1.35, 1.45)))[0] == []  # quartiles overlap
    assert report.compare(old, make_report(ratio=(1.0, 1.1, 1.2)))[0] == [f"{ROW}: the ratio fell from 1.50 to 1.10"]
    assert report.compare(old, make_report(memory=2**25))[0] == [f"{ROW}: memory grew from 16.0 to 32.0 MiB"]
    assert report.compare(old, make_report(memory=None)) == ([], [])
    other = copy.deepcopy(old)
    other["machine"]["threads"] = 1
    assert report.compare(other, old)[1] == ["threads was 1, is 2"]


def test_markdown_goes_between_its_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n")
    report.replace_marked(path, report.markdown(make_report(), targets=True))
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| 1.50 (1.40-1.60) |" in text and "ratio 1.62 (g 1.25) MISSED" in text and "a CPU" in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="expected .*README.md to hold the lines"):
        report.replace_marked(path, "table")


def test_command(tmp_path):
    new, old, picture = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "ratios.png"
    done = bench("--quick", "--rows", ROW, "--threads", "1", "--json", str(new), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "layer train" in done.stdout and picture.stat().st_size > 0
    found = json.loads(new.read_text())
    assert found["machine"]["threads"] == 1 and [row["name"] for row in found["rows"]] == [ROW]
    figures = found["rows"][0]["implementations"]
    assert set(figures) == {"ours", "document", "sdpa", "torch"}
    if sys.platform.startswith("linux"):
        assert all(0 < each["bytes"] < 2**28 for each in figures.values())

    found["rows"][0]["ratio"] = [100.0, 100.0, 100.0]
    old.write_text(json.dumps(found))
    done = bench("--quick", "--rows", ROW, "--threads", "1", "--compare", str(old), "--markdown")
    assert done.returncode == 1 and "the ratio fell from 100.00" in done.stdout
    assert done.stdout.startswith("| what | shape |")


def test_list_names_every_row(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in ROWS)


def test_reader_who_has_gone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    assert cli.main(["bench", "--list"]) == 141


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rows", "nothing"], "expected --rows to name rows (see --list), got 'nothing'"),
        (["--rows", ","], "expected --rows to name rows"),
        (["--threads", "0"], "expected a number of threads >= 1, got '0'"),
        (["--threads", "two"], "expected a number of threads >= 1, got 'two'"),
        (["--compare", "absent.json"], "absent.json"),
        (["--compare", __file__], "to be a report of --json"),
        (["--json", "absent/new.json"], "expected a file in a folder that exists"),
        (["--markdown", "absent.md"], "expected --markdown to name a file that exists"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


# --- Whole models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["eval", "train"])
def test_a_model_is_measured_before_and_after(work):
    subject = models.encoder(2, 8, d_model=16, heads=2, layers=1)
    cells = models.measure(subject, work, budget=0.01)
    assert cells[:2] == [subject.name, work] and len(cells) == len(models.HEADINGS)
    assert models.markdown([cells], "a CPU").count("\n|") == 2


@pytest.mark.parametrize(
    "other", [["--rows", "plain-*"], ["--compile"], ["--compiled"], ["--heads"]], ids=lambda other: other[0]
)
def test_models_are_measured_without_options_of_rows(other, capsys):
    assert main(["--models", *other]) == 2
    assert capsys.readouterr().err == f"bench: expected --models without {other[0]}, got both\n"


def test_models_that_disagree_are_an_error():
    subject = models.encoder(2, 8, d_model=16, heads=2, layers=1)
    noisy = models.Subject(subject.name, subject.model, lambda model: subject.call(model) + torch.rand(()))
    with pytest.raises(RuntimeError, match="expected nn.TransformerEncoder.* and its copy to agree, got a difference"):
        models.measure(noisy, "eval", budget=0.01)


def test_a_model_without_attention_is_an_error():
    subject = models.Subject("linear", torch.nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)))
    with pytest.raises(RuntimeError, match="expected attention to replace in linear, got none"):
        models.measure(subject, "eval", budget=0.01)


# --- torch.compile ------------------------------------------------------------------------------------------------


def test_compiled_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{compiled.MARKS[0]}\nold\n{compiled.MARKS[1]}\nafter\n")
    for name in ("layer", "block"):
        small = functools.partial(getattr(compiled, name), 2, 8, 16, 2)
        monkeypatch.setattr(compiled, name, lambda *_, small=small: small())
    assert main(["--compiled", "--quick", "--markdown", str(path)]) == 0
    text, printed = path.read_text(), capsys.readouterr().out
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for name in ("mha_ext.MultiHeadAttention, (2, 8, 16, 2)", "pre-norm Transformer block, (2, 8, 16, 2)"):
        assert f"| {name} | {compiled.EAGER} |" in text and name in printed
    assert "| the block with SDPA, compiled |" in text and text.count("\n|") == 5


def test_compiled_modules_that_disagree_are_an_error():
    subject = compiled.layer(2, 8, 16, 2)
    subject.others["another"] = compiled.layer(2, 8, 16, 2).module
    with pytest.raises(
        RuntimeError, match="expected mha_ext.MultiHeadAttention.* and another to agree, got a difference"
    ):
        compiled.measure(subject, budget=0.01)


# --- Heads --------------------------------------------------------------------------------------------------------


def test_heads_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{heads.MARKS[0]}\nold\n{heads.MARKS[1]}\nafter\n")
    monkeypatch.setattr(heads, "SHAPES", ((2, 8, 16, 2), (1, 4, 16, 2)))
    assert main(["--heads", "--quick", "--markdown", str(path)]) == 0
    text, printed = path.read_text(), capsys.readouterr().out
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| (2, 8, 16, 2) |") == 6 and "(1, 4, 16, 2)" not in text
    assert "in record()" in printed and "| head_mask=, (B, H) |" in text
