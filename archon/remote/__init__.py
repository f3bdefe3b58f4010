"""Inference servers in other processes: generation over HTTP and verified weight pushes."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"config": ("PushConfig",), "connect": ("connect",), "engine": ("RemoteEngine",)}
)
