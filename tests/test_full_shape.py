"""Kimi K3's full shape, 1.56 TB in sparse files, within 1.6 GB: measured from outside, and inside a control group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3.checkpoint.synthetic.synth import write_synthetic

pytestmark = pytest.mark.slow

LIMIT = 1_600_000_000
EXPERT = 17_547_264
EXPERTS = 1_472 * EXPERT
TRUNK = 108_811_920_384
HEAD = 163_840 * 7_168 * 2
SMALL = (
    69 * 4 * (3 * 12_288 * 4 + 12_288 + 128 + 128)  # convolutions, dt_bias, A_log, o_norm
    + 24 * 2 * (1_536 + 512)  # the inner norms of MLA
    + 92 * (4 * 896 + 2 * 3_584)  # correction bias, latent norm
    + (93 * 6 + 3) * 2 * 7_168  # norms and mixes over the hidden width
)
"""Bytes of the trunk that are no matrices: read once, when the model is built."""
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("full") / "model"
    write_synthetic("full-shape", path)
    return path


@pytest.fixture
def group():
    """A control group (version 1) with the limit, or a skip where none can be made."""
    place = GROUPS / f"k3-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield place
    place.rmdir()


def run(checkpoint, tmp_path, *options, group=None):
    """Decode two tokens in a process of its own; its record, and its peak as its parent sees it."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "k3", "run", checkpoint, "--ids", "5,9,33", "--gen", "2", "--out", out, *options]

    def enter():
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.Popen(command, preexec_fn=enter, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    complaint = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert process.returncode == 0, complaint
    return json.loads(out.read_text()), usage.ru_maxrss * 1024


def walk_bytes(step):
    return step["bytes_read"]["trunk"] + step["bytes_read"]["head"]


def test_two_tokens_within_the_limit(checkpoint, tmp_path):
    record, peak = run(
        checkpoint, tmp_path, "--memory", "1.6GB", "--context", "64", "--trunk-gb", "0", "--cache-gb", "0"
    )
    assert peak <= LIMIT
    assert record["peak_rss_bytes"] <= record["plan"]["total_bytes"] <= LIMIT
    step = record["steps"][1]
    assert step["bytes_read"]["head"] == HEAD
    assert step["bytes_read"]["trunk"] == TRUNK - SMALL
    assert step["bytes_read"]["experts"] == EXPERTS
    assert step["bytes_read"]["embedding"] == 2 * 7_168
    assert (step["expert_requests"], step["expert_resident_hits"]) == (1_472, 0)


def test_inside_a_control_group_of_that_size(checkpoint, tmp_path, group):
    record, peak = run(checkpoint, tmp_path, "--memory", "1.6GB", group=group)
    assert peak <= LIMIT
    assert record["peak_rss_bytes"] <= record["plan"]["total_bytes"] <= LIMIT - (48 << 20)


def test_what_is_pinned_is_not_read(checkpoint, tmp_path):
    bare, _ = run(checkpoint, tmp_path, "--trunk-gb", "0", "--cache-gb", "0", "--context", "64")
    record, peak = run(checkpoint, tmp_path, "--memory", "8GB", "--context", "64")
    assert peak <= 8_000_000_000
    kept = record["plan"]["items"]["trunk and head kept"]
    assert record["plan"]["total_bytes"] > 7_900_000_000, "what is left over is spent"
    assert kept > 5_000_000_000
    saved = walk_bytes(bare["steps"][1]) - walk_bytes(record["steps"][1])
    assert 0 <= kept - saved < kept // 500, "the plan counts whole pages, the reads payload"
    assert record["logits_sha256"] == bare["logits_sha256"]
