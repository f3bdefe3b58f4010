"""Tools for agents: programs in the sandbox, and search in a local file.

A tool is a function of JSON arguments that returns text; its docstring is its description for the model.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archon.rl.sandbox.default import default_runner
from archon.rl.sandbox.programs import Limits, Result
from archon.schema.errors import SandboxError

TOOL_LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10.0, output_bytes=1 << 16)
MAX_TEXT = 8000
"""Characters of a tool's result, which the model reads."""
MAX_INDEX_BYTES = 1 << 30
_K1, _B = 1.5, 0.75  # of BM25: saturation of term counts, and normalization by length
_WORD = re.compile(r"\w+")


def python_tool(code: str) -> str:
    """Run a Python program in a sandbox without network and return what it prints. Each call starts anew."""
    return _describe(default_runner().run(["python", "main.py"], {"main.py": code}, limits=TOOL_LIMITS))


def bash_tool(command: str) -> str:
    """Run a bash command in a sandbox without network and return what it prints. Each call starts anew."""
    return _describe(default_runner().run(["bash", "main.sh"], {"main.sh": command}, limits=TOOL_LIMITS))


def _describe(result: Result) -> str:
    """Return the output of a program, and how it ended if it failed."""
    text = result.stdout + result.stderr
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n… {len(text) - MAX_TEXT:,} characters left out …\n{text[-MAX_TEXT // 2 :]}"
    if result.limit is not None:
        return f"{text}\n[ended: it exceeded its limit {result.limit}]".lstrip()
    return text if result.ok else f"{text}\n[exit code {result.exit_code}]".lstrip()


def search_tool(path: str | Path, text_key: str = "text", n: int = 3) -> Callable[[str], str]:
    """Return a tool `search(query)` that finds rows of a JSONL file by BM25.

    Args:
        path: the file; each line is an object.
        text_key: column that is searched and shown.
        n: number of rows that a search returns.
    """
    if n < 1:
        raise SandboxError(f"n: got {n!r}, expected at least 1")
    index = _read_index(str(Path(path).absolute()), text_key)

    def search(query: str) -> str:
        """Search a collection of texts for words and return the best matches, the best first."""
        found = index.search(query, n)
        return "\n\n".join(text[: MAX_TEXT // n] for text in found) or "nothing found"

    return search


class BM25:
    """Inverted index of texts, ranked by BM25 (Robertson and Zaragoza 2009; inverse document frequency as in Lucene).

    Args:
        texts: the documents.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        counts = [Counter(_words(text)) for text in self.texts]
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for document, words in enumerate(counts):
            for word, count in words.items():
                self._postings.setdefault(word, []).append((document, count))
        lengths = [words.total() for words in counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each document that has a word of the query."""
        found: dict[int, float] = {}
        for word in _words(query):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (len(self.texts) - len(postings) + 0.5) / (len(postings) + 0.5))
            for document, count in postings:
                gain = weight * count * (_K1 + 1) / (count + self._norms[document])
                found[document] = found.get(document, 0.0) + gain
        return found

    def search(self, query: str, n: int) -> list[str]:
        """Return the `n` best texts, the best first; equal scores in the order of the texts."""
        scores = self.scores(query)
        return [self.texts[document] for document in sorted(scores, key=lambda one: (-scores[one], one))[:n]]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@functools.lru_cache(maxsize=8)
def _read_index(path: str, text_key: str) -> BM25:
    texts = []
    try:
        size = Path(path).stat().st_size
        if size > MAX_INDEX_BYTES:
            raise SandboxError(f"{path} has {size:,} bytes, expected at most {MAX_INDEX_BYTES:,}")
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    texts.append(_text_of(line, text_key, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxError(f"cannot read the texts of {path}: {error}") from None
    if not texts:
        raise SandboxError(f"{path} has no rows; expected lines such as {{{text_key!r}: …}}")
    return BM25(texts)


def _text_of(line: str, key: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise SandboxError(f"{where} is no JSON: {line.strip()[:80]!r}") from None
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise SandboxError(f"{where} is {line.strip()[:80]!r}; expected an object with the text {key!r}")
    text: str = row[key]
    return text
