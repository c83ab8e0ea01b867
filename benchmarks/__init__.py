"""Benchmarks: measuring programs, and their published figures in `results/`."""
