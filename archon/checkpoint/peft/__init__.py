"""LoRA checkpoints in PEFT's format."""
