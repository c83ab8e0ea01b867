"""Decisions about a batch of requests: the order of the lines, states, and the form of the journal."""
