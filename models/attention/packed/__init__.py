"""Attention over packed documents: CPU and CUDA backends."""
