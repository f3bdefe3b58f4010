"""Addresses on which a server listens: every way in which one cannot be used is one line."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from archon.schema.errors import ConfigError

_SHOWN_CHARACTERS = 80


@contextmanager
def listening(host: str, port: int, setting: str = "") -> Iterator[None]:
    """Turn an error of the block, which binds a socket to `host` and `port`, into a ConfigError.

    Args:
        host: a name or address.
        port: the port; 0 for a free one.
        setting: the option or field that sets the port, for the error.
    """
    shown = repr(host if len(host) <= _SHOWN_CHARACTERS else host[:_SHOWN_CHARACTERS] + "…")
    name = f"{setting}: " if setting else ""
    try:
        yield
    except (socket.gaierror, UnicodeError, ValueError) as error:  # a name of more than 63 characters, a NUL
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name}host {shown} has no address here ({error}); expected an address of this machine, such as 127.0.0.1"
        ) from None
    except OSError as error:
        number = error.errno or 0
        advice = {
            errno.EADDRINUSE: f"port {port} on {host} is in use; choose another, or 0 for any that is free",
            errno.EADDRNOTAVAIL: f"host {shown} is no address of this machine; use one of its own, such as 127.0.0.1",
        }.get(number, f"cannot listen on host {shown}, port {port}: {os.strerror(number)}; choose another address")
        if number in (errno.EACCES, errno.EPERM):
            advice = f"port {port} on {host} needs more rights than this user has; choose one from 1024 on"
        raise ConfigError(name + advice) from None


def require_address(host: str, port: int) -> None:
    """Raise ConfigError unless a server could listen on all addresses of `host`; for checks before long work."""
    if _is_multicast(host):  # Linux binds it, and no client ever connects
        raise ConfigError(f"host {host!r} is a multicast address; use one of this machine's own, such as 127.0.0.1")
    with listening(host, port):
        if not host.isprintable():  # getaddrinfo would stop at a NUL
            raise ValueError("it has unprintable characters")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in found:
            socket.create_server(address, family=family).close()


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False
