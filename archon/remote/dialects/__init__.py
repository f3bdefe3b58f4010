"""HTTP protocols of inference servers: archon, SGLang and vLLM."""
