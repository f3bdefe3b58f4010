"""Worker of a sandbox: an interpreter, already started, that forks a supervisor for each program.

It has run no program itself and reads none: each supervisor gets its request through its own socket. So a program finds
in its copy of the worker's memory nothing of earlier programs.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import site
import socket
import sys
import tempfile
import types
from typing import Any

from . import kernel, supervisor


def main(descriptor: int, setup: dict[str, Any]) -> dict[str, Any] | None:
    """Serve until the caller closes the socket. Returns only in a program's process, with its request."""
    isolation = setup["isolation"]
    if isolation == "namespaces":
        _enter_namespaces(setup["layout"])
    if isolation != "rlimits":
        kernel.end_with_parent()
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
    else:
        kernel.adopt_orphans()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program can send its process 1 only signals with a handler
    site.setquit()  # `exit` and `quit`; the packages of the machine are not importable
    control = socket.socket(fileno=descriptor)
    control.send(b"r")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not data:
            return None
        folder = "/tmp" if isolation != "rlimits" else tempfile.mkdtemp(prefix="archon-sandbox-")
        if isolation != "rlimits":
            kernel.unshare(kernel.NEWPID)  # for the next child
        pid = os.fork()
        if pid == 0:
            control.close()
            channel = socket.socket(fileno=descriptors[0])
            return supervisor.supervise(channel, descriptors[1], descriptors[2], setup, folder)
        for number in descriptors:
            os.close(number)
        if isolation != "rlimits":
            kernel.enter_namespace(own_processes, kernel.NEWPID)
        os.waitpid(pid, 0)
        if isolation == "rlimits":
            supervisor.kill_descendants()
            shutil.rmtree(folder, ignore_errors=True)
        control.send(b"d")


def _enter_namespaces(layout: list[list[str]]) -> None:
    """Continue as a child in new namespaces with the files of `layout`; this process waits for the child and exits."""
    outside = (os.getuid(), os.getgid())
    if outside[0] == 0:  # root's processes escape the limit on their number
        outside = (supervisor.UNPRIVILEGED, supervisor.UNPRIVILEGED)
    _unshare_user(outside)
    kernel.unshare(kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP)
    pid = os.fork()
    if pid:
        kernel.end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    kernel.end_with_parent()
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    socket.sethostname("sandbox")
    # Opened with the rights of the user who started this: only that one may reach them.
    paths = {entry[1] for entry in layout if entry[0] in ("bind", "device")}
    sources = {path: os.open(path, os.O_PATH) for path in paths}
    os.setresgid(supervisor.USER, supervisor.USER, supervisor.USER)
    os.setresuid(supervisor.USER, supervisor.USER, supervisor.USER)
    kernel.make_dumpable()
    _mount_layout(layout, sources)
    for descriptor in sources.values():
        os.close(descriptor)


def _unshare_user(outside: tuple[int, int]) -> None:
    """Enter a new user namespace whose only user is `outside`; a helper writes the map, as root may."""
    ready, done = os.pipe(), os.pipe()
    target = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(ready[1])
        os.read(ready[0], 1)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{supervisor.USER} {outside[0]} 1"),
            ("gid_map", f"{supervisor.USER} {outside[1]} 1"),
        ):
            with open(f"/proc/{target}/{name}", "w") as file:
                file.write(text)
        os.write(done[1], b"d")
        os._exit(0)
    kernel.unshare(kernel.NEWUSER)
    os.write(ready[1], b"r")
    os.close(done[1])
    if os.read(done[0], 1) != b"d":
        raise OSError("the user namespace has no map")
    os.waitpid(helper, 0)
    for descriptor in (*ready, done[0]):
        os.close(descriptor)


def _mount_layout(layout: list[list[str]], sources: dict[str, int]) -> None:
    """Replace the file system by the entries of `layout`, read-only; `sources` are open files of what it shows."""
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    kernel.mount("/new", "/new", None, kernel.MS_BIND)
    for kind, *values in layout:
        path = f"/new{values[-1]}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if kind == "dir":
            os.makedirs(path, exist_ok=True)
        elif kind == "symlink":
            os.symlink(values[0], path)
        elif kind == "file":
            with open(path, "w") as file:
                file.write(values[0])
        elif kind == "device":
            with open(path, "w"):
                pass
            kernel.mount(f"/old/proc/self/fd/{sources[values[0]]}", path, None, kernel.MS_BIND)
        else:
            os.makedirs(path, exist_ok=True)
            kernel.mount(f"/old/proc/self/fd/{sources[values[0]]}", path, None, kernel.MS_BIND | kernel.MS_REC)
            kernel.make_read_only(path)
    kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.pivot_root("/new", "/new/tmp")
    os.chdir("/")
    kernel.unmount("/tmp")
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def load_script(argv: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Return the code of `python FILE …` and a new `__main__` for it, without this program's modules and names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "inside"]:
        del sys.modules[name]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=argv[1])
    sys.modules["__main__"] = module
    sys.argv[:] = argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(argv[1]))
    with open(argv[1], "rb") as file:
        return compile(file.read(), argv[1], "exec", dont_inherit=True), module.__dict__


def run(descriptor: str, setup: str) -> None:
    """Serve; in the process of a Python program, execute it."""
    request = main(int(descriptor), json.loads(setup))
    if request is not None:
        try:
            exec(*load_script(request["argv"]))  # the program, in its sandbox
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - printed as Python prints it, without this file
            own = ("<string>", __file__)
            while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename in own:
                error.__traceback__ = trace.tb_next
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
