"""Muon for matrices (Jordan et al. 2024), with the update size of AdamW (Liu et al. 2025, arXiv:2502.16982)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from archon.parallel.comm import Group
from archon.parallel.fsdp import local_region, local_tensor
from archon.parallel.ranks import SOLO
from archon.parallel.whole_matrices import Part, apply_to_parts, plan_parts

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x -> a x + b x^3 + c x^5, which moves singular values near 1 (Jordan et al. 2024)."""
NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2
"""Root mean square of an update per unit of learning rate, as large as AdamW's (Liu et al. 2025, section 2.2)."""


class Muon(Optimizer):
    """Muon on the groups with `matrices` = True, AdamW on the others.

    With momentum μ, a matrix W [m, n] with gradient G has

        M = μ M + G;  U = orthogonalize(G + μ M);  W = (1 - lr · decay) W - lr · 0.2 √max(m, n) · U

    A stack of matrices [k, m, n], such as experts, is k matrices. Sharded matrices are gathered, each on one rank, and
    the ranks share the work. The gradients of matrices are overwritten.

    Args:
        groups: parameter groups with `weight_decay` and `matrices`.
        lr: learning rate.
        momentum: μ.
        betas: AdamW's decay of the first and the second moment.
        eps: AdamW's term added to the root of the second moment.
        group: all ranks that hold the parameters, if there are several.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        group: Group = SOLO,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})
        self._group = group
        plain = [group for group in self.param_groups if not group["matrices"]]
        # AdamW gets copies of the groups; `step` gives it the current learning rate.
        self._adamw = AdamW([dict(group) for group in plain], fused=True) if plain else None
        if self._adamw is not None:
            self._adamw.state = self.state
        self._plans: dict[tuple[int, ...], list[list[Part]]] = {}

    def new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return zero moments of a parameter by name, sharded like it."""
        is_matrix = any(parameter is p for group in self.param_groups if group["matrices"] for p in group["params"])
        names = ("momentum_buffer",) if is_matrix else ("exp_avg", "exp_avg_sq")
        return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step on all parameters with a gradient. A collective of `group`."""
        assert closure is None
        plain = (group for group in self.param_groups if not group["matrices"])
        if self._adamw is not None:
            for adamw_group, group in zip(self._adamw.param_groups, plain, strict=True):
                adamw_group |= {"lr": group["lr"], "params": group["params"]}
            self._adamw.step()
        trained = [(p, g) for g in self.param_groups if g["matrices"] for p in g["params"] if p.grad is not None]
        if not trained:
            return
        # 1. Update the momentum of this rank's shards. The gradient becomes the update.
        updates = []
        for parameter, group in trained:
            state, gradient = self.state[parameter], local_tensor(parameter.grad)
            if not state:
                state["step"] = torch.zeros((), device=gradient.device)
                state.update(self.new_moments(parameter))
            state["step"] += 1
            momentum = local_tensor(state["momentum_buffer"])
            momentum.mul_(group["momentum"]).add_(gradient)
            updates.append(gradient.add_(momentum, alpha=group["momentum"]))
        # 2. Orthogonalize whole matrices.
        parameters = [parameter for parameter, _ in trained]
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = plan_parts(parameters, self._group)
        regions, device = [local_region(parameter) for parameter in parameters], _device(parameters[0])
        dtype = torch.bfloat16 if device.type == "cuda" and updates[0].dtype != torch.float64 else updates[0].dtype
        for parts in self._plans[key]:
            apply_to_parts(_orthogonalize_all, updates, regions, parts, self._group, dtype, device)
        # 3. Update the weights.
        for (parameter, group), update in zip(trained, updates, strict=True):
            weight = local_tensor(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5)


def is_matrix(role: str | None, shape: Sequence[int]) -> bool:
    """Return whether Muon trains a linear layer's weight or an expert tensor of this role and shape."""
    if role == "experts":
        return len(shape) == 3
    return role in ("column", "row", "latent", "router", "vision") and len(shape) == 2 and min(shape) > 1


def orthogonalize_flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of `orthogonalize` of a matrix, or of all matrices of a stack."""
    *stack, rows, columns = shape
    low, high = sorted((rows, columns))
    return prod(stack) * NEWTON_SCHULZ_STEPS * (4 * low * low * high + 2 * low**3)


def orthogonalize(x: Tensor) -> Tensor:
    """Return U Vᵀ of matrices x = U S Vᵀ [..., m, n] approximately: singular values from 0.7 to 1.2 in place of S.

    Five steps of the Newton-Schulz iteration of Jordan et al. (2024), in the dtype of x.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def _orthogonalize_all(wholes: list[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices and stacks; matrices of the same shape are computed together."""
    by_shape = defaultdict[torch.Size, list[int]](list)
    for index, whole in enumerate(wholes):
        by_shape[whole.shape[-2:]].append(index)
    results = list(wholes)
    for shape, indices in by_shape.items():
        stacked = orthogonalize(torch.cat([wholes[index].reshape(-1, *shape) for index in indices]))
        counts = [wholes[index].numel() // shape.numel() for index in indices]
        for index, result in zip(indices, stacked.split(counts), strict=True):
            results[index] = result.view(wholes[index].shape)
    return results


def _device(parameter: Tensor) -> torch.device:
    """Return the device of collectives; an offloaded parameter is on another device."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())
