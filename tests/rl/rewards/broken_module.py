"""A module that worker processes cannot import, while the parent, which has `PARENT_CAN` set, can."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("BROKEN_FOR") != str(os.getpid()):
    raise ImportError("no license file in this process")


def reward(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 1.0
