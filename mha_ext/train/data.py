"""Text, its split into a training and a held-out part, and batches of windows for the decoder.

A batch is a pure function of (seed, step): a resumed run sees the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import TrainError
from .model import FIRST_CHARACTER, UNKNOWN

HELD_OUT_LIMIT = 50_000  # characters evaluated at most; a longer held-out part is sampled evenly
HELD_OUT_BATCH = 64  # sequences at once
HELD_OUT_SAMPLE = 16  # sequences in which heads are looked at


@dataclass
class Batch:
    """Inputs of a model's forward, and the targets (B, L) int64 it should predict, UNKNOWN where nothing counts."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    @property
    def tokens(self) -> int:
        return int((self.targets != UNKNOWN).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(tuple(x.to(device) for x in self.inputs), self.targets.to(device))


def step_seed(seed: int, step: int) -> int:
    """The seed of everything random in one step."""
    return (seed * 1_000_003 + step) % 2**63


def read_text(paths: Sequence[str]) -> str:
    """The UTF-8 files one after the other, or the text that ships with Python when there are none."""
    text = "\n".join(read_file(path) for path in paths) if paths else python_topics()
    if not text.strip():
        raise TrainError(f"the text is empty: {', '.join(paths)}")
    return text


def read_file(path: str) -> str:
    if not path:  # to the system an empty name is the folder at hand
        raise TrainError("--text: expected the name of a file, got ''")
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start})") from None
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # a name with a null character
        raise TrainError(f"cannot read {path!r}: {error}") from None


def python_topics() -> str:
    """Python's language reference as `help()` shows it, topics in alphabetical order.

    Many topics quote others, so a paragraph that came before is left out: what is held out was never trained on.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TrainError("this Python lacks pydoc_data/topics.py, the default text: name a file with --text") from None
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values())


def fingerprint(text: str) -> str:
    """Tells a resumed run whether it has the text it began with."""
    return hashlib.sha256(text.encode()).hexdigest()


def vocabulary(text: str) -> str:
    """The distinct characters of a text, sorted."""
    return "".join(sorted(set(text)))


def encode(text: str, characters: str) -> Tensor:
    """Ids (L,) int64 as CharacterModel.encode gives them, for a long text and sorted characters."""
    known, sought = code_points(characters), code_points(text)
    places = torch.searchsorted(known, sought).clamp(max=len(known) - 1)
    return torch.where(known[places] == sought, places + FIRST_CHARACTER, UNKNOWN)


def code_points(text: str) -> Tensor:
    """(L,) int32 for a text that is not empty."""
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)


def split(text: str) -> tuple[str, str]:
    """The text to train on and the tenth at its end that is held out, cut between lines where there are any."""
    cut = len(text) - len(text) // 10
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return text[:cut], text[cut:]


class Windows:
    """Windows of `context` characters, each with the same window one character on as its targets."""

    def __init__(self, text: str, context: int, batch_size: int, seed: int) -> None:
        training_text, self.held_out_text = split(text)
        if len(training_text) <= context or len(self.held_out_text) < 2:
            raise TrainError(
                f"the text is too short for --context {context}: it has {len(training_text)} characters to train on "
                f"and {len(self.held_out_text)} held out"
            )
        self.characters = vocabulary(training_text)
        self.training = encode(training_text, self.characters)
        self.held_out = encode(self.held_out_text, self.characters)
        self.context, self.batch_size, self.seed = context, batch_size, seed

    def training_batch(self, step: int) -> Batch:
        """batch_size windows from anywhere in the training text."""
        generator = torch.Generator().manual_seed(step_seed(self.seed, step))
        starts = torch.randint(len(self.training) - self.context, (self.batch_size, 1), generator=generator)
        windows = self.training[starts + torch.arange(self.context + 1)]
        return Batch((windows[:, :-1].contiguous(),), windows[:, 1:].contiguous())

    def held_out_batches(self) -> Iterator[Batch]:
        """The held-out text in windows that do not overlap, or as many of them, evenly spread, as the limit allows."""
        most = max(1, HELD_OUT_LIMIT // self.context)
        for windows in self.held_out_windows(most).split(HELD_OUT_BATCH):
            yield Batch((windows[:, :-1].contiguous(),), windows[:, 1:].contiguous())

    def held_out_sample(self) -> Batch:
        """A few windows of the held-out text, evenly spread."""
        windows = self.held_out_windows(HELD_OUT_SAMPLE)
        return Batch((windows[:, :-1].contiguous(),), windows[:, 1:].contiguous())

    def held_out_windows(self, most: int) -> Tensor:
        """(N, length + 1), N <= most"""
        length = min(self.context, len(self.held_out) - 1)
        count = (len(self.held_out) - 1) // length
        used = min(count, most)
        starts = torch.arange(used) * count // used * length
        return self.held_out[starts.unsqueeze(1) + torch.arange(length + 1)]

    def describe(self) -> str:
        unknown = int((self.held_out == UNKNOWN).sum())
        note = f", of which {unknown:,} do not occur in it and are not scored" if unknown else ""
        return (
            f"{len(self.training):,} characters to train on, {len(self.characters)} distinct; "
            f"the {len(self.held_out):,} after them held out{note}"
        )
