"""HTTP over a generator: OpenAI's and Anthropic's protocols, and sessions that record every token exactly.

FastAPI routes, validates and describes; uvicorn with httptools reads HTTP. A stub generator behind it, on 2 cores, 64
clients that keep their connections, medians of alternating rounds: 708 answers/s (p99 406 ms, 0.9 ms of processor time
each), streams of 14 tokens 422/s (475 ms, 1.5 ms). The aiohttp server before it: 763/s (375 ms, 0.6 ms) and 472/s (561
ms, 1.1 ms). With uvicorn's other parser, h11, it is 528/s and 354/s, which is why httptools is required. A model of 26
million parameters samples 14 tokens in some 40 ms, so that the difference is 1 % of an answer.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "server": ("AgentServer",),
        "service": ("Limits",),
        "sessions": ("Interaction", "Session", "Trajectory"),
    },
)
