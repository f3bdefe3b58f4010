"""Advantages of rewards with several parts."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    Groups,
    NormalizedGroupSettings,
    normalized_rows,
)
from archon.schema.errors import RolloutError


class GDPOSettings(NormalizedGroupSettings):
    """Settings of advantage `gdpo`."""

    needs_parts = True
    weights: dict[str, float] = Field(
        default_factory=dict, description="weight of each part of the reward by name; 1 if it is not named"
    )


@ADVANTAGES.register("gdpo")
def gdpo(inputs: AdvantageInputs, settings: GDPOSettings) -> Tensor:
    """GDPO: Σ_k w_k · (r_k − mean_group) / (std_group + eps), divided by its standard deviation over the batch.

    Each part r_k of the reward is normalized by itself (arXiv 2601.05242, section 3.1): with GRPO, groups with
    different parts and equal sums have the same advantages. The batch's deviation is over trajectories and unbiased
    (n − 1), with eps added. Its mean needs no subtraction: it is 0, as the mean of every group is. Trajectories without
    a part count for neither mean nor deviation of that part.

    Raises:
        RolloutError: a row has no part, or `weights` names none of the batch's parts.
    """
    parts = {name: part.double() for name, part in (inputs.reward_parts or {}).items()}
    _check_parts(parts, len(inputs.rewards), settings)
    ids = torch.arange(len(inputs.rewards)) if inputs.trajectory_ids is None else inputs.trajectory_ids
    total = torch.zeros(len(inputs.rewards), dtype=torch.float64)
    for name, part in parts.items():
        rows = (~part.isnan()).nonzero().flatten()
        groups = Groups(part[rows], inputs.group_ids[rows], ids[rows])
        total[rows] += settings.weights.get(name, 1.0) * normalized_rows(groups, settings.eps)
    trajectories = Groups(total, inputs.group_ids, ids).rewards
    variance = trajectories.square().sum() / max(len(trajectories) - 1, 1)
    return inputs.broadcast_to_tokens(total / (variance.sqrt() + settings.eps))


def _check_parts(parts: dict[str, Tensor], n_rows: int, settings: GDPOSettings) -> None:
    absent = torch.stack([part.isnan() for part in parts.values()]).all(0) if parts else torch.ones(n_rows).bool()
    if absent.any():
        raise RolloutError(
            f"algorithm.advantage gdpo normalizes each part of a reward, but {int(absent.sum())} of {n_rows} rewards "
            "have no parts; return a dictionary of numbers from the reward function, or set algorithm.advantage=grpo"
        )
    if unknown := sorted(settings.weights.keys() - parts.keys()):
        raise RolloutError(
            f"algorithm.advantage.weights names {unknown[0]!r}, but the rewards have the parts "
            f"{', '.join(map(repr, sorted(parts)))}; use their names"
        )
