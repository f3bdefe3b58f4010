"""Inference servers in other processes: answers over HTTP, and pushes of new weights, each of which is verified."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"config": ("PushConfig",), "connect": ("connect",), "engine": ("RemoteEngine",)}
)
