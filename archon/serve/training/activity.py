"""Loss curves and token rates for the page of the training service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECONDS = 120
"""Number of seconds for which token rates are kept."""
POINTS = 400
"""Maximum points of a loss curve; a longer curve keeps one of 2, 4, 8, … steps."""


@dataclass
class LossCurve:
    """Mean loss per token at each optimizer step of a model.

    Attributes:
        steps: number of optimizer steps.
        tokens: tokens of all forward_backward requests.
        points: (step, loss) of every `stride`-th step.
    """

    steps: int = 0
    tokens: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, loss: float, tokens: int) -> None:
        """Add the sum of losses over `tokens` tokens to the next step."""
        self.tokens += tokens
        self._sum, self._count = self._sum + loss, self._count + tokens

    def step(self) -> None:
        """End a step."""
        self.steps += 1
        if self._count and self.steps % self.stride == 0:
            self.points.append((self.steps, self._sum / self._count))
        self._sum, self._count = 0.0, 0
        if len(self.points) > POINTS:
            self.stride *= 2
            self.points = [point for point in self.points if point[0] % self.stride == 0]


class Activity:
    """Loss curves of the models in memory, and tokens of the last seconds. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._curves: dict[str, LossCurve] = {}
        self._tokens: dict[str, dict[int, int]] = {"trained": {}, "sampled": {}}

    def trained(self, model: str, loss: float, tokens: int) -> None:
        """Count a forward_backward request with the sum of its losses."""
        with self._lock:
            self._curves.setdefault(model, LossCurve()).add(loss, tokens)
            self._count("trained", tokens)

    def stepped(self, model: str) -> None:
        """Count an optimizer step."""
        with self._lock:
            self._curves.setdefault(model, LossCurve()).step()

    def sampled(self, tokens: int) -> None:
        """Count sampled tokens."""
        with self._lock:
            self._count("sampled", tokens)

    def remove(self, model: str) -> None:
        """Forget a model."""
        with self._lock:
            self._curves.pop(model, None)

    def curve(self, model: str) -> dict[str, Any]:
        """Return steps, tokens and loss curve of a model."""
        with self._lock:
            curve = self._curves.get(model, LossCurve())
            return {"steps": curve.steps, "tokens": curve.tokens, "losses": list(curve.points)}

    def rates(self) -> dict[str, list[int]]:
        """Return the tokens of each of the last `SECONDS` whole seconds, the oldest first."""
        now = int(self._clock())
        with self._lock:
            return {
                kind: [seconds.get(second, 0) for second in range(now - SECONDS, now)]
                for kind, seconds in self._tokens.items()
            }

    def _count(self, kind: str, tokens: int) -> None:
        seconds, now = self._tokens[kind], int(self._clock())
        seconds[now] = seconds.get(now, 0) + tokens
        for second in [second for second in seconds if second < now - SECONDS]:
            del seconds[second]
