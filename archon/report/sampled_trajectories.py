"""Samples the trajectories of a run for its page, bounded in number and size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from archon.report.tokens import readable

MAX_GROUPS = 300
MAX_ANSWERS = 64  # per group
MAX_TOKENS = 4096  # per answer
MAX_CHARACTERS = 20_000  # per prompt or answer
MAX_SIZE = 6_000_000  # of all groups together, in characters as `_size` counts them
TOKEN_SIZE = 14  # approximate characters of a token in the page
MAX_DEPTH = 20  # of nested lists and mappings
LARGEST_LOGPROB = 1e300

SHOWN = ("step", "split", "prompt", "answer", "completion", "reward", "rewards", "advantage", "length", "stop_reason")
SHARED = ("prompt", "answer")  # equal within a group; stored only with its first answer

TrajectoryGroup = list[dict[str, Any]]


@dataclass
class SampledTrajectories:
    """The sampled groups (trajectories of one prompt at one step), and the totals they were sampled from."""

    groups: list[TrajectoryGroup]
    total_groups: int
    total: int
    answers_left_out: bool = False  # whether a sampled group has more answers than are shown

    @property
    def selection(self) -> str:
        """A sentence that says how many trajectories are shown, and which."""
        shown = sum(map(len, self.groups))
        if shown == self.total:
            return f"All {shown:,} trajectories that the run has written."
        groups = f"{self.total_groups:,} groups"
        which = f"all {groups}"
        if len(self.groups) < self.total_groups:
            which = f"{len(self.groups):,} of {groups}, taken evenly, the first and the last included"
        first = f", of each at most the first {MAX_ANSWERS} answers" if self.answers_left_out else ""
        return f"{shown:,} of {self.total:,} trajectories: {which}{first}. The others are in trajectories.jsonl."


def sample(records: Iterable[dict[str, Any]]) -> SampledTrajectories:
    """Returns as many groups as the limits allow, evenly spaced, including the first and the last."""
    found: dict[tuple[int, str, str], TrajectoryGroup] = {}
    for record in records:
        split, group = (str(_plain(record.get(name))) for name in ("split", "group"))
        found.setdefault((record["step"], split, group), []).append(record)
    groups = list(found.values())
    sizes = [sum(map(_size, group[:MAX_ANSWERS])) for group in groups]
    count = min(len(groups), MAX_GROUPS)
    while count > 2 and sum(sizes[i] for i in _evenly(len(groups), count)) > MAX_SIZE:
        count = max(2, count * 4 // 5)
    chosen = [groups[i] for i in _evenly(len(groups), count)]
    return SampledTrajectories(
        groups=[_shown_group(group[:MAX_ANSWERS]) for group in chosen],
        total_groups=len(groups),
        total=sum(map(len, groups)),
        answers_left_out=any(len(group) > MAX_ANSWERS for group in chosen),
    )


def _evenly(n: int, count: int) -> list[int]:
    """Returns `count` evenly spaced indices of 0 … n − 1."""
    return list(range(n)) if n <= count else [round(i * (n - 1) / (count - 1)) for i in range(count)]


def _size(record: Mapping[str, Any]) -> int:
    texts = sum(
        min(len(str(_plain(record.get(name, "")))), MAX_CHARACTERS) for name in ("prompt", "completion", "answer")
    )
    tokens = record.get("tokens")
    return 200 + texts + TOKEN_SIZE * min(len(tokens) if isinstance(tokens, list) else 0, MAX_TOKENS)


def _shown_group(group: TrajectoryGroup) -> TrajectoryGroup:
    shown = [_shown(record) for record in group]
    for record in shown[1:]:
        for name in SHARED:
            if name in record and record[name] == shown[0].get(name):
                del record[name]
    return shown


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the page's fields of an answer; with its tokens where the record has a logprob for each."""
    shown = {name: _plain(record[name]) for name in SHOWN if name in record}
    if type(record.get("version")) is int:
        shown["version"] = record["version"]
    tokens: Any = record.get("tokens")
    logprobs = record.get("logprobs")
    if not (_is_column(tokens, str) and isinstance(logprobs, list) and len(tokens) == len(logprobs)):
        return shown
    numbers = [round(x, 3) if isinstance(x, int | float) and abs(x) <= LARGEST_LOGPROB else None for x in logprobs]
    texts = readable(tokens, [number is None for number in numbers], str(record.get("completion", "")))
    shown |= {"tokens": texts[:MAX_TOKENS], "logprobs": numbers[:MAX_TOKENS]}
    if len(tokens) > MAX_TOKENS:
        shown["tokens_in_all"] = len(tokens)
    for name in ("turn_ids", "versions"):
        column: Any = record.get(name)
        if _is_column(column, int) and len(column) == len(tokens):
            shown[name] = column[:MAX_TOKENS]
    return shown


def _is_column(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is kind for item in value)


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns `value` as JSON-compatible data, with long texts and deep nesting truncated."""
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}\n… and {len(value) - MAX_CHARACTERS:,} more characters"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    return value
