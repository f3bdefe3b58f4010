"""Triton kernels for CUDA. They also run on CPU tensors in the interpreter (`TRITON_INTERPRET=1`), for tests."""

from archon.schema.errors import ConfigError

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"Triton cannot be imported ({error}); models on a GPU need it: pip install triton (PyTorch's CUDA builds for "
        "Linux do so), or set device: cpu"
    ) from error
