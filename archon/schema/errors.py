"""Errors that a user can fix. Each message is one line: the received value, the expectation and the fix.

The command line prints a `UserError` as one line with exit code 2. Any other error is a bug of archon and keeps its
traceback.
"""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class UserError(ValueError):
    """User error in a path, a value, a file or a combination of options."""


class ConfigError(UserError):
    """Unknown or invalid configuration value, or a contradiction between values.

    Attributes:
        field: the name of the field, if known, so that a caller can report several errors.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(UserError):
    """Missing, incomplete, damaged or unsuitable checkpoint; the message names the file and the key."""


class TokenizerError(UserError):
    """Missing tokenizer, or a tokenizer without a chat template or end token that the task needs."""


class BatchError(UserError):
    """Training batch with missing or misshapen fields, or with a document longer than a micro-batch."""


class ImageError(UserError):
    """Unusable image, or an image without a placeholder in the prompt."""


class DatasetError(UserError):
    """Missing, empty or malformed dataset; the message names the file and the line."""


class RewardError(UserError):
    """Unknown reward function, or a reward that is not a finite number."""


class SandboxError(UserError):
    """Program that the sandbox cannot run: an invalid argument, or an isolation that does not work here."""


class RolloutError(UserError):
    """Workflow or generation request that cannot be satisfied, or that always fails."""


class ContextOverflowError(RolloutError):
    """Prompt that leaves no tokens for an answer."""


class UnknownLoRAError(RolloutError):
    """Request for a LoRA that is not loaded; the message names the loaded ones."""


class LayoutError(UserError):
    """Illegal parallel layout; the message names the broken rule and the nearest legal layouts."""


class FamilyError(UserError):
    """Code of a model family that breaks its contract; the message names the class or the function."""


class ResourceExhaustedError(UserError):
    """Memory, open files or threads are exhausted; the message names the resource and a remedy."""


class NotFiniteError(ArithmeticError, UserError):
    """NaN or infinite logits: a damaged checkpoint, or training that diverged."""


class UnknownModelError(KeyError, UserError):
    """Model type without a registered family; the message names the available types."""

    def __str__(self) -> str:
        # KeyError.__str__ returns the repr of the message.
        return str(self.args[0]) if self.args else ""
