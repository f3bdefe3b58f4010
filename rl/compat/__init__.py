"""Workflows in the form of other frameworks; the core does not import them."""
