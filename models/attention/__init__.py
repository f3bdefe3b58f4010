"""Attention of queries, keys and values: packed documents, shared prefixes, a paged cache, and the backends."""
