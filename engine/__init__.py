"""The engine: every part of raydix that needs no Ray."""
