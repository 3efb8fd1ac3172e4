"""`ronde predict`: a model over a data set, alone, on ranks that it starts, or as the ranks of `ronde run`."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ronde.cli.arguments import CommandParser, print_error, whole_number
from ronde.cli.run import add_host_options
from ronde.errors import RondeError
from ronde.text import format_compact_number, format_count, format_duration

if TYPE_CHECKING:
    from ronde.predict import PredictManifest, PredictOptions, PredictProgress
    from ronde.predict.plan import OutputNames
    from ronde.predict.worker import PredictWorker

DESCRIPTION = """Predict with a model over a data set: each row once, in the order of the input.

  ronde predict --model models/photos --input photos --output scores.csv
  ronde predict --model models/photos --input s3://bucket/photos --output s3://bucket/scores -np 4
  ronde predict job.yaml

The input is anything that `ronde data prepare` reads. The output is a file
(.parquet, .csv, .jsonl) or a folder of parts. Rows that cannot be predicted are
kept aside with the reason. A run that was killed goes on where it was. A job
file has the same in its section `predict`. Under `ronde run`, ranks share the
work."""

PROG = "ronde predict"
SHOW_S = 2.0
END_S = 10.0
"""How long ranks may take to end when all rows are predicted."""
COOLDOWN_S = (0.2, 5.0)
"""For how long the slot of a rank that has died is left alone: the first time, and at most."""


def predict(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "predict", DESCRIPTION, usage="--model M --input IN --output OUT [FLAGS]\n       ronde predict JOB.yaml [FLAGS]"
    )
    parser.add_argument("job", metavar="JOB.yaml", nargs="?", help="Job file.")
    parser.add_flag("--model", metavar="FOLDER", help="Model folder, as `ronde export` makes it.")
    parser.add_flag("--input", metavar="IN", help="Data, in any format that ronde.data reads.")
    parser.add_flag("--output", metavar="OUT", help="File (.parquet, .csv, .jsonl), or folder of parts.")
    help = "Processes. Default: all slots of the hosts, or 1."
    parser.add_flag("-np", "--num-ranks", dest="num_ranks", metavar="N", type=whole_number, help=help)
    parser.add_flag("--format", metavar="FORMAT", help="Of an output folder: parquet (default), csv or jsonl.")
    parser.add_flag("--split", metavar="NAME", help="Split of the input.")
    parser.add_flag("--input-format", metavar="FORMAT", help="Of IN: tar, tfrecord, parquet, csv or images.")
    help = "Fields that an input of the model is made of. Default: the field of its name. Repeatable."
    parser.add_argument("--columns", metavar="INPUT=FIELD,…", action="append", help=help)
    parser.add_flag(
        "--keep", metavar="FIELD,…", type=lambda text: text.split(","), help="Fields to copy to the output."
    )
    parser.add_flag("--preprocess", metavar="MODULE:FUNCTION", help="Makes the model's inputs of a row.")
    parser.add_flag("--postprocess", metavar="MODULE:FUNCTION", help="Makes the columns of the model's outputs.")
    parser.add_flag("--batch-size", metavar="N", type=whole_number, help="Rows at a time. Default: 64.")
    parser.add_flag("--part-rows", metavar="N", type=whole_number, help="Rows of a part. Default: about 128 parts.")
    parser.add_flag("--threads", metavar="N", type=whole_number, help="Of the model, in each rank. Default: 1.")
    parser.add_argument("--trust", action="store_true", default=None, help="Load pickles of IN: they may run code.")
    help = "Replace what was predicted there from other data or with other settings."
    parser.add_argument("--force", action="store_true", default=None, help=help)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    add_host_options(parser)
    flags = vars(parser.parse(arguments))
    as_json, job_file = flags.pop("json"), flags.pop("job") or ""
    given = {name: value for name, value in flags.items() if value is not None}
    return _report_errors(lambda: _predict(_make_options(given, job_file), job_file, as_json=as_json))


def _report_errors(carry_out: Callable[[], int]) -> int:
    """The exit code."""
    try:
        return carry_out()
    except (ValueError, ModuleNotFoundError) as error:
        return print_error(PROG, error)
    except (RondeError, OSError) as error:
        print_error(PROG, error)
        return 1


def _make_options(given: dict[str, Any], job_file: str) -> PredictOptions:
    from ronde.predict import PredictOptions

    if "columns" in given:
        columns: dict[str, Any] = {}
        for text in given["columns"]:
            name, equals, fields = text.partition("=")
            if not equals or not fields:
                raise ValueError(f"--columns must be as in x=height,width, got {text!r}")
            columns[name] = fields.split(",") if "," in fields else fields
        given["columns"] = columns
    if job_file:
        from ronde.launch.config import read_section

        return msgspec.structs.replace(read_section(job_file, "predict", PredictOptions), **given)
    missing = [name for name in ("model", "input", "output") if name not in given]
    if missing:
        raise ValueError(f"give --{missing[0]}, or a job file")
    if given.get("format", "") not in ("", "parquet", "csv", "jsonl"):
        raise ValueError(f"--format must be parquet, csv or jsonl, got {given['format']!r}")
    return PredictOptions(**given)


def _predict(options: PredictOptions, job_file: str, *, as_json: bool) -> int:
    from ronde.comm.launchers import detect_launcher
    from ronde.launch.config import host_flags
    from ronde.launch.named_functions import search_modules_beside
    from ronde.predict.plan import name_output
    from ronde.predict.worker import PredictWorker
    from ronde.predict.worker import predict as predict_parts
    from ronde.settings import Settings

    if options.preprocess or options.postprocess:
        search_modules_beside(job_file)
    settings, launcher, started = Settings.load(), detect_launcher(), time.monotonic()
    place = settings if settings.coordinator else launcher
    if place is not None and place.size > 1:  # this process is a rank of a job
        if options.force:
            raise ValueError("--force cannot be used by the ranks of a job; give it to `ronde predict -np N`")
        show = ProgressLine() if place.rank == 0 else (lambda progress: None)
        shared = predict_parts(options, rank=place.rank % place.size, size=place.size, on_progress=show)
        if place.rank == 0:
            _print_result(options, shared, name_output(options), time.monotonic() - started, as_json=as_json)
        return 0
    worker = PredictWorker(options)
    if options.force:
        worker.output.clear()
        options = msgspec.structs.replace(options, force=False)
    manifest: PredictManifest | None
    exit_code, line = 0, ProgressLine()
    flags = host_flags(options, job_file)
    with contextlib.closing(worker.output):
        if options.num_ranks in (None, 1) and flags.keys().isdisjoint(("hosts", "hostfile", "env")):
            manifest = worker.run(line)
        else:
            exit_code, manifest = _run_ranks(options, flags, worker, line)
    if manifest is None:
        return exit_code or 1
    _print_result(options, manifest, worker.plan.names, time.monotonic() - started, as_json=as_json)
    return 0


def _run_ranks(
    options: PredictOptions, flags: dict[str, Any], worker: PredictWorker, line: ProgressLine
) -> tuple[int, PredictManifest | None]:
    """Start the ranks of an elastic job, where these flags say: those that die are started again, and the others go on.
    Returns the exit code, and the manifest if all is done."""
    from dataclasses import replace

    from ronde.launch.config import make_launch_config
    from ronde.launch.driver.driver import Driver
    from ronde.launch.function import FUNCTION_RANK_COMMAND, pickle_call
    from ronde.launch.output.printer import open_standard_printer

    complete = worker.output.read_complete()
    if complete is not None:
        return 0, complete
    flags = {**flags, "min_np": 1, "cooldown": COOLDOWN_S}
    if options.num_ranks is not None:
        flags["num_ranks"] = options.num_ranks
    job = make_launch_config(flags, FUNCTION_RANK_COMMAND).job
    worker.output.begin()  # what is wrong is said here, once
    job = replace(job, pickled_call=pickle_call(_run_rank, (options,), {}))
    ended = threading.Event()
    with contextlib.closing(open_standard_printer(job.num_ranks)) as printer:
        driver = Driver(job, printer)

        def watch() -> None:
            complete_s = math.inf
            while not ended.wait(SHOW_S / 4):
                line(worker.current_progress())
                if worker.output.read_complete() is None:
                    continue
                complete_s = min(complete_s, time.monotonic())
                if time.monotonic() - complete_s > END_S:  # one may be stopped
                    driver.stop("all rows are predicted, and not all ranks have ended")

        # Owned by this function: shows how far it is, and ends ranks that do not end by themselves.
        watcher = threading.Thread(target=watch, name="ronde-predict-progress", daemon=True)
        watcher.start()
        try:
            result = driver.run()
        finally:
            ended.set()
            watcher.join()
    complete = worker.output.read_complete()
    if complete is None and result.summary:
        print(result.summary, file=sys.stderr, flush=True)
    return result.exit_code, complete


def _run_rank(options: PredictOptions) -> None:
    """The function of each rank that this command starts."""
    from ronde.predict.worker import predict as predict_parts
    from ronde.settings import Settings

    def carry_out() -> int:
        settings = Settings.load()
        predict_parts(options, rank=settings.rank % settings.size, size=settings.size)
        return 0

    sys.exit(_report_errors(carry_out))


class ProgressLine:
    """Prints how far it is, every tenth and at most every SHOW_S seconds, with the throughput."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown_s = 0.0
        self._first: int | None = None
        self._last = -1

    def __call__(self, progress: PredictProgress) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = progress.num_rows  # of an earlier run
        is_end = progress.num_rows == progress.num_all_rows
        # At the end the entries are removed one by one, so a later look may find fewer of them.
        if progress.num_rows <= self._last or (now - self._shown_s < SHOW_S and not is_end):
            return
        self._last, self._shown_s = progress.num_rows, now
        rate = (progress.num_rows - self._first) / max(1e-6, now - self._started)
        speed = f", {format_compact_number(rate)} rows/s" if rate else ""
        print(f"{progress.num_rows}/{progress.num_all_rows} rows{speed}", file=sys.stderr, flush=True)


def _print_result(
    options: PredictOptions, manifest: PredictManifest, names: OutputNames, seconds: float, *, as_json: bool
) -> None:
    num_predicted = manifest.num_rows - manifest.num_errors
    if as_json:
        facts = {
            "output": options.output,
            "num_rows": manifest.num_rows,
            "num_errors": manifest.num_errors,
            "num_parts": len(manifest.parts),
            "seconds": round(seconds, 3),
        }
        print(msgspec.json.encode(facts).decode())
        return
    aside = ""
    if manifest.num_errors:
        aside = f"; {format_count(manifest.num_errors, 'row')} could not be predicted: {names.folder}/{names.errors}"
    print(f"{options.output}: {format_count(num_predicted, 'row')} in {format_duration(seconds)}{aside}")
