"""Speed of the GPU kernels and of a whole model on them, against the machine's own ceilings and installed peers.

`python -m benchmarks.kernels [--json FILE] [--quick]` needs an NVIDIA GPU, torch and triton, no Ray and no network; the
model needs numpy, too. Each operation is checked against its float32 reference first, the model with graphs against
without and a whole prompt against chunks, and only correct ones are timed; peers whose result differs are not timed
either. Exit code 0: all passed; 1: a check failed; 2: there is no GPU.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import begin, command_parser
from benchmarks.kernel_cases import KernelCase, all_cases, relative_error

PEER_LIMIT = 1e-2
HEADER = ("operation", "shape", "error", "ms", "rate", "of ceiling", "beside (time of theirs / time of ours)")
WIDTHS = (30, 34, 9, 9, 15, 11, 0)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of this machine: a copy of 2 GiB, and a bfloat16 product of 8192 x 8192 matrices."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One case: its error, and if correct its time, rate, share of the ceiling, and the peers' times in ms.

    `peers_missing` gives the reason for each peer that was not timed.
    """

    operation: str
    shape: str
    error: float | None
    passed: bool
    failure: str | None = None
    ms: float | None = None
    tflops_per_s: float | None = None
    gb_per_s: float | None = None
    of_ceiling: float | None = None
    peers_ms: dict[str, float] | None = None
    peers_missing: dict[str, str] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = command_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only operations whose name contains TEXT; model for the whole one"
    )
    arguments, output = begin(parser, argv)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs an NVIDIA GPU that torch can use; found none", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    results, ceilings = run_all(arguments.quick, arguments.only, with_model=arguments.only in "model")
    output.write({"ceilings": asdict(ceilings), "results": [asdict(result) for result in results]})
    return 0 if all(result.passed for result in results) else 1


def run_all(quick: bool, only: str, with_model: bool) -> tuple[list[KernelResult], Ceilings]:
    """Measures the ceilings, then every case, printing each line as soon as it is known."""
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"ceilings measured here: copy {ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), "
        f"bfloat16 product {ceilings.matmul_flops_per_s / 1e12:,.0f} TFLOP/s\n"
    )
    print(line(HEADER))
    results = []
    for case in all_cases(quick):
        if only in case.operation:
            results.append(measure(case, ceilings))
            print(line(cells(results[-1])), flush=True)

    if with_model:
        for result in model_results(quick, ceilings):
            results.append(result)
            print(line(cells(result)), flush=True)

    failed = sum(not result.passed for result in results)
    print(f"\n{len(results) - failed} of {len(results)} passed")
    return results, ceilings


def model_results(quick: bool, ceilings: Ceilings) -> Iterator[KernelResult]:
    """Measures the whole model, if it fits; it also needs numpy, which the kernels do not."""
    try:
        from benchmarks.model_cases import model_cases

        for case in model_cases(quick):
            yield measure(case, ceilings)
    except Exception as problem:
        yield KernelResult("model", "Llama-3-8B", None, False, failure=reason(problem))


def measure_ceilings() -> Ceilings:
    """The two figures everything else is compared with."""
    source, target = (torch.zeros(2 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_s = time_ms(lambda: target.copy_(source)) / 1e3
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul_s = time_ms(lambda: a @ b) / 1e3
    return Ceilings(2 * 2**31 / copy_s, 2 * 8192**3 / matmul_s)


def measure(case: KernelCase, ceilings: Ceilings) -> KernelResult:
    """Checks a case, and times the operation and its peers after a passed check."""
    try:
        out = case.run()
        error = case.error(out)
    except Exception as problem:
        return KernelResult(case.operation, case.shape, None, False, failure=reason(problem))

    if not error <= case.limit:
        failure = f"error {error:.2e} is over {case.limit:.0e}"
        return KernelResult(case.operation, case.shape, error if error < float("inf") else None, False, failure=failure)

    ms = time_from_outside_ms(case.run) if case.returns_when_done else time_ms(graphed(case.run))
    tflops_per_s = case.flops / ms / 1e9 if case.flops else None
    gb_per_s = case.num_bytes / ms / 1e6 if case.num_bytes else None
    ceiling = ceilings.matmul_flops_per_s if case.flops else ceilings.copy_bytes_per_s
    peers_ms, peers_missing = measure_peers(case, out)
    return KernelResult(
        case.operation,
        case.shape,
        error,
        True,
        ms=ms,
        tflops_per_s=tflops_per_s,
        gb_per_s=gb_per_s,
        of_ceiling=(case.flops or case.num_bytes) / (ms / 1e3) / ceiling,
        peers_ms=peers_ms,
        peers_missing=peers_missing,
    )


def measure_peers(case: KernelCase, ours: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Times in ms of the peers that run here and agree with `ours`, and why the others are missing."""
    times: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, make in case.peers.items():
        try:
            peer = make()
            difference = agreement(peer(), ours)
            if difference > PEER_LIMIT:
                missing[name] = f"differs from ours by {difference:.1e}"
            else:
                times[name] = time_ms(graphed(peer))
        except Exception as problem:
            missing[name] = reason(problem)
    return times, missing


def agreement(theirs: Tensor, ours: Tensor) -> float:
    """Relative difference of two results, byte by byte where ours is bytes."""
    if ours.dtype == torch.uint8:
        theirs = theirs.contiguous().view(-1).view(torch.uint8)
        return 0.0 if torch.equal(theirs, ours) else float("inf")
    return relative_error(theirs, ours)


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as the replay of a CUDA graph, as the engine runs decode steps; itself where it cannot be captured."""
    try:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except Exception:
        torch.cuda.synchronize()
        return run
    return graph.replay


def time_ms(run: Callable[[], Any]) -> float:
    """Median time of one call in milliseconds, by CUDA events, the L2 cache emptied before each call."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


def time_from_outside_ms(run: Callable[[], Any], at_least_s: float = 2.0) -> float:
    """Median time of one call in milliseconds, by the clock on the wall."""
    for _ in range(3):
        run()
    times: list[float] = []
    while sum(times) < at_least_s or len(times) < 5:
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e3


def reason(problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first}"[:200]


def cells(result: KernelResult) -> tuple[str, ...]:
    """Cells of a result's line."""
    error = "-" if result.error is None else f"{result.error:.1e}"
    if result.ms is None:
        return result.operation, result.shape, error, "FAILED", "", "", result.failure or ""
    rate = f"{result.tflops_per_s:,.1f} TFLOP/s" if result.tflops_per_s else f"{result.gb_per_s or 0:,.0f} GB/s"
    peers = [f"{name} {ms / result.ms:.2f}" for name, ms in (result.peers_ms or {}).items()]
    missing = [f"{name} -" for name in result.peers_missing or {}]
    ceiling = f"{result.of_ceiling or 0:.2f}"
    return result.operation, result.shape, error, f"{result.ms:.4f}", rate, ceiling, ", ".join(peers + missing)


def line(row: Sequence[str]) -> str:
    """Cells as a line of the table."""
    return " ".join(f"{cell:<{width}}" for cell, width in zip(row, WIDTHS, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
