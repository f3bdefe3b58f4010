"""AdamW with narrow moments: bfloat16, or 8 bits in blocks (Dettmers et al. 2022, arXiv:2110.02861)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from archon.parallel.fsdp import local_tensor
from archon.parallel.transfer import to_device_async
from archon.schema.errors import ConfigError

NarrowMoments = Literal["bfloat16", "int8"]
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCKS = (256, 128, 64, 32)
"""Block sizes in elements: blocks of a rank's shard have the first size that divides its rows."""
CHUNK = 2**24
"""Maximum elements updated at once; bounds the memory of widened moments."""


class LowBitAdamW(AdamW):
    """AdamW [Loshchilov & Hutter 2019, algorithm 2] that stores its moments in bfloat16 or 8 bits.

    A step widens the moments, updates them and the weights in the dtype of the weights, and rounds the moments to
    nearest. The 8-bit format is torchao's dynamic map, signed for the first moment, with a float32 scale per block of a
    row. Vectors, and matrices with rows that no block size divides, keep moments in the dtype of the weights. Unlike
    torchao, 8 bits never round a second moment to 0: a first moment above 0 would then be divided by `eps` alone.

    Args:
        groups: parameter groups with their weight decay.
        moments: the format of the moments.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        compiled: compile the update into few kernels.

    Raises:
        ConfigError: 8 bits need torchao, and it cannot be imported.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        moments: NarrowMoments,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compiled: bool,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.moments = moments
        self._update = torch.compile(_update, dynamic=True) if compiled else _update
        self._maps: dict[torch.device, tuple[Tensor, ...]] = {}
        if moments == "int8":
            try:
                from torchao.optim.quant_utils import create_dynamic_map
            except ImportError as error:
                raise ConfigError(
                    f"optimizer.moments = int8 needs torchao, and it cannot be imported ({error}): pip install "
                    "'archon-engine[fp8]', or set it to bfloat16"
                ) from error
            maps = tuple(torch.tensor(create_dynamic_map(signed)) for signed in (True, False))
            self._maps[torch.device("cpu")] = maps

    def new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return zero moments of a parameter by name, sharded like it: codes, and scales if they have any."""
        block = block_size(local_tensor(parameter)) if self.moments == "int8" else None
        dtype = torch.bfloat16 if self.moments == "bfloat16" else parameter.dtype if block is None else torch.uint8
        contiguous = torch.contiguous_format
        state = {name: torch.zeros_like(parameter, dtype=dtype, memory_format=contiguous) for name in MOMENTS}
        if block is not None:
            state |= {f"{name}_scale": _zero_scales(parameter, block) for name in MOMENTS}
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step on all parameters with a gradient."""
        assert closure is None
        for group in self.param_groups:
            lr, decay = (torch.tensor(group[key], dtype=torch.float64) for key in ("lr", "weight_decay"))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, state = local_tensor(parameter), self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=weight.device)
                    state.update(self.new_moments(parameter))
                state["step"] += 1
                if not weight.numel():  # this rank has no rows of a small matrix
                    continue
                tensors = [weight, local_tensor(parameter.grad), *(local_tensor(state[name]) for name in MOMENTS)]
                if f"{MOMENTS[0]}_scale" in state:
                    tensors += [local_tensor(state[f"{name}_scale"]) for name in MOMENTS]
                rows = max(1, CHUNK // max(1, weight.shape[1:].numel()))
                for chunk in zip(*(x.split(rows) for x in tensors), strict=True):
                    self._update(
                        *chunk,
                        step=state["step"].double(),
                        lr=lr,
                        decay=decay,
                        betas=group["betas"],
                        eps=group["eps"],
                        maps=self._maps_on(weight.device),
                    )

    def _maps_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the dynamic maps of both moments on a device; none without 8 bits."""
        if self._maps and device not in self._maps:
            self._maps[device] = tuple(to_device_async(values, device) for values in self._maps[torch.device("cpu")])
        return self._maps.get(device, ())


def block_size(weight: Tensor) -> int | None:
    """Return the block size of this rank's shard, in elements; None if its moments stay wide."""
    if weight.dim() < 2:
        return None
    return next((block for block in BLOCKS if weight.shape[-1] % block == 0), None)


def moment_bytes(moments: str, width: int) -> float:
    """Return the bytes of both moments of one element of a trained matrix with masters of `width` bytes.

    The planner applies it to all trained parameters, because moments of vectors are negligible.
    """
    per_moment = {"float32": width, "bfloat16": 2, "int8": 1 + 4 / BLOCKS[0]}
    return 2 * per_moment[moments]


def _zero_scales(parameter: Tensor, block: int) -> Tensor:
    """Return float32 zeros [..., columns / block], sharded like `parameter` [..., columns]."""
    local = local_tensor(parameter)
    scales = torch.zeros(*local.shape[:-1], local.shape[-1] // block, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    whole = torch.empty(*parameter.shape[:-1], parameter.shape[-1] // block, device="meta")
    placed = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return placed.to(local.device)  # from_local moves an offloaded shard to the device of the mesh


def _update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *scales: Tensor,
    step: Tensor,
    lr: Tensor,
    decay: Tensor,
    betas: tuple[float, float],
    eps: float,
    maps: tuple[Tensor, ...],
) -> None:
    """Update one chunk of a weight and its moments in place. `step`, `lr` and `decay` are float64 scalars."""
    # 1. Widen the moments and update them.
    if scales:
        from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

        pairs = zip((exp_avg, exp_avg_sq), maps, scales, strict=True)
        first, second = (dequant_with_qmap(codes, values, scale.flatten()) for codes, values, scale in pairs)
    else:
        first, second = exp_avg, exp_avg_sq
    wide = grad.to(weight.dtype)
    first = first.to(weight.dtype).lerp(wide, 1 - betas[0])
    second = second.to(weight.dtype).lerp(wide.square(), 1 - betas[1])
    # 2. Update the weights with the moments before rounding.
    weight.mul_(1 - lr * decay)
    denominator = second.sqrt() / (1 - betas[1] ** step).sqrt() + eps
    weight.sub_(lr * (first / (1 - betas[0] ** step)) / denominator)
    # 3. Round the moments.
    if not scales:
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        return
    # The code of the smallest value: the map's code 0 is the number 0, which no second moment is rounded to.
    for moment, codes, values, scale, least in zip(
        (first, second), (exp_avg, exp_avg_sq), maps, scales, (0, 1), strict=True
    ):
        scaled, block_scales = scale_tensor(moment.float().contiguous(), codes.shape[-1] // scale.shape[-1])
        codes.copy_(quantize_8bit_with_qmap(scaled, values).clamp(min=least))
        scale.copy_(block_scales.view(scale.shape))
