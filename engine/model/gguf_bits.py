"""The kinds of GGUF's blocks of weights that can be kept as they are, and their sizes in memory."""

MEMORY_BITS = {
    "Q4_0": 4.75,
    "Q4_1": 5.5,
    "Q5_0": 8.75,
    "Q5_1": 9.5,
    "Q8_0": 8.75,
    "Q4_K": 4.63,
    "Q5_K": 8.63,
    "Q6_K": 8.57,
}
"""Bits of a weight by its block's kind, scales included. Numbers of five and six bits take eight."""
FILE_BITS = {2: 4.9, 3: 5.6, 7: 8.8, 8: 8.8, 9: 9.5, 14: 5.3, 15: 6.3, 16: 8.7, 17: 8.7, 18: 8.7}
"""About the same by a file's `general.file_type`: a few of its matrices are of another kind than most."""


def suffix(kind: str) -> str:
    """The ending of the name of a weight that is kept in blocks of this kind."""
    return f".{kind}"
