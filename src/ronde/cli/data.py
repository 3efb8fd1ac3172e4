"""`ronde data`: prepares data sets. Under `ronde run` all ranks share the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ronde.cli.arguments import Command, CommandParser, list_commands, print_error, run_command, whole_number
from ronde.errors import RondeError
from ronde.text import format_duration

COMMANDS = {
    "prepare": Command("ronde.cli.data:prepare", "Cut a data set into shards with checksums and an index."),
}

PREPARE_DESCRIPTION = """Cut a data set by a rule into shards with checksums and an index.

  ronde data prepare photos data/photos --split train=0.8,val=0.1,test=0.1
  ronde run -H host1:4,host2:4 ronde data prepare photos /shared/photos --transform mytransforms:resize
  ronde data prepare job.yaml

IN is a folder with one folder of images for each class, or with files of CSV,
Parquet, WebDataset (tar) or TFRecord, or module:function, which returns an
iterable of dicts. A job file has the same in its section `data`. A run that was
killed goes on where it was. All ranks have to see both folders."""


def data(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "data",
        "Prepare data sets for training.",
        usage="COMMAND …",
        epilog=f"{list_commands(COMMANDS)}\n\n`ronde data COMMAND --help` has more.",
    )
    return run_command(parser, COMMANDS, arguments)


def prepare(arguments: Sequence[str]) -> int:
    from ronde.data.preparation import RULES, PrepareOptions

    parser = CommandParser(
        "data prepare", PREPARE_DESCRIPTION, usage="IN OUT [FLAGS]\n       ronde data prepare JOB.yaml"
    )
    parser.add_argument("input", metavar="IN", help="Data, or a job file, which stands alone.")
    parser.add_argument("output", metavar="OUT", nargs="?", help="Folder to make.")
    parser.add_flag("--transform", metavar="MODULE:FUNCTION", help="Called with each sample, a dict; returns one.")
    parser.add_flag("--by", metavar="|".join(RULES), help="What decides in which shard a sample is. Default: hash.")
    help = "Shares of splits, by a hash of the key. Default: the folders train, val and test of IN, or all in train."
    parser.add_flag("--split", metavar="NAME=SHARE,…", help=help)
    parser.add_flag("--group-by", metavar="FIELD", help="Samples with an equal field are in the same split.")
    parser.add_flag("--key", metavar="FIELD", help="Field that names a sample. Default: its place in IN.")
    parser.add_flag("--class-field", metavar="FIELD", help="Field with the class. Default: class, label or cls.")
    parser.add_flag("--format", metavar="FORMAT", help="Of IN: tar, tfrecord, parquet, csv or images.")
    parser.add_flag("--shard-bytes", metavar="N", type=whole_number, help="Size of a shard. Default: 64 MiB.")
    parser.add_flag("--threads", metavar="N", type=whole_number, help="Samples that a rank transforms at a time.")
    parser.add_argument("--trust", action="store_true", default=None, help="Load pickles of IN: they may run code.")
    help = "Replace what was prepared there from other data or with other options."
    parser.add_argument("--force", action="store_true", default=None, help=help)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    flags = vars(parser.parse(arguments))
    as_json = flags.pop("json")
    given = {name: value for name, value in flags.items() if value is not None}

    def make_options() -> PrepareOptions:
        if "output" in given:
            return PrepareOptions(**given)
        if not given["input"].endswith((".yaml", ".yml")):
            raise ValueError("give the folder to make, OUT, or a job file that ends with .yaml")
        from ronde.launch.config import read_section

        options = read_section(given.pop("input"), "data", PrepareOptions)
        return msgspec.structs.replace(options, **given)

    return _run(parser, lambda: _prepare(make_options(), as_json=as_json))


def _prepare(options: Any, *, as_json: bool) -> None:
    import time

    import ronde
    from ronde.data.preparation import PrepareProgress, describe_index
    from ronde.data.preparation import prepare as prepare_data

    started = time.monotonic()
    shown: tuple[str, int] = ("", -1)

    def show(progress: PrepareProgress) -> None:
        nonlocal shown
        tenths = 10 * progress.num_done // max(1, progress.num_tasks)
        if (progress.phase, tenths) != shown:
            shown = progress.phase, tenths
            passed = format_duration(time.monotonic() - started)
            print(f"{progress.phase} {progress.num_done}/{progress.num_tasks}, {passed}", file=sys.stderr, flush=True)

    ronde.init()
    result = prepare_data(options, on_progress=show)
    if ronde.rank() == 0:
        if as_json:
            splits = {
                split: {
                    "num_samples": result.index.num_samples(split),
                    "num_shards": len(shards),
                    "num_bytes": sum(shard.num_bytes for shard in shards),
                }
                for split, shards in result.index.splits.items()
            }
            facts = {"output": str(Path(options.output)), "splits": splits, "was_complete": result.was_complete}
            print(msgspec.json.encode(facts).decode())
        else:
            already = " had been prepared" if result.was_complete else ""
            print(f"{options.output}{already}: {describe_index(result.index)}")
    ronde.shutdown()


def _run(parser: CommandParser, carry_out: Callable[[], None]) -> int:
    """Carry out a command: the exit code. ValueError is a mistake of usage."""
    try:
        carry_out()
    except (ValueError, ModuleNotFoundError) as error:
        return print_error(parser.prog, error)
    except (RondeError, OSError) as error:
        print_error(parser.prog, error)
        return 1
    return 0
