"""LoRA: layers, targets, the token-to-LoRA mapping, merging."""
