"""`k3 trace replay FILE`: how often each cache policy finds a recorded run's experts, at every size of the cache."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.files import require_writable, write_bytes
from k3.cli.plot import picture_file, require_matplotlib

if TYPE_CHECKING:
    from k3.storage.trace import Trace

_GB = 10**9
_SIZES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 26, 28, 32, 36, 40, 48, 64)
_EXPERT_BYTES = 17_547_264
_TOP_K = 16
_EXPERTS = 896
_NOTE = (
    "hits: requests that find their expert in memory, the first token's included; GB: read from the drive a token.\n"
    "pins: the experts chosen most in the first half of the tokens, counted in the second half.\n"
    "belady: what no cache can exceed, since it knows the future."
)


@dataclass(frozen=True, slots=True)
class Result:
    """A policy's hits at one size, the share of requests that they are, and the GB that a token still reads."""

    hits: int
    requests: int
    hit_rate: float
    gb_per_token: float


@dataclass(frozen=True, slots=True)
class Row:
    """A cache size in GB, the whole experts that fit in it, and each policy's result."""

    gb: float
    slots: int
    policies: dict[str, Result]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    again = what.add_parser("replay", help="every cache policy on a recorded routing trace")
    again.add_argument("file", metavar="FILE", type=Path, help="an expert_trace.bin of --dump-cache-trace")
    again.add_argument(
        "--sizes", metavar="GB,GB", type=_sizes, default=list(_SIZES), help="sizes of the cache (default: 1 to 64)"
    )
    again.add_argument("--tokens", metavar="N", type=options.positive, help="the file's last step, of N tokens, alone")
    again.add_argument(
        "--expert-bytes",
        metavar="N",
        type=options.positive,
        default=_EXPERT_BYTES,
        help=f"bytes of an expert (default: {_EXPERT_BYTES})",
    )
    again.add_argument(
        "--top-k", metavar="N", type=options.positive, default=_TOP_K, help="experts a token (default: 16)"
    )
    again.add_argument(
        "--experts", metavar="N", type=options.positive, default=_EXPERTS, help="experts of a layer (default: 896)"
    )
    again.add_argument("--plot", metavar="FILE.png", type=picture_file, help="draw the hits (png, svg, pdf)")
    again.add_argument("--json", action="store_true", help="print one JSON object")
    again.add_argument("--debug", action="store_true", help="show where an error comes from")


def execute(arguments: argparse.Namespace) -> int:
    from k3.storage.trace import Trace

    if arguments.plot is not None:
        require_matplotlib("--json")
        require_writable(plot=arguments.plot)
    trace = Trace.read(arguments.file, arguments.top_k, arguments.experts, arguments.tokens)
    rows = [_row(trace, gb, arguments.expert_bytes) for gb in sorted(set(arguments.sizes))]
    if arguments.plot is not None:
        write_bytes(arguments.plot, _plot(rows, arguments.plot.suffix[1:]))
    if arguments.json:
        tokens, layers, top_k = trace.ids.shape
        about = {"tokens": tokens, "layers": layers, "top_k": top_k, "expert_bytes": arguments.expert_bytes}
        print(json.dumps({**about, "sizes": [asdict(row) for row in rows]}))
    else:
        print("\n".join(_table(trace, rows, arguments.expert_bytes)))
    return 0


def _row(trace: Trace, gb: float, expert_bytes: int) -> Row:
    from k3.storage.policies import Belady, LayerLru, Lru, Pins, Policy, RankRecency
    from k3.storage.trace import replay

    slots = round(gb * _GB) // expert_bytes
    half = len(trace.ids) // 2

    def result(trace: Trace, hits: int) -> Result:
        tokens, requests = len(trace.ids), trace.ids.size
        return Result(hits, requests, hits / requests, (requests - hits) * expert_bytes / tokens / _GB)

    policies: dict[str, Policy] = {
        "rank-recency": RankRecency(slots, trace.layers),
        "layer-lru": LayerLru(slots, trace.layers),
        "lru": Lru(slots),
        "belady": Belady(slots, trace.visits()),
    }
    results = {name: result(trace, replay(trace, policy)) for name, policy in policies.items()}
    if half:
        first, second = trace.part(0, half), trace.part(half, len(trace.ids))
        results["pins"] = result(second, replay(second, Pins.most_popular(slots, first.visits())))
    return Row(gb, slots, results)


def _table(trace: Trace, rows: list[Row], expert_bytes: int) -> list[str]:
    tokens, layers, top_k = trace.ids.shape
    token_gb = layers * top_k * expert_bytes / _GB
    names = list(rows[0].policies)
    lines = [
        f"{tokens} tokens, {layers} layers, {top_k} experts a token and layer: {token_gb:.4g} GB a token uncached",
        f"{'cache':>8} {'slots':>7}" + "".join(f"{name:>20}" for name in names),
        f"{'GB':>8} {'':>7}" + f"{'hits':>11}{'GB':>9}" * len(names),
    ]
    for row in rows:
        cells = (f"{100 * found.hit_rate:>9.1f} %{found.gb_per_token:>9.4g}" for found in row.policies.values())
        lines.append(f"{row.gb:>8g} {row.slots:>7}" + "".join(cells))
    return [*lines, _NOTE]


def _plot(rows: list[Row], kind: str) -> bytes:
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in rows[0].policies:
        axes.plot([row.gb for row in rows], [100 * row.policies[name].hit_rate for row in rows], marker=".", label=name)
    axes.set(xlabel="cache, GB", ylabel="requests found in memory, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=150)
    return image.getvalue()


def _sizes(value: str) -> list[float]:
    try:
        sizes = [float(item) for item in value.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(math.isfinite(size) and 0 <= size <= 1e6 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes in GB separated by commas, such as 4,8,16, found {value!r}")
    return sizes
