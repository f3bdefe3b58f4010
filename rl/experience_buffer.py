"""Experience buffer: an SQLite file of trajectory groups between explorer and trainer processes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from archon.rl.episode import Episode, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt
from archon.schema.errors import RolloutError

_VERSION = 1  # of the tables
_LOCK_SECONDS = 60.0
_TABLES = (
    "groups (number INTEGER PRIMARY KEY, prompt INTEGER, row TEXT, data BLOB)",
    "state (key TEXT PRIMARY KEY, value TEXT)",
)


class ExperienceBuffer:
    """Groups in sampling order, numbered from 0, and the explorer's position.

    One transaction adds the groups of an explorer step and its position. Groups are never removed: the trainer's
    checkpoint stores how many groups it has read. Methods raise `RolloutError` if the file is no buffer or cannot be
    read or written.

    Args:
        path: the file, created at the first write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, groups: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], step: int, position: Any) -> None:
        """Add the groups of a step and the explorer's position after it, in one transaction.

        Args:
            groups: trajectory tensors of each group.
            prompts: the prompt of each group.
            step: the explorer's step, counted from 1.
            position: the explorer's data position, a JSON value.
        """
        with self._connection(write=True) as file:
            (first,) = file.execute("SELECT COUNT(*) FROM groups").fetchone()
            for number, (group, prompt) in enumerate(zip(groups, prompts, strict=True), first):
                data = pack_episodes({0: Episode(prompt, EpisodeContext(prompt.index), dict(group))})
                row = json.dumps(prompt.row, default=str)
                file.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", (number, prompt.index, row, data))
            _set(file, "explorer", {"step": step, "position": position})

    def read(self, numbers: Sequence[int]) -> list[Episode]:
        """Return the numbered groups as episodes."""
        episodes = []
        with self._connection() as file:
            for number in numbers:
                record = file.execute("SELECT prompt, row, data FROM groups WHERE number = ?", (number,)).fetchone()
                if record is None:
                    raise RolloutError(f"{self.path}: group {number} is missing; the file was replaced")
                prompt, row, data = record
                episode = Episode(Prompt(prompt, json.loads(row)), EpisodeContext(prompt))
                unpack_episodes(data, [episode])
                episodes.append(episode)
        return episodes

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        with self._connection() as file:
            count: int = file.execute("SELECT COUNT(*) FROM groups").fetchone()[0]
            return count

    def explorer_state(self) -> tuple[int, Any] | None:
        """Return the explorer's step and position; None for an empty buffer."""
        state = self._state("explorer")
        return None if state is None else (state["step"], state["position"])

    @property
    def finished(self) -> bool:
        """Whether the explorer is finished."""
        return bool(self._state("finished"))

    def finish(self, finished: bool = True) -> None:
        """Set whether the explorer is finished."""
        with self._connection(write=True) as file:
            _set(file, "finished", finished)

    def _state(self, key: str) -> Any:
        if not self.path.exists():
            return None
        with self._connection() as file:
            record = file.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if record is None else json.loads(record[0])

    @contextmanager
    def _connection(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=_LOCK_SECONDS, isolation_level=None)) as file:
                if write:
                    file.execute("PRAGMA journal_mode = WAL")
                    file.execute("PRAGMA synchronous = FULL")
                file.execute("BEGIN IMMEDIATE" if write else "BEGIN")  # closing rolls back uncommitted changes
                version: int = file.execute("PRAGMA user_version").fetchone()[0]
                new = version == 0 and not file.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
                if not new and version != _VERSION:
                    raise RolloutError(f"{self.path}: not an experience buffer of archon; use another file")
                for table in _TABLES if new else ():
                    # A reader before the first write sees empty temporary tables.
                    file.execute(f"CREATE {'' if write else 'TEMP '}TABLE {table}")
                if new and write:
                    file.execute(f"PRAGMA user_version = {_VERSION}")
                yield file
                file.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise RolloutError(f"{self.path}: the experience buffer cannot be used: {error}") from error


def split_groups(trajectories: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a batch into its groups, trimming the padding of each group."""
    groups, size = [], trajectories["input_ids"].shape[1]
    for number in trajectories["group_ids"].unique().tolist():
        rows = (trajectories["group_ids"] == number).nonzero().flatten()
        length = int(trajectories["attention_mask"][rows].any(0).nonzero().max()) + 1
        group: dict[str, Any] = {}
        for name, value in trajectories.items():
            if name == "group_ids":
                continue
            if not isinstance(value, Tensor):
                group[name] = [value[row] for row in rows.tolist()]
            else:
                group[name] = value[rows][:, :length] if value.ndim > 1 and value.shape[1] == size else value[rows]
        groups.append(group)
    return groups


def _set(file: sqlite3.Connection, key: str, value: Any) -> None:
    file.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))
