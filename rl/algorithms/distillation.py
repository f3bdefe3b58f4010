"""On-policy distillation: a teacher scores the policy's answers token by token."""

from __future__ import annotations

from torch import Tensor

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageSettings


class DistillSettings(AdvantageSettings):
    """Settings of advantage `distill`."""

    needs_teacher = True


@ADVANTAGES.register("distill")
def distill(inputs: AdvantageInputs, settings: DistillSettings) -> Tensor:
    """Return log π_teacher − log π, a one-sample estimate of −KL(π ‖ π_teacher).

    On-policy distillation: the discount is 0, and rewards are not used (Lu and Thinking Machines Lab 2025; MiniLLM,
    arXiv 2306.08543; GKD, arXiv 2306.13649).
    """
    assert inputs.logprobs is not None and inputs.teacher_logprobs is not None, "the configuration requires a teacher"
    logprobs = inputs.logprobs.double()
    gap = (inputs.teacher_logprobs.to(logprobs) - logprobs).where(inputs.loss_mask > 0, 0.0)
    return gap.to(inputs.rewards.dtype)
