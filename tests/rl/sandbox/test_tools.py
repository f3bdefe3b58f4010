"""Tools of agents: programs in the sandbox, and search by BM25."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from archon.rl import AgentWorkflow, GenerationHyperparameters
from archon.rl.bootstrap import make_tokenizer
from archon.rl.compat.trinity.react import tool_schema
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.rl.sandbox import bash_tool, python_tool, search_tool, tools
from archon.rl.sandbox.programs import Limits
from archon.rl.sandbox.tools import BM25
from archon.schema.errors import SandboxError
from archon.training.config import TokenizerRecipe
from tests.rl.compat.trinity.test_react import ROW, react
from tests.serve.scripted import Scripted
from tests.test_readme import shown


def test_a_program_of_the_model_returns_its_output() -> None:
    assert python_tool("print(6 * 7)") == "42\n"
    assert bash_tool("echo a; echo b | tr b c") == "a\nc\n"
    assert python_tool("1/0").endswith("ZeroDivisionError: division by zero\n\n[exit code 1]")
    assert python_tool("open('/tmp/a', 'w')") == "" and bash_tool("cat /tmp/a").endswith("[exit code 1]")


def test_a_result_is_short_and_says_which_limit_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = python_tool("print('a' * 9000 + 'b')")
    assert len(text) < tools.MAX_TEXT + 60 and text.endswith("ab\n") and "\n… 1,002 characters left out …\n" in text
    monkeypatch.setattr(tools, "TOOL_LIMITS", Limits(wall_seconds=0.1))
    assert bash_tool("echo a; sleep 9") == "a\n\n[ended: it exceeded its limit wall_seconds]"


def test_a_react_agent_runs_programs_and_answers_with_their_output() -> None:
    arguments = json.dumps({"code": "print(12 * (3 + 4))"})
    says = [f'<tool_call>\n{{"name": "python_tool", "arguments": {arguments}}}\n</tool_call>', "84"]
    tokenizer = make_tokenizer(TokenizerRecipe(kind="bpe", vocab_size=400), says)
    told = Scripted(tokenizer, says)
    workflow = react(tokenizer, workflow_args={"tools": ["archon.rl.sandbox.python_tool", bash_tool]})
    rollout = Rollout(told, workflow, log=lambda _: None)  # type: ignore[arg-type]
    (episode,) = asyncio.run(rollout.run([Prompt(0, ROW)]))
    assert episode.error is None and episode.rewards is not None and episode.rewards.tolist() == [1.0]
    last = tokenizer.decode(told.requests[-1].input_ids)
    assert "<tool_response>\n84\n" in last and "Run a bash command in a sandbox" in last


def test_the_agent_of_the_guide_runs_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guide_tool_agent.py").write_text(shown("tool-agent"))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = json.dumps({"code": "print(12 * (3 + 4))"})
    says = [f'<tool_call>\n{{"name": "python_tool", "arguments": {arguments}}}\n</tool_call>', "84"]
    tokenizer = make_tokenizer(TokenizerRecipe(kind="bpe", vocab_size=400), says)
    workflow = AgentWorkflow(
        "guide_tool_agent.Programs", GenerationHyperparameters(n_samples=1, max_new_tokens=100, greedy=True), tokenizer
    )
    rollout = Rollout(Scripted(tokenizer, says), workflow, log=lambda _: None)  # type: ignore[arg-type]
    (episode,) = asyncio.run(rollout.run([Prompt(0, {"prompt": "12*(3+4)", "answer": 84})]))
    assert episode.error is None and episode.rewards is not None and episode.rewards.tolist() == [1.0]


def test_tools_have_schemas_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    for tool, argument in ((python_tool, "code"), (bash_tool, "command"), (search_tool(tmp_path / "a.jsonl"), "query")):
        function = tool_schema(tool)["function"]
        assert function["parameters"]["required"] == [argument] and function["description"]


def plain_bm25(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """The formula, document by document."""
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            n = sum(word in other for other in documents)
            f = document.count(word)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            score += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_the_formula(seed: int) -> None:
    source = random.Random(seed)
    texts = [" ".join(source.choices("abcdefgh", k=source.randrange(1, 12))) for _ in range(20)]
    query = " ".join(source.choices("abcdz", k=3))
    found = BM25(texts).scores(query)
    assert [found.get(n, 0.0) for n in range(20)] == pytest.approx(plain_bm25(texts, query), abs=1e-12)


def test_search_returns_the_best_rows_first(tmp_path: Path) -> None:
    rows = ["Paris is the capital of France.", "Berlin is in Germany.", "The capital of Italy is Rome."]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    search = search_tool(path, "body", n=2)
    assert search("capital of FRANCE?") == f"{rows[0]}\n\n{rows[2]}"
    assert search("Tokyo") == search("") == "nothing found"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("{", "line 1 is no JSON"),
        ('{"text": "a"}\n\n{"b": 1}\n', "line 3 is .*; expected an object with the text 'text'"),
        ("[1]", "expected an object"),
        (None, "cannot read the texts of"),
    ],
)
def test_a_file_that_cannot_be_searched_is_an_error(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SandboxError, match=message):
        search_tool(path)
