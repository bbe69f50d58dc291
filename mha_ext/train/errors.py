"""The errors that the command shows to its user."""

from __future__ import annotations

import reprlib

from ..cli import CommandError


class TrainError(CommandError):
    """Something the user can put right; its text is one sentence, printed without a traceback (exit code 2)."""


class Diverged(TrainError):
    """A loss is not finite any more. The run, which knows what is saved, completes the sentence."""


def shown(value: object) -> str:
    """A value that may be anything, on one short line."""
    return " ".join(reprlib.repr(value).split())
