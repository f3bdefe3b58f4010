"""Checkpoint formats of other trainers: torch DCP and Megatron."""
