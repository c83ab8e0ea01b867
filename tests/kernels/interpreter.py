"""Runs the tests of Triton kernels under Triton's interpreter where there is no GPU.

The interpreter is chosen by an environment variable that Triton reads when it is first imported, which other tests may
have made happen long before. So each module of such tests runs in a pytest of its own and appears here as one test.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


INTERPRETED_S = 3000
"""After which all tests of a module are given up, which are one test here. No test is about these seconds."""


def collect_triton_module(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A collector for `path` if its tests need the interpreter and this process has another Triton; else `None`."""
    if not path.name.startswith("test_triton_") or INTERPRETING or torch.cuda.is_available():
        return None
    module: pytest.Collector = InterpretedModule.from_parent(parent, path=path)
    return module


class InterpretedModule(pytest.File):
    """A module of tests seen from outside."""

    def collect(self) -> Iterator[pytest.Item]:
        tests = InterpretedTests.from_parent(self, name="interpreted")
        tests.add_marker(pytest.mark.timeout(INTERPRETED_S))
        yield tests


class InterpretedTests(pytest.Item):
    """All tests of one module that need no GPU, in another process."""

    def runtest(self) -> None:
        # A GPU does not warn of an overflow to infinity either.
        quiet = ["-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-m", "not gpu", *quiet, str(self.path)]
        env = os.environ | {"TRITON_INTERPRET": "1"}
        result = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            pytest.fail(result.stdout, pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name} under the interpreter"


def teach_arithmetic() -> None:
    """Has the interpreter multiply matrices and convert to bfloat16 as a GPU does.

    It keeps bfloat16 as integers, whose bits `tl.dot` would multiply and a conversion cut off instead of rounding. And
    its products of matrices sum in another order for another row, which no tensor core does; in float64 none shows.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand.data.astype(np.float64)
        return (operand.data.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, addend: Any, *options: Any) -> Any:
        product = np.matmul(widened(a), widened(b)).astype(addend.data.dtype)
        return TensorHandle(product + addend.data, addend.dtype.scalar)

    @functools.wraps(cast)
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        to_even = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, to_even).astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
