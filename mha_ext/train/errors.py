"""The one error that the command shows to its user."""


class TrainError(Exception):
    """Something the user can put right; its text is one sentence, printed without a traceback (exit code 2)."""
