"""The CPU path: C++ kernels built once per machine and loaded on first use.

Without a compiler `cpu_ops` returns `None` and every operation runs on its PyTorch reference instead.
"""

from raydix.kernels.cpp.loader import arithmetic, cpu_ops
from raydix.kernels.cpp.memory import prefer_huge_pages

__all__ = ["arithmetic", "cpu_ops", "prefer_huge_pages"]
