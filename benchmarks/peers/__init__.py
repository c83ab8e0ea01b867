"""raydix beside other CPU engines, each in a process and an environment of its own.

`install` makes the environments, `roster` lists the engines and the way to start each, `process` and `worker` talk to
one, `cases` defines the measurements. `engines/` holds the code that runs inside each environment and needs nothing
from here; `grammars/` does the same for libraries that compile grammars.
"""
