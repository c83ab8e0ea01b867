"""The ingress deployment: HTTP and handle calls in, answers out."""
