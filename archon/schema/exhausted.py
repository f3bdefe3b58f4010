"""What a machine or a limit has run out of, said in one line: memory, open files, threads."""

from __future__ import annotations

import errno
import resource

# What PyTorch, oneDNN, the C++ library and the dynamic loader say of memory, in lower case.
OF_MEMORY = (
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
OF_FILES = "too many open files"
OF_THREADS = ("can't start new thread", "resource temporarily unavailable")


def what_ran_out(error: BaseException | None) -> str | None:
    """One line that names what ran out and what to do, or None where `error` is of something else.

    An error that came up while another was handled, and not on purpose (`raise … from`), is of what that one is of.
    """
    while error is not None:
        if (line := _of_one(error)) is not None:
            return line
        error = None if error.__suppress_context__ else error.__context__
    return None


def _of_one(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    said = " ".join(str(error).split())
    text = said.lower() if isinstance(error, RuntimeError | OSError | ImportError | MemoryError) else ""
    if number in (errno.EMFILE, errno.ENFILE) or OF_FILES in text:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"no further file can be opened ({said[:160]}), for this process may have {limit:,} open; raise the limit "
            "(ulimit -n)"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(words in text for words in OF_MEMORY):
        why = said[:160] or "an object found no room"
        return (
            f"memory ran out ({why}); free some, raise the limit where one is set (ulimit -v), or take a smaller "
            "model, fewer tokens at a time (max_tokens_per_mb) or fewer answers at a time (max_slots)"
        )
    if isinstance(error, RuntimeError) and any(words in text for words in OF_THREADS):
        return f"no further thread can be started ({said[:160]}); raise the limit (ulimit -u, ulimit -v)"
    return None
