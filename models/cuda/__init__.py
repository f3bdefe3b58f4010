"""Triton kernels for CUDA. They also run on CPU tensors in the interpreter (`TRITON_INTERPRET=1`), for tests."""
