"""A conversation with an environment: walk along the alphabet from one letter to another in three steps at most.

The environment says "d>k", the model "+4", the environment "h>k", and so on. Every letter within nine of the first can
be reached in three steps of one or four; the player that the model imitates at first often steps anywhere.
"""

from __future__ import annotations

import random
import string
from dataclasses import asdict
from typing import Any

from archon.rl import Experience, TextEnvWorkflow

STEPS, FARTHEST = 3, 9
MOVES = {"+1": 1, "-1": -1, "+4": 4, "-4": -4}
LETTERS = string.ascii_lowercase


class Walking:
    """The environment, as `TextEnvWorkflow` takes it."""

    def reset(self, task: dict[str, Any]) -> str:
        self._at, self._to = (LETTERS.index(letter) for letter in task["prompt"].split(">"))
        return str(task["prompt"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Apply a move. Invalid moves and moves beyond the ends do nothing."""
        self._at = min(max(self._at + MOVES.get(action, 0), 0), len(LETTERS) - 1)
        there = self._at == self._to
        return f"{LETTERS[self._at]}>{LETTERS[self._to]}", float(there), there, {}


class StepByStep(TextEnvWorkflow):
    """The same walk without memory: each step answers the last observation and is a separate row."""

    def run(self) -> list[Experience]:
        observation, done, rewards = self.first_observation(), False, list[float]()
        steps: list[Experience] = []
        while not done and len(steps) < self.max_env_steps:
            asked = [{"role": "user", "content": observation}]
            (response,) = self.model.chat(asked, **asdict(self.task.rollout_args) | {"n": 1})
            observation, reward, done = self.act(response.response_text or "")
            steps.append(response)
            rewards.append(reward)
        for step in steps:
            step.reward = self.total(rewards, done)
        return steps


def rows(split: str) -> list[dict[str, Any]]:
    """`warm`: walks of the player; `train`, `test`: start and goal. No two sets share the start of a walk."""
    rng = random.Random("walking")
    ends = [(a, b) for a in range(len(LETTERS)) for b in range(len(LETTERS)) if 1 < abs(a - b) <= FARTHEST]
    rng.shuffle(ends)
    tasks = [{"prompt": f"{LETTERS[a]}>{LETTERS[b]}", "answer": LETTERS[b]} for a, b in ends]
    held_out, tasks = tasks[:120], tasks[120:]
    if split == "warm":
        return [{"prompt": _walk(rng.choice(tasks), rng)} for _ in range(20_000)]
    return {"train": tasks, "test": held_out}[split]


def _walk(task: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    """Return the next step of a player who takes the best step a third of the time, else a random one."""
    env = Walking()
    messages = [{"role": "user", "content": env.reset(task)}]
    while len(messages) < 2 * STEPS:
        here, there = (LETTERS.index(letter) for letter in messages[-1]["content"].split(">"))
        nearest = min(MOVES, key=lambda move: abs(there - here - MOVES[move]))
        move = nearest if rng.random() < 0.35 else rng.choice(list(MOVES))
        observation, _, done, _ = env.step(move)
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": observation}]
        if done:
            break
    return messages[:-1]
