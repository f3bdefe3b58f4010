"""Losses of preference training: functions of one number per answer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.training.preference_kinds import PairLoss


def preference_loss(
    chosen: Tensor, rejected: Tensor, kind: PairLoss, beta: float, *, gamma: float = 0.0, margin: Tensor | None = None
) -> Tensor:
    """Return the loss of each pair, [P].

    - `dpo`: −log σ(β(c − r)) (Rafailov et al. 2023, arXiv 2305.18290, equation 7).
    - `ipo`: (c − r − 1/(2β))² (Azar et al. 2023, arXiv 2310.12036, equation 17).
    - `cpo`: −log σ(β(c − r)) (Xu et al. 2024, arXiv 2401.08417, equation 3, the preference term).
    - `simpo`: −log σ(β(c − r) − γ) (Meng et al. 2024, arXiv 2405.14734, equation 6).
    - `orpo`: −β·log σ(log odds(c) − log odds(r)), odds(x) = eˣ / (1 − eˣ) (Hong et al. 2024, arXiv 2403.07691,
      equation 7).
    - `reward`: −log σ(c − r − margin) (Bradley and Terry 1952; the margin: Touvron et al. 2023, arXiv 2307.09288,
      equation 2).

    Args:
        chosen: c, [P]. Log-ratio to the reference (dpo, ipo), log-probability (cpo), mean log-probability of the tokens
            (simpo, orpo), or score (reward).
        rejected: r, [P].
        kind: the loss.
        beta: β; unused by `reward`.
        gamma: γ of `simpo`.
        margin: margin of each pair for `reward`, [P]; None: 0.
    """
    difference = chosen - rejected
    if kind == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if kind == "orpo":
        return -beta * F.logsigmoid(difference - (log1mexp(chosen) - log1mexp(rejected)))
    if kind == "reward":
        return -F.logsigmoid(difference if margin is None else difference - margin)
    return -F.logsigmoid(beta * difference - (gamma if kind == "simpo" else 0.0))


def kto_loss(
    values: Tensor, mismatched: Tensor, labels: Tensor, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """Return KTO's loss of each answer, [A] (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8).

    λ_D·(1 − σ(β(v − z))) for a desirable answer and λ_U·(1 − σ(β(z − v))) for an undesirable one. The reference point
    z = max(0, mean of `mismatched`) estimates KL(π ‖ π_ref) of the batch and has no gradient.

    Args:
        values: v, log-ratio of each answer to the reference, [A].
        mismatched: log-ratio of another row's answer to each prompt, [A].
        labels: whether each answer is desirable, bool [A].
        beta: β.
        desirable: λ_D.
        undesirable: λ_U.
    """
    margin = beta * (values - mismatched.detach().mean().clamp(min=0))
    return torch.where(labels, desirable * torch.sigmoid(-margin), undesirable * torch.sigmoid(margin))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − eˣ) for x < 0, exact for x near 0 and for large −x.

    A probability of 1 has no odds: x is kept below −ε of its dtype.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # Mächler 2012, "Accurately computing log(1 − exp(−|a|))": the better branch by the size of x. `where` needs finite
    # gradients in both.
    near = x > -0.693
    return torch.where(
        near, (-torch.where(near, x, -1.0).expm1()).log(), torch.log1p(-torch.where(near, -1.0, x).exp())
    )
