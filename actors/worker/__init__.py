"""The prefill, decode and mixed worker actors."""
