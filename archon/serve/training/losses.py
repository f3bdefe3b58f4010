"""The loss functions that the Tinker SDK names, as pure functions of one document's log-probabilities.

Definitions: https://tinker-docs.thinkingmachines.ai/losses. Each returns a sum over positions. In
a document of N positions, `logprobs` is log p(target) of the model, q the probability at sampling, A the advantage and
r = p / q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from archon.schema.errors import UserError

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss function and its interface.

    Attributes:
        fn: (logprobs, inputs, settings) -> the loss of each position.
        inputs: required `loss_fn_inputs` besides target_tokens, with one value per position.
        optional: further inputs; absent ones have the value of the setting of this name, or 1.
        settings: `loss_fn_config` and its defaults; None is required.
        several_targets: whether a position may have several targets.
    """

    fn: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    settings: Mapping[str, float | None] = field(default_factory=dict)
    several_targets: bool = False


CLIP: dict[str, float | None] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of r; each may also be an input with one value per position."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -weight log p."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -r A."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -min(r A, clip(r) A) [Schulman et al. 2017]."""
    return _clipped(_ratio(logprobs, inputs), inputs)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -stop_gradient(clip(r)) log p A [MiniMax-M1, arXiv:2506.13585]."""
    return -_clip(_ratio(logprobs, inputs), inputs).detach() * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -(log p A - beta / 2 (log r)²) [Richemond et al. 2024, arXiv:2405.19107]."""
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * (logprobs - inputs["logprobs"]) ** 2)


def gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the loss of PPO with the geometric mean of r over `sequence_ratio_mask`, GSPO-token [arXiv:2507.18071]."""
    inside = inputs["sequence_ratio_mask"] != 0
    mean = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    return _clipped(torch.exp(mean + logprobs - logprobs.detach()), inputs)


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clip(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.clamp(ratio, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs) * advantages)


_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy, (), ("weights",), several_targets=True),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": Loss(ppo, _POLICY, tuple(CLIP), CLIP),
    "cispo": Loss(cispo, _POLICY, tuple(CLIP), CLIP),
    "dro": Loss(dro, _POLICY, settings={"beta": None}),
    "gspo": Loss(gspo, (*_POLICY, "sequence_ratio_mask"), tuple(CLIP), CLIP),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return a loss function and its settings.

    Raises:
        UserError: an unknown name or setting.
    """
    if name not in LOSSES:
        raise UserError(
            f"loss_fn {name!r:.80} is not supported; expected one of {', '.join(LOSSES)}, or forward_backward_custom"
        )
    loss = LOSSES[name]
    known = ", ".join(loss.settings) or "none"
    for key, value in config.items():
        if key not in loss.settings or isinstance(value, str) or not math.isfinite(value):
            raise UserError(
                f"loss_fn_config has {key!r:.80} = {value!r:.80}; expected finite numbers for the settings of {name}: "
                f"{known}"
            )
    settings = dict[str, float]()
    for key, default in loss.settings.items():
        chosen = config.get(key, default)
        if chosen is None:
            raise UserError(f"{name} needs the setting {key!r}; pass it in loss_fn_config")
        settings[key] = float(chosen)
    return loss, settings
