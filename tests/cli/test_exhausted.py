"""What runs out is named in one line: in a process of its own with a limit, and by what the libraries say."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.schema.exhausted import resource_error_message

LIMITED = (
    "import resource, sys; resource.setrlimit(resource.{limit}, ({value},) * 2); from archon.cli import main; main()"
)


def limited(limit: str, value: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`archon ARGUMENTS…` in a process that may have so much."""
    command = [sys.executable, "-c", LIMITED.format(limit=limit, value=value), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    [line] = done.stderr.splitlines()
    return line


def test_memory_that_does_not_hold_the_libraries_is_named():
    said = complaint(limited("RLIMIT_AS", 400 * 2**20, "models"))
    assert said.startswith("archon: out of memory (") and "ulimit -v" in said


@pytest.mark.slow
def test_output_that_cannot_be_written_is_named():
    read, closed = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for stream, reason in ((closed, "Broken pipe"), (full, "No space left on device")):
        command = [sys.executable, "-m", "archon", "models"]
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=300, check=False, env=buffered
        )
        os.close(stream)
        assert complaint(done) == f"archon: standard output cannot be written: {reason}"


@pytest.mark.slow
def test_closed_standard_streams_lose_only_what_is_printed(checkpoint: Path):
    target = checkpoint.parent / "native"

    def without(streams: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", f'exec "$0" -m archon "$@" {streams}', sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    done = without("<&- >&- 2>&-", "convert", checkpoint, target, "--to", "native")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and target.is_dir()
    done = without("2>&-", "inspect", checkpoint.parent / "missing")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.slow
def test_a_checkpoint_of_more_files_than_may_be_open_is_named(checkpoint: Path):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, checkpoint / weight_map[name])
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    said = complaint(limited("RLIMIT_NOFILE", 16, "convert", checkpoint, checkpoint.parent / "out", "--to", "native"))
    assert f"archon: {checkpoint}/model-" in said and "cannot be read: no more files can be opened" in said
    assert "the limit of this process is 16; raise it (ulimit -n)" in said
    assert not (checkpoint.parent / "out").exists()


def test_an_allocation_of_pytorch_is_named():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    said = resource_error_message(caught.value)
    assert said is not None and said.startswith("out of memory (") and "allocate" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory (MemoryError)"),
        (RuntimeError("could not create a primitive"), "out of memory (could not create a primitive)"),
        (RuntimeError("CUDA out of memory. Tried"), "out of memory (CUDA out of memory. Tried)"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "out of memory ([Errno 12] Cannot allocate memory)"),
        (OSError(errno.EMFILE, "Too many open files"), "no more files can be opened"),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), "no more files can be opened"),
        (RuntimeError("can't start new thread"), "no more threads can be started (can't start new thread)"),
    ],
)
def test_what_libraries_say_is_understood(error: Exception, said: str):
    assert str(resource_error_message(error)).startswith(said)


def fail_while_failing() -> None:
    try:
        raise OSError(errno.EMFILE, "Too many open files")
    finally:
        raise AttributeError("what close() did not find")


def fail_for_a_reason() -> None:
    try:
        raise OSError(errno.EMFILE, "Too many open files")
    except OSError as error:
        raise AttributeError("said on purpose") from error


def test_an_error_while_another_was_handled_is_of_that_one():
    with pytest.raises(AttributeError) as caught:
        fail_while_failing()
    assert "no more files" in str(resource_error_message(caught.value))
    with pytest.raises(AttributeError) as caught:
        fail_for_a_reason()
    assert resource_error_message(caught.value) is None


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyError("x"), RuntimeError("shape mismatch"), None])
def test_other_errors_keep_their_traceback(error: Exception | None):
    assert resource_error_message(error) is None
