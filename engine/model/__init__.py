"""The model: its description, its weights, its paged KV tensors and the decoder on top of them."""
