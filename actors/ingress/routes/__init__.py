"""HTTP routes beside generation, by purpose."""

OPEN_ROUTES = {"/health", "/ping", "/version", "/openapi.json", "/docs", "/", "/page/{name}"}
"""Routes that need no API key."""
PROBED_ROUTES = {"/health", "/ping"}
"""Routes by which load balancers ask whether a replica can serve."""
UNSUPPORTED_ROUTES = {"/score", "/rerank", "/v1/rerank", "/v2/rerank"}
"""Routes of other servers for ranking texts, which clients may look for here."""
