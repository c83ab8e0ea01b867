"""Compiles Triton kernels for GPUs that are not there: registers, spills and shared memory of each.

    python -m tests.kernels.ahead_of_time [--targets 80 86 89 90 100 120] [--cases attention]

Launches are recorded on CPU tensors, with what `raydix.kernels.gpu` would say of the target, and compiled as they would
be there. Nothing runs.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from raydix.kernels.batch_invariant_matmul import triton as matmul
from raydix.kernels.kv_pack.triton import kv_pack_triton
from raydix.kernels.paged_attention import plan as attention_plan
from raydix.kernels.paged_attention.triton import paged_attention_triton
from raydix.kernels.rms_norm.triton import rms_norm_triton
from raydix.kernels.rotary_kv_store.triton import rotary_kv_store_triton
from raydix.kernels.sample import Controls, TokenMask
from raydix.kernels.sample.triton import sample_triton
from raydix.kernels.silu_and_mul.triton import silu_and_mul_triton

KIB = 1024
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have, in KiB, by compute capability times ten (CUDA C++ programming guide, table of
technical specifications)."""
MULTIPROCESSORS = 132
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a launch needs on its target: bytes of shared memory, registers of a thread, bytes that spill from them."""

    kernel: str
    constants: str
    num_warps: int
    shared: int
    registers: int
    spilled: int


class Launch(NamedTuple):
    """A recorded launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded(target: int, num_multiprocessors: int = MULTIPROCESSORS) -> Iterator[list[Launch]]:
    """Yield the list of the block's launches, which are not run, as on a GPU of this compute capability."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: launches.append(Launch(kernel, arguments, options))

    hopper, shared = mock.Mock(return_value=target == 90), mock.Mock(return_value=SHARED_KIB[target] * KIB)
    with (
        mock.patch.object(JITFunction, "__getitem__", launcher),
        mock.patch.multiple(matmul, is_hopper=hopper, multiprocessors=lambda device: num_multiprocessors),
        mock.patch.multiple(
            attention_plan, is_hopper=hopper, multiprocessors=lambda device: num_multiprocessors, shared_memory=shared
        ),
    ):
        yield launches


def variant(launch: Launch) -> tuple[object, ...]:
    """What Triton compiles the launch's kernel for: a launch of another variant is compiled anew."""
    kernel = launch.kernel
    given = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | launch.options
    options = sorted((name, value) for name, value in launch.options.items() if name not in kernel.arg_names)
    return (
        kernel.fn.__name__,
        *(_specialised(parameter, given[parameter.name]) for parameter in kernel.params),
        *options,
    )


def _specialised(parameter: Any, value: Any) -> tuple[object, ...]:
    if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
        return parameter.name, value
    if isinstance(value, Tensor):
        # On a device memory begins at multiples of 512 bytes, so that a tensor is aligned as its place in there is.
        return parameter.name, _type_of(value), value.storage_offset() * value.element_size() % 16 == 0
    is_multiple = type(value) is int and value % 16 == 0 and not parameter.do_not_specialize
    return parameter.name, _type_of(value), is_multiple


def compiled(launch: Launch, target: int) -> Compiled:
    """Compile a launch with what Triton would specialise it on."""
    kernel = launch.kernel
    given = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | launch.options
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if type(address) is int and address % 16 == 0 and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]

    options = {name: value for name, value in launch.options.items() if name not in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spilled = _resources(made.asm["ptx"], target)
    named = {kernel.params[index].name: value for (index,), value in constants.items()}
    shown = {name: value for name, value in named.items() if name.startswith(("BLOCK", "HAS", "IS"))}
    return Compiled(
        kernel.fn.__name__,
        ", ".join(f"{name}={value}" for name, value in shown.items()),
        made.metadata.num_warps,
        made.metadata.shared,
        registers,
        spilled,
    )


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(ptx: str, target: int) -> tuple[int, int]:
    """Registers of a thread and bytes that spill, as the assembler that Triton takes for the target reports them."""
    [name] = set(re.findall(r"^\.target (sm_\w+)", ptx, re.MULTILINE))
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx.encode())
        file.flush()
        command = [get_ptxas(target).path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.findall(r"Used (\d+) registers", said)[0]), int(re.findall(r"(\d+) bytes spill stores", said)[0])


# Llama 3 8B, SmolLM2, Gemma 3 4B: query heads, KV heads, head dim; and hidden size, columns of the widest product.
HEADS = ((32, 8, 128), (9, 3, 64), (8, 4, 256))
PRODUCTS = ((6144, 4096), (4096, 14336), (28672, 4096), (960, 576), (1536, 576))
ROWS = (1, 64, 300, 8192)
BATCHES = (((1,) * 4, 500), ((1,) * 256, 500), ((1, 600), 600), ((8000,), 8000))
"""Queries of each sequence, and the context of all: few decodes, many, a chunk among them, and one alone."""


def products() -> None:
    for rows, (columns, inner), has_bias in product(ROWS, PRODUCTS, (False, True)):
        x, weight = (torch.zeros(count, inner, dtype=torch.bfloat16) for count in (rows, columns))
        bias = torch.zeros(columns, dtype=torch.bfloat16) if has_bias else None
        matmul.batch_invariant_matmul_triton(x, weight, bias)


def attentions(heads: Sequence[tuple[int, int, int]] = HEADS) -> None:
    for (num_heads, num_kv_heads, head_dim), (lengths, context), deterministic, is_gemma in product(
        heads, BATCHES, (False, True), (False, True)
    ):
        caches = torch.zeros(2, 600, num_kv_heads, 16, head_dim, dtype=torch.bfloat16)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        paged_attention_triton(
            torch.zeros(sum(lengths), num_heads, head_dim, dtype=torch.bfloat16),
            caches[0],
            caches[1],
            torch.zeros(len(lengths), -(-context // 16), dtype=torch.int32),
            starts,
            torch.full((len(lengths),), context, dtype=torch.int32),
            scale=head_dim**-0.5,
            sliding_window=1024 if is_gemma else None,
            soft_cap=30.0 if is_gemma else None,
            deterministic=deterministic,
        )


def samplings() -> None:
    for vocabulary, cuts in product((49_152, 128_256, 262_144), (False, True)):
        logits = torch.zeros(2, vocabulary, dtype=torch.bfloat16)
        mask = TokenMask(torch.zeros(2, dtype=torch.int32), torch.zeros(1, vocabulary // 32, dtype=torch.int32))
        sample_triton(logits, Controls.neutral(2), mask=mask, cuts=cuts)


def row_by_row() -> None:
    for hidden in (576, 4096):
        x = torch.zeros(8, hidden, dtype=torch.bfloat16)
        rms_norm_triton(x, x[0], 1e-5)
        rms_norm_triton(x, x[0], 1e-5, x)
        silu_and_mul_triton(torch.zeros(8, 2 * hidden, dtype=torch.bfloat16))
    for num_heads, num_kv_heads, head_dim in HEADS:
        pool = torch.zeros(20, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16)
        qkv = torch.zeros(8, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16)
        positions, tables = torch.zeros(8, dtype=torch.int64), torch.zeros(100, head_dim)
        norm = torch.zeros(head_dim, dtype=torch.bfloat16)
        operands = (qkv, positions, tables, pool[:, 0], pool[:, 1], positions, num_heads)
        rotary_kv_store_triton(*operands)
        rotary_kv_store_triton(*operands, q_norm=norm, k_norm=norm)
        kv_pack_triton(pool, torch.arange(4), torch.empty(4 * pool[0].nbytes, dtype=torch.uint8))


CASES: dict[str, Callable[[], None]] = {
    "products": products,
    "attention": attentions,
    "sampling": samplings,
    "rows": row_by_row,
}


def compile_all(target: int, case: Callable[[], None]) -> list[Compiled]:
    """Compile each variant that the launches of a case need on a target, once."""
    with recorded(target) as launches:
        case()
    return sorted({compiled(launch, target) for launch in launches}, key=lambda each: (each.kernel, each.constants))


def main() -> int:
    """Print a table; returns 1 where a kernel does not fit its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", type=int, choices=SHARED_KIB, default=list(SHARED_KIB))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    misfits = 0
    print("| target | kernel | warps | registers | spilled | shared KiB | |\n|---|---|---|---|---|---|---|")
    for target in options.targets:
        for case in options.cases:
            for each in compile_all(target, CASES[case]):
                fits = each.shared <= SHARED_KIB[target] * KIB
                misfits += not fits
                cells = (each.kernel, each.num_warps, each.registers, each.spilled, f"{each.shared / KIB:.1f}")
                print(
                    f"| {target} | {' | '.join(map(str, cells))} | {each.constants}{'' if fits else ' DOES NOT FIT'} |"
                )
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
