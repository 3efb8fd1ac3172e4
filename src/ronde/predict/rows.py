"""From rows of a data set to the model's inputs, and from its outputs to columns. A row that fails is an error with its
reason, and the others go on."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ronde.comm.buffers import Array
from ronde.data.samples import KEY, Sample, decode_image
from ronde.data.shards import BlockReader, OpenBlock
from ronde.errors import DataError, ModelError
from ronde.launch.named_functions import load_function
from ronde.predict.plan import PartRange, PredictOptions
from ronde.serve.model import ImagePreprocessing, OnnxModel, TensorInfo
from ronde.text import shorten

ROW = "row"
"""The column with the number of a row in the input, from 0."""
LABEL = "predicted_label"
"""The column with the class of the highest score, if the model has labels."""
NUM_OPEN_BLOCKS = 4
MIN_ALL_FAILED = 8
"""If at least so many rows fail and none succeeds, the settings are probably wrong."""


class RowError(NamedTuple):
    """A row that could not be predicted."""

    row: int
    key: str
    reason: str


class RowReader:
    """Reads rows by their numbers in the input. The last blocks stay open."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._ends = np.cumsum(reader.table.lengths)
        self._open: dict[int, OpenBlock] = {}

    def read(self, part: PartRange) -> Iterator[tuple[int, Sample | DataError]]:
        """The rows of a part. DataError is raised if a whole block cannot be read, and returned for a single row."""
        row = part.start
        block = int(np.searchsorted(self._ends, row, side="right"))
        while row < part.stop:
            end = int(self._ends[block])
            first = end - int(self._reader.table.lengths[block])
            opened = self._open_block(block)
            stop = min(end, part.stop)
            for number in range(row, stop):
                try:
                    yield number, opened.read(number - first)
                except DataError as error:
                    yield number, error
            row, block = stop, block + 1

    def _open_block(self, block: int) -> OpenBlock:
        opened = self._open.pop(block, None) or self._reader.open(block)
        self._open[block] = opened
        while len(self._open) > NUM_OPEN_BLOCKS:
            del self._open[next(iter(self._open))]
        return opened


def preprocess_image(image: Any, wanted: ImagePreprocessing) -> Array:
    """One image, encoded or as an array (rows, columns, 3), as a model takes it. DataError if it is none."""
    from PIL import Image

    pixels = decode_image(image) if isinstance(image, bytes) else np.asarray(image)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise DataError(f"an image is an array of bytes (rows, columns, 3), got {pixels.dtype} {pixels.shape}")
    height, width = pixels.shape[:2]
    if wanted.resize is not None:
        factor = wanted.resize / min(height, width)
        height, width = max(wanted.height, round(height * factor)), max(wanted.width, round(width * factor))
    else:
        height, width = wanted.height, wanted.width
    if (height, width) != pixels.shape[:2]:
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
    top, left = (height - wanted.height) // 2, (width - wanted.width) // 2
    cut = pixels[top : top + wanted.height, left : left + wanted.width].astype(np.float32) * np.float32(wanted.scale)
    normal = (cut - np.array(wanted.mean, np.float32)) / np.array(wanted.std, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1) if wanted.layout == "CHW" else normal)


class RowPredictor:
    """Predicts parts with one model."""

    def __init__(self, options: PredictOptions, model: OnnxModel) -> None:
        known = {each.name for each in model.metadata.inputs}
        unknown = [name for name in options.columns if name not in known]
        if unknown:
            raise ValueError(f"columns: the model has no input {unknown[0]!r}; it has {', '.join(sorted(known))}")
        if not model.metadata.is_batched and options.batch_size > 1:
            raise ValueError(f"{options.model} takes only batches of fixed size; give batch_size: 1")
        made = [ROW, *([LABEL] if model.metadata.labels else []), *(each.name for each in model.metadata.outputs)]
        taken = [name for name in options.keep if name in (made if not options.postprocess else [ROW])]
        if taken:
            raise ValueError(f"keep: the output has a column {taken[0]!r} of its own; leave it out, or use postprocess")
        self._options = options
        self._model = model
        self._makers = [self._make_maker(each) for each in model.metadata.inputs]
        self._preprocess = load_function(options.preprocess) if options.preprocess else None
        self._postprocess = load_function(options.postprocess) if options.postprocess else None
        self.num_predicted = 0

    def _make_maker(self, info: TensorInfo) -> tuple[TensorInfo, Callable[[Sample], Any]]:
        """How an input is made of a row."""
        chosen = self._options.columns.get(info.name)
        images = self._model.metadata.preprocessing.get(info.name)
        if isinstance(chosen, list):
            fields = tuple(chosen)
            return info, lambda sample: _fields(sample, fields)
        field = chosen or (images.field if images is not None else info.name)
        if images is not None:
            return info, lambda sample: preprocess_image(_field(sample, field), images)
        return info, lambda sample: _field(sample, field)

    def predict(self, rows: Iterator[tuple[int, Sample | DataError]]) -> tuple[list[dict[str, Any]], list[RowError]]:
        """Return the output rows and the errors of a part, both in the order of the input. ModelError if many rows
        fail and none has been predicted yet."""
        found: list[dict[str, Any]] = []
        errors: list[RowError] = []
        pending: list[tuple[int, Sample, dict[str, Array]]] = []
        for row, sample in rows:
            if isinstance(sample, DataError):
                errors.append(RowError(row, "", shorten(str(sample))))
                continue
            try:
                pending.append((row, sample, self._make_inputs(sample)))
            except Exception as error:  # of the row, or of the user's function
                errors.append(RowError(row, str(sample.get(KEY, "")), _describe(error)))
            if len(pending) == self._options.batch_size:
                self._predict_batch(pending, found, errors)
                pending = []
        if pending:
            self._predict_batch(pending, found, errors)
        self.num_predicted += len(found)
        if not self.num_predicted and len(errors) >= MIN_ALL_FAILED:
            raise ModelError(
                f"the first {len(errors)} rows have failed, all of them: probably the settings do not fit the data; "
                f"row {errors[0].row}: {errors[0].reason}"
            )
        return found, sorted(errors)

    def _make_inputs(self, sample: Sample) -> dict[str, Array]:
        if self._preprocess is not None:
            made = self._preprocess(sample)
            if not isinstance(made, Mapping):
                raise TypeError(f"{self._options.preprocess} returned a {type(made).__name__}, not inputs by name")
            return {info.name: fit_input(info, _field(made, info.name)) for info, _ in self._makers}
        return {info.name: fit_input(info, make(sample)) for info, make in self._makers}

    def _predict_batch(
        self,
        batch: Sequence[tuple[int, Sample, dict[str, Array]]],
        found: list[dict[str, Any]],
        errors: list[RowError],
    ) -> None:
        inputs = {info.name: np.stack([made[info.name] for _, _, made in batch]) for info, _ in self._makers}
        try:
            outputs = self._model.predict(inputs)
        except (ModelError, ValueError) as error:
            if len(batch) > 1:  # which of the rows is it?
                for each in batch:
                    self._predict_batch([each], found, errors)
            else:
                errors.append(RowError(batch[0][0], str(batch[0][1].get(KEY, "")), _describe(error)))
            return
        for index, (row, sample, _) in enumerate(batch):
            try:
                found.append(self._make_columns(row, sample, {name: each[index] for name, each in outputs.items()}))
            except Exception as error:  # of the user's function, or a field that is missing
                errors.append(RowError(row, str(sample.get(KEY, "")), _describe(error)))

    def _make_columns(self, row: int, sample: Sample, outputs: dict[str, Any]) -> dict[str, Any]:
        columns: dict[str, Any] = {ROW: row}
        for name in self._options.keep:
            columns[name] = _plain(_field(sample, name))
        if self._postprocess is not None:
            made = self._postprocess(outputs)
            if not isinstance(made, Mapping):
                raise TypeError(f"{self._options.postprocess} returned a {type(made).__name__}, not values by column")
            twice = [name for name in made if name in columns]
            if twice:
                raise ValueError(
                    f"{self._options.postprocess} returned the column {twice[0]!r}, which is there already"
                )
            return columns | {str(name): _plain(value) for name, value in made.items()}
        labels = self._model.metadata.labels
        if labels:
            columns[LABEL] = labels[int(np.argmax(next(iter(outputs.values()))))]
        return columns | {name: _plain(value) for name, value in outputs.items()}


def _field(sample: Mapping[str, Any], name: str) -> Any:
    if name not in sample:
        known = ", ".join(str(each) for each in sample if each != KEY)
        raise KeyError(f"there is no field {name!r}; there are {shorten(known)}")
    return sample[name]


def _fields(sample: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    try:
        return [sample[name] for name in names]
    except KeyError:
        return [_field(sample, name) for name in names]  # which says what is missing


def fit_input(info: TensorInfo, value: Any) -> Array:
    """The value as one sample of an input. ValueError if its dtype or shape cannot be that."""
    array = np.asarray(value, object) if info.dtype == "string" else _convert(info, value)
    if array.ndim == 0 and info.shape[1:] == (1,):
        array = array.reshape(1)
    shape = info.shape[1:]
    if len(array.shape) != len(shape) or any(
        wanted is not None and wanted != length for wanted, length in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{info.name!r} has shape {array.shape} in this row; the model takes {info.describe()}")
    return array


def _convert(info: TensorInfo, value: Any) -> Array:
    """The numbers, or texts of numbers, as an array of the input's dtype. ValueError if it cannot hold them."""
    if isinstance(value, list) and value and isinstance(value[0], str):  # a row of CSV: most of the time goes here
        array = np.array([_parse_number(each, info.dtype) for each in value])
    else:
        array = np.asarray(value)
        if array.dtype.kind in "OSU":
            flat = [_parse_number(each, info.dtype) for each in array.reshape(-1).tolist()]
            array = np.array(flat).reshape(array.shape)
    wanted = info.numpy_dtype
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "iubf" or (array.dtype.kind == "f" and wanted.kind != "f"):
        raise ValueError(f"{info.name!r} is {array.dtype}; the model takes {info.describe()}")
    with np.errstate(over="ignore"):
        made = array.astype(wanted)
    if array.dtype.kind == "f":
        is_lost = bool(np.any(np.isinf(made) & ~np.isinf(array)))
    else:
        is_lost = wanted.kind != "f" and not np.array_equal(made, array)
    if is_lost:
        raise ValueError(f"{info.name!r} has numbers that {info.dtype} cannot hold; the model takes {info.describe()}")
    return made


def _parse_number(given: Any, dtype: str) -> Any:
    """The number in a text; what is no text stays as it is."""
    if not isinstance(given, str | bytes):
        return given
    if dtype.startswith("float"):
        return float(given)
    if dtype != "bool":
        return int(given)
    text = (given if isinstance(given, str) else given.decode("latin-1")).strip().lower()
    if text not in ("0", "1", "false", "true"):
        raise ValueError(f"{shorten(text)!r} is neither true nor false")
    return text in ("1", "true")


def _describe(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return shorten(text if isinstance(error, DataError | ModelError) else f"{type(error).__name__}: {text}", 500)


def _plain(value: Any) -> Any:
    """A value that any of the output formats can hold."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array.reshape(-1)[0].item() if array.shape in ((), (1,)) else array.tolist()
    return value


# --- formats ---------------------------------------------------------------------------------------------------------


def encode_rows(rows: Sequence[Mapping[str, Any]], format: str) -> bytes:
    """The bytes of a part in one of the output formats. A part of CSV has the names of its columns as its first row."""
    match format:
        case "jsonl":
            return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        case "csv":
            text = io.StringIO(newline="")
            names = list(rows[0]) if rows else []
            writer = csv.writer(text, lineterminator="\n")
            if names:
                writer.writerow(names)
            for row in rows:
                _check_columns(names, row)
                writer.writerow([_csv_value(value) for value in row.values()])
            return text.getvalue().encode()
        case _:
            import pyarrow as pa
            from pyarrow import parquet

            sink = io.BytesIO()
            table = pa.Table.from_pylist(
                [dict(row) for row in rows], schema=None if rows else pa.schema([(ROW, pa.int64())])
            )
            parquet.write_table(table, sink)
            return sink.getvalue()


def _check_columns(names: list[str], row: Mapping[str, Any]) -> None:
    if list(row) != names:
        raise ModelError(f"row {row[ROW]} has the columns {', '.join(row)}, and rows before it {', '.join(names)}")


def _csv_value(value: Any) -> Any:
    """Lists and dicts as JSON; a missing value is empty."""
    if isinstance(value, list | dict | tuple):
        return msgspec.json.encode(value).decode()
    if isinstance(value, float):
        return repr(value)
    return "" if value is None else value


def encode_errors(errors: Sequence[RowError]) -> bytes:
    return b"".join(msgspec.json.encode(each._asdict()) + b"\n" for each in errors)


def join_parts(read: Callable[[], Iterator[bytes]], format: str, write: Callable[[bytes], object]) -> None:
    """Put parts together to one file, in their order. Parts without rows are left out. `read` goes through them."""
    match format:
        case "parquet":
            _join_parquet(read, write)
        case "csv":
            _join_csv(read(), write)
        case _:
            for data in read():
                write(data)


def _join_csv(parts: Iterator[bytes], write: Callable[[bytes], object]) -> None:
    """The names of the columns are written once."""
    first: bytes | None = None
    for data in parts:
        if not data:
            continue
        reader = csv.reader(io.StringIO(data.decode(), newline=""))
        next(reader)
        header = b"\n".join(data.split(b"\n", reader.line_num)[:-1])  # a name may hold newlines
        if first is None:
            first = header
            write(data)
        elif header != first:
            raise ModelError(f"parts have different columns: {shorten(str(first))} and {shorten(str(header))}")
        else:
            write(data[len(header) + 1 :])


def _join_parquet(read: Callable[[], Iterator[bytes]], write: Callable[[bytes], object]) -> None:
    """Columns get a type that holds the values of all parts: one may have only missing values."""
    import pyarrow as pa
    from pyarrow import parquet

    class Sink(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            write(bytes(data))
            return len(data)

    schemas: list[Any] = []
    for data in read():
        file = parquet.ParquetFile(pa.BufferReader(data))
        if file.metadata.num_rows or not schemas:
            schemas.append(file.schema_arrow)
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise ModelError(f"parts have columns of different kinds: {error}") from None
    with parquet.ParquetWriter(pa.PythonFile(Sink(), mode="w"), schema) as writer:
        for data in read():
            table = parquet.read_table(pa.BufferReader(data))
            if table.num_rows:
                missing = {field.name: pa.nulls(table.num_rows, field.type) for field in schema}
                columns = [table[name] if name in table.column_names else missing[name] for name in schema.names]
                writer.write_table(pa.table(columns, names=schema.names).cast(schema))
