"""Replaying traces in virtual time through the engine's own decisions: see `benchmarks.replay`."""
