"""Programs that tests run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout
