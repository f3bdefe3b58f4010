"""HTTP dialects of inference servers: archon, SGLang and vLLM."""
