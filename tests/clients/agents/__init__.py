"""Coding agents and frameworks for agents, each run to the end of a scripted task of ten turns."""
