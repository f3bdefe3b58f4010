"""archon's extension of vLLM, whose repair of tied embeddings a test can leave out, as vLLM's own reload does."""

from __future__ import annotations

from archon.serve import vllm_extension

_REPAIR = vllm_extension.share_packed_embeddings


class Extension(vllm_extension.Extension):
    """A base of vLLM's worker: its methods can be called by `/collective_rpc`."""

    def leave_head_stale(self, stale: bool) -> None:
        """Choose whether later reloads keep the old head of tied embeddings."""
        vllm_extension.share_packed_embeddings = (lambda model: None) if stale else _REPAIR
