"""raydix beside other CPU engines, each in a process and an environment of its own.

`install` makes the environments, `roster` lists the engines and the way to start each, `process` talks to one,
`comparison` has the measurements. `serve` and the files of `engines/` run inside each environment, and need nothing
from here.
"""
