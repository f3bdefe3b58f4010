"""Checks of `archon doctor` on real ranks."""
