"""Builds the C++ kernels for machines without a compiler.

`python -m raydix.kernels.cpp.prebuild FOLDER [INSTRUCTION_SET ...]`, in an image's build for example. A process whose
`RAYDIX_PREBUILT_KERNELS` names the folder takes its kernels from there. Building needs no CPU that has the
instructions; it needs the same versions of torch and Python as the machine that loads the kernels.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from raydix.kernels.cpp import loader


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line names; 1 if the compiler fails, after one line that says why."""
    parser = argparse.ArgumentParser(prog="python -m raydix.kernels.cpp.prebuild", description="Build the C++ kernels.")
    parser.add_argument("folder", type=Path, help="where the shared objects go")
    known = ", ".join(loader.INSTRUCTION_SETS)
    parser.add_argument("instruction_sets", nargs="*", metavar="INSTRUCTION_SET", help=f"by default {known}")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.instruction_sets) - set(loader.INSTRUCTION_SETS):
        parser.error(f"unknown instruction set {min(unknown)!r}; known are {known}")

    try:
        prebuild(chosen.folder, chosen.instruction_sets or tuple(loader.INSTRUCTION_SETS))
    except (loader.BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prebuild(folder: Path, instruction_sets: Sequence[str]) -> None:
    """Build one shared object for each instruction set into `folder`; those that are there already stay.

    Raises:
        BuildError: there is no compiler, or the compiler fails.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for instructions in instruction_sets:
        path = folder / loader.file_name(instructions)
        if not path.exists():
            loader.build(instructions, path)
        print(path, flush=True)


if __name__ == "__main__":
    sys.exit(main())
