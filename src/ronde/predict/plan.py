"""What a batch prediction is made of: its options, its parts, and the names of its files. Pure but for make_plan().

The rows of the input are cut into parts, runs of consecutive rows. A part is named after its rows, not after the rank
that predicts it, and its contents depend on the plan alone. So any rank may do any part, also twice.

    OUT/part-000000000000-000000000800.parquet …       an output that is a folder
    OUT/errors.jsonl                                   the rows that could not be predicted, if there are any
    OUT/manifest.json                                  written last
    OUT/_work/…                                        while it runs: the plan, claims, and an entry for each part

An output that is a file (scores.csv) has the same beside it, as scores.csv.errors.jsonl, scores.csv.manifest.json and
scores.csv.work; its parts are put together at the end.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec
import numpy as np

from ronde.data.dataset import open_dataset
from ronde.data.preparation import hash_source
from ronde.data.shards import BlockReader
from ronde.errors import DataError
from ronde.launch.config import HOST_OPTIONS, HostOptions
from ronde.serve.model import ModelFolder, load_model_folder

MANIFEST_FORMAT = "ronde-predictions"
MANIFEST_VERSION = 1
NUM_PARTS = 128
"""About how many parts there are, if they are neither smaller than a batch nor larger than MAX_PART_ROWS."""
MAX_PART_ROWS = 65536
FORMATS = ("parquet", "csv", "jsonl")


class PredictOptions(HostOptions, frozen=True, kw_only=True):
    """What to predict, and how: the section `predict` of a job file. Its further keys `hosts`, `hostfile`, `ssh_port`,
    `ssh_identity`, `ssh_option`, `ssh_start_s`, `python` and `env` are those of `ronde run`."""

    model: str
    """Model folder, as `ronde export` makes it."""
    input: str
    """Data in any format that ronde.data reads: a folder, a file or a URL."""
    output: str
    """Folder, or file (.parquet, .csv, .jsonl), here or at a URL. All ranks see the same."""
    format: Literal["", "parquet", "csv", "jsonl"] = ""
    """Of the output. By default that of the file's name, or Parquet."""
    split: str | None = None
    """A split of the input. By default `train`, or the only one, of prepared data."""
    input_format: str | None = None
    """Of the input, if it cannot be known by its names."""
    columns: dict[str, list[str] | str] = {}  # noqa: RUF012  # copied by msgspec
    """By the name of a model's input, the field or fields of a row it is made of. By default the field of that name."""
    keep: list[str] = []  # noqa: RUF012  # copied by msgspec
    """Fields of the input that are copied to the output."""
    preprocess: str = ""
    """`module:function`. It gets a row, a dict, and returns the model's inputs for it, by name."""
    postprocess: str = ""
    """`module:function`. It gets the outputs for a row, by name, and returns the values to write, by column."""
    batch_size: int = 64
    """Rows that the model gets at a time."""
    part_rows: int | None = None
    """Rows of a part. By default so many that there are about 128 parts."""
    threads: int = 1
    """Of the model, in each rank."""
    num_ranks: int | None = None
    """Processes. Default: all slots of the hosts, or 1."""
    trust: bool = False
    """Load pickles of the input: they may run code."""
    force: bool = False
    """Replace what was predicted there from other data, or with another model or other settings."""


class PartRange(msgspec.Struct, frozen=True, order=True):
    """Rows `start` to `stop` - 1 of the input."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"part-{self.start:012d}-{self.stop:012d}"


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is done."""

    start: int
    stop: int
    num_rows: int
    num_errors: int
    num_bytes: int
    sha256: str


class PredictFingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """What the predictions depend on. If one changes, a run does not go on with what another has written."""

    input: str
    model: str
    settings: str


class PredictManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of manifest.json."""

    format: str = MANIFEST_FORMAT
    version: int = MANIFEST_VERSION
    output_format: str
    num_rows: int
    """Of the input: predictions and errors together."""
    num_errors: int
    fingerprints: PredictFingerprints
    parts: tuple[PartEntry, ...]
    """In the order of the input."""


class OutputNames(msgspec.Struct, frozen=True):
    """Where the files of an output are, as names below a folder."""

    folder: str
    """The folder or URL that the other names are below."""
    file: str
    """The single file of the output; empty if it is a folder of parts."""
    format: str

    @property
    def work(self) -> str:
        """The folder of everything that is removed at the end."""
        return f"{self.file}.work" if self.file else "_work"

    @property
    def manifest(self) -> str:
        return f"{self.file}.manifest.json" if self.file else "manifest.json"

    @property
    def errors(self) -> str:
        return f"{self.file}.errors.jsonl" if self.file else "errors.jsonl"

    def part(self, part: PartRange) -> str:
        name = f"{part.name}.{self.format}"
        return f"{self.work}/{name}" if self.file else name


class PredictPlan(msgspec.Struct, frozen=True):
    """The parts of a prediction, and what they depend on."""

    fingerprints: PredictFingerprints
    num_rows: int
    parts: tuple[PartRange, ...]
    names: OutputNames


def name_output(options: PredictOptions) -> OutputNames:
    """The names of the output's files. ValueError if its format is unknown or contradicts its name."""
    scheme, found, rest = options.output.rpartition("://")
    path = PurePosixPath(rest)
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        if ending in ("json", "pq", "tsv", "txt"):
            raise ValueError(f"{options.output}: an output ends with {', '.join('.' + each for each in FORMATS)}")
        return OutputNames(options.output, "", options.format or "parquet")
    if options.format not in ("", ending):
        raise ValueError(f"{options.output} and the format {options.format!r} contradict each other")
    return OutputNames(f"{scheme}{found}{path.parent}", path.name, ending)


def cut_rows(num_rows: int, part_rows: int) -> tuple[PartRange, ...]:
    return tuple(PartRange(start, min(num_rows, start + part_rows)) for start in range(0, num_rows, part_rows))


def choose_part_rows(num_rows: int, batch_size: int) -> int:
    """A multiple of the batch, so that only the last batch of the input is smaller."""
    wanted = min(MAX_PART_ROWS, -(-num_rows // NUM_PARTS))
    return max(1, -(-wanted // batch_size)) * batch_size


def order_parts(num_parts: int, rank: int, size: int) -> list[int]:
    """All parts in the order in which a rank looks for work: its own share first, then those of the ranks behind it.
    So ranks work far from each other, and a block of the input is read by few."""
    first = rank * num_parts // size
    return [(first + offset) % num_parts for offset in range(num_parts)]


def make_plan(options: PredictOptions) -> tuple[PredictPlan, BlockReader, ModelFolder]:
    """Look at input and model. ValueError, DataError or ModelError if they cannot be used."""
    names = name_output(options)
    counts = (options.batch_size, options.threads, options.part_rows, options.num_ranks)
    if any(each is not None and each < 1 for each in counts):
        raise ValueError("batch_size, part_rows, threads and num_ranks must be at least 1")
    model = load_model_folder(options.model)
    needs_pixels = any(name not in options.columns for name in model.metadata.preprocessing)
    reader = open_dataset(
        options.input,
        split=options.split,
        format=options.input_format,
        decode_images=not needs_pixels and not options.preprocess,
        trust=options.trust,
    )
    num_rows = int(np.sum(reader.table.lengths))
    if not num_rows:
        raise DataError(f"{options.input} has no rows")
    if names.file and options.format == "" and names.folder == "":
        names = msgspec.structs.replace(names, folder=".")
    fingerprints = PredictFingerprints(
        input=fingerprint_input(reader), model=model.fingerprint, settings=fingerprint_settings(options, names)
    )
    parts = cut_rows(num_rows, options.part_rows or choose_part_rows(num_rows, options.batch_size))
    return PredictPlan(fingerprints, num_rows, parts, names), reader, model


def fingerprint_input(reader: BlockReader) -> str:
    """Changes when a file of the input does, by its size and its time or ETag."""
    used = set(reader.table.files)
    versions = [info for info in reader.folder.list_files() if info.name in used]
    return hashlib.sha256((reader.table.fingerprint() + repr(versions)).encode()).hexdigest()


def fingerprint_settings(options: PredictOptions, names: OutputNames) -> str:
    """Changes when an option or function does that the predictions depend on."""
    left_out = ("model", "input", "output", "threads", "num_ranks", "force", "trust", "format", *HOST_OPTIONS)
    chosen: dict[str, Any] = {
        name: value for name, value in msgspec.to_builtins(options).items() if name not in left_out
    }
    chosen["format"] = names.format
    chosen["sources"] = [hash_source(name) for name in (options.preprocess, options.postprocess) if name]
    return hashlib.sha256(msgspec.json.encode(chosen, order="sorted")).hexdigest()


def describe_change(found: PredictFingerprints, wanted: PredictFingerprints) -> str:
    """Which of input, model and settings differ, in words; empty if none does."""
    changed = [name for name in PredictFingerprints.__struct_fields__ if getattr(found, name) != getattr(wanted, name)]
    return " and ".join(f"the {name}" for name in changed)
