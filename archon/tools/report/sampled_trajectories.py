"""Sample of a run's trajectories for its page, bounded in number and size."""

from __future__ import annotations

import base64
import codecs
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.schema.errors import ConfigError
from archon.schema.files import read_limited

MAX_GROUPS = 300
MAX_ANSWERS = 64  # per group
MAX_IMAGES = 16  # per answer
MAX_TOKENS = 4096  # per answer
MAX_CHARACTERS = 20_000  # per prompt or answer
MAX_SIZE = 6_000_000  # of all groups together, in characters as `_size` counts them
TOKEN_SIZE = 14  # approximate characters of a token in the page
MAX_IMAGE_BYTES = 6_000_000  # of all image files together
MAX_DEPTH = 20  # of nested lists and mappings
MAX_LOGPROB = 1e300

SHOWN_FIELDS = (
    "step",
    "split",
    "prompt",
    "answer",
    "completion",
    "reward",
    "rewards",
    "advantage",
    "length",
    "stop_reason",
)
SHARED = ("prompt", "answer", "images")  # equal within a group; stored only with its first answer

TrajectoryGroup = list[dict[str, Any]]


@dataclass
class SampledTrajectories:
    """Sampled groups (trajectories of one prompt at one step), and a sentence about the selection."""

    groups: list[TrajectoryGroup]
    selection: str


def sample(records: Iterable[dict[str, Any]], images: Path | None = None) -> SampledTrajectories:
    """Return as many groups as the limits allow, evenly spaced, including the first and the last.

    Image files in the folder `images` become data URLs.
    """
    by_prompt: dict[tuple[int, str, str], TrajectoryGroup] = {}
    for record in records:
        split, group = (str(_to_json(record.get(name))) for name in ("split", "group"))
        by_prompt.setdefault((record["step"], split, group), []).append(record)
    groups = list(by_prompt.values())
    sizes = [sum(map(_size, group[:MAX_ANSWERS])) for group in groups]
    count = min(len(groups), MAX_GROUPS)
    while count > 2 and sum(sizes[i] for i in _evenly_spaced(len(groups), count)) > MAX_SIZE:
        count = max(2, count * 4 // 5)
    chosen = [groups[i] for i in _evenly_spaced(len(groups), count)]
    shown = [_group_fields(group[:MAX_ANSWERS]) for group in chosen]
    _embed_images(shown, images)
    return SampledTrajectories(shown, _selection(shown, chosen, groups))


def _embed_images(groups: list[TrajectoryGroup], folder: Path | None) -> None:
    """Replace image names by data URLs; null for a missing image and beyond `MAX_IMAGE_BYTES`."""
    left, known = MAX_IMAGE_BYTES, dict[str, str | None]()
    for record in [record for group in groups for record in group if "images" in record]:
        for name in record["images"]:
            if name not in known:
                data = _png(folder, name, left)
                left -= len(data or b"")
                known[name] = None if data is None else f"data:image/png;base64,{base64.b64encode(data).decode()}"
        record["images"] = [known[name] for name in record["images"]]


def _png(folder: Path | None, name: str, limit: int) -> bytes | None:
    """Return the bytes of a run's image; None for an invalid name, no PNG, or more than `limit` bytes."""
    if folder is None or re.fullmatch(r"[0-9a-f]{1,64}\.png", name) is None:
        return None
    try:
        data = read_limited(folder / name, limit)
    except ConfigError:
        return None
    return data if data.startswith(b"\x89PNG") else None


def _selection(shown: list[TrajectoryGroup], chosen: list[TrajectoryGroup], groups: list[TrajectoryGroup]) -> str:
    count, total = sum(map(len, shown)), sum(map(len, groups))
    if count == total:
        return f"All {count:,} trajectories of the run."
    selection = f"all {len(groups):,} groups"
    if len(chosen) < len(groups):
        selection = f"{len(chosen):,} of {len(groups):,} groups, evenly spaced from the first to the last"
    if any(len(group) > MAX_ANSWERS for group in chosen):
        selection += f", at most the first {MAX_ANSWERS} answers of each"
    return f"{count:,} of {total:,} trajectories: {selection}. The others are in trajectories.jsonl."


def _evenly_spaced(n: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices of 0 … n − 1."""
    return list(range(n)) if n <= count else [round(i * (n - 1) / (count - 1)) for i in range(count)]


def _size(record: Mapping[str, Any]) -> int:
    texts = [str(_to_json(record.get(name, ""))) for name in ("prompt", "completion", "answer")]
    tokens = record.get("tokens")
    size = TOKEN_SIZE * min(len(tokens), MAX_TOKENS) if isinstance(tokens, list) else 0
    return 200 + size + sum(min(len(text), MAX_CHARACTERS) for text in texts)


def _group_fields(group: TrajectoryGroup) -> TrajectoryGroup:
    shown = [_answer_fields(record) for record in group]
    for record in shown[1:]:
        for name in SHARED:
            if name in record and record[name] == shown[0].get(name):
                del record[name]
    return shown


def _answer_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the visible fields of an answer, with its tokens if every token has a logprob."""
    shown = {name: _to_json(record[name]) for name in SHOWN_FIELDS if name in record}
    if _is_column(record.get("images"), str):
        shown["images"] = record["images"][:MAX_IMAGES]
    if type(record.get("version")) is int:
        shown["version"] = record["version"]
    tokens: Any = record.get("tokens")
    logprobs = record.get("logprobs")
    if not (_is_column(tokens, str) and isinstance(logprobs, list) and len(tokens) == len(logprobs)):
        return shown
    numbers = [round(x, 3) if isinstance(x, int | float) and abs(x) <= MAX_LOGPROB else None for x in logprobs]
    texts = token_texts(tokens, [number is None for number in numbers], str(record.get("completion", "")))
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


def _to_json(value: Any, depth: int = 0) -> Any:
    """Return `value` as JSON-compatible data; truncate long texts and deep nesting."""
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}\n… and {len(value) - MAX_CHARACTERS:,} more characters"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _to_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item, depth + 1) for item in value]
    return value


def token_texts(tokens: Sequence[str], is_input: Sequence[bool], completion: str) -> list[str]:
    """Return the text of each token.

    The alphabet is plain, GPT-2's bytes, or SentencePiece. It is the one in which the tokens that are not `is_input`
    concatenate to `completion`; otherwise, the one with a space marker that occurs. A character of several tokens is
    shown with the last of them.
    """
    spellings = {"": list(tokens), "Ġ": _decode_byte_tokens(tokens), "▁": [token.replace("▁", " ") for token in tokens]}
    for texts in spellings.values():
        if "".join(text for text, skip in zip(texts, is_input, strict=True) if not skip) == completion:
            return texts
    return next(spellings[mark] for mark in ("Ġ", "▁", "") if any(mark in token for token in tokens))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies (GPT-2).

    Printable bytes represent themselves; characters from U+0100 on represent all other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


def _decode_byte_tokens(tokens: Sequence[str]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in tokens:
        is_byte_level = all(character in _BYTES for character in token)
        content = bytes(_BYTES[character] for character in token) if is_byte_level else token.encode("utf-8", "replace")
        texts.append(decoder.decode(content))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
