"""Supervisor of one program: starts it under its limits, watches what it uses, and reports how it ended.

With namespaces, the supervisor is process 1 of the program's own process namespace: the kernel kills every other
process of it when the supervisor ends.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from . import kernel

LENGTH = struct.Struct(">I")
LOOK_SECONDS = 0.02
"""Seconds between two looks at the memory, CPU time and number of processes of a program."""
_SHARED_BYTES = 1 << 30  # address space beyond the memory limit, for shared and reserved mappings
_OPEN_FILES = 256
_STACK_BYTES = 64 << 20
_INODES = 8192
_TICK = os.sysconf("SC_CLK_TCK")
USER = 1000
"""User and group of programs, inside the sandbox."""
UNPRIVILEGED = 65534
"""User and group, outside the sandbox, of programs that root starts."""


def supervise(channel: socket.socket, output: int, errors: int, setup: dict[str, Any], folder: str) -> dict[str, Any]:
    """Read a request from `channel`, run it and exit. Returns only in the program's own process, with the request."""
    only_rlimits = setup["isolation"] == "rlimits"
    if only_rlimits:
        kernel.adopt_orphans()  # they count for the program's limits
    request = _receive(channel)
    pid = None
    try:
        stdin = _write_files(request, folder)
        started = time.monotonic()
        pid = os.fork()
        if pid:
            for descriptor in (stdin, output, errors):
                os.close(descriptor)  # the reader sees the end of the output when the program's processes have ended
            reply = _watch(pid, channel, request["limits"], folder, only_rlimits)
            reply["seconds"] = time.monotonic() - started
    except OSError as error:
        reply = {"error": str(error)}
    if pid == 0:
        channel.detach()  # the program may open a file with its number
        _become_program(request, setup, folder, stdin, output, errors)
        return request
    body = json.dumps(reply).encode()
    with suppress(OSError):  # the caller has gone
        channel.sendall(LENGTH.pack(len(body)) + body)
    os._exit(0)


def private_mounts(folder: str, bytes_: int) -> None:
    """Give this process its own /proc and an empty `folder` in memory, which end with its namespaces."""
    kernel.unshare(kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS)
    options = f"size={bytes_},nr_inodes={_INODES},mode=0700"
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, "subset=pid")


def _receive(channel: socket.socket) -> dict[str, Any]:
    with channel.makefile("rb") as stream:
        header = stream.read(LENGTH.size)
        body = stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""
    if not body:
        os._exit(0)  # the caller has gone
    request: dict[str, Any] = json.loads(body)
    return request


def _write_files(request: dict[str, Any], folder: str) -> int:
    """Write the request's files into `folder`; return a descriptor of its standard input."""
    files = {name: base64.b64decode(content) for name, content in request["files"].items()}
    stdin = base64.b64decode(request["stdin"])
    if folder == "/tmp":
        given = sum(len(content) + 4096 for content in (*files.values(), stdin))
        private_mounts(folder, request["limits"]["file_bytes"] + given)
    path = f"{folder}/.stdin"
    with open(path, "wb") as file:
        file.write(stdin)
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    for name, content in files.items():
        path = f"{folder}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    if os.geteuid() == 0:  # without namespaces
        for where, folders, names in os.walk(folder):
            for name in (".", *folders, *names):
                os.chown(f"{where}/{name}", UNPRIVILEGED, UNPRIVILEGED)
    return descriptor


def _become_program(
    request: dict[str, Any], setup: dict[str, Any], folder: str, stdin: int, output: int, errors: int
) -> None:
    """Limit this process, take its rights, and execute the program, unless it is a Python script."""
    os.setsid()
    for number, descriptor in enumerate((stdin, output, errors)):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    os.chdir(folder)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(setup["environment"], HOME=folder, TMPDIR=folder)
    limits = request["limits"]
    cpu = -int(-limits["cpu_seconds"] // 1)
    processes = limits["processes"] + setup["helpers"]
    if setup["isolation"] == "rlimits":
        uid = UNPRIVILEGED if os.geteuid() == 0 else os.getuid()
        processes = limits["processes"] + _tasks_of_user(uid)
    for name, soft, hard in (
        ("NPROC", processes, processes),
        ("CPU", cpu, cpu + 1),
        ("DATA", limits["memory_bytes"], limits["memory_bytes"]),
        ("AS", limits["memory_bytes"] + _SHARED_BYTES, limits["memory_bytes"] + _SHARED_BYTES),
        ("FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("NOFILE", _OPEN_FILES, _OPEN_FILES),
        ("STACK", min(8 << 20, limits["memory_bytes"]), _STACK_BYTES),
        ("CORE", 0, 0),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(number)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(number, (soft, hard))
    kernel.drop_bounding_set()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(*[UNPRIVILEGED] * 3)
        os.setresuid(*[UNPRIVILEGED] * 3)
    kernel.drop_capabilities()
    kernel.filter_system_calls()
    argv = request["argv"]
    if is_script(argv):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def is_script(argv: list[str]) -> bool:
    """Return whether it is `python FILE …`, which the started interpreter runs itself."""
    return argv[0] in ("python", "python3") and len(argv) > 1 and not argv[1].startswith("-")


def _watch(pid: int, channel: socket.socket, limits: dict[str, Any], folder: str, only_rlimits: bool) -> dict[str, Any]:
    """Wait until the program ends, breaks a limit, or the caller closes `channel`."""
    started = time.monotonic()
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLIN)
    status, broken, wait = None, None, LOOK_SECONDS
    while status is None and broken is None:
        ready = dict(poll.poll(1000 * max(0.0, min(wait, started + limits["wall_seconds"] - time.monotonic()))))
        if channel.fileno() in ready:
            os._exit(0)
        status = _reap(pid)
        if status is None:
            looked = time.monotonic()
            broken = _broken_limit(limits, started, folder if only_rlimits else None)
            wait = max(LOOK_SECONDS, 4 * (time.monotonic() - looked))  # at most a fifth of a core
    if status is None:
        return {"exit_code": None, "limit": broken}
    code = os.waitstatus_to_exitcode(status)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code == -signal.SIGXCPU or usage.ru_utime + usage.ru_stime >= limits["cpu_seconds"]:
        return {"exit_code": None, "limit": "cpu_seconds"}
    return {"exit_code": None, "limit": "file_bytes"} if code == -signal.SIGXFSZ else {"exit_code": code, "limit": None}


def _reap(pid: int) -> int | None:
    """Reap ended processes, among them adopted ones; return the status of `pid` once it has ended."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = status


def _broken_limit(limits: dict[str, Any], started: float, folder: str | None) -> str | None:
    """Return the name of a limit that all processes of the program together exceed.

    With namespaces the kernel counts processes and files, and `folder` is None.
    """
    if time.monotonic() - started >= limits["wall_seconds"]:
        return "wall_seconds"
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, memory, tasks = usage.ru_utime + usage.ru_stime, 0, 0
    pids = descendants(os.getpid())
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # it has just ended
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICK
            tasks += int(fields[17])
            if fields[0] == b"Z":  # its first thread has ended: the others have the memory
                threads = (f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task"))
                memory += next(filter(None, map(_memory, threads)), 0)
            # Between vfork and exec a child has its parent's memory. Asked first: an exec in between adds nothing.
            elif int(fields[1]) not in pids or not kernel.share_memory(pid, int(fields[1])):
                memory += _memory(f"/proc/{pid}")
    if cpu >= limits["cpu_seconds"]:
        return "cpu_seconds"
    if memory > limits["memory_bytes"]:
        return "memory_bytes"
    if folder is not None and tasks > limits["processes"]:
        return "processes"
    if folder is not None and _size(folder) > limits["file_bytes"]:
        return "file_bytes"
    return None


def _memory(folder: str) -> int:
    """Return the memory of the process or thread of a /proc folder, with its share of what it shares with others."""
    try:
        with open(f"{folder}/smaps_rollup", "rb") as file:
            sizes = dict(line.split()[:2] for line in file if line.startswith((b"Pss:", b"SwapPss:")))
    except PermissionError:  # the program has hidden it; this file has no shares
        with open(f"{folder}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (ProcessLookupError, FileNotFoundError):  # it has just ended
        return 0
    return 1024 * sum(map(int, sizes.values()))


def _size(folder: str) -> int:
    total = 0
    for where, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(OSError):
                total += os.lstat(f"{where}/{name}").st_blocks * 512
    return total


def descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of `root`."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)  # Z: its first thread has ended
            if not ended:
                children.setdefault(int(fields[1]), []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def _tasks_of_user(uid: int) -> int:
    """Return the number of threads of a user's processes."""
    total = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError, ValueError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                with open(f"/proc/{name}/stat", "rb") as file:
                    total += int(file.read().rpartition(b")")[2].split()[17])
    return total


def kill_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans, and reap them."""
    own = os.getpid()
    while True:
        stopped: set[int] = set()
        while new := set(descendants(own)) - stopped:
            for pid in new:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGSTOP)  # a stopped process cannot start another
            stopped |= new
        for pid in stopped:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)  # they are ending, or one was not seen because its parent ended meanwhile
