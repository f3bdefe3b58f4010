"""archon's extension of vLLM without its repair of tied embeddings, as vLLM's own reload leaves them."""

from __future__ import annotations

from archon.serve import vllm_extension

vllm_extension.repack_embeddings = lambda model: None

Extension = vllm_extension.Extension
