"""Decisions without I/O: standard library only, no clock and no randomness of its own."""
