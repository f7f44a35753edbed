"""The lossless 12-bit encoding of bfloat16 matrices: 0.756 of the bytes, multiplied as they are.

The high byte of a bfloat16 weight (sign and seven bits of exponent) takes few values. A weight keeps its low byte, and
its high byte becomes a four-bit code into a table of the sixteen most frequent ones of its tensor. Blocks of 32 weights
that hold any other high byte (0.2 to 0.7 % of them in bell-shaped weights) are listed, as they were, behind the rest.
Every pattern of bits comes back, NaN payloads included.

A *panel* is a run of consecutive rows of a tensor, encoded together. With B = cols / 32 blocks a row, its bytes are

1. rows x B x 48: per row, units of four blocks (192 bytes), then single blocks (48 bytes) where B % 4 are left;
2. listed x 64: the listed blocks, raw;
3. listed x 4: their numbers, row x B + block, uint32, little-endian, ascending.

The number of listed blocks follows from the length. A unit is 64 low bytes of blocks 0 and 1, 64 of blocks 2 and 3,
and 64 bytes of codes: low byte 16 l + 8 k + i of a pair belongs to element 8 l + i of its block k (l < 4, k < 2,
i < 8), and byte n of the codes holds the code of the first pair's low byte n in its low nibble, the second pair's in
its high one. A single block is its 32 low bytes, then 16 bytes of codes: byte i for element i (low nibble) and element
16 + i. Codes of listed blocks mean nothing.

Functions take the kernels to work with; without them a portable-speed set of one thread is made for the call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.kernels.ops import Kernels

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
"""Columns of a block; a matrix has whole ones."""
PACKED_BLOCK_BYTES = 48
LISTED_BLOCK_BYTES = 68
"""What a listed block adds: its raw weights and its number."""


def high_byte_counts(bits: Bits, ops: Kernels | None = None) -> npt.NDArray[np.int64]:
    """How often each high byte occurs in raw bfloat16 bits [rows, cols] -> int64 [256]; pieces of a tensor add up."""
    return (ops or Kernels(1)).count_high_bytes(bits)


def table_of_counts(counts: npt.NDArray[np.int64]) -> Bytes:
    """The sixteen most frequent high bytes -> uint8 [16], most frequent first, the lower byte first among equals."""
    return np.argsort(-counts, kind="stable")[:16].astype(np.uint8)


def high_byte_table(bits: Bits, ops: Kernels | None = None) -> Bytes:
    """The sixteen most frequent high bytes of raw bfloat16 bits [rows, cols] -> uint8 [16].

    Any table encodes any matrix losslessly; this one lists the fewest elements.
    """
    return table_of_counts(high_byte_counts(bits, ops))


def panel_limit(rows: int, cols: int) -> int:
    """Bytes of the longest panel of that shape: every block listed."""
    return rows * (cols // BLOCK) * (PACKED_BLOCK_BYTES + LISTED_BLOCK_BYTES)


def encode_panel_into(bits: Bits, table: Bytes, panel: Bytes, ops: Kernels | None = None) -> int:
    """Writes the panel of raw bfloat16 bits [rows, cols] into `panel` and returns how many bytes it takes.

    Args:
        bits: contiguous; cols is a multiple of 32.
        table: uint8 [16], see `high_byte_table`.
        panel: uint8 [at least panel_limit(rows, cols)]; what lies behind the panel is left as it was.
        ops: the kernels to work with.

    Raises:
        ValueError: a shape, an element type or a memory layout is not as documented.
    """
    return (ops or Kernels(1)).encode_panel(bits, table, panel)


def encode_panel(bits: Bits, table: Bytes, ops: Kernels | None = None) -> bytes:
    """The panel of raw bfloat16 bits [rows, cols], cols a multiple of 32; see `encode_panel_into`."""
    room = np.empty(panel_limit(*bits.shape), np.uint8)
    return room[: encode_panel_into(bits, table, room, ops)].tobytes()


def decode_panel(data: Bytes, rows: int, cols: int, table: Bytes, ops: Kernels | None = None) -> Bits:
    """The raw bfloat16 bits [rows, cols] of a panel.

    Raises:
        ValueError: the bytes can't be a panel of that shape.
    """
    bits = np.empty((rows, cols), np.uint16)
    (ops or Kernels(1)).decode_panel(data, table, bits)
    return bits
