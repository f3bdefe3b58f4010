"""Attention: packed documents, shared prefixes, a paged cache, and the backends."""
