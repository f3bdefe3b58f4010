"""The checks of `archon doctor` on real ranks."""
