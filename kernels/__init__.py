"""Operations on tensors: each folder holds one, as a PyTorch reference, a Triton kernel and a CPU path."""
