"""C++ programs: the examples, built against the installed wheel, and the module against its Python twin."""

from __future__ import annotations

import re
import shlex
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext
from mha_ext.cli import main
from tests.commands import ROOT, run

TORCH = Path(torch.__file__).parent
FIND = "cmake_minimum_required(VERSION 3.22)\nproject(find LANGUAGES CXX)\n{before}\nfind_package(mha_ext REQUIRED)\n"
PRINT = 'get_target_property(found mha_ext::torch_cpu IMPORTED_LOCATION)\nmessage(STATUS "torch at ${found}")\n'


def cmake_dir(python: Path) -> Path:
    return Path(run(python, "-m", "mha_ext", "cmake-dir", cwd=python.parent).strip())


@pytest.fixture(scope="module")
def programs(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs."""
    folder = tmp_path_factory.mktemp("cpp")
    run("cmake", "-S", ROOT / "tests" / "cpp", "-B", folder, f"-Dmha_ext_DIR={cmake_dir(installed)}")
    run("cmake", "--build", folder, "--parallel", "2")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of the decoder on a text with characters of one to four bytes."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("Öl, naïve cafés, 注意力 and 𝔸ttention: " * 40, encoding="utf-8")
    options = ["--text", text, "--context", 24, "--d-model", 32, "--heads", 2, "--layers", 1, "--steps", 8]
    assert main(["train", *map(str, options), "--quiet", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def scripted(trained: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(trained / "model.pt"))


def written(model: torch.jit.ScriptModule, prompt: str, characters: int) -> str:
    """What the model makes of a prompt, in Python."""
    return model.decode(model.generate(model.encode(prompt).unsqueeze(0), characters, 0.0)[0])


# --- The package -------------------------------------------------------------------------------------------------


def configure(folder: Path, package: Path, before: str = "", after: str = "", **variables: object):
    """Runs CMake on a project that looks for mha_ext in `package`."""
    (folder / "CMakeLists.txt").write_text(FIND.format(before=before) + after)
    options = [f"-D{name}={value}" for name, value in {"mha_ext_DIR": package, **variables}.items()]
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_package_lies_beside_the_library(installed: Path) -> None:
    folder = cmake_dir(installed)
    assert folder.is_relative_to(installed.parents[1])
    assert (folder.parent / "libmha_ext.so").is_file() and (folder.parent / "include" / "mha_ext.h").is_file()


@pytest.mark.parametrize("where", ["beside", "named", "built against"])
def test_torch_is_found(where: str, installed: Path, tmp_path: Path) -> None:
    package, variables = cmake_dir(installed), {}
    expected = TORCH / "lib" / "libtorch_cpu.so"
    elsewhere = tmp_path / "torch"
    if where != "built against":
        for folder in ("include", "lib"):
            (elsewhere / folder).mkdir(parents=True)
        (elsewhere / "include" / "ATen").symlink_to(TORCH / "include" / "ATen")
        (elsewhere / "version.py").write_text((TORCH / "version.py").read_text())
        expected = elsewhere / "lib" / "libtorch_cpu.so"
    if where == "named":
        variables["MHA_EXT_TORCH_DIR"] = elsewhere
    elif where == "beside":
        (tmp_path / "mha_ext").mkdir()
        package = tmp_path / "mha_ext" / "cmake"
        package.mkdir()
        for file in cmake_dir(installed).iterdir():
            (package / file.name).write_text(file.read_text())
    (tmp_path / "project").mkdir()
    result = configure(tmp_path / "project", package, after=PRINT, **variables)
    assert result.returncode == 0, result.stderr
    assert f"torch at {expected}\n" in result.stdout


@pytest.mark.parametrize("scope", ["file", "function"])
def test_a_torch_that_was_found_before_is_used(scope: str, installed: Path, tmp_path: Path) -> None:
    before = "find_package(Torch REQUIRED)"
    if scope == "function":  # which leaves the target, but no variable
        before = f"function(find)\n{before}\nendfunction()\nfind()"
    after = 'if(TARGET mha_ext::torch_cpu)\n  message(FATAL_ERROR "two of them")\nendif()\n'
    result = configure(tmp_path, cmake_dir(installed), before, after, CMAKE_PREFIX_PATH=torch.utils.cmake_prefix_path)
    assert result.returncode == 0, result.stderr


def test_another_release_of_torch_is_refused(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "torch" / "include" / "ATen").mkdir(parents=True)
    (tmp_path / "torch" / "include" / "ATen" / "ATen.h").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.1.0'\n")
    result = configure(tmp_path, cmake_dir(installed), MHA_EXT_TORCH_DIR=tmp_path / "torch")
    assert result.returncode != 0
    release = ".".join(torch.__version__.split(".")[:2])
    assert f"mha_ext: expected torch {release}, for which it was built, got '2.1.0'" in " ".join(result.stderr.split())


def test_a_torch_that_was_named_must_be_there(installed: Path, tmp_path: Path) -> None:
    result = configure(tmp_path, cmake_dir(installed), MHA_EXT_TORCH_DIR=tmp_path / "nowhere")
    assert result.returncode != 0
    assert "mha_ext: expected PyTorch with its C++ headers in" in " ".join(result.stderr.split())


@pytest.mark.parametrize("wanted, found", [("0.1", True), ("0.0.1", False), ("1.0", False), ("COMPONENTS no", False)])
def test_the_version_is_told(wanted: str, found: bool, installed: Path, tmp_path: Path) -> None:
    result = configure(tmp_path, cmake_dir(installed), f"find_package(mha_ext {wanted} REQUIRED)")
    assert (result.returncode == 0) == found, result.stderr


# --- The examples ------------------------------------------------------------------------------------------------


def test_a_program_trains(programs: Path) -> None:
    lines = run(programs / "train").splitlines()
    assert lines[0].startswith("output [2, 8, 10, 64], weights [2, 8, 10, 12], gradient of the bias ")
    losses = [float(line.split()[-1]) for line in lines[1:]]
    assert losses[-1] < losses[0] / 4


def test_a_program_generates_text(programs: Path, trained: Path, scripted: torch.jit.ScriptModule) -> None:
    found = run(programs / "generate", trained / "model.pt", "注意 naïve", 30)
    assert found == written(scripted, "注意 naïve", 30) + "\n"


def test_a_program_fine_tunes(programs: Path, trained: Path, scripted: torch.jit.ScriptModule, tmp_path: Path) -> None:
    """The same losses as in Python, and a model that Python loads."""
    text = tmp_path / "text.txt"
    text.write_text("attention naïve " * 20, encoding="utf-8")
    lines = run(programs / "fine_tune", trained / "model.pt", text, 5, tmp_path / "tuned.pt").splitlines()
    found = [float(line.split()[-1]) for line in lines]

    model, ids, length = scripted, scripted.encode(text.read_text(encoding="utf-8")), 24
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    model.train()
    expected = []
    for _ in range(5):
        batch = ids[torch.randint(len(ids) - length, (8, 1)) + torch.arange(length + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tuned = torch.jit.load(str(tmp_path / "tuned.pt"))
    for (name, a), (_, b) in zip(tuned.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_a_program_runs_a_package(programs: Path, trained: Path, scripted: torch.jit.ScriptModule) -> None:
    """AOTInductor: the vocabulary comes from the metadata, and prompts may be longer than the context."""
    assert main(["export", str(trained), "--to", "aoti"]) == 0
    for prompt, characters in (("注意 naïve", 30), ("attention " * 5, 3)):
        found = run(programs / "generate_package", trained / "package.pt2", prompt, characters)
        assert found == written(scripted, prompt, characters) + "\n"


@pytest.mark.parametrize(
    "command",
    [
        "generate none.pt a",
        "generate {model} ''",
        "generate {model} a ten",
        "generate {model} a 10 nan",
        "fine_tune none.pt text.txt 1 tuned.pt",
        "fine_tune {model} none.txt 1 tuned.pt",
        "fine_tune {model} {text} -2 tuned.pt",
        "fine_tune {model} {text} 1 /dev/full",
        "generate_package none.pt2 a",
        "generate_package /tmp a",
        "generate_package {model} a",
    ],
)
def test_what_is_wrong_is_one_sentence(command: str, programs: Path, trained: Path, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command.format(model=trained / "model.pt", text=trained.parent / "text.txt"))
    result = subprocess.run([programs / program, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert re.fullmatch(rf"{program}: .+\n", result.stderr), result.stderr
    assert not list(tmp_path.iterdir())
    usage = subprocess.run([programs / program], capture_output=True, text=True)
    assert usage.returncode == 2 and usage.stderr.startswith(f"usage: {program} ")


# --- The module --------------------------------------------------------------------------------------------------


def python_results(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tests/cpp/module.cpp computes, by the Python class."""
    results: dict[str, Tensor] = {}
    torch.manual_seed(4)
    for name, parameter in mha_ext.MultiHeadAttention(12, 3).named_parameters():
        results[f"initial.{name}"] = parameter.detach()
    results["drawn after"] = torch.rand(3)

    layer = mha_ext.MultiHeadAttention(12, 3, dropout=0.4)
    layer.load_state_dict({name: x for name, x in inputs.items() if name.startswith("W_")})
    calls = {
        "training": {},
        "plain": {},
        "no weights": {"need_weights": False},
        "mask": {"mask": inputs["mask"]},
        "bool mask": {"mask": inputs["mask"] != 0},
        "causal": {"is_causal": True},
        "bottom right": {"is_causal": True, "causal_bottom_right": True},
        "lengths": {"key_lengths": inputs["key_lengths"]},
        "bias": {"bias": inputs["bias"].requires_grad_()},
    }
    for name, options in calls.items():
        layer.train(name == "training")
        leaves = [inputs[x].clone().requires_grad_() for x in ("query", "key", "value")]
        torch.manual_seed(7)
        output, weights = layer(*leaves, **options)
        loss = (output * inputs["grad_output"]).sum()
        if weights is not None:
            results[f"{name}.weights"] = weights.detach()
            loss = loss + weights.square().sum()
        results[f"{name}.output"] = output.detach()
        leaves += [options["bias"]] if "bias" in options else []
        for i, gradient in enumerate(torch.autograd.grad(loss, [*leaves, *layer.parameters()])):
            results[f"{name}.gradient{i}"] = gradient
    results["copied, saved, loaded"] = results["plain.output"]
    return results


def test_the_module_is_the_python_class(programs: Path, tmp_path: Path) -> None:
    inputs = {name: torch.randn(2, length, 12) for name, length in (("query", 5), ("key", 7), ("value", 7))}
    inputs["grad_output"] = torch.randn(2, 5, 12)
    inputs["mask"] = torch.randint(0, 3, (2, 1, 5, 7))
    inputs["key_lengths"], inputs["bias"] = torch.tensor([7, 3]), torch.randn(3, 5, 7)
    inputs |= {name: torch.randn_like(x) / 3 for name, x in mha_ext.MultiHeadAttention(12, 3).state_dict().items()}
    torch.save(inputs, tmp_path / "inputs.pt")
    run(programs / "module", tmp_path / "inputs.pt", tmp_path / "results.pt")
    found = torch.load(tmp_path / "results.pt", weights_only=False)  # C++ writes the types of containers, too
    expected = python_results(inputs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
        if name.startswith("initial") or name == "drawn after":
            assert torch.equal(found[name], tensor), name
