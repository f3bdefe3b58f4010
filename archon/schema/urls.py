"""URLs of servers, checked when the configuration is read."""

from __future__ import annotations

from urllib.parse import urlsplit

from archon.schema.errors import ConfigError

_SHOWN_CHARACTERS = 80


def require_http_url(url: str, name: str) -> str:
    """Return `url`. Raises ConfigError unless it is http or https with a host and a valid port.

    Args:
        url: the URL.
        name: the option or the configuration field, for the error.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number below 65536, or half an IPv6 address
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        shown = url if len(url) <= _SHOWN_CHARACTERS else url[:_SHOWN_CHARACTERS] + "…"
        raise ConfigError(
            f"{name}: got {shown!r}; expected http://HOST:PORT or https://HOST, such as http://127.0.0.1:8000"
        )
    return url
