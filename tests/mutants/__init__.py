"""Mistakes of the kind that fail silently, planted one at a time: is each noticed by a test?

`catalog` lists them by room, `mutant` says what one is, `planting` runs tests on a copy of the tree that has it, and
`record` keeps what was found. `python -m tests.mutants` is the command.
"""
