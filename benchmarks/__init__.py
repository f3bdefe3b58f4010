"""Side-by-side measurements of archon and its peers. `python -m benchmarks` takes them all; README.md tells what they
are.
"""
