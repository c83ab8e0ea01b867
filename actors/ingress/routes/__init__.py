"""Handlers of the routes (`raydix.engine.api.routes`), by purpose."""
