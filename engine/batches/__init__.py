"""Batches on disk and in progress: files and batches of tenants, journals, inputs and outputs. No Ray, no HTTP.

`raydix.engine.core.batches` decides; the server (`raydix.actors.ingress`) and other programs (`raydix`) run batches
with these parts.
"""
