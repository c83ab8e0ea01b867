"""The prefill, decode, mixed and elastic worker actors."""
