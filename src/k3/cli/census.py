"""`k3 census MODEL`: what the checkpoint's bytes are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.terminal import json_text

if TYPE_CHECKING:
    from k3.checkpoint.census import Census, Line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--extra-dir", metavar="DIR", type=Path, action="append", default=[], help="more drives that hold shards"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    from k3.api import model_path
    from k3.checkpoint.census import take_census
    from k3.checkpoint.index import TensorIndex

    index = TensorIndex.open(model_path(arguments.model), extra_dirs=arguments.extra_dir)
    census = take_census(index)
    if arguments.json:
        print(json_text(_json(census, index.shard_sizes)))
    else:
        print("\n".join(_table(census, index.shard_sizes)))
    return 0


def _json(census: Census, shard_sizes: tuple[int, ...]) -> dict[str, object]:
    from k3.checkpoint.census import TRUNK

    total, trunk = census.total(), census.total(TRUNK)

    def counts(line: Line) -> dict[str, object]:
        share = line.nbytes / total.nbytes if total.nbytes else 0.0
        return {"tensors": line.tensors, "bytes": line.nbytes, "share": share, "parameters": line.parameters}

    return {
        "classes": {
            group: {
                **counts(census.total([group])),
                "parts": {line.part: counts(line) for line in census.lines if line.group == group and line.part},
            }
            for group in census.groups()
        },
        "experts": census.experts,
        "expert_bytes": census.expert_bytes,
        "trunk": counts(trunk),
        "total": counts(total),
        "shards": len(shard_sizes),
        "shard_bytes": sum(shard_sizes),
    }


def _table(census: Census, shard_sizes: tuple[int, ...]) -> list[str]:
    from k3.checkpoint.census import TRUNK

    total = census.total()
    rows: list[tuple[str, ...]] = [("class", "tensors", "bytes", "share", "parameters")]
    for group in census.groups():
        rows.append(_row(census.total([group]), group, total))
        rows += [_row(line, f"  {line.part}", total) for line in census.lines if line.group == group and line.part]
    rows += [_row(census.total(TRUNK), "trunk (no experts, head, embedding)", total), _row(total, "total", total)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    rule = "-" * len(lines[0])
    if census.expert_bytes is not None:
        lines.append(f"{census.experts:,} routed experts of {census.expert_bytes:,} bytes each")
    lines.append(f"{len(shard_sizes)} shards of {sum(shard_sizes):,} bytes, headers included")
    return [lines[0], rule, *lines[1 : len(rows) - 2], rule, *lines[len(rows) - 2 :]]


def _row(line: Line, name: str, total: Line) -> tuple[str, ...]:
    share = 100 * line.nbytes / total.nbytes if total.nbytes else 0.0
    return (name, f"{line.tensors:,}", f"{line.nbytes:,}", f"{share:.3f} %", f"{line.parameters:,}")
