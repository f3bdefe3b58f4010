"""Two hosts on one machine: network namespaces, which share nothing but a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Hosts:
    """The two, each with `lo` and one network device, named `interface` on both."""

    interface = "archon0"

    def __init__(self) -> None:
        self._names = [f"archon-{os.getpid()}-{number}" for number in range(2)]

    def make(self) -> None:
        """Makes and joins them. Raises CalledProcessError where the kernel or missing rights forbid it."""
        for name in self._names:
            _ip("netns", "add", name)
        first, second = self._names
        # Each end is born inside its namespace, so that the machine's own network never sees either.
        end = ["name", self.interface]
        _ip("-n", first, "link", "add", *end, "type", "veth", "peer", *end, "netns", second)
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", self.interface)
            for device in ("lo", self.interface):
                _ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        """Removes what `make` made, also after it failed half-way."""
        for name in self._names:
            _ip("netns", "delete", name, check=False)

    def on(self, host: int) -> list[str]:
        """Returns what stands before a command that runs on host 0 or 1; the process keeps its id."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self) -> None:
        """Loses every packet between them, as a pulled cable does: no connection is told."""
        _ip("-n", self._names[1], "link", "set", self.interface, "down")

    def join(self) -> None:
        _ip("-n", self._names[1], "link", "set", self.interface, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Joined hosts, gone afterwards."""
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def can_make_hosts() -> bool:
    """Whether this machine allows it: root's rights and iproute2's `ip`."""
    if shutil.which("ip") is None:
        return False
    try:
        with two_hosts():
            return True
    except subprocess.CalledProcessError:
        return False


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30)


if __name__ == "__main__":
    raise SystemExit(0 if can_make_hosts() else "archon: no network namespaces here: they need root's rights and `ip`")
