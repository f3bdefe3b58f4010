"""Random rows and files in every format that archon reads, and broken ones.

A word that starts with A belongs to an answer, and a word that starts with Q to everything else. The trained text of a
row shows by its words whether all answers are trained, and nothing else.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

WORD = re.compile("[AQ][0-9]+[éß数😀_]*")
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
JUNK: list[Any] = [
    *(None, "", " ", 0, -1, 1.5, 10**400, float("nan"), True, [], {}, [[]], [None], [0], {"role": "user"}),
    *("\ud83d\ude00", "\ud800", "\x00", "\u2028", "\ufeff", "<|im_end|>", "<think>", "</think>"),
    *("x", "[", "{}", "null"),
    *("y" * 5000, "\n\nHuman: y\n\nAssistant: y", [{"type": "text"}], [{"type": "image"}], {"a": {"b": [1]}}, "a\r\nb"),
]
FIELDS = ["name", "weight", "train", "tools", "images", "extra", "content", "system", "tool_calls", "thinking", "mask"]


def words(draw: random.Random, letter: str, least: int = 1) -> str:
    """Return some words of one kind."""
    text = ""
    for number in range(draw.randint(least, 4)):
        ending = draw.choice(["", "", "é", "ß_", "数", "😀"])
        text += (draw.choice([" ", " ", "\n", "  ", "\n\n", "\u2028", "\t"]) if number else "") + letter
        text += f"{draw.randrange(40)}{ending}"
    return text


def content(draw: random.Random, letter: str) -> Any:
    """Return the content of a message: text, or text parts."""
    if draw.random() < 0.15:
        return [{"type": "text", "text": words(draw, letter)} for _ in range(draw.randint(1, 2))]
    return words(draw, letter)


def _text(value: Any) -> str:
    """Return the content of a message as text."""
    return "".join(part.get("text", "") for part in value) if isinstance(value, list) else value or ""


def call(draw: random.Random) -> Row:
    """Return a tool call of an answer."""
    arguments: Any = {f"A{draw.randrange(9)}": draw.choice([f"A{draw.randrange(9)}", 1, None, [True], {"A1": 2.5}])}
    arguments = json.dumps(arguments) if draw.random() < 0.5 else arguments
    return {"id": f"call{draw.randrange(99)}", "type": "function", "function": {"name": "A7", "arguments": arguments}}


def answer(draw: random.Random) -> Row:
    """Return an assistant's message."""
    message: Row = {"role": "assistant", "content": content(draw, "A")}
    match draw.randrange(12):
        case 0:
            message["content"] = ""
        case 1:
            message["weight"] = draw.choice([0, 1])
        case 2:
            message["train"] = draw.choice([False, True])
        case 3:
            message["reasoning_content"] = words(draw, "A")
        case 4:
            message["content"] = f"<think>\n{words(draw, 'A')}\n</think>\n\n{words(draw, 'A')}"
    return message


def turns(draw: random.Random, most: int = 4) -> list[Row]:
    """Return a conversation that ends with an answer."""
    messages: list[Row] = []
    if draw.random() < 0.2:
        messages.append({"role": "system", "content": content(draw, "Q")})
    for _ in range(draw.choice([1, 1, 2, most])):
        messages.append({"role": "user", "content": content(draw, "Q")})
        if draw.random() < 0.15:
            calls = [call(draw) for _ in range(draw.randint(1, 2))]
            messages.append({"role": "assistant", "content": draw.choice(["", None]), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": words(draw, "Q")} for c in calls]
        messages.append(answer(draw))
    if len(messages) > 2 and draw.random() < 0.2:  # an answer that occurs twice
        messages += messages[-2:]
    return messages


def tools(draw: random.Random) -> Any:
    """Return the functions of a conversation, as a list or as JSON."""
    parameters = {"type": "object", "properties": {"A1": {"type": "string"}}}
    functions = [{"type": "function", "function": {"name": "Q7", "description": "Q8", "parameters": parameters}}]
    return json.dumps(functions) if draw.random() < 0.3 else functions


def messages_row(draw: random.Random) -> Row:
    row: Row = {draw.choice(["messages", "messages", "conversations"]): turns(draw)}
    return row | {"tools": tools(draw)} if draw.random() < 0.1 else row


def sharegpt_row(draw: random.Random) -> Row:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    messages = [message for message in turns(draw) if message["role"] in names and message["content"]]
    conversation = [{"from": names[message["role"]], "value": _text(message["content"])} for message in messages]
    if draw.random() < 0.2:
        called = {"from": "function_call", "value": json.dumps({"name": "A7", "arguments": {"A1": "A2"}})}
        conversation[-1:] = [called, {"from": "observation", "value": words(draw, "Q")}, conversation[-1]]
    return {"conversations": conversation}


def completion_row(draw: random.Random) -> Row:
    if draw.random() < 0.5:
        return {"prompt": words(draw, "Q"), "completion": words(draw, "A")}
    return {"prompt": [{"role": "user", "content": content(draw, "Q")}], "completion": [answer(draw)]}


def response_row(draw: random.Random) -> Row:
    return {"prompt": words(draw, "Q"), "response": words(draw, "A")}


def alpaca_row(draw: random.Random) -> Row:
    return {"instruction": words(draw, "Q"), "input": words(draw, "Q", 0), "output": words(draw, "A")}


def text_row(draw: random.Random) -> Row:
    return {"text": words(draw, "A")}


def question_row(draw: random.Random) -> Row:
    return {"question": words(draw, "Q"), draw.choice(["answer", "solution"]): words(draw, "A")}


def strings_pair(draw: random.Random) -> Row:
    return {"prompt": words(draw, "Q"), "chosen": words(draw, "A"), "rejected": words(draw, "A")}


def conversations_pair(draw: random.Random) -> Row:
    start = turns(draw)[:-1]
    last = [{"role": "assistant", "content": content(draw, "A")} for _ in range(2)]
    return {"chosen": [*start, last[0]], "rejected": [*start, last[1]]}


def answers_pair(draw: random.Random) -> Row:
    last = [[{"role": "assistant", "content": words(draw, "A")}] for _ in range(2)]
    return {"prompt": [{"role": "user", "content": content(draw, "Q")}], "chosen": last[0], "rejected": last[1]}


def transcript_pair(draw: random.Random) -> Row:
    start = "".join(f"\n\n{speaker}: {words(draw, 'Q')}" for speaker in ("Human", "Assistant", "Human"))
    return {side: f"{start}\n\nAssistant: {words(draw, 'A')}" for side in ("chosen", "rejected")}


def verl_row(draw: random.Random) -> Row:
    prompt = [{"role": "user", "content": words(draw, "Q")}]
    gold = {"style": "rule", "ground_truth": words(draw, "A")}
    return {"data_source": "Q1", "prompt": prompt, "reward_model": gold, "extra_info": {"index": draw.randrange(9)}}


def prompt_row(draw: random.Random) -> Row:
    return {"prompt": draw.choice([words(draw, "Q"), [{"role": "user", "content": content(draw, "Q")}]])}


SFT = [messages_row, messages_row, sharegpt_row, completion_row, response_row, alpaca_row, text_row, question_row]
PAIRS = [strings_pair, conversations_pair, answers_pair, transcript_pair]
RL = [verl_row, prompt_row, response_row, question_row, messages_row, completion_row]
MAKERS: dict[str, list[Callable[[random.Random], Row]]] = {"sft": SFT, "dpo": PAIRS, "rl": RL}


def mutate(value: Any, draw: random.Random) -> Any:
    """Return the value with one place changed: replaced, removed, repeated or added."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return draw.choice(JUNK)
    value = dict(value) if isinstance(value, dict) else list(value)
    place = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    match draw.randrange(5):
        case 0:
            del value[place]
        case 1 if isinstance(value, list):
            value.insert(place, value[place])
        case 2 if isinstance(value, dict):
            value[draw.choice(FIELDS)] = draw.choice(JUNK)
        case _:
            value[place] = mutate(value[place], draw)
    return value


@dataclass
class Case:
    """A data set on disk.

    Attributes:
        path: file, folder or pattern.
        rows: its rows; None if the file is broken.
        regular: whether every row is of one format.
        mutated: number of the row that was changed.
    """

    path: Path
    rows: list[Row] | None
    regular: bool = True
    mutated: int | None = None


def random_case(draw: random.Random, kind: str, folder: Path) -> Case:
    """Write random rows of a kind to a new folder; a third of the data sets are irregular or broken."""
    folder.mkdir(parents=True)
    make = draw.choice(MAKERS[kind])
    rows: list[Row] = [make(draw) for _ in range(draw.choice([1, 1, 2, 3, 8]))]
    if len({tuple(row) for row in rows}) > 1:  # one set of columns in a file
        rows = [row for row in rows if row.keys() == rows[0].keys()]
    regular, mutated = True, None
    match draw.randrange(9):
        case 0 | 1:
            mutated = draw.randrange(len(rows))
            for _ in range(draw.choice([1, 1, 2])):
                rows[mutated] = mutate(rows[mutated], draw)
            regular = mutated > 0
        case 2:
            rows.insert(draw.randint(0, len(rows)), draw.choice(SFT + PAIRS + RL)(draw))
            regular = False
        case 3:
            return Case(_broken_file(draw, rows, folder), None)
    return Case(*_write(draw, rows, folder), regular, mutated)


def _write(draw: random.Random, rows: list[Row], folder: Path) -> tuple[Path, list[Row]]:
    """Write rows in a random file format that can hold them; return the path, and the rows as they are in the file."""
    stem = draw.choice(["rows", "some rows", "größe", "a#b", "[1]", "x=y", "~rows", "100%"])
    kind = draw.choice(["jsonl", "jsonl", "json", "jsonl.gz", "csv", "parquet", "arrow", "folder", "pattern"])
    if kind == "csv" and (data := _as_csv(rows)):
        name = draw.choice(["csv", "csv.gz"])
        return _put(folder / f"{stem}.{name}", gzip.compress(data) if name == "csv.gz" else data), rows
    if kind in ("parquet", "arrow"):
        try:
            table = pa.Table.from_pylist(list(rows))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
            table = None  # rows of several types
        if table is not None and table.num_columns and [*_clean(rows)] == [*_clean(table.to_pylist())]:
            path = folder / f"{stem}.{kind}"
            if kind == "parquet":
                pq.write_table(table, path)
            else:
                with pa.ipc.new_file(str(path), table.schema) as file:
                    file.write_table(table)
            return path, [json.loads(row) for row in _clean(rows)]
    lines = [_dump(draw, row) for row in rows]
    if kind == "json":
        return _put(folder / f"{stem}.json", b"[" + b",\n".join(lines) + b"]"), rows
    if kind == "folder":
        return _put(folder / "train.jsonl", b"\n".join(lines)).parent, rows
    if kind == "pattern" and len(lines) > 1 and rows[0] != []:  # a file of [] has no row
        _put(folder / "part-1.jsonl", b"\n".join(lines[:1]))
        return _put(folder / "part-2.jsonl", b"\n".join(lines[1:])).parent / "part-*.jsonl", rows
    end = draw.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\n \n"])
    data = draw.choice([b"", b"", b"\xef\xbb\xbf"]) + end.join(lines) + draw.choice([b"", end])
    if kind == "jsonl.gz":
        return _put(folder / f"{stem}.jsonl.gz", gzip.compress(data)), rows
    return _put(folder / f"{stem}.jsonl", data), rows


def _clean(rows: Sequence[Row]) -> Any:
    """Yield rows without nulls, which Arrow adds to every object."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return (json.dumps(clean(row), sort_keys=True) for row in rows)


def _dump(draw: random.Random, row: Any) -> bytes:
    """Return a row as JSON; half of a surrogate pair as an escape."""
    text = json.dumps(row, ensure_ascii=draw.random() < 0.3)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(row).encode()


def _as_csv(rows: Sequence[Row]) -> bytes | None:
    if not all(isinstance(row, dict) and row.keys() == rows[0].keys() and row for row in rows):
        return None
    if not all(isinstance(value, str) for row in rows for value in row.values()):
        return None
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, [*rows[0]])
    writer.writeheader()
    writer.writerows(rows)
    try:
        return stream.getvalue().encode()
    except UnicodeEncodeError:
        return None


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _broken_file(draw: random.Random, rows: Sequence[Row], folder: Path) -> Path:
    """Write a file that no reader may accept."""
    lines = [json.dumps(row).encode() for row in rows]
    data, name = b"\n".join(lines), draw.choice(["rows.jsonl", "rows.json"])
    damages: list[Callable[[], tuple[str, bytes]]] = [
        lambda: (name, data[: -draw.randint(1, len(lines[-1]) - 1)]),
        lambda: (name, b""),
        lambda: (name, b"\n \n"),
        lambda: (name, b"\xef\xbb\xbf"),
        lambda: (name, data[:5] + b"\xff" + data[5:]),
        lambda: (name, data[:-1] + b"\x00"),
        lambda: (name, data.decode().encode("utf-16")),
        lambda: (name, draw.randbytes(draw.randint(1, 300))),
        lambda: (name, data + b"\n" + b"[" * 10_000 + b"]" * 10_000),
        lambda: (name, b"[" * 10_000 + b"]" * 10_000),
        lambda: (name, b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        lambda: (name, data + b'\n{"prompt": ' + b"9" * 10_000 + b"}"),
        lambda: (name, data + b'\n{"prompt": "a", "prompt": "b"}'),
        lambda: (name, data + b"\n" + draw.choice([b"1", b"null", b'"x"', b"[]", b"NaN", b"true", b"{,}", b"\x00"])),
        lambda: (name, draw.choice([b"1", b"null", b'"x"', b"[]", b"[[]]", b"[1]", b"{}", b"[{}]", b"[null]"])),
        lambda: (name, b"[" + b",".join(lines) + b"," + draw.choice([b"]", b"{]", b"[]]", b"1]"])),
        lambda: (name, b"{'prompt': 'x'}"),
        lambda: (name, b"x" * 1_000_000),
        lambda: ("rows.jsonl", gzip.compress(data)),
        lambda: ("rows.jsonl.gz", data),
        lambda: ("rows.jsonl.gz", gzip.compress(data)[: -draw.randint(1, 12)]),
        lambda: ("rows.jsonl.gz", gzip.compress(data + draw.randbytes(3000))[:-2000]),
        lambda: ("rows.jsonl.gz", gzip.compress(data)[:-8] + b"\x00" * 8),
        lambda: (draw.choice(["rows.txt", "rows", "rows.parquet", "rows.arrow", "rows.csv", "rows.JSONL.zip"]), data),
        lambda: ("rows.csv", b"prompt,response\nx\n"),
        lambda: ("rows.csv", b'prompt,response\n"x,y\n'),
        lambda: ("rows.csv", b"prompt,prompt\nx,y\n"),
        lambda: ("rows.csv", b"prompt,response\n\xff,y\n"),
        lambda: ("rows.parquet", _damaged_table(draw, rows)),
    ]
    name, data = draw.choice(damages)()
    return _put(folder / name, data)


def _damaged_table(draw: random.Random, rows: Sequence[Row]) -> bytes:
    """Return a parquet file that is cut off, or whose strings are bytes that are not UTF-8."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": [b"\xff\xfe"] * len(rows), "response": [b"x"] * len(rows)}), sink)
    data = sink.getvalue()
    return data if draw.random() < 0.3 else data[: draw.randrange(len(data))]


def sft_answers(rows: Sequence[Row], template: str, train_turns: str = "all") -> list[Counter[str]] | None:
    """Return the words that each row trains; None if the columns of the first row have no known format."""
    columns = rows[0].keys()
    if {"prompt", "response"} <= columns:
        return [word_counts(row["response"]) for row in rows]
    if name := next((name for name in ("messages", "conversations") if name in columns), None):
        return [_turn_words(row[name], template, train_turns) for row in rows]
    if {"prompt", "completion"} <= columns:
        return [_turn_words(_as_turns(row["completion"]), template, train_turns) for row in rows]
    if name := next((name for name in ("output", "text", "solution", "answer") if name in columns), None):
        return [word_counts(row[name]) for row in rows]
    return None


def pair_answers(rows: Sequence[Row], side: str) -> list[Counter[str]]:
    """Return the words of the last answer of each pair."""
    answers = []
    for row in rows:
        last = row[side]
        if isinstance(last, str):
            answers.append(word_counts(last.rpartition("Assistant: ")[2]))
        else:
            answers.append(_turn_words(last, "full", "last"))
    return answers


def _as_turns(value: Any) -> list[Row]:
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else value


def _turn_words(messages: Any, template: str, train_turns: str) -> Counter[str]:
    messages = json.loads(messages) if isinstance(messages, str) else messages
    messages = [
        {"role": ROLES.get(m["from"], m["from"]), "content": m.get("value")} if "from" in m and "role" not in m else m
        for m in messages
    ]
    count: Counter[str] = Counter()
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in assistants if train_turns == "all" else assistants[-1:]:
        message = messages[index]
        if message.get("weight", 1) == 0 or message.get("train", 1) == 0:
            continue
        text = _text(message.get("content"))
        thought = text.partition("</think>")[0] if "</think>" in text else ""
        if template == "thinking" and index < len(messages) - 1 and word_counts(thought):
            continue  # the template strips this thought, so the turn is masked
        count += word_counts(text)
        thinking = next((message[key] for key in ("reasoning_content", "thinking") if message.get(key)), "")
        count += word_counts(thinking)
        count += word_counts([tool.get("function", tool) for tool in message.get("tool_calls") or ()])
    return count


def word_counts(value: Any) -> Counter[str]:
    """Count the words of a text, or of another value as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Counter(WORD.findall(text))


def gold_answer(row: Row) -> Counter[str] | None:
    """Return the words of an RL row's gold answer, without separate thinking; None if it has none."""
    if name := next((name for name in ("messages", "conversations") if name in row), None):
        return _last_content(row[name])
    if "reward_model" in row:
        return word_counts(row["reward_model"]["ground_truth"])
    name = next((name for name in ("response", "answer", "solution", "completion") if name in row), None)
    return None if name is None else _last_content(_as_turns(row[name]))


def _last_content(messages: Sequence[Row]) -> Counter[str]:
    return word_counts(_text(messages[-1].get("content")))


ODD_PROMPTS = ["x", "\u2028", "<|im_end|>", "\x00", "'\\n", "#", "\x0cx"]


def random_prompts(draw: random.Random) -> tuple[bytes, list[str] | None]:
    """Return a file of prompts, and its prompts; None if the file is broken."""
    prompts = [words(draw, "Q").replace("\n", " ") for _ in range(draw.choice([1, 1, 2, 5]))]
    prompts += draw.sample(ODD_PROMPTS, draw.choice([0, 1, 3]))
    if draw.random() < 0.1:
        prompts.append("y" * draw.choice([600, 100_000]))
    end = draw.choice(["\n", "\n", "\r\n", "\n\n", "\n  \n"])
    data = (draw.choice(["", "", "\ufeff"]) + end.join(prompts) + draw.choice(["", end])).encode()
    match draw.randrange(10):
        case 0:
            return draw.choice([b"", b"\n", b" \n\t\r\n", b"\xef\xbb\xbf"]), None
        case 1:
            return draw.choice([data.decode().encode("utf-16"), data + b"\xff", b"\xff" + draw.randbytes(50)]), None
    return data, [prompt for prompt in prompts if prompt.strip()]


NUMBERS = ["1e400", "-1", "0", "1.5", ".nan", ".inf", "9" * 5000, "1_000", "0x10", "1:30", "2026-01-01", "true", "null"]
NESTED = ["[", "{", "[1,2]", "{a: 1}", "[[[1]]]", "[" * 2000, "{a: " * 300, "a: b: c", "- a", "? x", ": x", "|", ">"]
TEXTS = ["", " ", "a #b", "# a", " x ", "x\ny", "\t", "\x00", "größe", "数", "\u2028", "\ud800", "\udc80", "\ufeff"]
TEXTS.append("y" * 3000)
PATHS = ["~", "~/x", "~nobody-here/x", "$HOME", "$NO_SUCH_NAME", "\\", "a\\", "a=b", "=", "%", "@", "`"]
PATHS += ["'", '"', "'x", "!x"]
VARIABLES = ["${", "${x}", "${.}", "${oc.env:NO_SUCH_NAME}", "${run_dir}", "${model}", "${now:%Y}", "${now:\x00}"]
VARIABLES += ["${now:}", "${oc.decode:[}", "${oc.create:1}", "${oc.select:x}", "???", "*x", "&a"]
VARIABLES += ["!!python/object:os.system x"]
KEYS = ["", ".", "a..b", "model", "model.path.x", "model[path]", "a[0]", "x[", "]", "größe", " a", "a ", "~", "$A", "#"]


def random_override(draw: random.Random, names: Sequence[str]) -> str:
    """Return `key=value` for a field of `names`, or another key."""
    key = draw.choice(names) if draw.random() < 0.85 else draw.choice(KEYS)
    if draw.random() < 0.1 and key:
        place = draw.randrange(len(key))
        key = key[:place] + draw.choice(["", ".", "x", "[", "\x00", " "]) + key[place + 1 :]
    return (key.lstrip("-") + "=" if draw.random() < 0.97 else key.lstrip("-") + "x") + draw.choice(
        NUMBERS + NESTED + TEXTS + PATHS + VARIABLES
    )
