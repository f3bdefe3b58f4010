"""Side-by-side measurements of archon and its peers; README.md describes them."""
