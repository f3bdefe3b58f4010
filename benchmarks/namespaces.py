"""Hosts on one machine: Linux network namespaces, joined by virtual cables that can be unplugged.

Each host has loopback and one address per cable; files, memory and users are shared with this machine. Needs root and
`ip` of iproute2; `missing` names what is absent.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness import BenchmarkError

_NETNS = Path("/etc/netns")  # `ip netns exec` replaces files in /etc by those in this directory


def missing() -> str | None:
    """Return why namespaces cannot be made here, or None where they can."""
    if shutil.which("ip") is None:
        return "there is no `ip`; install iproute2"
    name = f"archon-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"`ip netns add` failed: {' '.join(made.stderr.split())}"
    _ip("netns", "delete", name)
    return None


@dataclass(frozen=True)
class Host:
    """A network namespace; without a name, the namespace of this process."""

    name: str = ""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` on the host."""
        return [*(["ip", "netns", "exec", self.name] if self.name else []), *arguments]


@dataclass(frozen=True)
class Cable:
    """A cable between two hosts; `addresses` are their addresses in joining order."""

    hosts: tuple[Host, Host]
    addresses: tuple[str, str]
    interfaces: tuple[str, str]

    def pull(self) -> None:
        """Unplug the cable: packets of the second host are lost, and connections stay open until a peer gives up."""
        self._set("down")

    def plug(self) -> None:
        """Join it again."""
        self._set("up")

    def _set(self, state: str) -> None:
        # Only at the first end: the other end loses its carrier, like an unplugged cable, and keeps address and route.
        _run(self.hosts[0].command("ip", "link", "set", self.interfaces[0], state))


class Network:
    """Makes hosts and cables, which are removed when its block is left. Raises BenchmarkError where `ip` fails."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._hosts, self._cables = itertools.count(), itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def host(self) -> Host:
        """Return a new host with loopback up."""
        host = Host(f"archon-{os.getpid()}-{next(self._hosts)}")
        _ip("netns", "add", host.name)
        self._stack.callback(_ip, "netns", "delete", host.name)
        # No name server is reachable: immediate refusal is better than a time-out with this machine's servers.
        folder = _NETNS / host.name
        folder.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, folder)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        _run(host.command("ip", "link", "set", "lo", "up"))
        return host

    def join(self, one: Host, other: Host) -> Cable:
        """Return a new cable between two hosts, in a separate subnet of 10.64.0.0/10, chosen by process and cable."""
        number, pid = next(self._cables), os.getpid()
        if number >= 64:
            raise BenchmarkError("a network has at most 64 cables")
        base = f"10.{64 + pid // 256 % 64}.{pid % 256}"
        cable = Cable(
            (one, other),
            (f"{base}.{4 * number + 1}", f"{base}.{4 * number + 2}"),
            (f"a{pid}n{number}x", f"a{pid}n{number}y"),
        )
        _ip("link", "add", cable.interfaces[0], "type", "veth", "peer", "name", cable.interfaces[1])
        self._stack.callback(_remove, cable)
        for host, interface, address in zip(cable.hosts, cable.interfaces, cable.addresses, strict=True):
            if host.name:
                _ip("link", "set", interface, "netns", host.name)
            _run(host.command("ip", "address", "add", f"{address}/30", "dev", interface))
            _run(host.command("ip", "link", "set", interface, "up"))
        return cable


def _remove(cable: Cable) -> None:
    """Remove both ends of a cable."""
    _run(cable.hosts[0].command("ip", "link", "delete", cable.interfaces[0]))


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())}")
