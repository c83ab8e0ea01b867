"""`raydix key`: a new API key for a client, and its hash for the configuration's `tenants`. Neither is kept."""

import secrets

from raydix.engine.core.tenants import key_hash

KEY_BYTES = 32


def run() -> int:
    """Print a key and its hash; returns the exit code."""
    key = f"rdx-{secrets.token_urlsafe(KEY_BYTES)}"
    print(f"key   {key}\nhash  {key_hash(key)}")
    return 0
