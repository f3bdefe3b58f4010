"""Guards around user code: `sys.exit` and similar exceptions become one-line errors and do not end the process.

`os._exit` and a crash cannot be caught inside a process; rewards therefore run in worker processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from archon.schema.errors import ResourceExhaustedError, UserError
from archon.schema.exhausted import resource_error_message

LEAVING = (SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration, StopAsyncIteration, RecursionError)
"""Exceptions that `except Exception`, a loop or a generator would miss, or that have tracebacks of thousands of lines.

`KeyboardInterrupt` is not among them: the user's Ctrl-C raises it too, and ends a command with one line.
"""

CONTAINED = (*LEAVING, RuntimeError, MemoryError)
"""Exceptions that `raise_in_one_line` takes."""


class ExitError(UserError):
    """User code that called `sys.exit` or raised another exception that ends a process or a task."""


def exit_message(what: str, error: BaseException) -> str:
    """Return the message for user code that ended with `error`: the exception, and its line in the code."""
    name = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{what} ended with {name:.200}{place}; return, or raise an exception that says what is wrong"


@contextmanager
def user_code(what: str, error: type[UserError] = ExitError) -> Iterator[None]:
    """Convert exceptions of `LEAVING` and MemoryError inside the block to one-line errors; see `raise_in_one_line`."""
    try:
        yield
    except CONTAINED as left:
        raise_in_one_line(left, what, error)


def raise_in_one_line(
    left: BaseException, what: str, error: type[UserError] = ExitError, *, in_task: bool = False
) -> NoReturn:
    """Raise a one-line error for an exception of user code; raise an ordinary exception unchanged.

    Args:
        left: an exception of `CONTAINED`.
        what: the code, for the message: "dataset function my.rows".
        error: class of the error.
        in_task: the code is part of a coroutine, whose cancellation and end are not errors.

    Raises:
        UserError: the class `error`, for an exception of `LEAVING`.
        ResourceExhaustedError: for a MemoryError.
    """
    if in_task and is_ended(left):
        raise left
    if isinstance(left, MemoryError):
        raise ResourceExhaustedError(f"{what}: {resource_error_message(left)}") from left
    # Python turns a StopIteration that leaves a coroutine or a generator into a RuntimeError.
    cause = left.__cause__ if isinstance(left.__cause__, StopIteration | StopAsyncIteration) else left
    if not isinstance(cause, LEAVING):
        raise left
    raise error(exit_message(what, cause)) from left


def is_ended(error: BaseException) -> bool:
    """Return whether `error` reached a coroutine because its task was canceled, or it was closed without a loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return isinstance(error, GeneratorExit)
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
