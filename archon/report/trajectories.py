"""What a page shows of the trajectories a run has written: bounded in number and size, whatever is in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from archon.report.tokens import readable

MAX_GROUPS = 300
MAX_ANSWERS = 64  # of a group
MAX_TOKENS = 4096  # of an answer
MAX_CHARACTERS = 20_000  # of a prompt or an answer
MAX_SIZE = 6_000_000  # of all together, in characters as `_size` counts them
TOKEN_SIZE = 14  # what a token takes in the page, about
MAX_DEPTH = 20  # of lists and mappings in each other
LARGEST_LOGPROB = 1e300

SHOWN = ("step", "split", "prompt", "answer", "completion", "reward", "rewards", "advantage", "length", "stop_reason")
SHARED = ("prompt", "answer")  # by a group; stored with its first answer alone

Group = list[dict[str, Any]]


@dataclass
class Sampled:
    """Groups of trajectories that answer one prompt at one step, and of how many they were chosen."""

    groups: list[Group]
    total_groups: int
    total: int
    answers_left_out: bool = False  # of a group that is shown

    @property
    def selection(self) -> str:
        """How many of how many are shown, and which."""
        shown = sum(map(len, self.groups))
        if shown == self.total:
            return f"All {shown:,} trajectories that the run has written."
        groups = f"{self.total_groups:,} groups"
        which = f"all {groups}"
        if len(self.groups) < self.total_groups:
            which = f"{len(self.groups):,} of {groups}, taken evenly, the first and the last included"
        first = f", of each at most the first {MAX_ANSWERS} answers" if self.answers_left_out else ""
        return f"{shown:,} of {self.total:,} trajectories: {which}{first}. The others are in trajectories.jsonl."


def sample(records: Iterable[dict[str, Any]]) -> Sampled:
    """Choose whole groups evenly, the first and the last included: as many as the bounds leave room for."""
    found: dict[tuple[int, str, str], Group] = {}
    for record in records:
        split, group = (str(_plain(record.get(name))) for name in ("split", "group"))
        found.setdefault((record["step"], split, group), []).append(record)
    groups = list(found.values())
    sizes = [sum(map(_size, group[:MAX_ANSWERS])) for group in groups]
    count = min(len(groups), MAX_GROUPS)
    while count > 2 and sum(sizes[i] for i in _evenly(len(groups), count)) > MAX_SIZE:
        count = max(2, count * 4 // 5)
    chosen = [groups[i] for i in _evenly(len(groups), count)]
    return Sampled(
        groups=[_shown_group(group[:MAX_ANSWERS]) for group in chosen],
        total_groups=len(groups),
        total=sum(map(len, groups)),
        answers_left_out=any(len(group) > MAX_ANSWERS for group in chosen),
    )


def _evenly(n: int, count: int) -> list[int]:
    """`count` of the places 0 … n − 1."""
    return list(range(n)) if n <= count else [round(i * (n - 1) / (count - 1)) for i in range(count)]


def _size(record: Mapping[str, Any]) -> int:
    texts = sum(
        min(len(str(_plain(record.get(name, "")))), MAX_CHARACTERS) for name in ("prompt", "completion", "answer")
    )
    tokens = record.get("tokens")
    return 200 + texts + TOKEN_SIZE * min(len(tokens) if isinstance(tokens, list) else 0, MAX_TOKENS)


def _shown_group(group: Group) -> Group:
    shown = [_shown(record) for record in group]
    for record in shown[1:]:
        for name in SHARED:
            if name in record and record[name] == shown[0].get(name):
                del record[name]
    return shown


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the page is told of an answer, its tokens where the file has a logprob for each."""
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
    """`value` as JSON has it, long texts cut, and what is nested deeper than a page can show."""
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
