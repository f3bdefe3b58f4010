"""The list of subcommands, and how errors are reported."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

import archon
from archon.cli import (
    bench,
    bootstrap,
    check_model,
    convert,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    models,
    new_model,
    plan,
    report,
    serve,
    train,
)
from archon.schema.errors import UserError
from archon.schema.exhausted import resource_error_message

# Errors of the file system or network that a wrong path, name or port causes; any other keeps its traceback.
USER_ERRNOS = {
    errno.EACCES,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
}

# click's base of errors in how a command is called, which releases of typer keep in different places.
CommandError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="archon",
    help="A model engine that trains Hugging Face checkpoints by fine-tuning and reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(value: bool) -> None:
    if value:
        print(f"archon {archon.__version__}")
        raise typer.Exit


@app.callback()
def root_callback(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for module in (models, inspect, check_model, new_model, plan, convert, export, bootstrap):
    app.command(**module.SETTINGS)(module.command)
for name in train.RUNS:
    train.add_command(app, name)
for module in (generate, evaluate, serve, bench, report, doctor):
    app.command(**module.SETTINGS)(module.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave the process: exit code 0, 2 for a user's mistake, 130 / 143 when a signal ended it.

    See `exit_on_error` for what is written of an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The name of a file, or a text of its JSON, may hold what no encoding writes.
            stream.reconfigure(errors="backslashreplace")
    with exit_on_error():
        # The user's own rewards and workflows are imported from the current folder, as with `python -m archon`.
        with suppress(FileNotFoundError):  # the current folder was removed
            if "" not in sys.path and os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
        sys.exit(app(args=arguments, prog_name="archon", standalone_mode=False))


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process where an error leaves the block.

    A user's mistake becomes one line on stderr and exit code 2. Any other error, also one that a user's workflow raised
    for every prompt, keeps its traceback and exits with 1. Of several processes only the first to fail reports why, and
    all end.
    """
    try:
        yield
    except typer.Abort:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        message = user_message(error)
        if message is not None:
            # What a library or a user's function said may have lines of its own.
            message = " ".join(message.splitlines())
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from archon.parallel.failure import FailureMonitor, exit_rank

            failure = FailureMonitor.connect()
            if failure is not None:
                exit_rank(error, message, failure)
        if isinstance(error, CommandError):
            error.show()
            sys.exit(error.exit_code)
        if message is None:
            raise
        sys.stderr.write(f"archon: {message}\n")
        sys.exit(2)


def user_message(error: Exception) -> str | None:
    """Return the one line a user should read, or None when the error is not the user's to fix."""
    if isinstance(error, CommandError):
        return str(error.format_message())
    if isinstance(error, UserError):
        return str(error)
    if (line := resource_error_message(error)) is not None:
        return line
    if not isinstance(error, OSError) or error.errno not in USER_ERRNOS:
        return None
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
