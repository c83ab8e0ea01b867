"""raydix beside the CPU engines people would use instead, each in a process and an environment of its own.

`install` makes the environments, `roster` says which engines there are and how each is started, `worker` talks to one,
`cases` says what is measured. `engines/` holds what runs inside each environment and needs nothing from here.
"""
