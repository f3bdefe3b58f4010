"""`archon eval` as a user meets it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from archon.training.metrics import read_jsonl
from tests.data.toy_tokenizers import CHATML, toy_tokenizer
from tests.serve.served import served

ROWS = [("1+2=", "3"), ("2+2=", "4"), ("5+2=", "7"), ("3+1=", "4")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in ROWS))
    return file


async def digits(prompt: str, completions: str, prompt_ids, completion_ids, **row) -> dict[str, float]:
    """1 for an answer that has a digit, and a part that is always 0."""
    return {"digit": float(any(c.isdigit() for c in completions)), "nothing": 0.0}


def of_level(prompt: str, completions: str, prompt_ids, completion_ids, *, level, **row) -> float:
    return float(level)


async def even_only(prompt: str, completions: str, prompt_ids, completion_ids, **row) -> float:
    if len(completions) % 2:
        raise ValueError("an odd answer")
    return 1.0


REWARD = f"{__name__}.digits"


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_a_checkpoint_is_scored(archon, checkpoint, data, tmp_path):
    out = tmp_path / "out"
    done = archon("eval", checkpoint, "--data", data, "--reward", REWARD, "--n", 4, "--out", out, "max_new_tokens=3")
    assert done.code == 0, done.err
    answers = read_jsonl(out / "answers.jsonl")
    assert sorted((a["group"], a["sample"]) for a in answers) == [(i, j) for i in range(4) for j in range(4)]
    by_prompt = [[a["reward"] for a in answers if a["group"] == i] for i in range(4)]
    assert all(a["reward"] == float(any(c.isdigit() for c in a["completion"])) for a in answers)
    assert {(a["prompt"], a["answer"]) for a in answers} == set(ROWS)
    assert answers[0]["rewards"].keys() == {"digit", "nothing"} and 1 <= answers[0]["length"] <= 3
    found = results(out)
    assert found["scores"]["reward"]["mean"] == pytest.approx(sum(map(sum, by_prompt)) / 16)
    assert found["scores"]["pass@4"]["mean"] == sum(any(rewards) for rewards in by_prompt) / 4
    assert list(found["scores"]) == ["reward", "pass@1", "pass@2", "pass@4"] and found["lost"] == {}
    for name, score in found["scores"].items():
        assert f"{name:<10}{score['mean']:.4f}  [{score['low']:.4f}, {score['high']:.4f}]" in done.out
    page = (out / "report.html").read_text()
    assert "Evaluation of checkpoint" in page and "barChart" in page and "All 16 trajectories" in page


def test_the_same_seed_gives_the_same_answers_and_another_does_not(archon, checkpoint, data, tmp_path):
    texts = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        arguments = ("--data", data, "--reward", REWARD, "--out", tmp_path / name, "n=3", f"seed={seed}")
        assert archon("eval", checkpoint, *arguments, "max_new_tokens=4").code == 0
        answers = sorted(read_jsonl(tmp_path / name / "answers.jsonl"), key=lambda a: (a["group"], a["sample"]))
        texts.append([a["completion"] for a in answers])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 3


@pytest.mark.slow
def test_an_endpoint_is_scored_as_its_checkpoint_is(archon, checkpoint, data, tmp_path):
    options = ("--data", data, "--reward", REWARD, "--temperature", 0, "max_new_tokens=4")
    assert archon("eval", checkpoint, *options, "--out", tmp_path / "direct").code == 0
    with served(checkpoint) as url:
        done = archon("eval", *options, "--url", url, "--model", "checkpoint", "--out", tmp_path / "served")
    assert done.code == 0, done.err
    direct, through = (results(tmp_path / name) for name in ("direct", "served"))
    assert direct["scores"] == through["scores"] and through["who"] == url
    texts = [
        {a["prompt"]: (a["completion"], a["length"]) for a in read_jsonl(tmp_path / name / "answers.jsonl")}
        for name in ("direct", "served")
    ]
    assert texts[0] == texts[1]


async def seen(prompt: str, completions: str, prompt_ids, completion_ids, **row) -> dict[str, float]:
    """Numbers that differ if any argument does."""
    arguments = {"prompt": prompt.encode(), "prompt_ids": prompt_ids, "completion_ids": completion_ids}
    return {name: float(sum(i * x for i, x in enumerate(value, 1))) for name, value in arguments.items()}


@pytest.mark.slow
def test_a_reward_gets_the_same_values_from_an_endpoint_with_the_tokenizer(archon, checkpoint, data, tmp_path):
    options = ("--data", data, "--reward", f"{__name__}.seen", "--temperature", 0, "max_new_tokens=4")
    assert archon("eval", checkpoint, *options, "--out", tmp_path / "direct").code == 0
    with served(checkpoint) as url:
        endpoint = ("--url", url, "--model", "checkpoint")
        done = archon("eval", *options, *endpoint, "--out", tmp_path / "served", f"tokenizer={checkpoint}")
        plain = archon("eval", *options, *endpoint, "--out", tmp_path / "plain")
    assert done.code == 0, done.err
    direct, through = (
        sorted((a["prompt"], sorted(a["rewards"].items())) for a in read_jsonl(tmp_path / name / "answers.jsonl"))
        for name in ("direct", "served")
    )
    assert direct == through
    assert "the reward gets None as prompt_ids and completion_ids" in plain.out + plain.err


def test_lost_answers_are_counted_and_left_out(archon, checkpoint, data, tmp_path):
    out = tmp_path / "out"
    done = archon("eval", checkpoint, "--data", data, "--reward", f"{__name__}.even_only", "--n", 8, "--out", out)
    found = results(out)
    assert done.code == 0 and found["answers"] + found["lost"]["reward_raised"] == 32 and 0 < found["answers"] < 32
    assert found["scores"]["reward"]["mean"] == 1.0 and "ValueError: an odd answer" in done.out


def test_a_single_prompt_has_no_interval(archon, checkpoint, data, tmp_path):
    out = tmp_path / "out"
    done = archon("eval", checkpoint, "--data", data, "--reward", REWARD, "--out", out, "data.limit=1")
    text = (out / "results.json").read_text()
    assert done.code == 0 and "no interval" in done.out and "nan" not in done.out
    found = json.loads(text, parse_constant=pytest.fail)["scores"]  # JSON has no NaN
    assert found["reward"]["low"] is None and found["pass@1"]["low"] < found["pass@1"]["high"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--data", "DATA", "--reward", REWARD), "expected either a checkpoint folder or --url"),
        (
            ("CHECKPOINT", "--url", "http://x", "--data", "DATA", "--reward", REWARD),
            "expected either a checkpoint folder or --url",
        ),
        (("CHECKPOINT", "--reward", REWARD), "data: field required"),
        (("CHECKPOINT", "--data", "DATA", "--reward", "no_such"), "unknown reward 'no_such'"),
        (("CHECKPOINT", "--data", "DATA", "--reward", REWARD, "k=[3]"), "k: got 3, expected 1 to n = 1"),
        (("CHECKPOINT", "--data", "DATA", "--reward", REWARD, "--n", "2", "--temperature", "0"), "set n=1"),
        (("CHECKPOINT", "--data", "DATA", "--reward", REWARD, "temperatur=1"), "did you mean 'temperature'"),
        (("--url", "http://127.0.0.1:9/v1", "--data", "DATA", "--reward", REWARD), "http://127.0.0.1:9/v1: Connection"),
        (("--url", "", "--data", "DATA", "--reward", REWARD), "the value of option --url is empty; expected a value"),
        (("--url", "file:///etc/passwd", "--data", "DATA", "--reward", REWARD), "--url: got 'file:///etc/passwd'"),
        (("tokenizer=a/b", "--url", "http://x", "--data", "DATA", "--reward", REWARD), "a/b"),
        (("reward=a//b", "--url", "http://x", "--data", "DATA"), "unknown reward 'a//b'"),
        (("DATA", "--data", "DATA", "--reward", REWARD), "sums.jsonl"),
        (("CHECKPOINT", "--data", "DATA", "--reward", "CHECKPOINT"), "`archon rl` takes reward.model="),
        (("CHECKPOINT", "--data", "DATA", "--reward", "tests.cli.test_eval.of_level"), "needs 'level', but the rows"),
        (("CHECKPOINT", "--data", "DATA", "--reward", REWARD, "--out", "."), "is not empty; choose another folder"),
    ],
)
def test_a_mistake_is_one_line(archon, checkpoint, data, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    named = {"DATA": data, "CHECKPOINT": checkpoint}
    assert told in archon("eval", *(named.get(argument, argument) for argument in arguments)).complaint


def test_answers_to_one_prompt_are_sampled_independently(archon, checkpoint, data, tmp_path):
    done = archon("eval", checkpoint, "--data", data, "--reward", REWARD, "--out", tmp_path / "out", "n=6")
    assert done.code == 0, done.err
    answers = read_jsonl(tmp_path / "out" / "answers.jsonl")
    for group in range(len(ROWS)):
        assert len({a["completion"] for a in answers if a["group"] == group}) > 1


def test_temperature_sets_how_a_checkpoint_answers(archon, checkpoint, data, tmp_path):
    """A very low temperature answers as greedy decoding does, whatever the seed; temperature 1 does not."""
    texts = []
    for number, (temperature, seed) in enumerate([(0, 1), (0, 2), (0.001, 3), (1, 4)]):
        out = tmp_path / str(number)
        options = ("--temperature", temperature, f"seed={seed}", "max_new_tokens=8", "--out", out)
        done = archon("eval", checkpoint, "--data", data, "--reward", REWARD, *options)
        assert done.code == 0, done.err
        texts.append({a["group"]: a["completion"] for a in read_jsonl(out / "answers.jsonl")})
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_a_row_that_the_template_refuses_is_named(archon, checkpoint, data, tmp_path):
    tokenizer = toy_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tools = [{"type": "function", "function": {"name": "add"}}]
    data.write_text("".join(json.dumps({"prompt": p, "tools": tools * (p == "c")}) + "\n" for p in "abc"))
    options = ("--data", data, "--reward", REWARD, f"tokenizer={tmp_path / 'tokenizer'}")
    for out, source in (("direct", [checkpoint]), ("served", ["--url", "http://127.0.0.1:9/v1"])):
        complaint = archon("eval", *source, *options, "--out", tmp_path / out).complaint
        assert f"{data}:3: it has tools, but the tokenizer's chat template ignores them" in complaint


async def slow(prompt: str, completions: str, prompt_ids, completion_ids, **row) -> float:
    await asyncio.sleep(4 if prompt == ROWS[0][0] else 0)
    return 1.0


def test_a_long_evaluation_says_how_far_it_is(archon, checkpoint, data, tmp_path):
    asked = ("--data", data, "--reward", f"{__name__}.slow", "--out", tmp_path / "out", "max_new_tokens=3")
    done = archon("eval", checkpoint, *asked)
    assert done.code == 0, done.err
    assert re.search(r"^eval 3/4  reward 1  \d+ s left$", done.out, flags=re.M), done.out
