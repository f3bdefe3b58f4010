"""Checkpoints: import and export of Hugging Face folders, the crash-safe native format, and conversion."""
