"""One file per library: `load(options)` gives an object that compiles; `serve.py` puts it behind stdin and stdout."""
