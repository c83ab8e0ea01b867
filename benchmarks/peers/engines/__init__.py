"""One file per engine: `load(options)` gives an object with `generate`; `serve.py` puts it behind stdin and stdout."""
