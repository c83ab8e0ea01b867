"""`raydix models`: the families that run, which of their published sizes fit this machine, and what is refused and why.

`docs/guides/models.md` has the same tables, without the machine; `raydix models --markdown` prints them.
"""

from collections.abc import Iterable, Iterator, Sequence

from raydix.cli.cluster import STORE_RESERVE_GIB
from raydix.cli.machine import this_machine
from raydix.cli.sizing import GPU_CONTEXT_GIB, GPU_SHARE, INGRESS_GIB, SERVER_GIB, WORKER_GIB
from raydix.configs.choose import Machine
from raydix.engine.core.settings import GIB
from raydix.engine.model.families import FAMILIES
from raydix.engine.model.families.family import Family
from raydix.engine.model.families.refused import REFUSED

REST_GIB = 0.5  # memory of one step's results and of KV for some thousand tokens, about
# Approximate bytes of one parameter: in int8 the table of embeddings stays in bfloat16. Those of stored weights are the
# family's to say (`Family.stored_bytes`).
BYTES = {"bfloat16": 2.0, "int8": 1.1}
# Kinds of weights, as `model.quantization` names them, with the headings of their columns.
HEADINGS = {"bfloat16": "fits in bfloat16", "stored": "fits as stored", "int8": "fits in int8"}


def run(*, markdown: bool = False) -> int:
    """Print the tables; returns the exit code."""
    print("\n".join(markdown_lines() if markdown else lines(this_machine())))
    return 0


def lines(machine: Machine) -> Iterator[str]:
    """What runs on a machine, and what does not run at all."""
    room_gib, kinds = room(machine)
    where = f"{min(machine.large_gpus_gib):.0f} GiB of GPU memory" if machine.large_gpus_gib else "the free memory"
    yield f"Of {where} about {max(room_gib, 0):.1f} GiB can hold weights. raydix serve computes it exactly."
    yield ""
    heading = ("family", *(HEADINGS[kind] for kind in kinds), "too large here")
    yield from _columns([heading, *(_row(family, machine, room_gib, kinds) for family in FAMILIES.values())])
    yield ""
    yield "Not supported, and what is missing:"
    yield from _columns([(f"  {each.title}", each.missing) for each in REFUSED])


def room(machine: Machine) -> tuple[float, tuple[str, ...]]:
    """Memory for the weights of one worker, in GiB, and the kinds of weights that it may hold."""
    if machine.large_gpus_gib:
        return GPU_SHARE * min(machine.large_gpus_gib) - GPU_CONTEXT_GIB - REST_GIB, ("bfloat16",)
    free_gib = machine.memory_gib if machine.free_gib is None else machine.free_gib
    others_gib = SERVER_GIB + INGRESS_GIB + STORE_RESERVE_GIB + WORKER_GIB + REST_GIB
    return free_gib - others_gib, tuple(HEADINGS)


def _row(family: Family, machine: Machine, room_gib: float, kinds: Sequence[str]) -> tuple[str, ...]:
    """The family's sizes, each under the first kind of weights with which it fits."""
    if machine.large_gpus_gib and family.cpu_only is not None:
        return (family.title, *("" for _ in kinds), f"{family.cpu_only} run on CPUs only")
    rest, cells = dict(family.sizes), []
    for kind in kinds:
        size = family.stored_bytes if kind == "stored" else BYTES[kind]
        fitting = [] if size is None else [name for name, of in rest.items() if of * 1e9 * size / GIB <= room_gib]
        cells.append(", ".join(fitting))
        for name in fitting:
            del rest[name]
    return (family.title, *cells, ", ".join(rest))


def markdown_lines() -> Iterator[str]:
    """The tables of the documentation."""
    yield "| family | architecture in `config.json` | GGUF | published sizes |"
    yield "|---|---|---|---|"
    for family in FAMILIES.values():
        names = ", ".join(f"`{name}`" for name in family.architectures)
        gguf = "" if family.gguf_name is None else "yes"
        yield f"| {family.title} | {names} | {gguf} | {', '.join(family.sizes)} |"
    yield ""
    yield "| not supported | missing |"
    yield "|---|---|"
    for each in REFUSED:
        yield f"| {each.title} | {each.missing} |"


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows with their cells below each other."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
