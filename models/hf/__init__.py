"""Hugging Face configs and tensor names."""
