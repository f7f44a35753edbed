"""Where every tensor of a checkpoint lies, over any number of shards.

    index = TensorIndex.open(model_dir)                 # reads headers only
    entry = index["language_model.model.norm.weight"]   # TensorEntry
    rows = index.find("model.layers.{}.block_sparse_moe.experts.{}.w{}.weight_packed", 3, experts, 1)
    index.offsets[rows], index.shard_ids[rows]          # arrays; a row of -1 is a name that is not there

The released checkpoint has 497,220 tensors, so they are columns of NumPy arrays (22 bytes a tensor), sorted by
name key (`k3.checkpoint.headers.names`), and not objects.

`model.safetensors.index.json`, where it exists, says which shard holds which tensor, and every shard that is
opened must agree with it. Otherwise `model.safetensors`, or `model-*.safetensors`, or every `*.safetensors` of
the directory is read. Everything that is wrong is a `CheckpointError`.

An index whose metadata holds `"synthetic": true` belongs to a synthetic checkpoint: holes in its shards are meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.kinds import TensorKind
from k3.checkpoint.headers.names import Keys, NameTable, first_numbers, without_second_number
from k3.checkpoint.headers.safetensors import ShardHeader, read_header
from k3.checkpoint.headers.weight_map import INDEX_FILE, Wanted, WeightMap, refuse_different_copies
from k3.errors import CheckpointError, UsageError

SYNTHETIC_MARK: Final = "synthetic"
MAX_SHARDS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor on disk: `nbytes` bytes from byte `offset` of the file `shard_path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_path: Path
    offset: int
    nbytes: int

    @property
    def path(self) -> Path:
        """The file that holds the tensor."""
        return self.shard_path


@dataclass(frozen=True, slots=True)
class Family:
    """Tensors of one kind whose names differ in their second number only; `name` is one of them."""

    name: str
    kind: TensorKind
    count: int


class TensorIndex:
    """All tensors of the opened shards. Build it with `TensorIndex.open`; it doesn't change afterwards.

    Row i of the columns, sorted by key: `shard_ids` uint16 (into `shards` and `shard_sizes`, bytes of the files),
    `offsets` int64 (from the start of the file, in bytes), `kind_ids` uint32 (into `kinds`: dtype, shape, bytes).
    `metadata` is that of the index file.
    """

    def __init__(
        self, names: NameTable, headers: Iterable[ShardHeader], metadata: dict[str, Any] | None = None
    ) -> None:
        """Columns from checked headers with keys of `names`; CheckpointError where two shards hold the same tensor."""
        self.metadata: dict[str, Any] = metadata or {}
        self._names = names
        self._fill(headers)
        self._refuse_repetition()

    @classmethod
    def open(
        cls, model_dir: str | Path, wanted: Wanted | None = None, *, extra_dirs: Sequence[str | Path] = ()
    ) -> TensorIndex:
        """The index of a checkpoint directory.

        `wanted` (names, or a function of a name) limits it to shards that hold a wanted tensor: the others
        need not exist. A function must not tell names apart that differ only behind their first number, which is
        the layer. `extra_dirs` may hold shards that `model_dir` does not; of copies of the same size the
        first counts. UsageError where one of them is no directory.
        """
        places = [Path(model_dir), *map(Path, extra_dirs)]
        for place in places:
            if not place.is_dir():
                raise UsageError(f"{place} is not a directory. Give the directory that holds the checkpoint.")
        names = NameTable()
        path = places[0] / INDEX_FILE
        if not path.exists():
            return cls(names, (read_header(shard, names) for shard in _shards_without_index(places)))
        weight_map = WeightMap.read(path, names)
        shards = weight_map.locate(weight_map.needed(wanted), places)
        return cls(names, _agreeing_headers(weight_map, shards), weight_map.metadata)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return self._row(name) is not None

    def __iter__(self) -> Iterator[str]:
        """All names, those that differ only in numbers together, in the order of their numbers."""
        return map(self.name, range(len(self)))

    def __getitem__(self, name: str) -> TensorEntry:
        """The tensor's place; CheckpointError where there is no such tensor."""
        row = self._row(name)
        if row is None:
            where = f"the {len(self.shards)} shards that were read"
            raise CheckpointError(f"Tensor {name!r} is not in {where}. Complete the download of the checkpoint.")
        return self.entry(row)

    def get(self, name: str) -> TensorEntry | None:
        """The tensor's place, or None."""
        row = self._row(name)
        return None if row is None else self.entry(row)

    def name(self, row: int) -> str:
        """The name of a row."""
        return self._names.name(int(self._keys[row]))

    def entry(self, row: int) -> TensorEntry:
        """The tensor of a row."""
        kind = self.kinds[self.kind_ids[row]]
        shard = self.shards[self.shard_ids[row]]
        return TensorEntry(self.name(row), kind.dtype, kind.shape, shard, int(self.offsets[row]), kind.nbytes)

    def find(self, pattern: str, *numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Rows of many names at once: `pattern` has `{}` where `numbers`, broadcast together, belong.

        At most three numbers of at most four digits, and no other digit run in the pattern. int64, -1 where
        there is no such tensor.
        """
        keys, possible = self._names.keys_of(pattern, numbers)
        if not len(self):
            return np.full(keys.shape, -1, np.int64)
        rows = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(possible & (self._keys[rows] == keys), rows, -1)

    def families(self) -> list[Family]:
        """All tensors, those whose names differ in the second number only (a layer's experts) taken together."""
        same = without_second_number(self._keys)
        order = np.lexsort((self.kind_ids, same))
        changes = (np.diff(same[order]) != 0) | (np.diff(self.kind_ids[order].astype(np.int64)) != 0)
        firsts = np.flatnonzero(np.concatenate(([len(order) > 0], changes)))
        counts = np.diff(firsts, append=len(order)).tolist()
        rows = order[firsts].tolist()
        kinds = [self.kinds[self.kind_ids[row]] for row in rows]
        return [Family(self.name(row), kind, count) for row, kind, count in zip(rows, kinds, counts, strict=True)]

    def rows_under(self, prefix: str) -> npt.NDArray[np.int64]:
        """Rows of all names that begin with `prefix`, which holds no digits."""
        return np.flatnonzero(self._names.under(self._keys, prefix))

    def first_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first number in each row's name; 0 where it has none."""
        return first_numbers(self._keys[rows])

    @property
    def nbytes(self) -> int:
        """Bytes of the columns in memory."""
        return self._keys.nbytes + self.shard_ids.nbytes + self.offsets.nbytes + self.kind_ids.nbytes

    def _row(self, name: str) -> int | None:
        key = self._names.key(name)
        if key is None:
            return None
        row = int(np.searchsorted(self._keys, np.uint64(key)))
        return row if row < len(self) and self._keys[row] == key else None

    def _fill(self, headers: Iterable[ShardHeader]) -> None:
        known: dict[TensorKind, int] = {}
        paths, sizes = [], []
        keys, kinds, offsets = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
        for header in headers:
            paths.append(header.path)
            sizes.append(header.file_size)
            kind_ids = [known.setdefault(kind, len(known)) for kind in header.kinds]
            keys.append(header.keys)
            kinds.append(np.array(kind_ids, np.uint32)[header.kind_ids])
            offsets.append(header.offsets)
        if len(paths) > MAX_SHARDS:
            raise CheckpointError(f"Expected at most {MAX_SHARDS} shards, found {len(paths)}. Use fewer files.")
        count, lengths = sum(map(len, keys)), [len(part) for part in keys[1:]]
        # Made before anything that is temporary, so that the memory behind them can be returned.
        self._keys: Keys = np.empty(count, np.uint64)
        self.offsets: npt.NDArray[np.int64] = np.empty(count, np.int64)
        self.kind_ids: npt.NDArray[np.uint32] = np.empty(count, np.uint32)
        self.shard_ids: npt.NDArray[np.uint16] = np.empty(count, np.uint16)
        all_keys, ids = np.concatenate(keys), np.repeat(np.arange(len(paths), dtype=np.uint16), lengths)
        order = np.argsort(all_keys, kind="stable")
        # `clip` lets `take` write to `out` itself; no place is out of range.
        np.take(all_keys, order, out=self._keys, mode="clip")
        np.take(np.concatenate(offsets), order, out=self.offsets, mode="clip")
        np.take(np.concatenate(kinds), order, out=self.kind_ids, mode="clip")
        np.take(ids, order, out=self.shard_ids, mode="clip")
        self.shards: tuple[Path, ...] = tuple(paths)
        self.shard_sizes: tuple[int, ...] = tuple(sizes)
        self.kinds: tuple[TensorKind, ...] = tuple(known)

    def _refuse_repetition(self) -> None:
        repeated = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if len(repeated):
            row = int(repeated[0])
            first, second = (self.shards[self.shard_ids[r]] for r in (row, row + 1))
            raise CheckpointError(
                f"Tensor {self.name(row)!r} is in two shards, {first} and {second}; tensors found twice: "
                f"{len(repeated)}. Keep only the files of one checkpoint in the directory."
            )


def _shards_without_index(places: Sequence[Path]) -> list[Path]:
    """The files that make the checkpoint where no index names them; of equal names the first place counts."""
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        found: dict[str, list[Path]] = {}
        for place in places:
            for path in sorted(place.glob(pattern)):
                found.setdefault(path.name, []).append(path)
        for copies in found.values():
            refuse_different_copies(copies)
        if found:
            return [found[name][0] for name in sorted(found)]
    raise CheckpointError(
        f"{' or '.join(map(str, places))}: expected {INDEX_FILE} or *.safetensors files, found neither. "
        "Give the directory that holds the checkpoint, or complete its download."
    )


def _agreeing_headers(weight_map: WeightMap, shards: Sequence[Path]) -> Iterator[ShardHeader]:
    """Headers one by one, each with exactly the tensors that the index places in it."""
    allow_holes = weight_map.metadata.get(SYNTHETIC_MARK) is True
    for path in shards:
        header = read_header(path, weight_map.names, allow_holes=allow_holes)
        weight_map.check(path, header.keys)
        yield header
