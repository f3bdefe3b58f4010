"""Tests of archon.tools."""
