"""State of the service on disk: a SQLite file and a folder of checkpoints. It survives `kill -9`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from archon.checkpoint.atomic import undo_replacement
from archon.schema.errors import ConfigError, UserError

Kind = Literal["weights", "sampler_weights", "external_weights"]
FUTURE_SECONDS, RETRIEVED_SECONDS = 3600.0, 300.0
"""Seconds for which a finished future is kept, and after its retrieval: the answer may be lost on its way."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Names of checkpoints: file names that lead nowhere else."""
LOST = "the server restarted, and the request was not finished; create a training client from the last saved state"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT, seen REAL, ended INTEGER DEFAULT 0, metadata TEXT, name TEXT
);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, config TEXT, metadata TEXT, seen REAL, live INTEGER DEFAULT 1
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, path TEXT, clones INTEGER DEFAULT 0
);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT, owner TEXT, kind TEXT, name TEXT, config TEXT, metadata TEXT,
    time REAL, expires REAL, bytes INTEGER
);
CREATE TABLE IF NOT EXISTS futures (
    id TEXT PRIMARY KEY, owner TEXT, model TEXT, state TEXT, body BLOB, proto INTEGER, time REAL
);
"""


@dataclass(frozen=True)
class Checkpoint:
    """A saved LoRA; its tinker path is tinker://MODEL/KIND/NAME."""

    path: str
    model: str
    owner: str
    kind: Kind
    name: str
    config: dict[str, Any]
    metadata: dict[str, str] | None
    time: float
    expires: float | None
    bytes: int


class Store:
    """Sessions, models, samplers, checkpoints and futures. Use it from one thread.

    Raises:
        ConfigError: another server uses the folder.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self._lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"{root}: another training service uses this folder; choose another with --state"
            ) from None
        self._db = sqlite3.connect(root / "state.sqlite", isolation_level=None)
        self._db.row_factory = sqlite3.Row
        # Commits survive a killed process at every level; a power loss may lose the last ones.
        self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {_SCHEMA}")
        failed = json.dumps({"error": LOST, "category": "server"}).encode()
        self._db.execute(
            "UPDATE futures SET state='done', body=?, proto=0, time=? WHERE state='pending'", (failed, time.time())
        )
        self._db.execute("UPDATE models SET live=0")
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove unfinished saves and deletions of checkpoints, left by a killed server."""
        rows = self.query("SELECT model, kind, name FROM checkpoints")
        recorded = {self.folder(row["model"], row["kind"], row["name"]) for row in rows}
        for folder in recorded:
            undo_replacement(folder)
        for folder in (self.root / "checkpoints").glob("*/*/*"):
            if folder not in recorded:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Close the file and release the folder."""
        self._db.close()
        os.close(self._lock)

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        return self._db.execute(sql, values).fetchall()

    # Sessions and models

    def create_session(self, owner: str, metadata: Mapping[str, Any] | None, name: str | None) -> str:
        """Return the id of a new session."""
        session = secrets.token_hex(16)
        self._db.execute(
            "INSERT INTO sessions (id, owner, seen, metadata, name) VALUES (?, ?, ?, ?, ?)",
            (session, owner, time.time(), json.dumps(metadata or {}), name),
        )
        return session

    def touch_session(self, session: str) -> None:
        """Record a sign of life of a session."""
        self._db.execute("UPDATE sessions SET seen=? WHERE id=?", (time.time(), session))

    def end_session(self, session: str) -> None:
        """Mark a session as ended, and its models as removed."""
        self._db.execute("UPDATE sessions SET ended=1 WHERE id=?", (session,))
        self._db.execute("UPDATE models SET live=0 WHERE session=?", (session,))

    def create_model(self, model: str, session: str, owner: str, config: Any, metadata: Any) -> None:
        """Record a model whose creation is queued."""
        self._db.execute(
            "INSERT INTO models (id, session, owner, config, metadata, seen) VALUES (?, ?, ?, ?, ?, ?)",
            (model, session, owner, json.dumps(config), json.dumps(metadata), time.time()),
        )

    def set_model_config(self, model: str, config: Any) -> None:
        """Record the LoRA of a model that was created from a checkpoint."""
        self._db.execute("UPDATE models SET config=? WHERE id=?", (json.dumps(config), model))

    def remove_model(self, model: str) -> None:
        """Record that the model is no longer in memory."""
        self._db.execute("UPDATE models SET live=0 WHERE id=?", (model,))

    def create_sampler(self, sampler: str, session: str, owner: str, path: str | None) -> None:
        """Record a sampling session; a retry changes nothing."""
        self._db.execute(
            "INSERT OR IGNORE INTO samplers (id, session, owner, path) VALUES (?, ?, ?, ?)",
            (sampler, session, owner, path),
        )

    def next_clone(self, sampler: str) -> int:
        """Return a new number for a copy of a sampling client."""
        self._db.execute("UPDATE samplers SET clones=clones+1 WHERE id=?", (sampler,))
        return int(self.query("SELECT clones FROM samplers WHERE id=?", sampler)[0]["clones"])

    # Checkpoints

    def folder(self, model: str, kind: Kind, name: str) -> Path:
        """Return the folder of a checkpoint.

        Raises:
            UserError: the name is not a file name.
        """
        if NAME.fullmatch(name) is None:
            raise UserError(
                f"checkpoint name {name!r:.200}; expected 1 to 128 letters, digits, dots, dashes and underscores, and "
                "no dot first"
            )
        return self.root / "checkpoints" / model.replace(":", "_") / kind / name

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a written checkpoint, in place of one with the same path."""
        values = (
            checkpoint.path,
            checkpoint.model,
            checkpoint.owner,
            checkpoint.kind,
            checkpoint.name,
            json.dumps(checkpoint.config),
            json.dumps(checkpoint.metadata),
            checkpoint.time,
            checkpoint.expires,
            checkpoint.bytes,
        )
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def checkpoints(self, owner: str, model: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of an owner, the newest first."""
        rows = self.query(
            "SELECT * FROM checkpoints WHERE owner=? AND (? IS NULL OR model=?) ORDER BY time DESC", owner, model, model
        )
        return [_checkpoint(row) for row in rows]

    def find_checkpoint(self, owner: str, path: str) -> Checkpoint | None:
        """Return a checkpoint of an owner; None for another owner's."""
        rows = self.query("SELECT * FROM checkpoints WHERE path=? AND owner=?", path, owner)
        return _checkpoint(rows[0]) if rows else None

    def set_expiry(self, checkpoint: Checkpoint, ttl_seconds: float | None) -> None:
        """Let a checkpoint expire in `ttl_seconds`, or never."""
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        self._db.execute("UPDATE checkpoints SET expires=? WHERE path=?", (expires, checkpoint.path))

    def delete_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Delete a checkpoint; return its folder."""
        folder = self.folder(checkpoint.model, checkpoint.kind, checkpoint.name)
        self._db.execute("DELETE FROM checkpoints WHERE path=?", (checkpoint.path,))
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def expired_checkpoints(self) -> Iterator[Checkpoint]:
        """Yield checkpoints whose time to live has passed."""
        yield from map(_checkpoint, self.query("SELECT * FROM checkpoints WHERE expires < ?", time.time()))

    def used_bytes(self, owner: str) -> int:
        """Return the bytes of an owner's checkpoints."""
        return int(self.query("SELECT coalesce(sum(bytes), 0) AS n FROM checkpoints WHERE owner=?", owner)[0]["n"])

    # Futures

    def create_future(self, future: str, owner: str, model: str | None) -> bool:
        """Record a pending future; return False if it exists, which makes a retry harmless."""
        cursor = self._db.execute(
            "INSERT OR IGNORE INTO futures (id, owner, model, state, time) VALUES (?, ?, ?, 'pending', ?)",
            (future, owner, model, time.time()),
        )
        return cursor.rowcount == 1

    def finish_future(self, future: str, body: bytes, *, proto: bool) -> None:
        """Record the result of a future."""
        self._db.execute(
            "UPDATE futures SET state='done', body=?, proto=?, time=? WHERE id=?", (body, proto, time.time(), future)
        )

    def mark_retrieved(self, future: str) -> None:
        """Let a finished future expire soon."""
        latest = time.time() - FUTURE_SECONDS + RETRIEVED_SECONDS
        self._db.execute("UPDATE futures SET time=? WHERE id=? AND time > ?", (latest, future, latest))

    def drop_old_futures(self) -> None:
        """Delete futures that finished `FUTURE_SECONDS` ago."""
        self._db.execute("DELETE FROM futures WHERE state='done' AND time < ?", (time.time() - FUTURE_SECONDS,))


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    values = dict(row)
    return Checkpoint(**values | {key: json.loads(values[key]) for key in ("config", "metadata")})
