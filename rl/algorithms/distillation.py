"""On-policy distillation: the model's own answers, judged token by token by a teacher."""

from __future__ import annotations

from torch import Tensor

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageSettings


class DistillSettings(AdvantageSettings):
    """The settings of advantage `distill`."""

    needs_teacher = True


@ADVANTAGES.register("distill")
def distill(inputs: AdvantageInputs, settings: DistillSettings) -> Tensor:
    """log π_teacher − log π of each sampled token, minus its estimate of the reverse KL, KL(π ‖ π_teacher)
    (on-policy distillation, Lu and Thinking Machines Lab 2025; MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649).

    Later tokens are not taken into account (a discount of 0), and rewards have no part in it.
    """
    assert inputs.logprobs is not None and inputs.teacher_logprobs is not None, "the configuration asks for a teacher"
    own = inputs.logprobs.double()
    gap = (inputs.teacher_logprobs.to(own) - own).where(inputs.loss_mask > 0, 0.0)
    return gap.to(inputs.rewards.dtype)
