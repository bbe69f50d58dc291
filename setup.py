"""Hands the build to CMake. What is built, and how, stands in CMakeLists.txt; the metadata stands in pyproject.toml.

CMake works in build/<python>-<torch>, which is kept, so that only what changed is compiled again.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CMAKE_LEAST = (3, 22)
# Commands that lead to a build. Checked before any of them runs: pip asks for the metadata first, and would then
# download the dependencies, some of gigabytes, before it learns that the build cannot succeed.
BUILDING = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"mha_ext: {sentence}")


def check_tools() -> None:
    """Ends with one sentence if Python packages or CMake, which CMake itself cannot check, are missing."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        fail(
            "expected torch >= 2.11 within reach of the build, found none; install it first, then build with "
            "`pip install --no-build-isolation .`, without which pip hides the installed torch from the build"
        )
    cmake_command()


def cmake_command() -> str:
    """The cmake on PATH, or the one installed in this Python."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=sysconfig.get_path("scripts"))
    wanted = ".".join(map(str, CMAKE_LEAST))
    if cmake is None:
        fail(f"expected CMake >= {wanted}, found none; install it with your package manager or `pip install cmake`")
    text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    if not found or tuple(map(int, found.groups())) < CMAKE_LEAST:
        got = found[0] if found else "one that does not run"
        fail(f"expected CMake >= {wanted}, got {got} ({cmake}); install a newer one, for example `pip install cmake`")
    return cmake


class CMakeBuild(build_ext):
    """Configures, builds, and installs into the package: the source tree's when in place, else the wheel's."""

    def run(self) -> None:
        cmake = cmake_command()
        ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
        name = f"{sys.implementation.cache_tag}-torch{importlib.metadata.version('torch')}"
        binary_dir = ROOT / "build" / (name if ninja else name + "-make")
        self.configure(cmake, binary_dir, ninja)
        self.build(cmake, binary_dir)
        prefix = ROOT if self.inplace else Path(self.build_lib).resolve()
        subprocess.run([cmake, "--install", binary_dir, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)

    def configure(self, cmake: str, binary_dir: Path, ninja: str | None) -> None:
        cache = binary_dir / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT.as_posix()}\n" not in cache.read_text():
            shutil.rmtree(binary_dir)  # the tree was moved or copied since
        command = [cmake, "-S", str(ROOT), "-B", str(binary_dir), f"-DPython_EXECUTABLE={sys.executable}"]
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
        command += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            cache.unlink(missing_ok=True)  # it may remember what was missing
            sentence = re.search(r"mha_ext: (.+?)(?=\n\s*\n|\nCall Stack|\Z)", result.stdout, re.DOTALL)
            if sentence:
                fail(" ".join(sentence[1].split()))
            print(result.stdout, file=sys.stderr)
            fail("CMake could not configure the build; what it said is above")

    def build(self, cmake: str, binary_dir: Path) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(self.parallel or cores)
        result = subprocess.run([cmake, "--build", binary_dir, "--parallel", jobs])
        if result.returncode:
            fail("the build failed; what the compiler or the linker said is above")

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them

    def get_outputs(self) -> list[str]:
        return []  # CMake installs them

    def get_output_mapping(self) -> dict[str, str]:
        return {}


if int(setuptools.__version__.split(".")[0]) < 77:
    fail(f"expected setuptools >= 77, got {setuptools.__version__}; `pip install --upgrade setuptools`")
if BUILDING & set(sys.argv[1:]):
    check_tools()
# The extension has no sources of its own: it makes setuptools build a wheel for this platform and run CMakeBuild.
setuptools.setup(
    packages=[*setuptools.find_packages(include=["mha_ext*"]), "mha_ext._benchmarks"],
    package_dir={"mha_ext._benchmarks": "benchmarks"},  # for `python -m mha_ext bench`
    ext_modules=[setuptools.Extension("mha_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
