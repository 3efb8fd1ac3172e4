"""`ronde data`: prepares data sets, and moves them. Under `ronde run` all ranks share the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ronde.cli.arguments import (
    Command,
    CommandParser,
    list_commands,
    parse_option,
    print_error,
    run_command,
    whole_number,
)
from ronde.errors import RondeError
from ronde.text import format_bytes, format_duration

COMMANDS = {
    "prepare": Command("ronde.cli.data:prepare", "Cut a data set into shards with checksums and an index."),
    "upload": Command("ronde.cli.data:upload", "Copy prepared data to an object store, or another folder."),
    "download": Command(
        "ronde.cli.data:download", "Copy prepared data to this machine; on several hosts, a share to each."
    ),
    "verify": Command("ronde.cli.data:verify", "Compare all files of prepared data with their checksums."),
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
        "Prepare data sets for training, and move them.",
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
    help = "Keyword argument of the transform. Repeatable."
    parser.add_argument("--transform-option", metavar="NAME=VALUE", action="append", type=parse_option, help=help)
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
    if "transform_option" in given:
        given["transform_options"] = dict(given.pop("transform_option"))

    def make_options() -> PrepareOptions:
        if "output" in given:
            return PrepareOptions(**given)
        if not given["input"].endswith((".yaml", ".yml")):
            raise ValueError("give the folder to make, OUT, or a job file that ends with .yaml")
        from ronde.launch.config import read_section
        from ronde.launch.named_functions import search_modules_beside

        job_file = given.pop("input")
        options = read_section(job_file, "data", PrepareOptions)
        if options.transform or ":" in options.input:
            search_modules_beside(job_file)
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


def upload(arguments: Sequence[str]) -> int:
    parser = _make_transfer_parser("upload", "FOLDER URL [FLAGS]")
    parser.add_argument("source", metavar="FOLDER", help="Prepared data.")
    parser.add_argument("target", metavar="URL", help="As in s3://bucket/photos.")
    return _transfer(parser, arguments, "upload")


def download(arguments: Sequence[str]) -> int:
    parser = _make_transfer_parser("download", "URL FOLDER [FLAGS]")
    parser.add_argument("source", metavar="URL", help="Prepared data, as in s3://bucket/photos.")
    parser.add_argument("target", metavar="FOLDER", help="Folder of this machine.")
    parser.add_argument("--whole", action="store_true", help="On several hosts, copy everything to each of them.")
    parser.add_flag(
        "--splits", metavar="NAME,…", type=lambda text: text.split(","), help="Splits to copy. Default: all."
    )
    return _transfer(parser, arguments, "download")


def _make_transfer_parser(name: str, usage: str) -> CommandParser:
    parser = CommandParser(f"data {name}", COMMANDS[name].help, usage=usage)
    parser.add_flag(
        "--parallel", dest="num_parallel", metavar="N", type=whole_number, default=8, help="Files at a time."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    return parser


def _transfer(parser: CommandParser, arguments: Sequence[str], name: str) -> int:
    given = {flag: value for flag, value in vars(parser.parse(arguments)).items() if value is not None}
    as_json = given.pop("json")

    def carry_out() -> None:
        import ronde
        from ronde.data import transfer

        ronde.init()
        source, target = given.pop("source"), given.pop("target")
        result = getattr(transfer, name)(source, target, on_progress=_show_transfer, **given)
        if as_json:
            print(msgspec.json.encode({"rank": ronde.rank(), **result._asdict()}).decode())
        else:
            print(f"{target}: {transfer.describe_transfer(result)}")
        ronde.shutdown()

    return _run(parser, carry_out)


def _show_transfer(progress: Any) -> None:
    step = max(1, progress.num_all_files // 10)
    if progress.num_files % step == 0 or progress.num_files == progress.num_all_files:
        size = format_bytes(progress.num_bytes)
        print(f"{progress.num_files}/{progress.num_all_files} files, {size}", file=sys.stderr, flush=True)


def verify(arguments: Sequence[str]) -> int:
    parser = _make_transfer_parser("verify", "FOLDER|URL [FLAGS]")
    parser.add_argument("path", metavar="FOLDER|URL", help="Prepared data.")
    flags = parser.parse(arguments)
    is_good = True

    def carry_out() -> None:
        nonlocal is_good
        import ronde
        from ronde.data import transfer

        ronde.init()
        damaged = transfer.verify(flags.path, num_parallel=flags.num_parallel, on_progress=_show_transfer)
        is_good = not damaged
        if ronde.rank() == 0:
            if flags.json:
                print(msgspec.json.encode([each._asdict() for each in damaged]).decode())
            else:
                for each in damaged:
                    print(f"{each.name}: {each.problem}")
                print(
                    f"{flags.path}: "
                    + (f"{len(damaged)} damaged files" if damaged else "all files are as they were written")
                )
        ronde.shutdown()

    return _run(parser, carry_out) or int(not is_good)


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
