"""Everything that a run is told, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch

from .attention import ATTENTION_NAMES
from .errors import TrainError, shown

MODEL_NAMES = ("decoder", "seq2seq")
DIVERSITY_KINDS = ("redundancy", "outputs", "positions", "subspaces", "js")  # of mha_ext.heads.diversity

# annotation of a setting -> the types of its values; no subclasses, so that True is no number
TYPES: dict[str, list[type]] = {
    "str": [str],
    "list[str]": [list],
    "int": [int],
    "float": [float, int],
    "int | None": [int, type(None)],
}


@dataclass(frozen=True)
class Settings:
    """What a checkpoint remembers. `--help` explains each; the defaults suit a few minutes on two CPU cores."""

    model: str = "decoder"
    attention: str = "mha_ext"
    text: list[str] = field(default_factory=list)  # files; none: the text that ships with Python
    context: int = 128
    d_model: int = 128
    heads: int = 4
    layers: int = 4
    dropout: float = 0.0
    steps: int = 600
    batch_size: int = 16
    lr: float = 6e-3
    seed: int = 0
    eval_every: int = 100
    checkpoint_every: int = 100
    threads: int | None = None  # None: as PyTorch chooses
    device: str = "cpu"
    head_diversity: float = 0.0
    head_diversity_kind: str = "redundancy"

    def check(self) -> None:
        """Raises TrainError for a value that no run can have; one from a checkpoint may be of any type."""
        for f in fields(self):
            self._check_rule(f.name, f"a value of type {f.type}", type(getattr(self, f.name)) in TYPES[str(f.type)])
        self._check_rule("text", "names of files", all(type(name) is str for name in self.text))
        self._check_choice("model", MODEL_NAMES)
        self._check_choice("attention", ATTENTION_NAMES)
        self._check_choice("head_diversity_kind", DIVERSITY_KINDS)
        for name in ("d_model", "heads", "layers", "steps", "batch_size", "eval_every", "checkpoint_every"):
            self._check_range(name, 1, 2**31 - 1)
        self._check_range("context", 2, 2**31 - 1)
        self._check_range("seed", 0, 2**63 - 1)
        if self.threads is not None:
            self._check_range("threads", 1, 1024)
        self._check_rule("dropout", "at least 0 and below 1", 0 <= self.dropout < 1)
        self._check_rule("lr", "above 0 and finite", self.lr > 0 and math.isfinite(self.lr))
        self._check_rule("head_diversity", "at least 0 and finite", 0 <= self.head_diversity < math.inf)
        needs_ours = self.head_diversity > 0 and self.attention != "mha_ext"
        self._check_rule("head_diversity", f"0 with --attention {self.attention}", not needs_ours)
        if self.d_model % self.heads:
            raise TrainError(f"--d-model {self.d_model} is not divisible by --heads {self.heads}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check_rule(name, "one of " + ", ".join(choices), getattr(self, name) in choices)

    def _check_range(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        self._check_rule(name, f"at least {least}" if value < least else f"at most {most}", least <= value <= most)

    def _check_rule(self, name: str, rule: str, holds: bool) -> None:
        if not holds:
            raise TrainError(f"{option(name)}: expected {rule}, got {shown(getattr(self, name))}")

    def torch_device(self) -> torch.device:
        """The device, after putting a tensor there and reading it back."""
        try:
            device = torch.device(self.device)
            torch.ones(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError):
            raise TrainError(f"--device {self.device} is not available to this PyTorch ({torch.__version__})") from None
        return device


# A run cannot change these when it goes on: another value would be another model or another curve.
FIXED = ("model", "context", "d_model", "heads", "layers", "batch_size", "seed")

# Sizes with which the sequence-to-sequence task fills the same few minutes.
MODEL_DEFAULTS: dict[str, dict[str, object]] = {
    "decoder": {},
    "seq2seq": {"context": 48, "layers": 2, "batch_size": 32, "steps": 1000},
}

# Settings that older checkpoints lack; their defaults are what runs did before.
ADDED_LATER = {name: getattr(Settings(), name) for name in ("head_diversity", "head_diversity_kind")}

SETTING_NAMES = tuple(f.name for f in fields(Settings))


def option(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")
