"""The memory plan: within its limit, or refused; what is left over is spent; control groups count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import k3
from k3.engine import machine
from k3.engine import plan as plan_module
from k3.engine.loading import LoadOptions, bind_checkpoint
from k3.engine.machine import GroupMemory, group_memory, memory_limit
from k3.engine.plan import MemoryRequest, plan_memory
from k3.engine.sizes import PRESETS, parse_size
from k3.errors import MachineError, UsageError

BIG = 1 << 40


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """What the process holds doesn't move while a test compares plans."""
    monkeypatch.setattr(plan_module, "resident_bytes", lambda: 60_000_000)


@pytest.fixture(scope="module")
def needs():
    return bind_checkpoint(Path(k3.__file__).parent / "data" / "demo", LoadOptions()).needs


def floor(needs, **request):
    """The smallest limit that a plan fits in."""
    request = {"context": 64, "chunk": 1, "trunk_bytes": 0, "cache_bytes": 0} | request
    return plan_memory(needs, MemoryRequest(**request), BIG).total_bytes


def test_everything_is_kept_where_there_is_room(needs):
    plan = plan_memory(needs, MemoryRequest(), BIG)
    assert plan.expert_slots == needs.experts == 7 * 16
    assert sum(block.nbytes for block in plan.pinned) == needs.matrix_bytes
    assert plan.ring_bytes == 0
    assert plan.context == needs.config.max_position_embeddings
    assert plan.total_bytes <= BIG


@pytest.mark.parametrize("extra", [0, 1, 5_000, 100_000, 500_000, 1_000_000, 2_000_000, 3_000_000, 10_000_000])
def test_a_plan_never_exceeds_its_limit(needs, extra):
    limit = floor(needs) + (4 << 20) + extra
    plan = plan_memory(needs, MemoryRequest(context=64), limit)
    assert plan.total_bytes <= limit
    assert plan.limit == limit
    kept = sum(block.nbytes for block in plan.pinned)
    assert kept <= plan.trunk_budget
    if kept < needs.matrix_bytes:
        assert plan.expert_slots <= (limit - plan.total_bytes + needs.expert_buffer) // needs.expert_buffer + 40


def test_pins_come_before_experts(needs):
    previous = (-1, -1)
    base = floor(needs, chunk=64)
    for extra in range(0, 4_000_000, 250_000):
        plan = plan_memory(needs, MemoryRequest(context=64), base + extra)
        kept = (sum(block.nbytes for block in plan.pinned), plan.expert_slots)
        assert kept[0] >= previous[0]
        if plan.expert_slots > 20:
            assert kept[0] > 0.85 * needs.matrix_bytes
        previous = kept
    assert previous == (needs.matrix_bytes, needs.experts)


def test_the_split_by_hand(needs):
    plan = plan_memory(needs, MemoryRequest(trunk_bytes=300_000, cache_bytes=10 * needs.expert_bytes + 7), BIG)
    assert 0.8 * 300_000 < sum(block.nbytes for block in plan.pinned) <= 300_000
    assert plan.expert_slots == 10
    assert plan_memory(needs, MemoryRequest(trunk_bytes=0, cache_bytes=0), BIG).pinned == frozenset()
    assert plan_memory(needs, MemoryRequest(cache_experts=5), BIG).expert_slots == 5
    assert plan_memory(needs, MemoryRequest(cache_experts=10**9), BIG).expert_slots == needs.experts


def test_too_little_is_refused_with_items_and_shortfall(needs):
    limit = 50_000_000
    with pytest.raises(
        MachineError, match=r"the run needs 0\.\d+ GB .*interpreter.*0\.050 GB are to be had: 0\.\d+ GB are miss"
    ) as raised:
        plan_memory(needs, MemoryRequest(), limit)
    assert raised.value.exit_code == 2


def test_the_chunk_shrinks_before_a_run_is_refused(needs):
    request = MemoryRequest(context=64, trunk_bytes=0, cache_bytes=0)
    assert plan_memory(needs, request, floor(needs, chunk=64)).chunk == 64
    chunks = {
        plan_memory(needs, request, limit).chunk for limit in range(floor(needs), floor(needs, chunk=64) + 1, 100_000)
    }
    assert chunks >= {1, 8, 16, 32}
    assert plan_memory(needs, replace(request, chunk=3), BIG).chunk == 3


@pytest.mark.parametrize(("context", "chunk", "expected"), [(5, None, 5), (5, 100, 5), (50, None, 50), (2, 1, 1)])
def test_no_chunk_is_planned_that_the_context_cannot_hold(needs, context, chunk, expected):
    assert plan_memory(needs, MemoryRequest(context=context, chunk=chunk), BIG).chunk == expected


def test_context_takes_half_of_what_is_left(needs):
    assert needs.bytes_per_position == 2 * 4 * needs.config.mla_cache_width
    wide = replace(needs, config=replace(needs.config, max_position_embeddings=1 << 30))
    base = floor(wide, context=64, chunk=64) - 62 * needs.bytes_per_position
    plan = plan_memory(wide, MemoryRequest(), base + 1_000_000)
    assert abs(plan.context * needs.bytes_per_position - 500_000) < 2 * needs.bytes_per_position
    assert plan_memory(wide, MemoryRequest(context=77), BIG).context == 77


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("12GiB", 12 << 30),
        ("1.5 tb", 15 * 10**11),
        ("300 MB", 3 * 10**8),
        ("4096", 4096),
        ("auto", None),
        (" AUTO ", None),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "8 G B", "nan", "1e9", "0", "0GB", "8GBs", "1,5GB"])
def test_sizes_that_mean_nothing(text):
    with pytest.raises(UsageError, match="expected a size such as 8GB"):
        parse_size(text)


def test_presets_are_pairs():
    assert {name: (p.trunk_gb, p.cache_gb) for name, p in PRESETS.items()} == {
        "laptop": (3, 1),
        "desktop": (16, 10),
        "workstation": (60, 30),
        "server": (110, 13),
        "max": (110, 109),
    }


def available(monkeypatch, nbytes, own=50_000_000):
    memory = psutil.virtual_memory()._replace(available=nbytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "resident_bytes", lambda: own)


def test_what_was_asked_for_is_the_limit_where_the_machine_has_it(monkeypatch):
    available(monkeypatch, 10**10)
    assert memory_limit(10**9) == 10**9
    assert memory_limit(10**11) == 10**10 + 50_000_000
    assert 0.85 * 10**10 <= memory_limit() <= 0.95 * 10**10 + 50_000_000


@pytest.mark.parametrize(("limit", "margin"), [(10**9, 48 << 20), (10**10, 3 * 10**8)])
def test_a_control_group_keeps_a_margin(monkeypatch, limit, margin):
    available(monkeypatch, 10**12)
    group = GroupMemory(limit, used=60_000_000)
    assert memory_limit(limit, group) == limit - margin - 10_000_000
    assert memory_limit(None, group) == limit - margin - 10_000_000
    assert memory_limit(10**8, group) == 10**8


def write(root, path, **files):
    place = root / path
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


def test_groups_of_version_two(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("0::/outer/inner\n")
    write(tmp_path, "outer/inner", memory__max="max\n", memory__current="5000", memory__stat="inactive_file 1000\n")
    write(
        tmp_path, "outer", memory__max="900000\n", memory__current="7000", memory__stat="inactive_file 2000\nanon 3\n"
    )
    assert group_memory(process, tmp_path) == GroupMemory(900000, 5000)
    write(tmp_path, "outer/inner", memory__max="800000")
    assert group_memory(process, tmp_path) == GroupMemory(800000, 4000)


def test_groups_of_version_one(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    write(
        tmp_path,
        "memory/job",
        memory__limit_in_bytes="700000",
        memory__usage_in_bytes="6000",
        memory__stat="total_inactive_file 500\n",
    )
    write(tmp_path, "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    assert group_memory(process, tmp_path) == GroupMemory(700000, 5500)


def test_a_container_sees_its_group_as_the_root(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("0::/not/visible/here\n")
    write(tmp_path, "", memory__max="600000", memory__current="1", memory__stat="")
    assert group_memory(process, tmp_path) == GroupMemory(600000, 1)


def test_no_group(tmp_path):
    assert group_memory(tmp_path / "missing", tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert group_memory(tmp_path / "cgroup", tmp_path) is None
