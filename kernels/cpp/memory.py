"""Huge pages for large tensors: fewer first touches and address translations."""

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14


def prefer_huge_pages(tensor: "Tensor") -> None:
    """Asks Linux to back `tensor` with huge pages; to be called before the first write to the tensor.

    A hint: without huge pages nothing happens.
    """
    if sys.platform != "linux" or tensor.is_cuda:
        return
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)
