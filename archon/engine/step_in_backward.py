"""Optimizer step inside the backward pass: gradients of different weights never exist at once."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from archon.engine.optim import gradient_norm


class StepInBackward:
    """Step of an optimizer on each parameter as soon as its gradient is complete; frees the gradient.

    Args:
        optimizer: the optimizer of parameters on one process.

    Attributes:
        norms: float64 norms of the gradients that were freed since `start`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.norms: list[Tensor] = []
        self._optimizer = optimizer
        self._is_active = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._step, group))

    def start(self) -> None:
        """Update weights in the next backward pass, which completes the batch's gradients."""
        self.norms, self._is_active = [], True

    def stop(self) -> None:
        """Accumulate gradients in later backward passes."""
        self._is_active = False

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if not self._is_active:
            return
        self.norms.append(gradient_norm([parameter]))
        # Hide the other parameters: they may have incomplete gradients of earlier micro-batches.
        groups = [(each, each["params"]) for each in self._optimizer.param_groups]
        for each, _ in groups:
            each["params"] = [parameter] if each is group else []
        self._optimizer.step()
        for each, parameters in groups:
            each["params"] = parameters
        parameter.grad = None
