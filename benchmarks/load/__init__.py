"""The load generator behind `python -m benchmarks.serve`: it knows HTTP and the OpenAI wire format, no engine."""
