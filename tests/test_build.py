"""What is built: the wheel works away from the source tree, and the libraries hold what they should."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import mha_ext
from tests.commands import ROOT, run

PACKAGE = Path(mha_ext.__file__).parent
LIBRARY = PACKAGE / "libmha_ext.so"
MODULE = PACKAGE / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
needs_sources = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


@needs_sources
def test_wheel_imports_in_a_fresh_environment(installed: Path) -> None:
    program = """
import json, mha_ext, torch
x = torch.randn(2, 5, 16, requires_grad=True)
output, weights = mha_ext.MultiHeadAttention(16, 4)(x, x, x)
output.sum().backward()
print(json.dumps({"file": mha_ext.__file__, "version": mha_ext.__version__, "shape": list(weights.shape)}))
"""
    found = json.loads(run(installed, "-c", program, cwd=installed.parent))
    assert Path(found["file"]).is_relative_to(installed.parents[1])
    assert found["version"] == mha_ext.__version__
    assert found["shape"] == [2, 4, 5, 5]


@needs_sources
def test_console_script(installed: Path) -> None:
    found = json.loads(run(installed.with_name("mha-ext"), "info", "--json", cwd=installed.parent))
    assert found["cpu_capability"] == mha_ext.info()["cpu_capability"]
    assert found["torch"] == torch.__version__
    assert run(installed.with_name("mha-ext"), "bench", "--list", cwd=installed.parent)


@needs_sources
def test_library_for_another_torch_is_refused_in_one_sentence(installed: Path) -> None:
    program = "import torch; torch.__version__ = '2.12.1'; import mha_ext"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([installed, "-c", program], cwd=installed.parent, env=env, capture_output=True, text=True)
    assert re.fullmatch(
        r"ImportError: mha_ext: expected torch \d+\.\d+, for which libmha_ext.so was built, got 2\.12\.1; build it .*",
        result.stderr.strip().splitlines()[-1],
    )


@needs_sources
def test_missing_library_is_one_sentence(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("*.so", "_build.py", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "mha_ext", ignore=skip)
    result = subprocess.run([sys.executable, "-c", "import mha_ext"], cwd=tmp_path, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"ImportError: mha_ext: expected the compiled library .*libmha_ext.so, found none; .*", last)


@needs_sources
def test_the_version_stands_in_one_place() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert mha_ext.__version__ == mha_ext.info()["version"] == version
    assert importlib.metadata.version("mha-ext") == version
    files = [*ROOT.glob("*.txt"), *ROOT.glob("*.py"), *ROOT.glob("cmake/*"), *ROOT.glob("csrc/**/*.*")]
    files += [file for file in PACKAGE.rglob("*.py") if file.name != "_build.py"]
    assert [file for file in files if version in file.read_text()] == []


@needs_nm
def test_the_library_has_no_python_symbol() -> None:
    undefined = run("nm", "-D", "--undefined-only", LIBRARY).split()
    assert [symbol for symbol in undefined if symbol.startswith(("Py", "_Py"))] == []


@needs_readelf
def test_libraries_find_each_other_and_torch_where_a_wheel_puts_them() -> None:
    dynamic = run("readelf", "-d", LIBRARY)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert not [name for name in needed if "python" in name]
    assert "$ORIGIN/../torch/lib" in re.search(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", dynamic)[1].split(":")
    dynamic = run("readelf", "-d", MODULE)
    assert "libmha_ext.so" in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "$ORIGIN" in re.search(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", dynamic)[1].split(":")


@needs_nm
def test_kernels_share_no_symbol_between_instruction_sets() -> None:
    """A weak symbol would be one function for all of them, compiled for any; the build itself refuses others."""
    symbols = [line.split(maxsplit=2)[-2:] for line in run("nm", "-C", "--defined-only", LIBRARY).splitlines()]
    tables = [kind for kind, name in symbols if name.startswith("mha_ext::cpu::kernel_table_")]
    assert tables
    assert set(tables) <= set("rRdDbBtT")
    workers = [kind for kind, name in symbols if re.search(r"::(forward|backward)_worker<", name)]
    assert workers
    assert set(workers) == {"t"}


@needs_sources
@pytest.mark.skipif(None in map(shutil.which, ("cmake", "c++", "nm")), reason="needs cmake, c++ and nm")
def test_the_build_refuses_weak_symbols(tmp_path: Path) -> None:
    def check(source: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "a.cpp").write_text(source)
        run("c++", "-c", tmp_path / "a.cpp", "-o", tmp_path / "a.o")
        script = ROOT / "cmake" / "RefuseWeakSymbols.cmake"
        command = ["cmake", f"-DNM={shutil.which('nm')}", "-P", script, tmp_path / "a.o"]
        return subprocess.run(command, capture_output=True, text=True)

    assert check("namespace { int f() { return 1; } } int g() { return f(); }").returncode == 0
    shared = check("inline int f() { return 1; } int g() { return f(); }")
    assert shared.returncode != 0
    assert "expected no weak symbol in the kernels" in shared.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    program = """
import mha_ext, torch
q = torch.randn(2, 8, 128, 64)
mha_ext.attention(q, q, q)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}, sep="\\n")
"""
    assert len(run(sys.executable, "-c", program, cwd=ROOT).split()) == 1


def test_aten_cpu_capability_is_honoured() -> None:
    levels = ["default", "avx2", "avx512"]
    best = torch.backends.cpu.get_cpu_capability().lower()
    most = levels.index(best) if best in levels else 0  # beyond it PyTorch itself would crash
    for level in levels[: most + 1]:
        text = run(sys.executable, "-m", "mha_ext", "info", "--json", cwd=ROOT, ATEN_CPU_CAPABILITY=level)
        assert json.loads(text)["cpu_capability"] == level


def test_command_line_teaches() -> None:
    text = run(sys.executable, "-m", "mha_ext", "--help", cwd=ROOT)
    for command in ("info", "train", "export", "heads", "bench", "cmake-dir"):
        assert re.search(rf"^  {command} ", text, re.MULTILINE), text
    wrong = subprocess.run([sys.executable, "-m", "mha_ext", "trian"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "invalid choice: 'trian'" in wrong.stderr


@needs_sources
def test_set_up_sees_what_is_installed() -> None:
    """The script that looks into an environment runs there, and finds what this one has."""
    tree = ast.parse((ROOT / "tools" / "environment.py").read_text())
    (script,) = (
        node.value.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "PROBE"
    )
    found = json.loads(run(sys.executable, "-I", "-c", script))
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert set(found["missing"]) <= {"train", "bench", "onnx", "test", "test-models"}
