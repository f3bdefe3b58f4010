"""Built-in Trinity-style workflow for mathematics with a comparing judge (RULER)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from archon.rl.compat.trinity.builtin import MathWorkflow
from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import WORKFLOWS, Task
from archon.rl.rewards import RewardInvalid
from archon.schema.errors import ConfigError

_LIST = re.compile(r"\[[^\[\]]*\]")


@WORKFLOWS.register_module("async_math_ruler_workflow")
@WORKFLOWS.register_module("math_ruler_workflow")
class MathRULERWorkflow(MathWorkflow):
    """`MathWorkflow` with a judge that compares all answers to a question and scores them from 0 to 1.

    The judge is the first auxiliary model. The task's reward is only logged, as `gold_reward`. A verdict without one
    number per answer fails the task and is counted.
    """

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        if not self.auxiliary_models:
            raise ConfigError("math_ruler_workflow needs a judge: name one in explorer.auxiliary_models")

    def run(self) -> list[Experience]:
        """Answer the prompt and let the judge score the answers."""
        responses = self.score(self.model.chat(self.format_messages(), **self.rollout_args))
        for response in responses:
            response.metrics["gold_reward"] = response.reward or 0.0
        for response, score in zip(responses, self.judge_scores(responses), strict=True):
            response.reward = score
        return responses

    def judge_scores(self, responses: Sequence[Experience]) -> list[float]:
        """Return the judge's score of each response; raise `RewardInvalid` for an unusable verdict."""
        assert self.auxiliary_models
        judge = self.auxiliary_models[0]
        answers = "\n\n".join(f"Answer {n}:\n{response.response_text}" for n, response in enumerate(responses, 1))
        question = (
            f"Question:\n{self.task_desc}\n\n{answers}\n\nCompare the {len(responses)} answers. End with a list of "
            f"{len(responses)} numbers from 0 to 1 in brackets, the score of each answer in this order: 1 for one that "
            "answers the question rightly, 0 for one that does not help at all."
        )
        message = {"role": "user", "content": question}
        verdict = judge.chat.completions.create(model=judge.model_path, messages=[message]).choices[0].message.content
        return parse_scores(verdict or "", len(responses))


def parse_scores(verdict: str, count: int) -> list[float]:
    """Return the `count` numbers of the last list in the text, clipped to [0, 1]."""
    lists = _LIST.findall(verdict)
    try:
        scores = [float(score) for score in json.loads(lists[-1])] if lists else []
    except (ValueError, TypeError):
        scores = []
    if len(scores) != count or any(score != score for score in scores):
        raise RewardInvalid(f"the judge said {verdict[-200:]!r}, expected a list of {count} numbers from 0 to 1")
    return [min(max(score, 0.0), 1.0) for score in scores]
