"""Errors a user can fix. Each message says what was given, what was expected and how to fix it, in one line.

Anything else that escapes archon is a defect of archon and keeps its traceback; the command line turns a `UserError`
into one clear line and exit code 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what was given to archon: a path, a value, a file, a combination."""


class ConfigError(UserError):
    """A configuration value that is unknown, of the wrong type, or that contradicts another.

    `field` names the field where it is known, so that a caller can report several.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, damaged or of another model; names the file and the key."""


class TokenizerError(UserError):
    """A tokenizer that is missing or lacks what the task needs (a chat template, an end-of-text token)."""


class BatchError(UserError):
    """A training batch whose fields are missing or misshapen, or a document that fits no micro-batch."""


class ImageError(UserError):
    """A picture that cannot be used, or that a prompt has no place for; names it and why."""


class DatasetError(UserError):
    """A dataset that is missing, empty or malformed; names the file and the line."""


class RewardError(UserError):
    """A reward function that is unknown or returned something other than finite numbers."""


class RolloutError(UserError):
    """A workflow or generation request that cannot be satisfied, or that always fails."""


class ContextOverflowError(RolloutError):
    """A prompt that leaves no room for an answer."""


class UnknownLoRAError(RolloutError):
    """A request for an adapter that is not loaded; names those that are."""


class LayoutError(UserError):
    """A parallel layout that breaks a rule; names the rule and the nearest legal layouts."""


class ResourceExhaustedError(UserError):
    """Memory, open files or threads that ran out; names which, and what to do."""


class NotFiniteError(ArithmeticError, UserError):
    """Weights whose logits are NaN or infinite: of a damaged checkpoint, or of a training that diverged."""


class UnknownModelError(KeyError, UserError):
    """A model type that no registered family claims; names the types that are available."""

    def __str__(self) -> str:
        # KeyError's own __str__ is the repr of the message.
        return str(self.args[0]) if self.args else ""
