"""The command `archon`. Each subcommand is a short file; what is heavy is imported when a command runs."""

from __future__ import annotations

from archon.cli.app import main

__all__ = ["main"]
