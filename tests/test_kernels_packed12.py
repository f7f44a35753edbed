"""The 12-bit encoding: its bytes as documented, every pattern of bits back, and the bfloat16 product's bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.kernels import (
    Bf16Weight,
    Kernels,
    Packed12Weight,
    decode_panel,
    encode_panel,
    encode_panel_into,
    high_byte_counts,
    high_byte_table,
    panel_limit,
    table_of_counts,
)
from kernel_helpers import ISAS, assert_same_bits, define_panel, kernels, normal, pack12, to_bf16

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)
EACH = pytest.mark.parametrize(("isa", "threads"), [(isa, threads) for isa in ISAS for threads in (1, 2)])
ANY_TABLE = st.binary(min_size=16, max_size=16).map(lambda text: np.frombuffer(text, np.uint8))


def weights(rng: np.random.Generator, rows: int, cols: int, density: float) -> np.ndarray:
    """Bits of bell-shaped weights with extra exceptions: any patterns, in about this part of the blocks."""
    bits = to_bf16(normal(rng, rows, cols, scale=0.02))
    blocks = bits.reshape(-1, 32)
    chosen = rng.random(len(blocks)) < density
    blocks[chosen, rng.integers(0, 32, chosen.sum())] = rng.integers(0, 1 << 16, chosen.sum())
    return bits


def listed_blocks(weight: Packed12Weight) -> int:
    blocks = weight.rows * weight.cols // 32
    return (weight.nbytes - 48 * blocks) // 68


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (3, 64), (2, 96), (2, 128), (3, 160), (5, 544), (2, 1024)])
def test_the_documented_layout(isa: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * cols)
    bits = weights(rng, rows, cols, 0.2)
    table = high_byte_table(bits)
    panel = define_panel(bits, table)
    assert encode_panel(bits, table, kernels(isa)) == panel
    assert (decode_panel(np.frombuffer(panel, np.uint8), rows, cols, table, kernels(isa)) == bits).all()


@EACH
@pytest.mark.parametrize("cols", [32, 128, 256, 2048])
def test_every_pattern_comes_back(isa: str, threads: int, cols: int) -> None:
    """All 65,536, in order and mixed: NaN payloads, infinities, both zeros, subnormals."""
    ops = kernels(isa, threads)
    rng = np.random.default_rng(cols)
    for words in (EVERY_PATTERN, rng.permutation(EVERY_PATTERN)):
        bits = words.reshape(-1, cols)
        for table in (high_byte_table(bits, ops), rng.integers(0, 256, 16, dtype=np.uint8)):
            panel = np.frombuffer(encode_panel(bits, table, ops), np.uint8)
            assert (decode_panel(panel, *bits.shape, table, ops) == bits).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("first", range(0, 256, 16))
def test_every_pattern_comes_back_packed(isa: str, first: int) -> None:
    """Each pattern through the codes rather than the list."""
    bits = EVERY_PATTERN[first << 8 : (first + 16) << 8].reshape(8, 512)
    table = high_byte_table(bits)
    panel = np.frombuffer(encode_panel(bits, table), np.uint8)
    assert panel.nbytes == bits.size * 3 // 2
    assert (decode_panel(panel, 8, 512, table, kernels(isa)) == bits).all()


@settings(max_examples=150, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    threads=st.sampled_from([1, 2]),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 19),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    pool=st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=40),
    table=st.none() | ANY_TABLE,
    seed=st.integers(0, 1 << 32),
)
def test_any_mixture_comes_back_and_multiplies_alike(
    isa: str,
    threads: int,
    rows: int,
    blocks: int,
    density: float,
    pool: list[int],
    table: np.ndarray | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    bits = weights(rng, rows, 32 * blocks, 0)
    mixed = rng.random(bits.shape) < density
    bits[mixed] = rng.choice(np.array(pool, np.uint16), mixed.sum())
    weight = pack12(bits, table)
    ops = kernels(isa, threads)
    assert (decode_panel(weight.data, *bits.shape, weight.table, ops) == bits).all()
    for count in (1, 3, 20):
        x = normal(rng, count, 32 * blocks)
        assert_same_bits(ops.matmul(x, weight), ops.matmul(x, Bf16Weight(bits)))


@EACH
@pytest.mark.parametrize("listed", ["none", "some", "all"])
@pytest.mark.parametrize(("rows", "cols"), [(37, 32), (70, 64), (300, 96), (51, 512), (13, 7168), (5, 33792)])
def test_the_product_has_the_bits_of_bfloat16(isa: str, threads: int, listed: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows)
    blocks = rows * cols // 32
    bits = weights(rng, rows, cols, 0.05 if listed == "some" else 0)
    if listed == "none":
        bits = (bits & 0x83FF) | 0x3C00
    weight = pack12(bits, np.arange(0x60, 0x70, dtype=np.uint8) if listed == "all" else None)
    assert listed != "none" or listed_blocks(weight) == 0
    assert listed != "some" or 0 < listed_blocks(weight) < blocks
    assert listed != "all" or listed_blocks(weight) == blocks
    x = normal(rng, 33, cols)
    expected = kernels(ISAS[-1]).matmul(x, Bf16Weight(bits))
    ops = kernels(isa, threads)
    for count in range(1, 34) if cols < 1000 else (1, 2, 5, 8, 16, 17, 33):
        assert_same_bits(ops.matmul(x[:count], weight), expected[:count])


@EACH
def test_any_number_of_weight_rows(isa: str, threads: int) -> None:
    rng = np.random.default_rng(0)
    bits = weights(rng, 70, 416, 0.05)
    x = normal(rng, 25, 416)
    expected = kernels(ISAS[-1]).matmul(x, Bf16Weight(bits))
    for rows in range(1, 71):
        weight = pack12(bits[:rows])
        for count in (1, 4, 25):
            assert_same_bits(kernels(isa, threads).matmul(x[:count], weight), expected[:count, :rows])


@pytest.mark.parametrize("isa", ISAS)
def test_any_alignment(isa: str) -> None:
    rng = np.random.default_rng(1)
    bits = weights(rng, 9, 672, 0.05)
    weight = pack12(bits)
    x = normal(rng, 3, 672)
    for shift in (1, 7, 33):
        room = np.zeros(weight.nbytes + shift, np.uint8)
        room[shift:] = weight.data
        moved = Packed12Weight(room[shift:], 9, 672, weight.table)
        assert_same_bits(kernels(isa).matmul(x, moved), kernels(isa).matmul(x, Bf16Weight(bits)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("density", [0, 0.02, 1])
def test_attention_multiplies_from_the_packed_form(isa: str, density: float) -> None:
    rng = np.random.default_rng(2)
    heads, nope, rope, v_dim, latent = 5, 24, 8, 20, 160
    bits = weights(rng, heads * (nope + v_dim), latent, density)
    cache = normal(rng, 60, latent + rope)
    for rows in (1, 4, 19):
        q = normal(rng, rows, heads * (nope + rope))
        got, expected = (
            kernels(isa, 2).mla_attention(q, w, cache, 40, heads, nope, v_dim, 0.2)
            for w in (pack12(bits), Bf16Weight(bits))
        )
        assert_same_bits(got, expected)


@pytest.mark.parametrize("cols", [512, 3584, 7168, 33792])
def test_bell_shaped_weights_take_at_most_0_76(cols: int) -> None:
    """For any standard deviation: sixteen high bytes span 2^16, wherever its powers of two happen to lie."""
    rng = np.random.default_rng(cols)
    shape = normal(rng, (1 << 20) // cols, cols)
    for deviation in 2.0 ** np.linspace(-7, -5, 9):
        bits = to_bf16(shape * np.float32(deviation))
        assert pack12(bits).nbytes <= 0.76 * bits.nbytes


def test_the_table_holds_the_most_frequent_high_bytes() -> None:
    counts = np.zeros(256, np.int64)
    counts[40:70] = np.arange(30)
    counts[[3, 200]] = 29
    assert table_of_counts(counts).tolist() == [3, 69, 200, *range(68, 55, -1)]
    bits = weights(np.random.default_rng(0), 300, 8192, 0.1)
    expected = np.bincount((bits >> 8).ravel(), minlength=256)
    for threads in (1, 2):
        assert (high_byte_counts(bits, kernels(ISAS[-1], threads)) == expected).all()
    assert (high_byte_table(bits) == table_of_counts(expected)).all()
    assert len(set(high_byte_table(np.zeros((1, 32), np.uint16)).tolist())) == 16


def test_an_empty_matrix() -> None:
    table = np.arange(16, dtype=np.uint8)
    assert encode_panel(np.zeros((0, 64), np.uint16), table) == b""
    weight = Packed12Weight(np.zeros(0, np.uint8), 0, 64, table)
    assert decode_panel(weight.data, 0, 64, table).shape == (0, 64)
    assert kernels(ISAS[-1]).matmul(np.zeros((2, 64), np.float32), weight).shape == (2, 0)


def test_writing_into_a_buffer() -> None:
    bits = weights(np.random.default_rng(0), 4, 160, 0.3)
    table = high_byte_table(bits)
    room = np.full(panel_limit(4, 160) + 5, 77, np.uint8)
    size = encode_panel_into(bits, table, room)
    assert room[:size].tobytes() == encode_panel(bits, table)
    assert (room[size:] == 77).all()


def _malformed() -> dict[str, tuple[np.ndarray, int, int, str]]:
    """Bytes and a shape that don't belong together, and what the message says."""
    bits = weights(np.random.default_rng(0), 6, 256, 0.9)
    weight = pack12(bits)
    good, numbers = weight.data, np.frombuffer(weight.data[-4 * listed_blocks(weight) :].tobytes(), "<u4")

    def listing(change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        changed = change(numbers.astype(np.int64)).astype("<u4").view(np.uint8)
        return np.concatenate([good[: -len(changed)], changed])

    def swapped(n: np.ndarray) -> np.ndarray:
        return np.concatenate([n[:3], n[4:5], n[3:4], n[5:]])

    return {
        "too short": (good[:1000], 6, 256, "too few"),
        "no bytes": (good[:0], 6, 256, "too few"),
        "a byte lost": (good[:-1], 6, 256, "no list of blocks"),
        "a byte more": (np.append(good, np.uint8(0)), 6, 256, "no list of blocks"),
        "more listed than there are": (
            np.concatenate([good, np.zeros(68 * 48, np.uint8)]),
            6,
            256,
            "no list of blocks",
        ),
        "one number twice": (listing(lambda n: np.where(np.arange(len(n)) == 4, n[3], n)), 6, 256, "do not ascend"),
        "out of order": (listing(swapped), 6, 256, "do not ascend"),
        "beyond the end": (listing(lambda n: np.where(n == n[-1], 48, n)), 6, 256, "it lists block 48 and has 48"),
        "far beyond": (listing(lambda n: np.where(n == n[-1], 2**32 - 1, n)), 6, 256, "it lists block 4294967295"),
        "other rows": (good, 2**62, 256, "too few"),
        "other columns": (good, 6, 2**62, "too few"),
        "no blocks": (good, 6, 255, "whole blocks of 32"),
        "negative": (good, -6, 256, "shape"),
        "no columns": (good, 6, 0, "no list of blocks"),
    }


@pytest.mark.parametrize("name", _malformed())
@pytest.mark.parametrize("isa", ISAS)
def test_malformed_panels_are_refused(isa: str, name: str) -> None:
    data, rows, cols, message = _malformed()[name]
    table = np.arange(16, dtype=np.uint8)
    ops = kernels(isa)
    weight = Packed12Weight(data, rows, cols, table)
    x = np.zeros((1, min(max(cols, 0), 256)), np.float32)
    with pytest.raises(ValueError, match=message):
        ops.matmul(x, weight, np.zeros((1, 6), np.float32))
    with pytest.raises(ValueError, match=message):
        ops.mla_attention(np.zeros((1, 4), np.float32), weight, x, 0, 1, 3, 3, 1.0)
    if 0 <= rows < 100 and cols < 1000:
        with pytest.raises(ValueError, match=message):
            decode_panel(data, rows, cols, table, ops)


def test_shapes_and_types_are_checked() -> None:
    ops: Kernels = kernels(ISAS[-1])
    bits = np.zeros((2, 64), np.uint16)
    table = np.arange(16, dtype=np.uint8)
    room = np.zeros(panel_limit(2, 64), np.uint8)
    sealed = room.copy()
    sealed.flags.writeable = False
    panel = np.frombuffer(encode_panel(bits, table), np.uint8)
    x = np.zeros((1, 64), np.float32)
    cases = {
        "whole blocks of 32": lambda: encode_panel_into(bits[:, :63].copy(), table, room),
        "bits must be contiguous": lambda: encode_panel_into(np.zeros((2, 96), np.uint16)[:, :64], table, room),
        "bits has the wrong element type": lambda: encode_panel_into(bits.astype(np.int16), table, room),
        "table has shape": lambda: encode_panel_into(bits, table[:15], room),
        "table has the wrong": lambda: encode_panel_into(bits, table.astype(np.int64), room),
        "no room": lambda: encode_panel_into(bits, table, room[:-1]),
        "read-only": lambda: encode_panel_into(bits, table, sealed),
        "bits has shape": lambda: high_byte_counts(bits[0]),
        "weight.data has shape": lambda: ops.matmul(x, Packed12Weight(panel.reshape(2, -1), 2, 64, table)),
        "weight.data has the wrong": lambda: ops.matmul(x, Packed12Weight(panel.view(np.int8), 2, 64, table)),
        "weight.data must be contiguous": lambda: ops.matmul(x, Packed12Weight(room[::2], 2, 64, table)),
        "different numbers of columns": lambda: ops.matmul(x[:, :32], Packed12Weight(panel, 2, 64, table)),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
