"""Parts of `benchmarks.speculation`: workloads, engines, speed and figures."""
