"""Parts of `benchmarks.speculation`: workloads, engines, speed, gaps and identity of answers with drafts."""
