"""Where the host waits for the device, by the function, and why it may."""

from __future__ import annotations

HOST_WAITS: dict[str, str] = {
    "archon.models.layers.rope.RotaryEmbedding.init_buffers": "when a model is built",
    "archon.engine.build.ModelBuilder._init_weights": "when a model is built",
    "archon.engine.metrics.MetricSums.read": "at the end of a step, for the norm of its gradient and its metrics",
    "archon.engine.engine.ArchonEngine._score": "after the last forward, for the scores",
    "archon.models.layers.delta_rule._fla_delta_rule": "once in a forward, where fla copies its table of chunks",
    "archon.generation.replica._digest": "in a push of weights, for the fingerprint of each",
    "archon.generation.lora.LoRAManager._parts": "when a LoRA is loaded, for its copy and whether it is finite",
    "archon.generation.lora.ServedMultiLoRALayer.add_to_experts": "in a chunk of a prompt with a LoRA of experts",
    "archon.generation.generator._nonfinite_sequences": "after a chunk of a prompt with a LoRA",
    "archon.generation.sampler._sample_torch": "at the end of a step, for the tokens that the next one reads",
}
