"""Sandboxes of this test process, one for each isolation, started on first use."""

from __future__ import annotations

import os

import pytest

from archon.rl.sandbox import Sandbox, local
from archon.rl.sandbox.local import Isolation
from archon.schema.errors import SandboxError

STARTED: dict[Isolation, Sandbox | SandboxError] = {}


def started(isolation: Isolation) -> Sandbox | SandboxError:
    """Return the sandbox of an isolation, or why it does not work here."""
    if isolation not in STARTED:
        with pytest.MonkeyPatch.context() as patch:
            if isolation == "rlimits":
                use_readable_python(patch)
            try:
                STARTED[isolation] = Sandbox(isolation=isolation, workers=1)
            except SandboxError as error:
                STARTED[isolation] = error
    return STARTED[isolation]


def use_readable_python(patch: pytest.MonkeyPatch) -> None:
    """Let programs use the system's Python where root has one that others cannot read."""
    if os.geteuid() == 0 and local.interpreter().startswith("/root/"):
        patch.setattr(local, "interpreter", lambda: "/usr/bin/python3")
