"""A conversation with an environment: find a number between two bounds in four guesses, told each time where it lies.

The environment says "23-37", the model "30", the environment "<" (it is lower) or ">", and so on. Whoever halves what
is left always finds one of fifteen numbers in four guesses; the player that the model imitates at first does not.
"""

from __future__ import annotations

import random
from typing import Any

NUMBERS, GUESSES = 15, 4
LOWEST, HIGHEST = 10, 99


class Guessing:
    """The environment, as `TextEnvWorkflow` takes it."""

    def reset(self, task: dict[str, Any]) -> str:
        self._secret = int(task["answer"])
        return str(task["prompt"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """What is no number is told what a number too low is: it cannot help."""
        guess = int(action) if action.isdecimal() else -1
        found = guess == self._secret
        return "<" if guess > self._secret else ">", float(found), found, {}


def rows(split: str) -> list[dict[str, Any]]:
    """`warm`: games of the player; `train`, `test`: what there is to find. No bounds are in `test` and another one."""
    rng = random.Random("guessing")
    bounds = list(range(LOWEST, HIGHEST - NUMBERS + 2))
    rng.shuffle(bounds)
    tasks = [{"prompt": f"{low}-{low + NUMBERS - 1}", "answer": str(low + i)} for low in bounds for i in range(NUMBERS)]
    n_held_out = 12 * NUMBERS
    held_out, tasks = tasks[:n_held_out], tasks[n_held_out:]
    if split == "warm":
        return [{"prompt": _game(rng.choice(tasks), rng)} for _ in range(20_000)]
    return {"train": tasks, "test": held_out}[split]


def _game(task: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    """The player: anywhere in what is left most of the time, and sometimes anywhere at all."""
    env = Guessing()
    first, last = map(int, task["prompt"].split("-"))
    low, high = first, last
    messages = [{"role": "user", "content": env.reset(task)}]
    while len(messages) < 2 * GUESSES:
        guess = rng.randint(low, high) if rng.random() < 0.6 else rng.randint(first, last)
        observation, _, found, _ = env.step(str(guess))
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": observation}]
        if found:
            break
        low, high = (low, min(high, guess - 1)) if observation == "<" else (max(low, guess + 1), high)
    return messages[:-1]
