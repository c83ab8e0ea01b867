"""The KV cache manager actor."""
