"""Sandbox: runs untrusted programs under limits, without network, and leaves nothing behind."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "local": ("Sandbox",),
        "programs": ("Limits", "Result", "Runner"),
        "remote": ("RemoteSandbox",),
        "tools": ("bash_tool", "python_tool", "search_tool"),
    },
)
