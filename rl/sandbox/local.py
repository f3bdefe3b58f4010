"""`Sandbox` runs programs on this machine, isolated by bubblewrap, by Linux namespaces, or by resource limits alone.

A worker is an interpreter inside the isolation, started once, that forks a process for each program (`inside/`). Each
program has its own process, mount and IPC namespaces, its own /proc, and an empty /tmp in memory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from archon.rl.sandbox.inside import launch
from archon.rl.sandbox.programs import Content, Limits, Result, limits_as_json, program_as_json
from archon.schema.children import start_child
from archon.schema.errors import SandboxError

Isolation = Literal["bubblewrap", "namespaces", "rlimits"]
MACHINES = ("x86_64", "aarch64")
"""Processors whose system calls `inside/kernel.py` knows."""
LEVELS: tuple[Isolation, ...] = get_args(Isolation)
"""The isolations, the strongest first."""

START_SECONDS = 20.0  # of a worker
_GRACE_SECONDS = 5.0  # after the wall limit, for a supervisor to report; then its worker is killed
_CLOSE_SECONDS = 2.0  # for a worker to end by itself
_READ_BYTES = 1 << 16
_MAX_REPLY_BYTES = 1 << 16
_HELPERS = 3  # processes of the user namespace besides the program's: two of the worker, and the supervisor
_INSIDE = Path(__file__).parent / "inside"
_CODE = ("__init__.py", "kernel.py", "supervisor.py", "worker.py")
# `full` reads zeros too, and cannot be mapped: the limit does not count shared mappings of `zero`.
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
_LINKS = (("/proc/self/fd", "fd"), ("/proc/self/fd/0", "stdin"), ("/proc/self/fd/1", "stdout"))
_warned = False


class Sandbox:
    """Pool of workers that run untrusted programs, each in a new private folder.

    Programs have no network, no environment variables of this process and, except with `rlimits`, no files but the
    system's and Python's, read-only. Several threads may call `run`. `SECURITY.md` states what each isolation holds
    off.

    Args:
        limits: limits of a program, unless `run` gets others.
        workers: maximum number of concurrent programs; None: the number of CPUs.
        isolation: `bubblewrap`, `namespaces` or `rlimits`; None: the first of them that works on this machine, with a
            printed warning for `rlimits`.
        readable: further folders of this machine that programs may read, at the same path.

    Raises:
        SandboxError: the isolation does not work here.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        workers: int | None = None,
        isolation: Isolation | None = None,
        readable: Sequence[str | Path] = (),
    ) -> None:
        if sys.platform != "linux" or platform.machine() not in MACHINES:
            raise SandboxError(
                f"the sandbox needs Linux on {' or '.join(MACHINES)}, this is {platform.system()} on "
                f"{platform.machine()}; run programs elsewhere with RemoteSandbox (ARCHON_SANDBOX_URL)"
            )
        if workers is not None and workers < 1:
            raise SandboxError(f"workers: got {workers!r}, expected at least 1")
        if isolation is not None and isolation not in LEVELS:
            raise SandboxError(f"isolation: got {isolation!r}, expected one of {', '.join(LEVELS)}")
        for folder in readable:
            if not Path(folder).is_absolute() or not Path(folder).is_dir():
                raise SandboxError(f"readable: {str(folder)!r:.200} is no folder with an absolute path")
            if Path(folder).resolve().is_relative_to("/tmp"):
                raise SandboxError(f"readable: {str(folder)!r:.200} is in /tmp, which is empty in the sandbox; move it")
        self.limits = limits or Limits()
        self._readable = tuple(str(folder) for folder in readable)
        self._owner = os.getpid()
        self._free = threading.Semaphore(workers or len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False
        self.isolation = self._first_working((isolation,) if isolation else LEVELS)

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, Content] | None = None,
        stdin: Content = "",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program in a new folder with `files`, and return how it ended. Its processes have ended then.

        `python FILE …` runs in an interpreter that has already started; the standard library is importable.

        Args:
            argv: program and arguments; relative paths start at the folder.
            files: content of the folder by relative path.
            stdin: standard input.
            limits: limits of this program.

        Raises:
            SandboxError: an argument is invalid, the sandbox is closed, or its worker fails.
        """
        limits = limits or self.limits
        request = program_as_json(argv, files, stdin, limits)
        with self._free:
            worker = self._take()
            try:
                result = worker.run(json.dumps(request).encode(), limits)
            except BaseException:
                worker.kill()
                raise
            self._put(worker)
        return result

    def close(self) -> None:
        """End the idle workers. A program that runs goes on up to its limits, and its worker ends after it."""
        with self._lock:
            self._closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self) -> _Worker:
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox belongs to another process; create one in this one")
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed; create another")
            if self._idle:
                return self._idle.pop()
        return _Worker(self.isolation, self._readable)

    def _put(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive and not self._closed:
                self._idle.append(worker)
                return
        worker.kill()

    def _first_working(self, levels: Sequence[Isolation]) -> Isolation:
        """Return the first isolation in which a program runs; keep its worker."""
        global _warned
        reasons = []
        for level in levels:
            try:
                worker = _Worker(level, self._readable)
            except SandboxError as error:
                reasons.append(str(error))
                continue
            self._idle.append(worker)
            if level == "rlimits" and len(levels) > 1 and not _warned:
                _warned = True
                print(
                    "archon: warning: programs of the sandbox can read this machine's files and signal this user's "
                    f"processes, as only the isolation rlimits works here ({'; '.join(reasons)})",
                    file=sys.stderr,
                )
            return level
        raise SandboxError("; ".join(reasons))


class _Worker:
    """Worker process, from this side. It runs one program at a time."""

    def __init__(self, isolation: Isolation, readable: Sequence[str]) -> None:
        self.alive = True
        self._isolation = isolation
        self._control, theirs = socket.socketpair()
        python = interpreter()
        setup: dict[str, Any] = {
            "isolation": isolation,
            "python": python,
            "folder": str(_INSIDE.parent),
            # Root's own process in its namespaces is not counted.
            "helpers": _HELPERS - (isolation == "namespaces" and os.geteuid() == 0),
            "layout": [] if isolation == "rlimits" else _layout(python, readable),
            "environment": _environment(python, isolation),
        }
        options = ["-E", "-s", "-S", "-c", launch.start("launch")]
        with theirs:
            self._process = start_child(
                [python, *options, str(_INSIDE.parent), str(theirs.fileno()), json.dumps(setup)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        self._control.settimeout(START_SECONDS)
        try:
            if self._control.recv(1) == b"r":
                self._try_it()
                return
            reason = self._last_words()
        except TimeoutError:
            reason = f"its worker did not start within {START_SECONDS:g} s"
        except SandboxError as error:
            reason = str(error)
        self.kill()
        raise SandboxError(f"isolation {isolation} does not work here: {reason}")

    def _try_it(self) -> None:
        """Run a program that uses the standard library; raise `SandboxError` unless it succeeds."""
        limits = Limits(wall_seconds=START_SECONDS)
        files = {"try.py": base64.b64encode(b"import subprocess; subprocess.run('true', check=True)").decode()}
        request = {"argv": ["python", "try.py"], "files": files, "stdin": "", "limits": limits_as_json(limits)}
        result = self.run(json.dumps(request).encode(), limits)
        if not result.ok:
            error = (result.stderr.strip().splitlines() or ["without a message"])[-1]
            raise SandboxError(f"a test program ended with {result.limit or result.exit_code}: {error[:200]}")

    def run(self, request: bytes, limits: Limits) -> Result:
        """Run one program. The worker is dead afterwards if it did not report in time."""
        channel, theirs = socket.socketpair()
        (output, their_output), (errors, their_errors) = os.pipe(), os.pipe()
        started = time.monotonic()
        try:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"p"], [theirs.fileno(), their_output, their_errors])
                except OSError:
                    raise SandboxError(f"the sandbox's worker ended: {self._last_words()}") from None
                finally:
                    os.close(their_output)
                    os.close(their_errors)
            channel.settimeout(limits.wall_seconds + _GRACE_SECONDS)
            with contextlib.suppress(OSError):  # the supervisor has ended; its missing reply is reported below
                channel.sendall(len(request).to_bytes(4, "big") + request)
            return self._collect(channel, (output, errors), limits, started)
        finally:
            channel.close()
            os.close(output)
            os.close(errors)

    def _collect(self, channel: socket.socket, pipes: tuple[int, int], limits: Limits, started: float) -> Result:
        """Read output and reply until the program's processes have ended."""
        texts = {descriptor: bytearray() for descriptor in pipes}
        left, too_long, reply, done = limits.output_bytes, False, bytearray(), False
        deadline = started + limits.wall_seconds + _GRACE_SECONDS
        with selectors.DefaultSelector() as selector:
            for source in (channel, self._control, *pipes):
                selector.register(source, selectors.EVENT_READ)
            while not done or (len(selector.get_map()) > 1 and not too_long):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.kill()  # the machine is too busy for the supervisor, or the supervisor was killed
                    return _result(None, "wall_seconds", texts, pipes, time.monotonic() - started)
                for key, _ in ready:
                    if key.fileobj is self._control:
                        selector.unregister(self._control)
                        done = True
                        self.alive = self._control.recv(1) == b"d"
                    elif key.fileobj is channel:
                        data = channel.recv(_READ_BYTES)
                        reply += data
                        if not data or len(reply) > _MAX_REPLY_BYTES:
                            selector.unregister(channel)
                    else:
                        data = os.read(key.fd, _READ_BYTES)
                        texts[key.fd] += data[:left]
                        if len(data) > left and not too_long:
                            too_long = True
                            channel.shutdown(socket.SHUT_RDWR)  # the supervisor ends with the channel
                            deadline = time.monotonic() + _GRACE_SECONDS
                        left = max(0, left - len(data))
                        if not data or too_long:
                            selector.unregister(key.fd)
        seconds = time.monotonic() - started
        if too_long:
            return _result(None, "output_bytes", texts, pipes, seconds)
        try:
            outcome = json.loads(bytes(reply[4:]))
        except ValueError:
            self.kill()
            raise SandboxError("the supervisor of a program ended without a report") from None
        if "error" in outcome:
            raise SandboxError(f"a program could not start: {outcome['error']}")
        return _result(outcome["exit_code"], outcome["limit"], texts, pipes, outcome["seconds"])

    def _last_words(self) -> str:
        """Return the last line of what the worker wrote before it ended."""
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it ended without a message"

    def kill(self) -> None:
        """End the worker and everything in it."""
        self.alive = False
        self._control.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _result(
    code: int | None, limit: str | None, texts: dict[int, bytearray], pipes: tuple[int, int], seconds: float
) -> Result:
    output, errors = (texts[pipe].decode(errors="replace") for pipe in pipes)
    return Result(code, limit, output, errors, seconds)


def interpreter() -> str:
    """Return the Python of programs: the one that this process runs, without its virtual environment."""
    return os.path.realpath(f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}")


def _environment(python: str, isolation: Isolation) -> dict[str, str]:
    folder = os.path.dirname(python) if isolation == "rlimits" else f"{launch.FOLDER}/bin"
    return {
        "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # a program gives the same output each time
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _layout(python: str, readable: Sequence[str]) -> list[list[str]]:
    """Return the file system of programs: entries of a kind, a source or a content, and a path."""
    layout = [["dir", path] for path in ("/tmp", "/proc", "/dev")]
    prefix = os.path.realpath(sys.base_prefix)
    folders = ["/usr", *([] if prefix.startswith("/usr/") or prefix == "/usr" else [prefix]), *readable]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives"):
        if os.path.islink(path):
            layout.append(["symlink", os.readlink(path), path])
        elif os.path.isdir(path):
            folders.append(path)
    layout += [["bind", path, path] for path in folders]
    layout += [["device", f"/dev/{source}", f"/dev/{name}"] for name, source in _DEVICES.items()]
    layout += [["symlink", target, f"/dev/{name}"] for target, name in (*_LINKS, ("/proc/self/fd/2", "stderr"))]
    layout += [["symlink", "/tmp", "/dev/shm"]]
    layout += [
        ["file", "sandbox:x:1000:1000::/tmp:/bin/sh\n", "/etc/passwd"],
        ["file", "sandbox:x:1000:\n", "/etc/group"],
    ]
    layout += [["symlink", python, f"{launch.FOLDER}/bin/{name}"] for name in ("python", "python3")]
    return layout + [
        ["file", (_INSIDE / name).read_text(encoding="utf-8"), f"{launch.FOLDER}/inside/{name}"] for name in _CODE
    ]
