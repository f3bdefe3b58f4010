"""HTTP over a generator: OpenAI's and Anthropic's protocols, and sessions that record every token exactly.

FastAPI routes, validates and describes; uvicorn parses HTTP with httptools, because its other parser, h11, is slower by
a fourth. With a stub generator, on 2 cores and with 64 clients that keep their connections: 708 answers/s (p99 406 ms)
and 422 streams of 14 tokens/s (475 ms); aiohttp: 763/s and 472/s. That is 1 % of a small model's answer.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"server": ("AgentServer",), "service": ("Limits",)})
