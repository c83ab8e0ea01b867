"""The ingress's decisions: how requests run over workers, limits, text from tokens."""
