"""What attention does with queries, keys and values: packed documents, a paged cache, by one backend or another."""
