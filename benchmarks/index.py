"""Seconds and memory that indexing a checkpoint of the released shape takes.

    python benchmarks/index.py [--dir DIR] [--json]

Without DIR, a sparse header set of that shape is made in a temporary directory: 76 MB of headers, 60 MB of index, no
weights. Each figure is of a fresh process: resident memory that stays and its highest, both less what the process
had after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from k3.checkpoint.headers.weight_map import INDEX_FILE
from k3.checkpoint.index import SYNTHETIC_MARK
from k3.checkpoint.synthetic.shards import index_lines, index_pieces, shard_name
from k3.checkpoint.synthetic.synth import shard_plans

SHARDS = 96
MEASURE = """
import json, re, sys, time
from pathlib import Path
from k3.checkpoint.index import TensorIndex

def memory(field):
    return int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

resident, peak = memory("VmRSS"), memory("VmHWM")
start, used = time.perf_counter(), time.process_time()
index = TensorIndex.open(sys.argv[1])
seconds, cpu = time.perf_counter() - start, time.process_time() - used
print(json.dumps({"tensors": len(index), "seconds": seconds, "cpu_seconds": cpu, "index_bytes": index.nbytes,
    "kept_bytes": memory("VmRSS") - resident, "peak_bytes": memory("VmHWM") - peak}))
"""


def write_headers(directory: Path) -> None:
    """The shards' headers in sparse files of the released sizes, and the index."""
    lines, total = [], 0
    for number, plan in enumerate(shard_plans("full-shape"), 1):
        path = directory / shard_name(number, SHARDS)
        path.write_bytes(plan.header)
        os.truncate(path, plan.nbytes)
        lines.append(index_lines(plan, path.name))
        total += sum(spec.nbytes for spec, _ in plan.tensors)
    with (directory / INDEX_FILE).open("w") as file:
        file.writelines(index_pieces(lines, {"total_size": total, SYNTHETIC_MARK: True}))


def measure(directory: Path) -> dict[str, float]:
    """Figures of one fresh process."""
    command = [sys.executable, "-c", MEASURE, str(directory)]
    figures: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return figures


def main() -> None:
    """Measure three times, print every time."""
    parser = argparse.ArgumentParser(description="Measures indexing at the released shape.")
    parser.add_argument("--dir", type=Path, help="a checkpoint; default: sparse headers of the released shape")
    parser.add_argument("--json", action="store_true", help="print one JSON object a measurement")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.dir or Path(temporary)
        if arguments.dir is None:
            write_headers(directory)
        for _ in range(3):
            figures = measure(directory)
            if arguments.json:
                print(json.dumps(figures))
                continue
            print(
                f"{figures['tensors']:,} tensors: {figures['seconds']:.2f} s ({figures['cpu_seconds']:.2f} s of one "
                f"core), {figures['kept_bytes'] / 1e6:.1f} MB stay, {figures['peak_bytes'] / 1e6:.1f} MB at the peak"
            )


if __name__ == "__main__":
    main()
