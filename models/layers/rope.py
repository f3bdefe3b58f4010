"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its context extensions.

    (x_1, x_2) -> (x_1 cos(p f_i) - x_2 sin(p f_i), x_2 cos(p f_i) + x_1 sin(p f_i)),    f_i = theta^(-2i/d)

for pair i at position p. Scalings change f: linear, dynamic NTK, YaRN, llama3, LongRoPE and proportional frequencies.

The inverse frequencies are constants of a checkpoint. They are computed on the CPU in float32 with the same operations
as transformers (`modeling_rope_utils`), because one ulp of a frequency becomes a visible angle at a far position. All
later operations run in `promote_types(dtype, float32)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from archon.parallel.transfer import to_device_async
from archon.schema.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
RopeUse = Literal["global", "local", "none"]
"""Rotation of a layer: the model's global one, the one of layers with a sliding window, or none."""


@dataclass(frozen=True)
class RopeConfig:
    """Scaling of the frequencies theta^(-2i/d). Fields that `kind` does not use are None.

    Attributes:
        kind: `default | linear | dynamic | yarn | llama3 | longrope | proportional`.
        factor: the context-extension factor; for yarn and longrope None means max_seq_len / original_max_seq_len.
        original_max_seq_len: the context length of pre-training, in tokens (yarn, llama3, longrope).
        attention_factor: multiplies cos and sin; None means the paper's value (yarn, longrope).
        beta_fast, beta_slow: rotations that bound YaRN's ramp; None or 0 means 32 and 1.
        mscale, mscale_all_dim: DeepSeek's form of YaRN's attention factor.
        truncate: whether YaRN's ramp bounds are rounded outwards.
        low_freq_factor, high_freq_factor: llama3's wavelength bounds as divisors of the original context.
        short_factor, long_factor: LongRoPE's divisors of the frequencies, head_dim / 2 each.
        proportion: fraction of the frequencies, from the highest, that are not 0 (proportional).
    """

    kind: RopeKind = "default"
    factor: float | None = None
    original_max_seq_len: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    proportion: float | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the document's length, so that cached keys become invalid as it grows."""
        return self.kind in ("dynamic", "longrope")

    def check_length(self, dim: int) -> None:
        """Raise ConfigError unless LongRoPE has one divisor per pair of `dim` features."""
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if divisors is not None and len(divisors) != dim // 2:
                raise ConfigError(
                    f"RoPE {name} has {len(divisors)} entries; expected {dim // 2}, half of the rotated features "
                    "(head_dim times partial_rotary_factor)"
                )


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of a layer's queries and keys.

    Attributes:
        dim: rotated features of a head, from the first one; even.
        theta: base of the frequencies theta^(-2i/dim).
        max_seq_len: `max_position_embeddings`, which some scalings use.
        interleaved: pairs are (x_{2i}, x_{2i + 1}) instead of (x_i, x_{i + dim/2}).
        query_beta, query_period: queries at position p are multiplied by 1 + query_beta * log(1 + p // query_period)
            (Llama 4, Ministral 3); None for none.
        sections: counts of frequencies that use the time, row and column of an image patch, interleaved (M-RoPE, Qwen
            2025, arXiv:2511.21631); None for positions with one coordinate.
        consecutive_sections: the frequencies of the time come first, then those of the row, then those of the column
            (Qwen2-VL: Wang et al. 2024, arXiv:2409.12191).
        rounds_once: in a narrow dtype keep cos and sin wide, and round only the rotated features.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeConfig = field(default_factory=RopeConfig)
    max_seq_len: int = 32768
    interleaved: bool = False
    query_beta: float | None = None
    query_period: int | None = None
    rounds_once: bool = False
    sections: tuple[int, int, int] | None = None
    consecutive_sections: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Coordinate of each of the dim / 2 frequencies: 0 for time, 1 for the row, 2 for the column."""
        if self.sections and self.consecutive_sections:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        axes = [0] * (self.dim // 2)
        for axis in (1, 2):
            for frequency in range(axis, min(3 * self.sections[axis], len(axes)) if self.sections else 0, 3):
                axes[frequency] = axis
        return tuple(axes)


class Rotation(NamedTuple):
    """Rotation of every token of a forward.

    Attributes:
        cos, sin: [T, 1, dim / 2], of the angles of each token.
        query_scale: [T, 1, 1], factor on the queries; None for none.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim


def _dynamic(config: RopeConfig, theta: float, head_dim: int, max_seq_len: int, length: Tensor | int) -> Tensor:
    """Return NTK-aware frequencies for one document length (reddit /u/bloc97, /u/emozilla)."""
    assert config.factor is not None
    stretch = (config.factor * length / max_seq_len) - (config.factor - 1)
    base = theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / (base ** _exponents(head_dim))


def _yarn_factor(config: RopeConfig, max_seq_len: int) -> float:
    assert config.original_max_seq_len is not None
    return max_seq_len / config.original_max_seq_len if config.factor is None else config.factor


def yarn_mscale(config: RopeConfig, max_seq_len: int, weight: float) -> float:
    """Return YaRN's factor on queries and keys: 0.1 * weight * ln(s) + 1 for an extension s > 1."""
    factor = _yarn_factor(config, max_seq_len)
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(config: RopeConfig, theta: float, head_dim: int, max_seq_len: int) -> tuple[Tensor, float]:
    """Return YaRN's frequencies and attention factor (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4)."""
    original = config.original_max_seq_len
    assert original is not None
    factor = _yarn_factor(config, max_seq_len)
    attention_factor = config.attention_factor
    if attention_factor is None:
        attention_factor = yarn_mscale(config, max_seq_len, 1.0)
        if config.mscale and config.mscale_all_dim:
            attention_factor = yarn_mscale(config, max_seq_len, config.mscale)
            attention_factor /= yarn_mscale(config, max_seq_len, config.mscale_all_dim)

    def ramp_bound(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = ramp_bound(config.beta_fast or 32), ramp_bound(config.beta_slow or 1)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    frequencies = theta ** _exponents(head_dim)
    extrapolated, interpolated = 1.0 / frequencies, 1.0 / (factor * frequencies)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, attention_factor


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Return Llama 3.1's frequencies: interpolate long wavelengths, keep short ones, blend in between."""
    factor, low, high = config.factor, config.low_freq_factor, config.high_freq_factor
    original = config.original_max_seq_len
    assert factor is not None and low is not None and high is not None and original is not None
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, scaled)


def _proportional(config: RopeConfig, theta: float, head_dim: int) -> Tensor:
    """Return frequencies with only the first fraction nonzero; frequency 0 leaves features unrotated."""
    fraction = 1.0 if config.proportion is None else config.proportion
    rotated = int(fraction * head_dim // 2)
    inv_freq = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
    inv_freq[:rotated] = 1.0 / (theta ** _exponents(head_dim)[:rotated])
    return inv_freq / (config.factor or 1.0)


def _longrope(config: RopeConfig, theta: float, head_dim: int, max_seq_len: int) -> tuple[Tensor, Tensor, float]:
    """Return LongRoPE's short and long frequencies and attention factor (Ding et al. 2024, arXiv:2402.13753)."""
    original, short, long = config.original_max_seq_len, config.short_factor, config.long_factor
    assert original is not None and short is not None and long is not None
    factor = max_seq_len / original if config.factor is None else config.factor
    attention_factor = config.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    frequencies = theta ** _exponents(head_dim)
    short_inv, long_inv = (
        1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * frequencies) for divisors in (short, long)
    )
    return short_inv, long_inv, attention_factor


class RotaryEmbedding(nn.Module):
    """Computes the rotation of every token, once per forward for all layers with the same `RopeSpec`.

    The frequencies are attributes instead of buffers, because `to(bfloat16)`, `to_empty` and sharding must not change
    them.
    """

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec, self.config, self.theta = spec, spec.scaling, spec.theta
        self.head_dim, self.max_seq_len = spec.dim, spec.max_seq_len
        self.init_buffers(torch.device("cpu"))

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the inverse frequencies [head_dim / 2] in float32 and move them to `device`.

        Raises:
            ConfigError: the scaling has no finite frequencies.
        """
        try:
            inv_freq, long_inv_freq, self.attention_factor = self._frequencies()
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(f"{self._scaling()} cannot be computed ({error}); check its numbers") from error
        tables = [inv_freq] if long_inv_freq is None else [inv_freq, long_inv_freq]
        if not all(bool(frequencies.isfinite().all()) for frequencies in tables):
            raise ConfigError(f"{self._scaling()} gives frequencies that are NaN or infinite; check its numbers")
        self._inv_freq = inv_freq.to(device)
        self._axes = torch.tensor(self.spec.axes, device=device)
        self._long_inv_freq = None if long_inv_freq is None else long_inv_freq.to(device)

    def _scaling(self) -> str:
        fields = {name: value for name, value in vars(self.config).items() if value is not None and name != "kind"}
        return f"RoPE of type {self.config.kind!r}, theta {self.theta:g}, {fields}"

    def _frequencies(self) -> tuple[Tensor, Tensor | None, float]:
        """Return inverse frequencies, separate ones for long documents or None, and the attention factor."""
        config, theta, head_dim = self.config, self.theta, self.head_dim
        attention_factor = 1.0
        long_inv_freq: Tensor | None = None
        inv_freq = 1.0 / (theta ** _exponents(head_dim))
        if config.kind == "linear":
            assert config.factor is not None
            inv_freq = inv_freq / config.factor
        elif config.kind == "dynamic":
            inv_freq = _dynamic(config, theta, head_dim, self.max_seq_len, self.max_seq_len)
        elif config.kind == "yarn":
            inv_freq, attention_factor = _yarn(config, theta, head_dim, self.max_seq_len)
        elif config.kind == "llama3":
            inv_freq = _llama3(config, inv_freq)
        elif config.kind == "proportional":
            inv_freq = _proportional(config, theta, head_dim)
        elif config.kind == "longrope":
            inv_freq, long_inv_freq, attention_factor = _longrope(config, theta, head_dim, self.max_seq_len)
        return inv_freq, long_inv_freq, attention_factor

    def _inv_freq_per_token(self, lengths: Tensor) -> Tensor:
        """Return inverse frequencies [T, head_dim / 2] for document lengths [T] on the CPU."""
        if self._long_inv_freq is not None:
            original = self.config.original_max_seq_len
            assert original is not None
            is_long = to_device_async(lengths > original, self._inv_freq.device)
            return torch.where(is_long.unsqueeze(-1), self._long_inv_freq, self._inv_freq)
        # One row per distinct length, each from a 0-dim tensor: the same operations as transformers.
        device = self._inv_freq.device
        distinct, row_T = torch.unique(lengths.clamp(min=self.max_seq_len), return_inverse=True)
        rows = [
            to_device_async(_dynamic(self.config, self.theta, self.head_dim, self.max_seq_len, length), device)
            if length > self.max_seq_len
            else self._inv_freq
            for length in distinct
        ]
        return torch.stack(rows).index_select(0, to_device_async(row_T, device))

    @torch.no_grad()
    def forward(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> Rotation:
        """Return the rotation of every token, computed in at least float32.

        Args:
            positions: int [T], position of each token in its document, or [3, T] with its time, row and column.
            dtype: dtype of the result, unless the spec sets `rounds_once`.
            lengths: int [T] on the CPU, length of each token's document; required if `config.depends_on_length`, else
                ignored.
        """
        if self._inv_freq.device != positions.device:
            self.init_buffers(positions.device)
        inv_freq = self._inv_freq
        if self.config.depends_on_length:
            assert lengths is not None, f"{self.config.kind} RoPE needs document lengths"
            inv_freq = self._inv_freq_per_token(lengths)
        wide = torch.promote_types(dtype, torch.float32)
        if positions.dim() == 2:
            if self.spec.sections is None:
                raise ValueError(
                    f"positions have shape {tuple(positions.shape)}, but this model's have one coordinate; expected [T]"
                )
            angles = positions.index_select(0, self._axes).t().to(wide) * inv_freq.to(wide)
        else:
            angles = positions.unsqueeze(-1).to(wide) * inv_freq.to(wide)
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        query_scale = None
        if self.spec.query_beta is not None and self.spec.query_period is not None:
            periods = torch.floor(positions.to(wide) / self.spec.query_period)
            query_scale = (1 + self.spec.query_beta * torch.log1p(periods)).to(dtype).view(-1, 1, 1)
        kept = wide if self.spec.rounds_once else dtype
        return Rotation(cos.to(kept).unsqueeze(1), sin.to(kept).unsqueeze(1), query_scale)
