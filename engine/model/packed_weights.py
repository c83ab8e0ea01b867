"""Weights of 4 or 8 bits as others publish them: how their parts are named, shaped and read.

AWQ, GPTQ and llm-compressor pack numbers into 32-bit words, each group of input features with a scale and a zero. The
three store the same in different directions: w = scale * (number - zero). AWQ and GPTQ have in_features first.

In FP8 a weight is a matrix of floating-point numbers of eight bits, and has scales: one, or one for each row or block.
In MXFP4 it has floating-point numbers of four bits, and a power of two for each 32 input features.
"""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raydix.engine.core.errors import StartupError

if TYPE_CHECKING:  # nobody waits for torch who only reads a description
    from torch import Tensor

    from raydix.kernels.linear import GroupedWeight

Method: TypeAlias = Literal["awq", "gptq", "compressed-tensors"]
WORD_BITS = 32
LONGEST = 128  # input features of a group in memory, at most; longer groups are several with the same scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of a word's numbers, from the lowest bits on
ZEROS = {"awq": "qzeros", "gptq": "qzeros", "compressed-tensors": "weight_zero_point"}
SCALES = {"awq": "scales", "gptq": "scales", "compressed-tensors": "weight_scale"}
NUMBERS = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}
# Parts that say again what follows from the configuration: the order of groups is the usual one, or refused.
UNUSED = ("g_idx", "weight_shape", "weight_g_idx")
FLOAT8 = "F8_E4M3"  # as safetensors name it
FLOAT8_SCALES = ("weight_scale_inv", "weight_scale")  # a weight is multiplied by either
# Scales of inputs, which such a checkpoint would also round to FP8, and which stay wider here.
FLOAT8_UNUSED = ("input_scale", "activation_scale")
FLOAT8_MOST = 2.0**119  # no scale is as large: the kernels multiply it by 256
# Twice the values of MXFP4's sixteen numbers of four bits, so that they are whole.
FLOAT4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4_BITS = 4.25  # of a weight, with its part of a block's exponent
Parts: TypeAlias = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]]
"""Of each part of a weight the shapes and the dtypes that it may have."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the weights of a checkpoint are packed."""

    method: Method
    bits: int
    group_size: int | None
    """Input features with one scale; None: all of them."""
    zero_offset: int = 0
    """Added to the zeros as they are stored (GPTQ's first format leaves one out)."""
    has_zeros: bool = True
    """False: every zero is half of the numbers' range."""

    def weight_of(self, name: str) -> str:
        """The weight whose part a tensor of this name is; its own name, if it is none."""
        return _weight_of(name, (NUMBERS[self.method], SCALES[self.method], ZEROS[self.method], *UNUSED))

    def weights(self, dtypes: Mapping[str, str]) -> set[str]:
        """The weights that are packed, of a checkpoint with tensors of these names and dtypes."""
        return {self.weight_of(name) for name in dtypes} - dtypes.keys()

    def size(self, in_features: int) -> int:
        """Input features of a group in memory.

        Raises:
            StartupError: the weight's input features are not whole groups.
        """
        longest = LONGEST if self.group_size is None else min(self.group_size, LONGEST)
        # The kernels know groups of 32, 64 and 128, and no weight has a group in part.
        if in_features % (self.group_size or longest) or longest not in (32, 64, LONGEST):
            raise StartupError(f"a weight of {in_features} columns in groups of {self.group_size} cannot be read")
        return longest

    def bits_in_memory(self) -> float:
        """Bits of a weight in memory, with its scale and zero."""
        # Of each group 48 bits: a scale and a least value in float16, and a byte for each of their factors.
        return self.bits + 48 / min(self.group_size or LONGEST, LONGEST)

    def parts(self, weight: str, shape: tuple[int, ...], names: Container[str]) -> Parts:
        """The tensors of a weight of this shape; raises StartupError as `size` does."""
        self.size(shape[-1])
        module, (rows, columns), count = weight.removesuffix(".weight"), shape, WORD_BITS // self.bits
        groups = columns // (self.group_size or columns)
        # A word has numbers of neighbouring output features (AWQ), of input features (GPTQ), or of input features with
        # a last word that need not be full (compressed-tensors).
        words, floats = ("I32",), ("F16", "BF16")
        if self.method == "compressed-tensors":
            found = {
                NUMBERS[self.method]: ((rows, -(-columns // count)), words),
                SCALES[self.method]: ((rows, groups), floats),
            }
            if self.has_zeros:
                found[ZEROS[self.method]] = ((-(-rows // count), groups), words)
        else:
            numbers = (columns, rows // count) if self.method == "awq" else (columns // count, rows)
            found = {
                NUMBERS[self.method]: (numbers, words),
                SCALES[self.method]: ((groups, rows), floats),
                ZEROS[self.method]: ((groups, rows // count), words),
            }
        return {f"{module}.{part}": ((wanted,), dtypes) for part, (wanted, dtypes) in found.items()}

    def read(self, read: Callable[[str], "Tensor"], weight: str, shape: tuple[int, ...]) -> "GroupedWeight":
        """A weight from its parts, which `read` gives by name.

        Raises:
            StartupError: it has a scale that is no finite float16, or a zero that is no number of its own.
        """
        import torch

        from raydix.kernels.linear import GroupedWeight, Groups

        module, (rows, columns) = weight.removesuffix(".weight"), shape
        numbers = read(f"{module}.{NUMBERS[self.method]}")
        scales = read(f"{module}.{SCALES[self.method]}")
        zeros = read(f"{module}.{ZEROS[self.method]}") if self.has_zeros else None
        # All three with output features first.
        if self.method == "compressed-tensors":
            numbers = unpacked(numbers, self.bits, 1)[:, :columns]
            zeros = None if zeros is None else unpacked(zeros, self.bits, 0)[:rows]
        else:
            is_awq = self.method == "awq"
            order = AWQ_ORDER if is_awq else None
            numbers, scales = unpacked(numbers, self.bits, 1 if is_awq else 0, order).T, scales.T
            zeros = None if zeros is None else unpacked(zeros, self.bits, 1, order).T
        # A bfloat16 below 2^-17 may be rounded, by less than a rounding of usual weights to bfloat16.
        halves = scales.to(torch.float16)
        if not halves.isfinite().all():
            raise StartupError(f"{weight} has scales that are no finite float16")

        size = self.size(columns)
        times = columns // size // halves.shape[1]
        # A symmetric weight has its zero in the middle of the numbers' range.
        middle = torch.full(halves.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        least_factors = middle if zeros is None else zeros + self.zero_offset
        # The first format stores the zero less one: 255 would be 256, and wrap around to 0.
        if zeros is not None and self.zero_offset and bool((zeros == 255).any()):
            raise StartupError(f"{weight} has a zero of 256, which eight bits do not hold")
        halves = halves.repeat_interleave(times, 1)
        return GroupedWeight(
            groups=Groups(self.bits, size, size, 0, has_least=True),
            numbers=numbers.contiguous(),
            scales=halves,
            factors=torch.ones(halves.shape, dtype=torch.int8),
            least=halves,
            least_factors=least_factors.repeat_interleave(times, 1),
        )


@dataclass(frozen=True, slots=True)
class Float8:
    """How a checkpoint in FP8 has the scales of its weights. The weights' inputs stay wide."""

    block: tuple[int, int] | None
    """Rows and columns with one scale; None: a scale for each row, or for the whole weight."""

    def weight_of(self, name: str) -> str:
        """The weight whose part a tensor of this name is; its own name, if it is none."""
        return _weight_of(name, (*FLOAT8_SCALES, *FLOAT8_UNUSED))

    def weights(self, dtypes: Mapping[str, str]) -> set[str]:
        """The weights that are in FP8, of a checkpoint with tensors of these names and dtypes."""
        return {name for name, dtype in dtypes.items() if dtype == FLOAT8}

    def parts(self, weight: str, shape: tuple[int, ...], names: Container[str]) -> Parts:
        """The tensors of a weight of this shape, in a checkpoint with these names; raises StartupError if it is no
        matrix."""
        if len(shape) != 2:
            raise StartupError(f"{weight} is in FP8 with the shape {list(shape)}; raydix reads only matrices so")
        rows, columns = shape
        if self.block is None:
            scales: tuple[tuple[int, ...], ...] = ((), (1,), (rows, 1), (rows,))
        else:
            scales = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        return {weight: ((shape,), (FLOAT8,)), _scale_of(weight, names): (scales, ("F32", "BF16", "F16"))}

    def bits_in_memory(self) -> float:
        """Bits of a weight in memory, with its scale."""
        return 8 + 32 / math.gcd(LONGEST, LONGEST if self.block is None else self.block[1])

    def read(self, read: Callable[[str], "Tensor"], weight: str, names: Container[str]) -> "GroupedWeight":
        """A weight from its parts, which `read` gives by name.

        Raises:
            StartupError: it has a number that is none, or a scale that is not finite.
        """
        import torch

        from raydix.kernels.linear import GroupedWeight, Groups, Scales

        numbers = read(weight).view(torch.uint8)
        scales = read(_scale_of(weight, names)).float()
        if bool((numbers & 127 == 127).any()):
            raise StartupError(f"{weight} has numbers that are none (NaN)")
        if not bool((scales.abs() < FLOAT8_MOST).all()):
            raise StartupError(f"{weight} has scales that are not finite, or of 2^119 and more")
        rows, columns = numbers.shape
        # Groups in memory are parts of the blocks' columns, so that each has one scale for each row.
        width = columns if self.block is None else self.block[1]
        size = math.gcd(LONGEST, width, columns)
        if self.block is not None:
            # The last block of rows, or of columns, may be one in part.
            scales = scales.repeat_interleave(self.block[0], 0)[:rows]
            scales = scales.repeat_interleave(width // size, 1)[:, : columns // size]
        else:
            scales = scales.reshape(-1, 1).expand(rows, columns // size)
        groups = Groups(8, size, size, scales=Scales.FLOATS, is_float8=True)
        return GroupedWeight(groups=groups, numbers=numbers, scales=scales.contiguous())


def mxfp4(blocks: "Tensor", scales: "Tensor", name: str) -> "GroupedWeight":
    """A weight in MXFP4 (the OCP Microscaling Formats specification), as it is stored. Each of its values is one of
    bfloat16's, too, so that widening rounds nothing. `blocks` [out_features, num_blocks, 16] of bytes, the first number
    of each in its lower half; `scales` [out_features, num_blocks], the exponents; `name` is the weight's, for errors.

    Raises:
        StartupError: an exponent is the one that stands for no number.
    """
    import torch

    from raydix.kernels.linear import GroupedWeight, Groups, Scales

    if bool((scales == 255).any()):
        raise StartupError(f"{name} has an exponent of 255, which is no number in MXFP4")
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).reshape(len(blocks), -1)
    groups = Groups(4, size=32, super=32, scales=Scales.EXPONENTS, values=FLOAT4_DOUBLED)
    return GroupedWeight(groups=groups, numbers=numbers, scales=scales)


def _weight_of(name: str, parts: tuple[str, ...]) -> str:
    module, _, part = name.rpartition(".")
    return f"{module}.weight" if part in parts else name


def _scale_of(weight: str, names: Container[str]) -> str:
    module = weight.removesuffix(".weight")
    return next((of for part in FLOAT8_SCALES if (of := f"{module}.{part}") in names), f"{module}.{FLOAT8_SCALES[0]}")


def unpacked(words: "Tensor", bits: int, dim: int, order: tuple[int, ...] | None = None) -> "Tensor":
    """The numbers of int32 `words` [a, b] along `dim`, as uint8; `order`: places of a word's numbers among them."""
    import torch

    # The lowest bits are the first number.
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    apart = (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)
    if order is not None:
        apart = apart[..., torch.tensor(order).argsort()]
    return apart.flatten(1) if dim == 1 else apart.transpose(1, 2).reshape(-1, words.shape[1])


def packing_of(quantized: Mapping[str, Any]) -> Packing | Float8:
    """How a checkpoint with this `quantization_config` is packed.

    Raises:
        StartupError: its weights are quantised in a way that is not read.
    """
    method = quantized.get("quant_method", "unknown")
    try:
        if method == "awq":
            return _awq(quantized)
        if method == "gptq":
            return _gptq(quantized)
        if method == "compressed-tensors":
            return _compressed(quantized)
        if method == "fp8":
            return _float8(quantized)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(f"quantization_config of {method} has an unusable value: {error}") from error
    raise _refused(method)


def _awq(quantized: Mapping[str, Any]) -> Packing:
    if quantized.get("version", "gemm") != "gemm" or not quantized.get("zero_point", True) or quantized["bits"] != 4:
        raise _refused("awq, of another form than gemm with zeros in 4 bits")
    return Packing("awq", 4, _group_size(quantized["group_size"]))


def _gptq(quantized: Mapping[str, Any]) -> Packing:
    bits = int(quantized["bits"])
    if bits not in (4, 8):
        raise _refused(f"gptq in {bits} bits")
    # Such groups are of scattered columns, so that a row would be read all over.
    if quantized.get("desc_act"):
        raise _refused("gptq with desc_act, whose groups are not in the order of the columns")
    form = quantized.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refused(f"gptq in the format {form}")
    return Packing("gptq", bits, _group_size(quantized["group_size"]), zero_offset=int(form == "gptq"))


def _compressed(quantized: Mapping[str, Any]) -> Packing | Float8:
    form, groups = quantized.get("format"), list(quantized["config_groups"].values())
    if form == "float-quantized":
        return _compressed_float8([group["weights"] for group in groups])
    if form != "pack-quantized" or len(groups) != 1 or groups[0].get("input_activations"):
        raise _refused(f"compressed-tensors, {form}")
    weights = groups[0]["weights"]
    bits = int(weights["num_bits"])
    if weights["type"] != "int" or bits not in (4, 8) or weights.get("actorder") in ("group", "dynamic"):
        raise _refused(f"compressed-tensors, {weights['type']} in {bits} bits, order {weights.get('actorder')}")
    group_size = _group_size(weights.get("group_size") or -1)
    return Packing("compressed-tensors", bits, group_size, has_zeros=not weights.get("symmetric", True))


def _compressed_float8(groups: list[Mapping[str, Any]]) -> Float8:
    blocks = {_block(group.get("block_structure")) for group in groups}
    if {(group["type"], int(group["num_bits"])) for group in groups} != {("float", 8)} or len(blocks) != 1:
        raise _refused("compressed-tensors, float-quantized in other forms than one of 8 bits")
    return Float8(blocks.pop())


def _float8(quantized: Mapping[str, Any]) -> Float8:
    if (fmt := quantized.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"fp8 as {fmt}")
    return Float8(_block(quantized.get("weight_block_size")))


def _block(stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    rows, columns = map(int, stated)
    if min(rows, columns) < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    return rows, columns


def _group_size(stated: object) -> int | None:
    size = int(str(stated))
    if size != -1 and size <= 0:
        raise ValueError(f"a group_size of {size}")
    return None if size == -1 else size


def _refused(how: str) -> StartupError:
    return StartupError(
        f"the model's weights are quantised ({how}); raydix reads bfloat16, float16 and float32 weights, GGUF files, "
        "AWQ, GPTQ and compressed-tensors in 4 or 8 bits, and FP8 (E4M3): use such a checkpoint"
    )
