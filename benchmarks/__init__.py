"""Benchmarks: programs that measure, and the figures they left in `results/`."""
