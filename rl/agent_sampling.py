"""Policy for the sampling parameters in agents' HTTP requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from archon.generation.types import GenerationHyperparameters
from archon.rl.logprob_check import check_recomputable, truncating_fields

AgentSampling = Literal["override", "refuse", "allow"]


class SamplingPolicy:
    """Sampling parameters of agents' requests in training; evaluation has no policy.

    `override` uses the trainer's values. `refuse` raises `ConfigError`, which ends the run. `allow` uses the agent's
    values: the trainer computes logprobs at the temperature of each answer, and counts answers with top_p, top_k,
    min_p, penalties, logit_bias, greedy or min_tokens as uncorrected. Each overridden or uncorrected field is logged
    once.

    Args:
        mode: `override`, `refuse` or `allow`.
        trained: the trainer's sampling parameters.
        log: called with each line.
    """

    def __init__(self, mode: AgentSampling, trained: GenerationHyperparameters, log: Callable[[str], None]) -> None:
        self.mode, self._trained, self._log = mode, trained, log
        self._logged: set[str] = set()

    def __call__(self, asked: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return the parameters to sample with; raise `ConfigError` for refused ones."""
        trained = self._trained
        if self.mode == "refuse":
            check_recomputable(asked, trained.temperature)
            return asked
        cut = truncating_fields(asked)
        if self.mode == "allow":
            for name in cut:
                self._log_once(name, asked, "the logprobs of such answers cannot be corrected for it")
            return asked
        if asked.temperature != trained.temperature:
            cut = ["temperature", *cut]
        changes: dict[str, Any] = {name: getattr(trained, name) for name in cut}
        for name, value in changes.items():
            self._log_once(name, asked, f"training samples with {value}")
        return asked.model_copy(update=changes) if changes else asked

    def _log_once(self, name: str, asked: GenerationHyperparameters, effect: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            self._log(
                f"an agent asked for {name}={getattr(asked, name)}; {effect} (rollout.agent_sampling={self.mode}, out "
                "of override, refuse and allow)"
            )
