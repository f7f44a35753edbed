"""Whether a checkpoint is whole: its config, index, headers and sizes, and with `check_bytes` every byte.

found = check_structure(Path("K3"))                 # headers only: seconds
result = check_bytes(found, threads=4)              # reads everything
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k3.checkpoint.checksums import CHECKSUM_FILE, SHA256, Checksum, ChecksumRecord, KnownFile, compute
from k3.checkpoint.config import ModelConfig, stop_ids
from k3.checkpoint.fetch.record import DOWNLOAD_FILE, SMALL_FILES, DownloadRecord
from k3.checkpoint.index import SYNTHETIC_MARK, TensorIndex
from k3.checkpoint.layout import Layout, bind
from k3.checkpoint.released import RELEASED_FILES
from k3.errors import CheckpointError, UsageError
from k3.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer, load_tokenizer

_SECONDS_BETWEEN_REPORTS: Final = 0.2

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A checkpoint whose config, index and headers were found right. `stops` are the ids that end a generation."""

    directory: Path
    config: ModelConfig
    index: TensorIndex
    layout: Layout
    tokenizer: Tokenizer | None
    stops: frozenset[int]
    download: DownloadRecord | None

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(self.index.shard_sizes)

    @property
    def files(self) -> dict[str, Path]:
        """Every file of the checkpoint, by name."""
        small = {name: self.directory / name for name in SMALL_FILES}
        return {n: path for n, path in small.items() if path.exists()} | {path.name: path for path in self.index.shards}

    def lines(self) -> Iterator[str]:
        """What was checked, in a sentence each."""
        config, layout = self.config, self.layout
        yield (
            f"config     {config.num_hidden_layers} layers: {len(config.kda_layers)} KDA, {len(config.mla_layers)} "
            f"MLA; {len(config.moe_layers)} with {config.num_experts} experts; vocabulary of {config.vocab_size:,}"
        )
        holes = "holes are meant (synthetic), no" if self.index.metadata.get(SYNTHETIC_MARK) is True else "no hole,"
        yield f"shards     {len(self.index.shards)} headers, {self.nbytes:,} bytes; {holes} gap or overlap"
        yield f"index      {len(self.index):,} tensors, each where it should be"
        yield (
            f"layout     {layout.tensor_count:,} tensors bound, shapes and dtypes as the config asks: "
            f"{layout.trunk_bytes:,} bytes of trunk, {layout.expert_bytes:,} of experts"
        )
        yield f"sizes      {self._sizes()}"
        if self.tokenizer is None:
            yield "tokenizer  not there: the model works on token ids only"
        else:
            yield f"tokenizer  {self.tokenizer.n_vocab:,} ids"
        yield f"stop ids   {', '.join(map(str, sorted(self.stops))) or 'none'}"

    def _sizes(self) -> str:
        sizes = {path.name: size for path, size in zip(self.index.shards, self.index.shard_sizes, strict=True)}
        if self.download is not None:
            return f"all {len(self.download.files)} files as {DOWNLOAD_FILE} lists them"
        if sizes == RELEASED_FILES:
            return f"all {len(sizes)} shards as released"
        return "each shard ends where its header says; there is no list to compare with"


def check_structure(directory: Path, extra_dirs: tuple[Path, ...] = ()) -> Structure:
    """Check all that is known without reading weights: config, index, every header, sizes, holes, the tokenizer.

    Raises:
        UsageError: a directory is none.
        ConfigError, CheckpointError, TokenizerError: what is wrong.
    """
    for place in (directory, *extra_dirs):
        if not place.is_dir():
            raise UsageError(f"{place}: expected a directory, found {'a file' if place.exists() else 'nothing'}.")
    config = ModelConfig.read(directory / "config.json")
    download = DownloadRecord.read(directory)
    index = TensorIndex.open(directory, extra_dirs=extra_dirs)
    layout = bind(index, config)
    has_tokenizer = any((directory / name).exists() for name in (VOCABULARY_FILE, CONFIG_FILE))
    tokenizer = load_tokenizer(directory) if has_tokenizer else None
    if tokenizer is not None and tokenizer.n_vocab != config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.n_vocab} ids, and the config's vocab_size is "
            f"{config.vocab_size}. Use the tokenizer's files that came with the checkpoint."
        )
    stops = stop_ids(directory, config) | (tokenizer.stop_ids if tokenizer else frozenset())
    structure = Structure(directory, config, index, layout, tokenizer, stops, download)
    if download is not None:
        _compare_sizes(structure, download)
    return structure


def _compare_sizes(structure: Structure, download: DownloadRecord) -> None:
    files = structure.files
    problems = []
    for name, known in download.files.items():
        if name not in files:
            problems.append(f"{name} is not there")
        elif (size := files[name].stat().st_size) != known.bytes:
            problems.append(f"{files[name]} has {size} bytes, expected {known.bytes}")
    if problems:
        raise CheckpointError(
            f"{structure.directory / DOWNLOAD_FILE} lists files that are missing or have another size: "
            f"{'; '.join(problems)}. Remove those that are wrong, and complete the checkpoint with `k3 download`."
        )


@dataclass(frozen=True, slots=True)
class BytesChecked:
    """How many files were compared with a record of what they should be, and how many were recorded now."""

    compared: dict[str, int]
    recorded: int
    nbytes: int

    def lines(self) -> Iterator[str]:
        """What was compared, in a sentence each."""
        for source, count in self.compared.items():
            yield f"checksums  {count} files are what {source} says, byte for byte"
        if self.recorded:
            nothing = "" if self.compared else "nothing was compared, for there was no record: "
            yield (
                f"checksums  {nothing}{self.recorded} files were read and their checksums recorded in {CHECKSUM_FILE}; "
                "a later run compares with them"
            )


def check_bytes(structure: Structure, threads: int, progress: Progress = lambda *_: None) -> BytesChecked:
    """Read every file and compare its checksum with `k3-download.json`'s, or with what an earlier run recorded.

    What is in neither is recorded, unless something is wrong.

    Raises:
        CheckpointError: a file differs or can't be read; all of them are named.
        K3Error: the record could not be written.
    """
    record = ChecksumRecord.read(structure.directory)
    sources: dict[str, Mapping[str, KnownFile]] = {CHECKSUM_FILE: record.files}
    if structure.download is not None:
        sources = {DOWNLOAD_FILE: structure.download.files, **sources}
    known = {
        name: (source, checksum)
        for source, files in reversed(sources.items())
        for name, file in files.items()
        if (checksum := file.checksum) is not None
    }
    files = structure.files
    kinds = {name: known[name][1].kind if name in known else SHA256 for name in files}
    found = _compute_all(files, kinds, threads, progress)
    problems = [
        f"{files[name]}: expected {known[name][1]} ({known[name][0]}), found {checksum}"
        for name, checksum in found.items()
        if name in known and checksum != known[name][1]
    ]
    if problems:
        raise CheckpointError(
            f"{'One file is' if len(problems) == 1 else f'{len(problems)} files are'} not what the record says: "
            f"{'; '.join(problems)}. The content was damaged or exchanged: remove each of these files and fetch it "
            "again (`k3 download`)."
        )
    new = {
        name: KnownFile(bytes=files[name].stat().st_size, sha256=checksum.value)
        for name, checksum in found.items()
        if name not in known
    }
    if new:
        record.with_files(new).write(structure.directory)
    compared = [known[name][0] for name in files if name in known]
    counts = {source: compared.count(source) for source in sources if source in compared}
    return BytesChecked(counts, len(new), structure.nbytes)


class _StoppedError(Exception):
    """Another file failed, or the user stopped the run."""


def _compute_all(
    files: Mapping[str, Path], kinds: Mapping[str, str], threads: int, progress: Progress
) -> dict[str, Checksum]:
    """The checksum of every file, several files at a time."""
    total = sum(path.stat().st_size for path in files.values())
    stop, lock = threading.Event(), threading.Lock()
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _StoppedError
        with lock:
            done += count

    def work(name: str) -> Checksum:
        try:
            return compute(files[name], kinds[name], advance)
        except OSError as error:
            raise CheckpointError(f"{files[name]} can't be read: {error.strerror}. Check the drive.") from error

    with ThreadPoolExecutor(threads, "verify") as pool:
        futures = {name: pool.submit(work, name) for name in files}
        try:
            waiting = set(futures.values())
            while waiting:
                finished, waiting = wait(waiting, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
                progress(done, total)
                for future in finished:
                    future.result()
        except BaseException:
            stop.set()
            for future in futures.values():
                future.cancel()
            raise
    return {name: future.result() for name, future in futures.items()}
