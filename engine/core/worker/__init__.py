"""A worker's decisions: requests in one step, the blocks of its pool, swapping, scores."""
