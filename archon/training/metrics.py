"""Records of a run as JSON lines: metrics per step, and sampled trajectories.

Records are written unbuffered, so a killed run loses at most its last line. The reader ignores an incomplete last line,
and a resumed run removes it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archon.checkpoint.atomic import write_synced
from archon.schema.errors import DatasetError
from archon.schema.files import open_regular

METRICS_FILE = "metrics.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"
IMAGES_FOLDER = "images"  # images of trajectories


class JsonlWriter:
    """Appends JSON objects to a file, one per line, unbuffered.

    Raises OSError when the file cannot be opened or written; a partly written line is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and self.path != Path(os.devnull):  # ranks that keep no records write to the null device
            with open_regular(self.path) as file:
                content = file.read()
            if content and not content.endswith(b"\n"):
                os.truncate(self.path, content.rfind(b"\n") + 1)
        self._file = self.path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write `record` and return the written JSON values.

        Numbers of torch and numpy become Python numbers; NaN and infinities become `"NaN"`, `"Infinity"` and
        `"-Infinity"`.
        """
        plain = _to_json(record)
        # A lone surrogate, which UTF-8 cannot encode, becomes JSON's escape.
        line = memoryview(_line(plain).encode("utf-8", "backslashreplace"))
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed during the run", str(self.path))
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return plain

    def truncate(self, step: int) -> int:
        """Remove the records after `step`, which a resumed run writes again; return their number."""
        records = read_jsonl(self.path)
        kept = [record for record in records if record["step"] <= step]
        if len(kept) < len(records):
            self._file.close()
            temporary = self.path.with_name(self.path.name + ".tmp")
            write_synced(temporary, "".join(map(_line, kept)))
            temporary.replace(self.path)
            self._file = self.path.open("ab", buffering=0)
        return len(records) - len(kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsWriter(JsonlWriter):
    """Writer of `metrics.jsonl`: one object per step with `step`, `time` (seconds since the epoch) and metrics.

    Args:
        path: the file.
        on_record: called with each record after it is written.
    """

    def __init__(self, path: str | Path, on_record: Callable[[Mapping[str, Any]], None] | None = None):
        super().__init__(path)
        self._on_record = on_record

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step."""
        record = self.append({"step": step, "time": round(time.time(), 3), **metrics})
        if self._on_record is not None:
            self._on_record(record)


class TrajectoryWriter(JsonlWriter):
    """Writer of `trajectories.jsonl`: one object per sampled answer, for `archon report`. Logs the first error."""

    def __init__(self, path: str | Path, log: Callable[[str], None] = print):
        super().__init__(path)
        self._log = log
        self._failed = False

    def write(self, step: int, group: int | str, prompt: str, completion: str, reward: float, **extra: Any) -> bool:
        """Write one answer; return False if it cannot be written.

        Args:
            step: the training step.
            group: identifies the prompt; the report shows the answers of a group side by side.
            prompt: text of the prompt.
            completion: text of the answer.
            reward: total reward.
            extra: any JSON values. The report shows `length` (tokens of the answer), `stop_reason`, `answer` (the
                expected one), `advantage`, `rewards` (parts of the reward by name), `split` (`"train"` or `"eval"`),
                `version` (of the weights) and `images` (names of PNG files in the folder `images` next to this file),
                and the `tokens` (as in the vocabulary) with one each of `logprobs` (null for a token that was not
                sampled), `turn_ids` and `versions` (-1 for a token that was not sampled).
        """
        answer = {"prompt": prompt, "completion": completion, "reward": reward}
        try:
            self.append({"step": step, "group": group, **answer, **extra})
        except OSError as error:
            if not self._failed:
                self._log(f"{self.path}: {error.strerror}; unwritten samples are only counted")
            self._failed = True
            return False
        return True


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a file, without an incomplete last line.

    Raises:
        DatasetError: another line is not a JSON object with a step; the message has the line number.
    """
    # Bytes, because the last line may end inside a character.
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            reason = getattr(error, "msg", None) or str(error)
            raise DatasetError(f"{path}: line {number} is not JSON ({reason}); remove or fix it") from None
        if not isinstance(record, dict):
            raise DatasetError(f"{path}: line {number} is not a JSON object; remove or fix it")
        if type(step := record.get("step")) is not int or abs(step) >= 2**63:
            raise DatasetError(f"{path}: line {number} is without an integer step; remove or fix it")
        records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _to_json(value: Any) -> Any:
    """Convert `value` to JSON types."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and numpy scalars
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
