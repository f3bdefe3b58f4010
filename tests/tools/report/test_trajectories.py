"""What the page holds of a dump of trajectories: tokens as text, turns, versions, within bounds, whatever it says."""

from __future__ import annotations

import base64
import json
import os
import re
from contextlib import closing
from importlib import resources
from itertools import pairwise

import pytest

from archon.tools.report import load_run, render_page, sampled_trajectories
from archon.tools.report.page import SCRIPTS
from archon.tools.report.sampled_trajectories import sample, token_texts
from archon.training.metrics import MetricsWriter, TrajectoryWriter

HOSTILE = '</script><script>alert(1)</script><!-- <img src=x onerror="alert(2)"> \u2028 {{data}}'


def answer(step=0, group=0, text="ab", **changes):
    record = {"step": step, "group": group, "prompt": "p", "answer": "7", "completion": text, "reward": 0.5}
    return record | {"tokens": list(text), "logprobs": [-0.5] * len(text)} | changes


def shown(**changes):
    [[record]] = sample([answer(**changes)]).groups
    return record


def test_tokens_are_shown_with_their_logprobs():
    record = shown(text="4+", logprobs=[-0.123456, -2], version=3)
    assert (record["tokens"], record["logprobs"], record["version"]) == (["4", "+"], [-0.123, -2], 3)
    assert "turn_ids" not in record and "versions" not in record and "tokens_in_all" not in record


def test_turns_and_versions_and_tokens_that_were_given_are_kept_apart():
    record = shown(
        text="abc",
        tokens=["a", "b", "no!", "c"],
        logprobs=[-1.0, -2.0, None, -3.0],
        turn_ids=[0, 0, -1, 1],
        versions=[4, 5, -1, 5],
    )
    assert record["logprobs"] == [-1.0, -2.0, None, -3.0]
    assert (record["turn_ids"], record["versions"]) == ([0, 0, -1, 1], [4, 5, -1, 5])


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-1.0]},
        {"logprobs": None},
        {"tokens": "ab"},
        {"tokens": ["a", 3]},
        {"tokens": [], "logprobs": []},
    ],
)
def test_tokens_without_a_logprob_each_are_left_as_text(changes):
    record = shown(**changes)
    assert "tokens" not in record and "logprobs" not in record
    assert record["completion"] == "ab"


def test_a_dump_of_before_has_no_turns_and_is_shown_all_the_same():
    before = {"step": 3, "group": 1, "prompt": "p", "completion": "ab", "reward": 1.0, "length": 2}
    [[record]] = sample([before | {"tokens": ["a", "b"], "logprobs": [-1, -2]}]).groups
    assert record["tokens"] == ["a", "b"] and record["length"] == 2
    [[record]] = sample([before]).groups
    assert record == {name: value for name, value in before.items() if name != "group"}


def test_columns_of_another_length_or_kind_are_ignored():
    record = shown(turn_ids=[0], versions=[1.5, 2], version="new", logprobs=[-1.0, "Infinity"])
    assert record.keys().isdisjoint({"turn_ids", "versions", "version"})
    assert record["logprobs"] == [-1.0, None]


@pytest.mark.parametrize(
    ("tokens", "completion", "texts"),
    [
        (["4", "6"], "46", ["4", "6"]),
        (["Ġthe", "Ġcat", "Ċ"], " the cat\n", [" the", " cat", "\n"]),
        (["▁the", "▁cat"], " the cat", [" the", " cat"]),
        # é is C3 A9 and 日 is E6 97 A5; a character that is cut in two is with its last token.
        (["Ã©", "æĹ", "¥", "<|im_end|>"], "é日<|im_end|>", ["é", "", "日", "<|im_end|>"]),
        (["Ã©"], "Ã©", ["Ã©"]),  # a vocabulary of characters, not of bytes
        (["Ġcut", "Ã"], "something else", [" cut", "\ufffd"]),
    ],
)
def test_tokens_read_as_text(tokens, completion, texts):
    assert token_texts(tokens, [False] * len(tokens), completion) == texts


def test_tokens_that_were_given_do_not_hide_the_alphabet():
    assert token_texts(["Ġyes", "Ġagain", "Ġno"], [False, True, False], " yes no") == [" yes", " again", " no"]


def test_a_logprob_beyond_all_numbers_is_none():
    assert shown(text="abc", logprobs=[10**400, 1e308, float("nan")])["logprobs"] == [None, None, None]


def test_what_is_nested_deeper_than_a_page_shows_is_cut():
    deep = 1
    for _ in range(900):
        deep = [deep]
    record = shown(prompt=deep, group=deep, split=deep)
    assert json.dumps(record["prompt"]) == "[" * 21 + '"\\u2026"' + "]" * 21


def test_a_long_run_is_shown_evenly_and_says_so():
    run = sample(answer(step, step) for step in range(1000))
    assert len(run.groups) == sampled_trajectories.MAX_GROUPS
    steps = [group[0]["step"] for group in run.groups]
    assert steps[0] == 0 and steps[-1] == 999
    assert {b - a for a, b in pairwise(steps)} == {3, 4}
    assert run.selection == (
        "300 of 1,000 trajectories: 300 of 1,000 groups, evenly spaced from the first to the last."
        " The others are in trajectories.jsonl."
    )
    assert sample([answer()]).selection == "All 1 trajectories of the run."


def test_a_dump_of_long_answers_is_bounded_by_its_size(monkeypatch):
    monkeypatch.setattr(sampled_trajectories, "MAX_SIZE", 400_000)
    run = sample(answer(step, step, text="x" * 2000) for step in range(200))
    size = len(json.dumps(run.groups))
    assert 2 < len(run.groups) < 20 and size < 400_000
    assert (run.groups[0][0]["step"], run.groups[-1][0]["step"]) == (0, 199)


def test_one_group_cannot_fill_the_page():
    run = sample(answer(0, 0) for _ in range(1000))
    assert len(run.groups[0]) == sampled_trajectories.MAX_ANSWERS
    assert "64 of 1,000 trajectories: all 1 groups, at most the first 64 answers of each" in run.selection


def test_one_answer_cannot_fill_the_page():
    n = 3 * sampled_trajectories.MAX_TOKENS
    record = shown(text="x" * n, prompt="y" * 100_000, turn_ids=[0] * n)
    assert (
        len(record["tokens"]) == len(record["logprobs"]) == len(record["turn_ids"]) == sampled_trajectories.MAX_TOKENS
    )
    assert record["tokens_in_all"] == n
    assert record["prompt"].endswith("\n… and 80,000 more characters") and len(record["prompt"]) < 20_100


def test_what_a_group_shares_is_stored_once():
    [group] = sample([answer(), answer(), answer(prompt="another")]).groups
    assert [record.get("prompt") for record in group] == ["p", None, "another"]
    assert [record.get("answer") for record in group] == ["7", None, None]


def test_hostile_texts_are_inert_wherever_they_stand(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").write(1, {"reward": 0.0})
    with closing(TrajectoryWriter(tmp_path / "trajectories.jsonl")) as writer:
        extra = {"answer": HOSTILE, "stop_reason": HOSTILE, "split": HOSTILE, "rewards": {HOSTILE: 1.0}}
        writer.write(1, HOSTILE, HOSTILE, HOSTILE, 0.5, tokens=[HOSTILE], logprobs=[-1.0], **extra)
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 2, "prompt": "half \\ud800", "completion": "x", "reward": NaN, "advantage": Infinity}\n')
    page = render_page(load_run(tmp_path))
    assert page.count("<script") == 2 and "<img" not in page and "<!--" not in page
    block = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    data = json.loads(block, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = data["groups"]
    assert first[0]["tokens"] == [HOSTILE] and first[0]["rewards"] == {HOSTILE: 1.0}
    assert (second[0]["prompt"], second[0]["reward"], second[0]["advantage"]) == ("half ?", "nan", "inf")
    page.encode("utf-8")


def test_the_scripts_have_no_way_to_make_markup_or_run_text():
    folder = resources.files("archon.tools.report") / "assets"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    assert script.startswith('"use strict";')
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser", script)
    assert not re.search(r"document\.write|\beval\(|new Function|setTimeout\(\s*[\"'`]|\bon[a-z]+\s*=", script)
    assert not re.search(r"localStorage|sessionStorage|document\.cookie|postMessage|WebSocket|import\(", script)
    assert "</" not in script, "nothing in it can end its element"
    defined = re.findall(r"^(?:function|const|let) (\w+)", script, re.MULTILINE)
    assert len(defined) == len(set(defined)), "the scripts share one scope"


def test_every_class_the_viewer_gives_has_a_style_and_every_surprise_a_color():
    folder = resources.files("archon.tools.report") / "assets"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "trajectories.js"))
    ends = re.search(r"LOGPROB_CLASSES = \[(.*?)\]", script)[1].split(",")
    numbers = [float(end) for end in ends]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] < 0
    assert re.findall(r"^\.p(\d) \{ background", style, re.MULTILINE) == [str(i) for i in range(1, len(ends) + 1)]
    for name in ("row", "list", "prompt", "sample", "token", "input", "turn", "version", "scale", "reading", "chosen"):
        assert f".{name}" in style, name
    assert "prefers-color-scheme: dark" in style and "color-scheme: light dark" in style


def test_pictures_of_a_run_are_shown_and_nothing_else_of_the_machine(tmp_path):
    png = b"\x89PNG\r\n\x1a\n" + b"x" * 20
    (tmp_path / "0f.png").write_bytes(png)
    (tmp_path / "ab.png").write_bytes(b"no picture")
    os.mkfifo(tmp_path / "ef.png")
    names = ["0f.png", "ab.png", "../0f.png", "/etc/hostname", "cd.png", "ef.png"]
    [[first, second]] = sample([answer(images=names), answer(images=names)], tmp_path).groups
    assert first["images"] == ["data:image/png;base64," + base64.b64encode(png).decode(), *[None] * 5]
    assert "images" not in second  # stored with the first of them
