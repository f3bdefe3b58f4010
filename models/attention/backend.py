"""Interface of an attention backend.

To add one, subclass `AttentionBackend` in a new file and pass an instance to `register_attention_backend`.
"""

from __future__ import annotations

import abc
import importlib
from typing import ClassVar

import torch
from torch import Tensor

from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.spec import AttentionSpec


class AttentionBackend(abc.ABC):
    """Computes attention; stateless, so one object serves all models.

    Decoding reads its cache itself (`archon.models.attention.decode.paged`) and uses the backend only for new prompts.

    Attributes:
        name: its `attn_type`.
        features: the implemented options of `AttentionSpec`: `window`, `soft_cap`, `sinks`, and `bidirectional` for
            non-causal attention.
        saved_ops: `namespace::operator` names; selective recomputation keeps their results.
        prefers_equal_lengths: adjacent documents of equal length cost less; the engine then sorts them.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    saved_ops: ClassVar[frozenset[str]] = frozenset()
    prefers_equal_lengths: ClassVar[bool] = False

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why it cannot compute in `dtype` on `device`, or None."""
        return None

    def prepare_packed(self, documents: PackedDocuments) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare for `attend_packed` once per forward, outside compiled and recomputed code."""

    @abc.abstractmethod
    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        """Return attention within each document [T, H, D], for q [T, H, D], k and v [T, G, D].

        Each key head serves H / G consecutive query heads.
        """

    def prepare_gathered(self, keys: GatheredKeys) -> None:  # noqa: B027
        """Prepare for `attend_gathered` once per forward, outside compiled and recomputed code."""

    def attend_gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        """Return attention [Q, H, D] of this rank's queries [Q, H, D] under context parallelism.

        `keys` splits the gathered kv [T, 2 G, D]. Optional; never called under `torch.compile`.
        """
        raise NotImplementedError

    def attend_prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """Return attention [U, H, D] with shared prefixes, for q [U, H, D], k and v [U, G, D]. Optional."""
        raise NotImplementedError

    @property
    def supports_gathered(self) -> bool:
        """Whether it implements `attend_gathered`."""
        return type(self).attend_gathered is not AttentionBackend.attend_gathered

    @property
    def supports_prefixed(self) -> bool:
        """Whether it implements `attend_prefixed`."""
        return type(self).attend_prefixed is not AttentionBackend.attend_prefixed

    def layer_unsupported_reason(self, spec: AttentionSpec, head_dim: int) -> str | None:
        """Return why it cannot compute a layer with these options and features per head, or None."""
        return spec.unsupported_reason(self.features, f"attn_type {self.name!r}")


def import_failure(module: str) -> str | None:
    """Return why the installed `module` cannot be imported, or None; without a GPU, None without an import.

    Kernels compiled for another PyTorch fail when they are imported.
    """
    if torch.cuda.is_available():
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            return f"{module} cannot be imported ({type(error).__name__}: {reason})"
    return None


def flash_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FlashAttention kernels cannot compute in `dtype` on `device`, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA only and the model is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16 and the model computes in {str(dtype).removeprefix('torch.')}"
    return None
