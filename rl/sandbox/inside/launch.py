"""Launcher of a worker: starts it, with bubblewrap where asked, and ends with it.

The worker gets no environment. The launcher has the mark of its owner in its own, so that the owner's keeper finds it,
and a single thread, so that the worker can end with it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import kernel, supervisor

FOLDER = "/run/archon"
"""Folder of this package inside the sandbox."""


def run(descriptor: str, setup_text: str) -> None:
    """Start the worker of a setup with the socket `descriptor`, and exit with its code."""
    setup = json.loads(setup_text)
    os.set_inheritable(int(descriptor), True)
    if setup["isolation"] == "bubblewrap":
        folder, command = FOLDER, _bubblewrap(setup)
    else:
        folder, command = setup["folder"], []
    options = ["-s", "-S", "-B", "-X", "utf8", "-c", start("worker")]
    command += [setup["python"], *options, folder, descriptor, setup_text]
    pid = os.posix_spawnp(command[0], command, setup["environment"])
    os.close(int(descriptor))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


def start(module: str) -> str:
    """Return the program that runs a module of this package; its first argument is the folder of the package."""
    return f"import sys; sys.path[0] = sys.argv.pop(1); from inside.{module} import run; run(*sys.argv[1:])"


def _bubblewrap(setup: dict[str, Any]) -> list[str]:
    """Return the command of bubblewrap, up to the worker's own; give up root first."""
    layout = setup["layout"]
    if os.geteuid() == 0:
        layout = _reachable(layout)
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", str(supervisor.USER), "--gid", str(supervisor.USER)]
    command += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
    for name in ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_SETPCAP"):  # of its own namespaces only
        command += ["--cap-add", name]
    for kind, *values in layout:
        if kind == "file":
            command += ["--ro-bind-data", str(_pipe_with(values[0])), values[1]]
        else:
            option = {"bind": "--ro-bind", "device": "--dev-bind", "symlink": "--symlink", "dir": "--dir"}[kind]
            command += [option, *values]
    command += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]
    if os.geteuid() == 0:  # root's processes escape the limit on their number
        os.setgroups([])
        os.setresgid(*[supervisor.UNPRIVILEGED] * 3)
        os.setresuid(*[supervisor.UNPRIVILEGED] * 3)
    return command


def _reachable(layout: list[list[str]]) -> list[list[str]]:
    """Mount the layout's folders where an unprivileged user reaches them, in a mount namespace of this process."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    changed = []
    sources = [entry[1] for entry in layout if entry[0] == "bind"]
    handles = {source: os.open(source, os.O_PATH) for source in sources}
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    for number, (kind, *values) in enumerate(layout):
        if kind == "bind":
            place = f"/tmp/{number}"
            os.mkdir(place)
            kernel.mount(f"/proc/self/fd/{handles[values[0]]}", place, None, kernel.MS_BIND | kernel.MS_REC)
            values = [place, values[1]]
        changed.append([kind, *values])
    for handle in handles.values():
        os.close(handle)
    return changed


def _pipe_with(text: str) -> int:
    """Return a descriptor from which `text` can be read."""
    descriptor = os.memfd_create("file", 0)
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
