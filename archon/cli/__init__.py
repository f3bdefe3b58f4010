"""The `archon` command. Subcommands import heavy modules when they run."""

from __future__ import annotations

from archon.cli.app import main

__all__ = ["main"]
