"""The contract of an attention backend: one object says what it can do and does it.

To add one, write a file with a subclass and hand an instance to `register_attention_backend`.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from archon.models.attention.documents import GatheredKeys, PackedDocuments
from archon.models.attention.prefix import SharedPrefixes
from archon.models.attention.spec import AttentionSpec


class AttentionBackend(abc.ABC):
    """One way to compute causal attention; stateless, so that one object serves every model.

    Decoding reads its cache by itself (`archon.models.attention.paged`) and asks the backend for new prompts only.
    """

    name: ClassVar[str]
    """What `attn_type` calls it."""
    features: ClassVar[frozenset[str]] = frozenset({"window"})
    """Which options of `AttentionSpec` it computes; a layer that sets another is refused."""
    saved_ops: ClassVar[frozenset[str]] = frozenset()
    """`namespace::operator` of those whose results selective recomputation keeps, so that they do not run again."""
    batches_equal_lengths: ClassVar[bool] = False
    """Whether neighbouring documents of one length cost less; the engine then sorts them."""

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Returns why it cannot compute in `dtype` on `device`, or None."""
        return None

    def prepare_packed(self, documents: PackedDocuments) -> None:  # noqa: B027 - most have nothing to prepare
        """Called once a forward before `packed`, outside compiled and recomputed code."""

    @abc.abstractmethod
    def packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        """Attention within each document: q [T, H, D], k and v [T, G, D] to [T, H, D], H a multiple of G."""

    def prepare_gathered(self, keys: GatheredKeys) -> None:  # noqa: B027
        """Called once a forward before `gathered`, outside compiled and recomputed code."""

    def gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        """Attention of this rank's queries under context parallelism: q [Q, H, D] and the gathered kv [T, 2 G, D], to
        be read by `keys`, to [Q, H, D]. Optional; never called under `torch.compile`."""
        raise NotImplementedError

    def prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """Attention where each shared beginning stands once: q [U, H, D], k and v [U, G, D] to [U, H, D]. Optional."""
        raise NotImplementedError

    @property
    def attends_gathered(self) -> bool:
        """Whether it has `gathered`."""
        return type(self).gathered is not AttentionBackend.gathered

    @property
    def attends_prefixed(self) -> bool:
        """Whether it has `prefixed`."""
        return type(self).prefixed is not AttentionBackend.prefixed

    def require(self, spec: AttentionSpec) -> None:
        """Raises ConfigError for an option of `spec` that it does not compute."""
        spec.require(self.features, f"attn_type {self.name!r}")


def half_precision_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why a FlashAttention kernel cannot run so, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA only and the model is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16 and the model computes in {str(dtype).removeprefix('torch.')}"
    return None
