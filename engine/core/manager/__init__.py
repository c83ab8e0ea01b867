"""The KV cache manager's decisions: the prefix index, placement, segments in the object store."""
