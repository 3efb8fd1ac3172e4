"""`ronde data prepare`: a data set is cut by a rule into shards with checksums and an index, in parallel on all ranks.

It has two phases, each made of tasks that do not depend on the number of ranks. Rank r of n does tasks r, r + n, …

1. *Transform*: a part of the input (some of its blocks) is read and transformed once. The samples go to a file of the
   folder `.prepare` in the output folder, and what decides about them (split, hash, class, size) to a list beside it.
2. *Assemble*: the lists of all parts say which samples are in which shard. A shard is copied from the parts.

The list of a part, and the entry of a shard, are written when the file is complete, so a task that has one is done. A
run that was killed goes on with the tasks that are left. The result is the same bytes for any number of ranks and any
number of kills. `index.json` comes last; then `.prepare` is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.data.dataset import SPLITS, open_dataset
from ronde.data.files import LocalFolder, open_folder, wait_for_lock, write_aside
from ronde.data.samples import KEY, Sample, encode_sample
from ronde.data.shards import (
    INDEX_NAME,
    SHARD_ENDING,
    BlockReader,
    DataIndex,
    ShardBlock,
    ShardInfo,
    ShardReader,
    ShardWriter,
    read_index,
    write_index,
)
from ronde.errors import DataError
from ronde.launch.named_functions import load_function, module_path
from ronde.text import format_bytes, shorten
from ronde.training.agreement import check_settings

RULES = ("hash", "class", "size")
CLASS_FIELDS = ("class", "label", "cls", "label_name")
WORK_FOLDER = ".prepare"
SHARD_BYTES = 64 << 20
PART_BYTES = 32 << 20
LOCK_WAIT_S = 10.0
"""How long a run that was killed may take to end."""
LEAST_PARTS = 16
"""So small data keep several ranks busy, too."""
LEAST_BLOCKS = 240
"""Of a split, if it has so many samples: then each of the 60 virtual streams of a Stream has four."""


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to prepare, and how: the section `data` of a job file."""

    input: str
    """Folder, file or URL, or `module:function` of a function that returns an iterable of samples."""
    output: str
    """A folder of this machine, or one that all hosts share."""
    transform: str = ""
    """`module:function`. It gets a sample, a dict, and returns one, several in a list, or None to leave it out."""
    transform_options: dict[str, Any] = {}
    """Keyword arguments for the transform."""
    by: str = "hash"
    """What decides in which shard a sample is: hash (of its key), class, or size (consecutive samples)."""
    split: dict[str, float] | str | None = None
    """As in train=0.8,val=0.1,test=0.1. By default the folders train, val and test of the input, or all in train."""
    group_by: str = ""
    """A field of the input; samples of equal value are in the same split."""
    key: str = ""
    """A field of the input that names a sample. By default its place in the input."""
    class_field: str = ""
    """The field with the class. By default class, label or cls."""
    format: str | None = None
    """Of the input, if it cannot be known by its names."""
    shard_bytes: int = SHARD_BYTES
    """About how large a shard is."""
    threads: int = 1
    """Samples that a rank transforms at a time."""
    trust: bool = False
    """Load pickles of the input."""
    force: bool = False
    """Replace what was prepared there from other data or with other options."""


class PrepareProgress(NamedTuple):
    """How far it has come, all ranks together."""

    phase: str
    """transform or assemble"""
    num_done: int
    num_tasks: int


@dataclass(frozen=True)
class PrepareResult:
    """What was prepared."""

    index: DataIndex
    num_carried_out: int
    """Tasks that this rank has carried out."""
    was_complete: bool
    """Everything had been prepared before."""


class PartList(msgspec.Struct, frozen=True, kw_only=True):
    """What decides about the samples of a part, in their order."""

    shard: ShardInfo
    splits: tuple[int, ...]
    hashes: tuple[int, ...]
    classes: tuple[str, ...]
    sizes: tuple[int, ...]


class SampleTable(NamedTuple):
    """The lists of all parts, concatenated."""

    part: Array
    row: Array
    split: Array
    hash: Array
    size: Array
    classes: tuple[str, ...]


class PlannedShard(NamedTuple):
    """A shard, and the samples in it: indices into the SampleTable."""

    name: str
    samples: Array
    block_samples: int


# --- pure decisions ------------------------------------------------------------------------------------------------


def parse_split(given: dict[str, float] | str | None) -> dict[str, float]:
    """The shares of the splits; empty if they come from the input. ValueError if they are none."""
    if given is None or given == "":
        return {}
    shares: dict[str, float] = {}
    entries = given.items() if isinstance(given, Mapping) else (each.split("=", 1) for each in given.split(","))
    try:
        for name, share in ((str(name).strip(), float(share)) for name, share in entries):
            if name in shares or not name.replace("-", "").replace("_", "").isalnum() or not 0 <= share < math.inf:
                raise ValueError
            shares[name] = share
    except ValueError:
        raise ValueError(f"split must be as in train=0.8,val=0.1,test=0.1, got {given!r}") from None
    if not sum(shares.values()) > 0:
        raise ValueError(f"split: at least one share must be above 0, got {given!r}")
    return shares


def choose_split(name: str, shares: Mapping[str, float]) -> str:
    """The split of a sample by its name alone, so it stays there when others come. Shares need not add up to 1."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48  # at least 0, below 1
    bounds = accumulate(share / sum(shares.values()) for share in shares.values())
    return next((split for split, bound in zip(shares, bounds, strict=True) if place < bound), next(iter(shares)))


def hash_key(key: str) -> int:
    """63 bits that spread samples over shards; others than those that choose_split() uses."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[8:16], "big") >> 1


def cut_parts(sizes: Sequence[int], num_bytes: int) -> list[tuple[int, int]]:
    """Runs of consecutive blocks, each of about so many bytes, as first and last + 1."""
    parts, start, size = [], 0, 0
    for block, block_bytes in enumerate(sizes):
        size += block_bytes
        if size >= num_bytes:
            parts.append((start, block + 1))
            start, size = block + 1, 0
    return parts + ([(start, len(sizes))] if start < len(sizes) else [])


def plan_shards(samples: SampleTable, splits: Sequence[str], by: str, shard_bytes: int) -> list[PlannedShard]:
    """Which samples are in which shard."""
    planned = []
    for number, split in enumerate(splits):
        mine = np.flatnonzero(samples.split == number)
        if by == "hash":
            mine = mine[np.argsort(samples.hash[mine], kind="stable")]
            groups = [mine]
        elif by == "class":
            names = np.array(samples.classes, object)[mine] if len(mine) else np.array([], object)
            groups = [mine[names == name] for name in sorted(set(names.tolist()))]
        else:
            groups = [mine]
        block_samples = max(1, len(mine) // LEAST_BLOCKS)
        shards: list[Array] = []
        for group in groups:
            shards += _cut_evenly(group, samples.size, shard_bytes)
        width = max(5, len(str(len(shards))))
        for index, chosen in enumerate(shards):
            planned.append(PlannedShard(f"{split}/{index:0{width}d}{SHARD_ENDING}", chosen, block_samples))
    return planned


def _cut_evenly(samples: Array, sizes: Array, shard_bytes: int) -> list[Array]:
    """Consecutive samples in shards of about equal size, none above the limit unless it has only one sample."""
    total = int(sizes[samples].sum())
    num_shards = max(1, -(-total // shard_bytes))
    ends = np.searchsorted(np.cumsum(sizes[samples]), np.arange(1, num_shards) * total / num_shards, side="right")
    return [part for part in np.split(samples, ends) if len(part)]


# --- input -----------------------------------------------------------------------------------------------------------


def hash_source(name: str) -> str:
    """Changes when the module of `module:function` does."""
    path = module_path(name)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class PrepareInput(NamedTuple):
    """The parts of an input. An iterable has as many as there are tasks, each of which goes through all of it."""

    reader: BlockReader | None
    iterable: str
    parts: list[tuple[int, int]]
    fingerprint: str

    def read(self, part: int) -> Iterator[Sample]:
        start, stop = self.parts[part]
        if self.reader is None:
            for number, sample in enumerate(load_function(self.iterable)()):
                if number % len(self.parts) == part:
                    yield {KEY: f"{number:012d}", **sample}
            return
        for block in range(start, stop):
            opened = self.reader.open(block)
            for row in range(int(self.reader.table.lengths[block])):
                yield opened.read(row)


def open_input(options: PrepareOptions) -> PrepareInput:
    """Look at the input. DataError or ValueError if it is none."""
    path = Path(options.input)
    module, _, function = options.input.partition(":")
    if function.isidentifier() and module.replace(".", "").isidentifier() and not path.exists():
        load_function(options.input)
        return PrepareInput(None, options.input, [(0, 0)] * LEAST_PARTS, hash_source(options.input))
    reader = _open_prepared(options) or open_dataset(
        options.input, format=options.format, decode_images=False, trust=options.trust
    )
    sizes = reader.table.sizes.tolist()
    parts = cut_parts(sizes, max(1, min(PART_BYTES, -(-sum(sizes) // LEAST_PARTS))))
    versions = repr([info for info in reader.folder.list_files() if info.name in set(reader.table.files)])
    fingerprint = hashlib.sha256((reader.table.fingerprint() + versions).encode()).hexdigest()
    return PrepareInput(reader, "", parts, fingerprint[:16])


def _refuse_output_in_input(options: PrepareOptions) -> None:
    """The shards would be a part of the input next time, and with `force` the input would be removed."""
    folder, output = Path(options.input.removeprefix("file://")), Path(options.output).resolve()
    if folder.is_dir() and output.is_relative_to(folder.resolve()):
        raise ValueError(f"the output {options.output} is in the input {options.input}: give a folder elsewhere")


def _open_prepared(options: PrepareOptions) -> BlockReader | None:
    """All splits of an input that was prepared before, to be split anew; None if it was not."""
    folder = open_folder(options.input)
    if options.format is not None or all(info.name != INDEX_NAME for info in folder.list_files()):
        return None
    index = read_index(folder)
    if len(index.splits) > 1 and not parse_split(options.split):
        raise DataError(
            f"{options.input} was prepared, and has the splits {', '.join(index.splits)}: give --split to split all of "
            "it anew"
        )
    return ShardReader(folder, [shard for shards in index.splits.values() for shard in shards], index.classes)


# --- carrying out ----------------------------------------------------------------------------------------------------


class Preparation:
    """One run of prepare() on one rank."""

    def __init__(self, options: PrepareOptions, group: Group, on_progress: Callable[[PrepareProgress], object]) -> None:
        if options.by not in RULES:
            raise ValueError(f"by must be one of {', '.join(RULES)}, got {options.by!r}")
        if options.shard_bytes < 1 or options.threads < 1:
            raise ValueError("shard_bytes and threads must be at least 1")
        if "://" in options.output:
            raise ValueError(
                f"{options.output}: prepare into a folder of this machine or one that all hosts share, and then "
                "`ronde data upload` it"
            )
        _refuse_output_in_input(options)
        self._shares = parse_split(options.split)
        self._transform = load_function(options.transform) if options.transform else None
        if self._transform is None and options.transform_options:
            raise ValueError("transform_options are for a transform: give one")
        self._options = options
        self._group = group
        self._on_progress = on_progress
        self._output = Path(options.output)
        self._work = self._output / WORK_FOLDER
        self._num_carried_out = 0
        assert group.rank is not None
        self._rank = group.rank

    def run(self) -> PrepareResult:
        same = {**msgspec.to_builtins(self._options), "source of the transform": self._transform_source()}
        del same["threads"]
        check_settings(self._group, "prepare()", same)
        source = objects.call_on_first(lambda: open_input(self._options), group=self._group)
        with contextlib.ExitStack() as opened:
            objects.call_on_first(lambda: opened.enter_context(self._lock()), group=self._group)
            return self._carry_out(source)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Two runs that prepare the same folder would remove each other's work."""
        self._output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # not all file systems can lock a folder
                if not wait_for_lock(descriptor, LOCK_WAIT_S):
                    raise DataError(f"another run is preparing {self._output}; wait for it, or give another folder")
            yield
        finally:
            os.close(descriptor)

    def _carry_out(self, source: PrepareInput) -> PrepareResult:
        facts = self._describe(source)
        complete = objects.call_on_first(lambda: self._find_complete(facts), group=self._group)
        if complete is not None:
            return PrepareResult(complete, 0, True)
        objects.call_on_first(lambda: self._begin(facts), group=self._group)
        if not self._work.is_dir():
            raise DataError(f"rank {self._rank} does not see {self._work}; the output must be storage that all share")
        self._do("transform", len(source.parts), lambda part: self._transform_part(source, part), self._part_list_path)
        splits, samples, parts = self._read_lists(len(source.parts))
        planned = plan_shards(samples, splits, self._options.by, self._options.shard_bytes)
        self._do(
            "assemble",
            len(planned),
            lambda number: self._assemble(planned[number], number, samples, parts),
            self._entry_path,
        )
        index: DataIndex = objects.call_on_first(
            lambda: self._finish(facts, splits, planned, samples.classes, source), group=self._group
        )
        return PrepareResult(index, self._num_carried_out, False)

    def _describe(self, source: PrepareInput) -> dict[str, Any]:
        """What the result depends on."""
        options = msgspec.to_builtins(self._options)
        left_out = ("output", "threads", "force", "split")
        facts = {name: value for name, value in options.items() if name not in left_out}
        source_facts = {"input_fingerprint": source.fingerprint, "transform_source": self._transform_source()}
        return {**facts, "split": self._shares, **source_facts}

    def _transform_source(self) -> str:
        return hash_source(self._options.transform) if self._options.transform else ""

    def _find_complete(self, facts: dict[str, Any]) -> DataIndex | None:
        if not (self._output / INDEX_NAME).exists():
            return None
        index = read_index(LocalFolder(self._output))
        if index.made_by == facts:
            return index
        if not self._options.force:
            changed = [name for name, value in facts.items() if index.made_by.get(name) != value]
            raise DataError(
                f"{self._output} was prepared with another {', '.join(changed) or 'version'}; give another folder, or "
                "--force to replace it"
            )
        return None

    def _begin(self, facts: dict[str, Any]) -> None:
        """Keep what an earlier run with the same facts has done, and remove everything else."""
        facts_path = self._work / "facts.json"
        data = msgspec.json.encode(facts)
        if facts_path.is_file() and facts_path.read_bytes() == data:
            return
        if self._work.exists():
            shutil.rmtree(self._work)
        if (self._output / INDEX_NAME).exists():
            former = read_index(LocalFolder(self._output))
            (self._output / INDEX_NAME).unlink()  # first, so that a kill leaves no index of shards that are gone
            for shard in (shard for shards in former.splits.values() for shard in shards):
                LocalFolder(self._output).remove(shard.name)
        self._work.mkdir(parents=True)
        with write_aside(facts_path) as file:
            file.write(data)

    def _do(self, phase: str, num_tasks: int, carry_out: Callable[[int], None], path_of: Callable[[int], Path]) -> None:
        """Carry out this rank's tasks that are not done, and wait for those of the others."""
        for task in range(self._rank, num_tasks, self._group.size):
            if not path_of(task).exists():
                carry_out(task)
                self._num_carried_out += 1
            if self._rank == 0:
                pattern = path_of(0).name.replace("000000", "*")
                num_done = sum(1 for _ in self._work.glob(pattern))
                self._on_progress(PrepareProgress(phase, num_done, num_tasks))
        self._group.barrier()
        if self._rank == 0:
            self._on_progress(PrepareProgress(phase, num_tasks, num_tasks))

    def _part_list_path(self, part: int) -> Path:
        return self._work / f"part-{part:06d}.list"

    def _entry_path(self, number: int) -> Path:
        return self._work / f"shard-{number:06d}.json"

    def _transform_part(self, source: PrepareInput, part: int) -> None:
        name = f"part-{part:06d}{SHARD_ENDING}"
        splits, hashes, classes, sizes = [], [], [], []
        with write_aside(self._work / name) as file:
            writer = ShardWriter(file, name)
            for original, sample in self._transform_samples(source.read(part)):
                encoded = encode_sample(sample)
                writer.add(encoded)
                key = str(sample[KEY])
                splits.append(self._split_number(key, original))
                hashes.append(hash_key(key))
                classes.append(self._class_of(sample))
                sizes.append(len(encoded))
            shard = writer.finish()
        listed = PartList(
            shard=shard, splits=tuple(splits), hashes=tuple(hashes), classes=tuple(classes), sizes=tuple(sizes)
        )
        with write_aside(self._part_list_path(part)) as file:
            file.write(msgspec.msgpack.encode(listed))

    def _transform_samples(self, samples: Iterator[Sample]) -> Iterator[tuple[Sample, Sample]]:
        """Each sample of the input with what it became, in order, several at a time."""
        if self._options.threads == 1:
            for sample in samples:
                yield from self._transform_one(sample)
            return
        with ThreadPoolExecutor(self._options.threads, thread_name_prefix="ronde-prepare") as executor:
            while chunk := [sample for sample, _ in zip(samples, range(4 * self._options.threads), strict=False)]:
                for made in executor.map(lambda sample: list(self._transform_one(sample)), chunk):
                    yield from made

    def _transform_one(self, sample: Sample) -> Iterator[tuple[Sample, Sample]]:
        key = str(sample[KEY] if not self._options.key else self._field(sample, self._options.key))
        sample = {**sample, KEY: key}
        try:
            made = (
                sample if self._transform is None else self._transform(dict(sample), **self._options.transform_options)
            )
        except Exception as error:
            raise DataError(
                f"{self._options.transform} failed for sample {shorten(key)!r}: {type(error).__name__}: {error}"
            ) from error
        listed: Iterable[Any] = made if isinstance(made, list | tuple) else [] if made is None else [made]
        for each in listed:
            if not isinstance(each, Mapping):
                raise DataError(
                    f"{self._options.transform} returned a {type(each).__name__} for sample {shorten(key)!r}; it has "
                    "to return a dict, a list of dicts, or None"
                )
            yield sample, {KEY: key, **each}

    def _field(self, sample: Sample, name: str) -> Any:
        if name not in sample:
            known = ", ".join(str(each) for each in sample)
            raise DataError(f"sample {shorten(str(sample[KEY]))!r} has no field {name!r}; it has {shorten(known)}")
        return sample[name]

    def _split_number(self, key: str, original: Sample) -> int:
        if self._shares:
            group = self._options.group_by
            name = f"{group}={self._field(original, group)}" if group else key
            return list(self._shares).index(choose_split(name, self._shares))
        first = key.partition("/")[0]
        return SPLITS.index(first) if first in SPLITS and "/" in key else 0

    def _class_of(self, sample: Sample) -> str:
        if self._options.class_field:
            return str(self._field(sample, self._options.class_field))
        found = next((sample[name] for name in CLASS_FIELDS if name in sample), None)
        if found is None and self._options.by == "class":
            raise DataError(f"sample {shorten(str(sample[KEY]))!r} has no class; name the field by class_field")
        return "" if found is None or isinstance(found, np.ndarray | bytes) else str(found)

    def _read_lists(self, num_parts: int) -> tuple[list[str], SampleTable, list[ShardInfo]]:
        lists = []
        for part in range(num_parts):
            lists.append(msgspec.msgpack.decode(self._part_list_path(part).read_bytes(), type=PartList))
        lengths = [len(each.splits) for each in lists]
        if not sum(lengths):
            raise DataError(f"{self._options.input} has no samples, or the transform has left out all of them")
        samples = SampleTable(
            part=np.repeat(np.arange(num_parts), lengths),
            row=np.concatenate([np.arange(length) for length in lengths]),
            split=np.array([number for each in lists for number in each.splits], np.int64),
            hash=np.array([number for each in lists for number in each.hashes], np.int64),
            size=np.array([number for each in lists for number in each.sizes], np.int64),
            classes=tuple(name for each in lists for name in each.classes),
        )
        names = list(self._shares) or list(SPLITS)
        if not self._shares:  # only those that there are
            names = names[: int(samples.split.max()) + 1]
        return names, samples, [each.shard for each in lists]

    def _assemble(self, planned: PlannedShard, number: int, samples: SampleTable, parts: list[ShardInfo]) -> None:
        path = self._output / planned.name
        path.parent.mkdir(parents=True, exist_ok=True)
        reader = ShardReader(LocalFolder(self._work), parts)
        first_block = np.cumsum([0, *(len(part.blocks) for part in parts)])
        ends = [np.cumsum([length for _, _, length in part.blocks]) for part in parts]
        opened: dict[int, ShardBlock] = {}
        with write_aside(path) as file:
            writer = ShardWriter(file, planned.name, block_samples=planned.block_samples)
            for part, row in zip(samples.part[planned.samples], samples.row[planned.samples], strict=True):
                index = int(np.searchsorted(ends[part], row, side="right"))
                block = int(first_block[part]) + index
                if block not in opened:
                    opened[block] = reader.open(block)
                writer.add(opened[block].read_bytes(int(row - ends[part][index] + parts[part].blocks[index][2])))
            entry = writer.finish()
        with write_aside(self._entry_path(number)) as file:
            file.write(msgspec.json.encode(entry))

    def _finish(
        self,
        facts: dict[str, Any],
        splits: list[str],
        planned: list[PlannedShard],
        classes: Sequence[str],
        source: PrepareInput,
    ) -> DataIndex:
        shards: dict[str, list[ShardInfo]] = {split: [] for split in splits}
        for number, each in enumerate(planned):
            entry = msgspec.json.decode(self._entry_path(number).read_bytes(), type=ShardInfo)
            shards[each.name.partition("/")[0]].append(entry)
        named = source.reader.classes if source.reader is not None and source.reader.classes else ()
        index = DataIndex(
            splits={split: tuple(entries) for split, entries in shards.items()},
            classes=named or tuple(sorted({name for name in classes if name and not name.lstrip("-").isdigit()})),
            made_by=facts,
        )
        write_index(LocalFolder(self._output), index)
        LocalFolder(self._output).remove_unfinished()
        shutil.rmtree(self._work)
        return index


def prepare(
    options: PrepareOptions,
    *,
    group: Group | None = None,
    on_progress: Callable[[PrepareProgress], object] = lambda progress: None,
) -> PrepareResult:
    """Prepare data as the options say. Collective: all ranks call it, and all see the same folders. A run that was
    killed goes on where it was, with any number of ranks. `on_progress` is called on the first rank."""
    return Preparation(options, resolve_group(group), on_progress).run()


def describe_index(index: DataIndex) -> str:
    """For people: samples, shards and bytes of each split."""
    parts = []
    for split, shards in index.splits.items():
        size = format_bytes(sum(shard.num_bytes for shard in shards))
        parts.append(f"{split}: {index.num_samples(split)} samples in {len(shards)} shards, {size}")
    return "; ".join(parts)
