"""Hostile values for every argument of every command and every leaf of every configuration."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from archon.cli import main
from archon.cli.app import app
from archon.cli.config import import_schema, leaves

LONG = "9" * 5000
NUMBERS = ["0", "-1", "1.5", "70000", "1e999", "-inf", "nan", LONG, f"-{LONG}", f"1e{LONG}", "0x10", str(10**30)]
TEXTS = ["", " ", "\t", "a\nb", "größe", "\u202e", "\udc80", "x" * 5000, "x" * 250, "%s%n", "'", '"', "`id`", "$(id)"]
PATHS = [".", "..", "/", "/dev/null", "/proc/self/mem", "~", "~nobody/x", "$NOPE", "../checkpoint", "a/../checkpoint"]
PATHS += ["{folder}/fifo", "{folder}/binary", "{folder}/link", "{folder}/loop", "{checkpoint}/inside", "{checkpoint}"]
PATHS += ["{checkpoint}/config.json", "{folder}", "{checkpoint}/../checkpoint/inside", "{dataset}", "{dataset}/inside"]
URLS = ["http://", "http://[::1", "http://x:70000/v1", "file:///etc/passwd", "ftp://x", "http://a b", "//x"]
LAYOUTS = ["d" + "1" + "0" * 30, "d0", "d-1", "d" + LONG, "d2" * 50, "d1000000007"]
YAML = [
    "0x" + "f" * 5000,
    "[",
    "{",
    "[1,",
    "{a: 1}",
    "[[]]",
    "null",
    "true",
    "[" * 2000,
    "!!python/name:os.system",
    "${x}",
    "*a",
    "a: b",
]
ARGUMENTS = [*NUMBERS, *TEXTS, *PATHS, *URLS, *LAYOUTS, "[", "{", "-", "--", "=", "a=", "=b", "a.b.c.d=1", "a=b=c"]
FIELDS = [*NUMBERS, *TEXTS, *PATHS, *URLS, *LAYOUTS, *YAML]
OVERRIDES = [
    "{key}.b.c.d=1",
    "{key}[0]=1",
    "{key}x=1",
    "{key}",
    "{key}==",
    "{key}=1 {key}=2",
    "a.b.c.d.{key}=",
    "..={key}",
]

NEW_FILES = {("report", "out"), ("check-model", "cards"), ("doctor", "stacks")}
"""Folders that may be any: they are no input, and only new files are written into them."""

SERVING = {("serve", "port"), ("serve-training", "port"), ("report", "serve")}
"""Ports: 0 is any free port, at which the command serves until it is stopped."""

SCHEMAS = {
    "sft": "archon.training.config:SFTConfig",
    "preference": "archon.training.config:PreferenceConfig",
    "rl": "archon.rl.config:RLConfig",
    "bootstrap": "archon.training.config:BootstrapConfig",
    "generate": "archon.cli.generate_config:GenerateConfig",
    "eval": "archon.cli.eval_config:EvalConfig",
    "serve": "archon.cli.serve_config:ServeConfig",
    "serve-training": "archon.cli.serve_training_config:ServeTrainingConfig",
}
CPU_SECONDS = 20
"""Longest CPU time of a case; the slowest valid one, a generation, takes 2 s."""
WALL_SECONDS = 120
"""Longest time of a case, which may wait for a process that it starts, on a busy machine."""
MAX_LINES = 5
MAX_CHARACTERS = 3000
"""Length of a message: a hostile value of 200 characters, and the names of 100 valid keys."""


def baseline(command: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return valid arguments of a command by parameter; those of positional parameters in their order."""
    checkpoint, dataset = str(inputs["checkpoint"]), str(inputs["dataset"])
    run = ["run_dir=run", f"train_data.path={dataset}", "total_steps=1"]
    arguments: dict[str, dict[str, Any]] = {
        "models": {},
        "inspect": {"path": checkpoint},
        "check-model": {"target": "qwen3", "only": "checkpoint"},
        "new-model": {"path": checkpoint, "output": "family.py"},
        "plan": {"model": checkpoint, "gpus": "2", "seq": "64", "tokens": "1024"},
        "convert": {"source": checkpoint, "target": "out", "to": "native"},
        "export": {"source": str(inputs["adapter"]), "target": "out", "base": checkpoint, "merge": True},
        "bootstrap": {"overrides": ["path=made"], "dry_run": True},
        "sft": {"overrides": [*run, f"model.path={checkpoint}"], "dry_run": True},
        "preference": {"overrides": [*run, f"model.path={checkpoint}"], "dry_run": True},
        "rl": {"overrides": [*run, f"actor.path={checkpoint}", "reward=exact_match"], "dry_run": True},
        "generate": {"path": checkpoint, "overrides": ["max_new_tokens=1"], "prompt": "1+1="},
        # The reward is missing and the port is in use: each run ends after its arguments were read.
        "eval": {"checkpoint": checkpoint, "data": dataset, "reward": "no_such_reward", "out": "out"},
        "serve": {"path": checkpoint, "port": str(inputs["port"])},
        "serve-training": {"path": checkpoint, "port": str(inputs["port"])},
        "bench": {"model": checkpoint, "seq": "64", "tokens": "64", "micro_batch": "32"},
        "report": {"run_dir": str(inputs["run_dir"]), "out": "out"},
        "doctor": {"path": checkpoint, "layout": "d2", "rank": "0", "tokens": "64", "fresh": True},
    }
    return arguments[command]


@functools.cache
def _parameters(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return list(group.commands[command].params)


def parameters(command: str) -> list[Any]:
    """Return the parameters of a command that take a value."""
    return [p for p in _parameters(command) if p.name != "help" and not getattr(p, "is_flag", False)]


def command_line(command: str, values: dict[str, Any]) -> list[str]:
    """Return the arguments of values by parameter."""
    positional, options = [], []
    for parameter in _parameters(command):
        if parameter.name not in values:
            continue
        value = values[parameter.name]
        if not parameter.opts[0].startswith("-"):
            positional += value if isinstance(value, list) else [value]
        elif value is True:
            options.append(parameter.opts[0])
        else:
            options += [parameter.opts[0], *(value if isinstance(value, list) else [value])]
    return [command, *options, *positional]


def argument_cases(command: str, inputs: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command with each hostile value in each argument."""
    base = baseline(command, inputs)
    for parameter in parameters(command):
        for value in ARGUMENTS:
            if (command, parameter.name) in NEW_FILES and "{" in value:
                continue
            if (command, parameter.name) in SERVING and value == "0":
                continue
            text = value.replace("{checkpoint}", str(inputs["checkpoint"])).replace("{folder}", str(inputs["folder"]))
            text = text.replace("{dataset}", str(inputs["dataset"]))
            hostile = [text] * max(1, parameter.nargs)
            if parameter.name == "overrides":
                hostile = [*base.get("overrides", []), text]
            yield command_line(command, base | {parameter.name: hostile})


def leaf_cases(command: str, inputs: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command with each hostile value in each leaf of its configuration."""
    base = baseline(command, inputs)
    names = leaves(import_schema(SCHEMAS[command]))
    for key in names:
        for value in FIELDS:
            text = value.replace("{checkpoint}", str(inputs["checkpoint"])).replace("{folder}", str(inputs["folder"]))
            yield _with_overrides(command, base, f"{key}={text.replace('{dataset}', str(inputs['dataset']))}")
        for override in OVERRIDES:
            yield _with_overrides(command, base, *override.format(key=key).split(" "))


def _with_overrides(command: str, base: dict[str, Any], *overrides: str) -> list[str]:
    return command_line(command, base | {"overrides": [*base.get("overrides", []), *overrides]})


@dataclass
class Result:
    """What a command did: exit code, stderr, and what is wrong with it."""

    arguments: list[str]
    code: int = 0
    err: str = ""
    faults: list[str] = field(default_factory=list)


class TooLongError(BaseException):
    """The case did not end in time; no handler of the command catches it."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TooLongError in the block after `CPU_SECONDS` of this process, or `WALL_SECONDS`."""

    def stop(number: int, frame: FrameType | None) -> None:
        limit = f"{CPU_SECONDS} s of CPU time" if number == signal.SIGPROF else f"{WALL_SECONDS} s"
        raise TooLongError(limit)

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, CPU_SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, WALL_SECONDS)}
    previous = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def captured() -> Iterator[TextIOWrapper]:
    """Replace stdout and stderr as a terminal would see them: half a surrogate pair is escaped."""
    out, err = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield err
    finally:
        sys.stdout, sys.stderr = before


def run_case(arguments: list[str], work: Path) -> Result:
    """Run the command in the folder `work`, and find tracebacks, long messages and wrong exit codes."""
    result = Result(arguments)
    with captured() as err, chdir(work):
        try:
            with time_limit():
                main(arguments)
        except SystemExit as left:
            result.code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except TooLongError as error:
            result.faults.append(f"did not end within {error}")
        except BaseException as error:  # noqa: BLE001 - reported as a fault
            result.faults.append(f"traceback: {type(error).__name__}: {str(error)[:300]}")
        assert isinstance(err.buffer, BytesIO)
        result.err = err.buffer.getvalue().decode()
    lines = [line for line in result.err.splitlines() if line.strip()]
    if "Traceback" in result.err:
        result.faults.append("a traceback on stderr")
    if result.code not in (0, 2):
        result.faults.append(f"exit code {result.code}")
    if result.code == 2 and (not lines or len(lines) > MAX_LINES or len(result.err) > MAX_CHARACTERS):
        result.faults.append(f"{len(lines)} lines of {len(result.err)} characters")
    return result


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything below a folder."""
    found = {}
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            state = os.lstat(os.path.join(path, name))
            is_folder = name in folders
            found[os.path.join(path, name)] = (0, 0) if is_folder else (state.st_size, state.st_mtime_ns)
    return found


def changes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> Sequence[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
