"""Subcommands of `archon` and error reporting."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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
    init,
    inspect,
    launch,
    models,
    new_model,
    plan,
    report,
    serve,
    serve_training,
    train,
)
from archon.cli.examples import epilog
from archon.schema.capacity import rank_limit_error
from archon.schema.children import end_with_launcher, marked_environment
from archon.schema.config import expand_path
from archon.schema.errors import ConfigError, UserError
from archon.schema.exhausted import resource_error_message
from archon.schema.user_code import user_code

# File-system and network errors that a wrong path, name or port causes. Other errors keep their traceback.
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

MAX_WORD, MAX_MESSAGE = 400, 2500
"""Maximum characters of a word and of a message on stderr. The longest list of known keys has 2,000."""
STORE_SECONDS = 5.0  # to connect to torchrun's store
MAY_BE_EMPTY = ("--model", "--prompt", "--token")
"""Options that accept an empty value, or that have their own error for it."""

# click's base class of usage errors. Releases of typer keep it in different places.
CommandError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="archon",
    help="A model engine that trains Hugging Face checkpoints by fine-tuning and reinforcement learning.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        print(f"archon {archon.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _with_expanded_paths(command: Callable[..., None]) -> Callable[..., None]:
    """Replace `~` and environment variables in the paths among a command's arguments; name what ends the command."""

    @functools.wraps(command)
    def expanded(**arguments: Any) -> None:
        for name, value in arguments.items():
            if isinstance(value, Path):
                arguments[name] = expand_path(value)
            elif isinstance(value, tuple):
                arguments[name] = tuple(map(expand_path, value))
        # Commands return their exit code. A SystemExit therefore comes from user code, such as a loss or a metric.
        # User code and libraries start processes too.
        with marked_environment(forks=True), _written_output(), user_code("code that this command runs"):
            command(**arguments)

    return expanded


for module in (init, models, inspect, check_model, new_model, plan, convert, export, bootstrap):
    app.command(**module.SETTINGS, epilog=epilog(module.SETTINGS["name"]))(_with_expanded_paths(module.command))
for name in train.RUNS:
    app.command(**train.settings(name), epilog=epilog(name))(_with_expanded_paths(train.command(name)))
for module in (generate, evaluate, serve, serve_training, bench, launch, report, doctor):
    app.command(**module.SETTINGS, epilog=epilog(module.SETTINGS["name"]))(_with_expanded_paths(module.command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: code 0, 2 for a user error, 130 or 143 after a signal; see `exit_on_error`."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names and JSON strings may contain lone surrogates, which no encoding can write.
            stream.reconfigure(errors="backslashreplace")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _require_capacity()
        _end_with_torchrun()
    with exit_on_error(), _no_empty_cache():
        # Import the user's rewards and workflows from the current folder, as `python -m archon` does.
        with suppress(FileNotFoundError):  # the current folder was removed
            if "" not in sys.path and os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
        arguments = sys.argv[1:] if arguments is None else arguments
        _require_values(arguments)
        sys.exit(app(args=arguments, prog_name="archon", standalone_mode=False))


def _open_standard_streams() -> None:
    """Open closed descriptors 0 to 2 on /dev/null: the next file would get such a number, and prints go into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 - open until the process ends
        for stream in (sys.stdout, sys.stderr)
    )


@contextmanager
def _no_empty_cache() -> Iterator[None]:
    """Remove the folder of compiled code that `import torch._dynamo` creates in TMPDIR, if nothing was compiled."""
    is_configured = "TORCHINDUCTOR_CACHE_DIR" in os.environ
    try:
        yield
    finally:
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by torch
        if folder is not None and not is_configured:
            with suppress(OSError):  # it holds compiled code
                os.rmdir(folder)


@contextmanager
def _written_output() -> Iterator[None]:
    """Raise ConfigError if the block's standard output cannot be written; Python would only warn as it exits."""
    try:
        yield
    finally:
        failure = sys.exception()
        try:
            sys.stdout.flush()
        except OSError as reason:
            # The text stays in the buffer, so a second flush at the end of the process would fail too.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if failure is None or isinstance(failure, OSError):
                raise ConfigError(f"standard output cannot be written: {reason.strerror}") from None
        if isinstance(failure, BrokenPipeError):  # Python does not buffer with PYTHONUNBUFFERED
            raise ConfigError("standard output or a connection cannot be written: Broken pipe") from None


def _require_values(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an empty argument: an empty path would be the current folder."""
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        name, equals, value = argument.partition("=")
        is_empty = argument == "" or (name.startswith("--") and equals and not value)
        option = previous if argument == "" else name
        if is_empty and option not in MAY_BE_EMPTY:
            where = f"option {option}" if option.startswith("--") else "an argument"
            raise ConfigError(f"the value of {where} is empty; expected a value, or leave it out")


def shorten(message: str) -> str:
    """Cut long words and long messages: a rejected value may have thousands of characters."""
    message = re.sub(rf"\S{{{MAX_WORD + 1},}}", lambda word: f"{word[0][: MAX_WORD // 2]}…", message)
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"


def _end_with_torchrun() -> None:
    """End this rank when torchrun ends, which may be killed. Exit if it has already ended: its store then refuses."""
    end_with_launcher()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        try:
            socket.create_connection(address, timeout=STORE_SECONDS).close()
        except ConnectionRefusedError:
            sys.exit("archon: torchrun has ended")
        except OSError:  # the rendezvous reports it
            pass


def _require_capacity() -> None:
    """Exit if torchrun started more ranks than fit this machine, before they load PyTorch; rank 0 reports."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdecimal() and (error := rank_limit_error(int(ranks))):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"archon: {error}\n")
        sys.exit(2)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit the process if the block raises.

    A user error becomes one line on stderr and exit code 2. Any other error keeps its traceback and exits with 1, even
    if a user's workflow raised it. In a multi-process run only the first failing process reports; all exit.
    """
    try:
        yield
    except typer.Abort:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        message = user_message(error)
        if message is not None:
            # Messages from libraries and user functions may span several lines.
            message = shorten(" ".join(message.splitlines()))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from archon.parallel.failure import FailureMonitor, exit_rank

            failure = FailureMonitor.connect()
            if failure is not None:
                exit_rank(error, message, failure)
        if isinstance(error, CommandError):
            if context := getattr(error, "ctx", None):
                sys.stderr.write(f"{context.get_usage()}\nTry '{context.command_path} -h' for help.\n\n")
            sys.stderr.write(f"Error: {message}\n")
            sys.exit(error.exit_code)
        if message is None:
            raise
        sys.stderr.write(f"archon: {message}\n")
        sys.exit(2)


def user_message(error: Exception) -> str | None:
    """Return the message of a user error; None if the user cannot fix it."""
    if isinstance(error, CommandError):
        return str(error.format_message())
    if isinstance(error, UserError):
        return str(error)
    if (line := resource_error_message(error)) is not None:
        return line
    if not isinstance(error, OSError) or error.errno not in USER_ERRNOS:
        return None
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
