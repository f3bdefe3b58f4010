"""One-line messages for errors of exhausted resources: memory, open files, threads."""

from __future__ import annotations

import errno
import resource

# Phrases of PyTorch, oneDNN, the C++ library and the dynamic loader, in lower case.
MEMORY_PHRASES = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory",
    "failed to map segment from shared object",
    "storage size calculation overflowed",
)
THREAD_PHRASES = ("can't start new thread", "resource temporarily unavailable")


def resource_error_message(error: BaseException | None) -> str | None:
    """Return the exhausted resource and a remedy in one line; None for other errors.

    The context of `error` is checked too, unless it was raised `from` another error.
    """
    while error is not None:
        if (line := _message(error)) is not None:
            return line
        error = None if error.__suppress_context__ else error.__context__
    return None


def _message(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    reason = " ".join(str(error).split())
    text = reason.lower() if isinstance(error, RuntimeError | OSError | ImportError | MemoryError) else ""
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"no more files can be opened ({reason[:160]}): the limit of this process is {limit:,}; raise it "
            "(ulimit -n)"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(phrase in text for phrase in MEMORY_PHRASES):
        why = reason[:160] or "MemoryError"
        return (
            f"out of memory ({why}); free memory, raise the limit if one is set (ulimit -v), or use a smaller model, "
            "fewer tokens per micro-batch (max_tokens_per_mb) or fewer concurrent answers (max_slots)"
        )
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in THREAD_PHRASES):
        return f"no more threads can be started ({reason[:160]}); raise the limit (ulimit -u, ulimit -v)"
    return None
