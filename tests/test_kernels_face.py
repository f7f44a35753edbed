"""The typed face: choosing an instruction set and threads, and refusing what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from k3.errors import MachineError, UsageError
from k3.kernels import Bf16Weight, F32Weight, Kernels, Mxfp4Weight, available_isas
from k3.kernels.select import KNOWN_ISAS
from kernel_helpers import ISAS, kernels, normal


@pytest.fixture
def ops() -> Kernels:
    return kernels(ISAS[-1])


def test_the_best_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3_ISA", raising=False)
    assert available_isas()[0] == "scalar"
    assert Kernels(1).isa == available_isas()[-1]


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_ISA", "scalar")
    monkeypatch.setenv("K3_THREADS", "3")
    ops = Kernels()
    assert (ops.isa, ops.threads) == ("scalar", 3)
    assert Kernels(1, ISAS[-1]).isa == ISAS[-1]


def test_a_missing_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next(isa for isa in KNOWN_ISAS if isa not in ISAS)
    monkeypatch.setenv("K3_ISA", missing)
    with pytest.raises(MachineError, match=f"{missing}.*K3_ISA.*scalar") as caught:
        Kernels(1)
    assert caught.value.exit_code == 2


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_ISA", "sse9")
    with pytest.raises(UsageError, match=r"'sse9'.*K3_ISA"):
        Kernels(1)
    with pytest.raises(UsageError, match="isa"):
        Kernels(1, "AVX2")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1e9", "99999"])
def test_a_wrong_number_of_threads(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("K3_THREADS", text)
    with pytest.raises(UsageError, match="K3_THREADS"):
        Kernels()


def test_threads_default_to_allowed_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3_THREADS", raising=False)
    assert 1 <= Kernels().threads <= (os.cpu_count() or 1)


def test_a_forked_child_computes_alone(ops: Kernels) -> None:
    """The child of a fork has no worker threads; it must neither wait for them nor for their end."""
    assert ops.threads == 1
    program = (
        "import os, numpy as np\n"
        "from k3.kernels import Kernels, F32Weight\n"
        "ops = Kernels(2)\n"
        "x, w = np.ones((2, 512), np.float32), F32Weight(np.ones((600, 512), np.float32))\n"
        "assert ops.matmul(x, w)[0, 0] == 512\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if ops.matmul(x, w)[1, 599] == 512 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=20).returncode == 0


def test_shapes_are_checked(ops: Kernels) -> None:
    rng = np.random.default_rng(0)
    x, w, state = normal(rng, 3, 64), normal(rng, 5, 64), normal(rng, 2, 32, 32)
    packed, scales = np.zeros((5, 32), np.uint8), np.zeros((5, 2), np.uint8)
    narrow, beta, v = x[:, :63], normal(rng, 3, 2), normal(rng, 64)
    cases = {
        "different numbers of columns": lambda: ops.matmul(narrow, F32Weight(w)),
        "x has 1 dimensions": lambda: ops.matmul(x[0], F32Weight(w)),
        "out has shape": lambda: ops.matmul(x, F32Weight(w), np.zeros((3, 4), np.float32)),
        "weight.scales has shape": lambda: ops.matmul(x, Mxfp4Weight(packed, scales[:, :1])),
        "whole groups": lambda: ops.matmul(x, Mxfp4Weight(packed[:, :31].copy(), scales)),
        "x has the wrong element type": lambda: ops.matmul(x.astype(np.float64), F32Weight(w)),
        "weight must be contiguous": lambda: ops.matmul(narrow, F32Weight(w[:, :63])),
        "x must be contiguous along": lambda: ops.matmul(normal(rng, 3, 128)[:, ::2], F32Weight(w)),
        "weight has the wrong element type": lambda: ops.matmul(x, Bf16Weight(w.astype(np.int64))),
        "weight has shape": lambda: ops.rms_norm(x, v[:5], 1e-5),
        "needs at least one source": lambda: ops.residual_mix([], v, v, 1e-5),
        "a source has shape": lambda: ops.residual_mix([x, narrow], v, v, 1e-5),
        "the second argument has shape": lambda: ops.gated(x, x[:2]),
        "tail has shape": lambda: ops.short_conv(x, normal(rng, 4, 64), normal(rng, 4, 64)),
        "whole number of columns": lambda: ops.kda_gate(x, v[:5], v, -5.0),
        "q has shape": lambda: ops.kda_recurrence(narrow, x, x, x, beta, state),
        "beta has shape": lambda: ops.kda_recurrence(x, x, x, x, x, state),
        "state must be": lambda: ops.kda_recurrence(x, x, x, x, beta, state[:, :, :5].copy()),
        "whole number of heads": lambda: ops.kda_output(x, v[:5], x, 1e-5),
        "top_k must lie": lambda: ops.route(x, v, 65, 1.0, True),
        "outputs has 2 dimensions": lambda: ops.accumulate_experts(x, x),
        "weights has shape": lambda: ops.accumulate_experts(x[:, None], beta),
        "cache must be": lambda: ops.mla_attention(x, F32Weight(normal(rng, 28, 20)), x, 0, 2, 8, 6, 1.0),
        "at least start": lambda: ops.mla_attention(x, F32Weight(normal(rng, 28, 40)), x, 1, 2, 8, 6, 1.0),
        "MXFP4": lambda: ops.mla_attention(x, Mxfp4Weight(packed, scales), x, 0, 2, 8, 6, 1.0),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_read_only_arrays(ops: Kernels) -> None:
    x = np.ones((2, 8), np.float32)
    x.flags.writeable = False
    assert ops.add(x, x)[0, 0] == 2
    for call in (
        lambda: ops.add(x, x, out=x),
        lambda: ops.short_conv(x, x, np.broadcast_to(x[:1], (1, 8))),
        lambda: ops.kda_recurrence(x, x, x, x, x[:, :1], np.broadcast_to(np.float32(0), (1, 8, 8))),
    ):
        with pytest.raises(ValueError, match="read-only"):
            call()


def test_no_rows(ops: Kernels) -> None:
    none = np.zeros((0, 64), np.float32)
    assert ops.matmul(none, F32Weight(np.zeros((5, 64), np.float32))).shape == (0, 5)
    assert ops.exp(none).shape == (0, 64)
    tail = np.ones((3, 64), np.float32)
    ops.short_conv(none, np.ones((4, 64), np.float32), tail)
    assert (tail == 1).all()
    assert ops.route(none, np.zeros(64, np.float32), 4, 1.0, True).ids.shape == (0, 4)


def test_measurements(ops: Kernels) -> None:
    assert ops.measure_fma_peak() > 1e8
    buffer = np.ones(1 << 22, np.uint8)
    assert ops.measure_read_bandwidth(buffer) > 1e7
    assert ops.measure_read_bandwidth(buffer, all_threads=True) > 1e7
