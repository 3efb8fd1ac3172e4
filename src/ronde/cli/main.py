"""The console script `ronde`: finds the command and runs it. `python -m ronde.cli.main` does the same."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from ronde.cli.arguments import Command, CommandParser, list_commands, run_command
from ronde.exit_codes import INTERRUPTED_CODE

COMMANDS = {
    "run": Command("ronde.cli.run:run", "Start a command as the ranks of one job, here or on many hosts."),
    "top": Command("ronde.cli.top:top", "Show live what ranks do with their time, and who holds up others."),
    "stack": Command("ronde.cli.stack:stack", "Print where every rank of a running job is: its Python stack."),
    "data": Command("ronde.cli.data:data", "Prepare data sets for training, in parallel on all ranks."),
    "search": Command("ronde.cli.search:search", "Search for hyper-parameters, on warm workers or with a command."),
    "export": Command("ronde.cli.export:export", "Make a model of a checkpoint: ONNX with its metadata."),
    "predict": Command("ronde.cli.predict:predict", "Predict with a model over a data set, on any number of ranks."),
    "workflow": Command(
        "ronde.cli.workflow:workflow", "Prepare, search, train, export and predict, as a job file says."
    ),
    "serve": Command("ronde.cli.serve:serve", "Answer requests for predictions over HTTP, with several replicas."),
    "bench": Command("ronde.cli.bench.command:bench", "Measure ronde on this machine, in turn with gloo, DDP and MPI."),
    "doctor": Command(
        "ronde.cli.doctor.command:doctor", "Say whether jobs can run on these hosts, and what to do if not."
    ),
    "version": Command("ronde.cli.main:print_version", "Say which ronde this is, on which Python."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ronde ARGUMENTS` (by default those of this process): the exit code."""
    # A standard stream that is closed (`>&-`) becomes /dev/null, which takes the number of the closed descriptor that
    # another file would get otherwise. A character that the encoding of standard output lacks is printed as `?`.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123  # a device, until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--version"]:
        arguments = ["version"]
    parser = CommandParser(
        "",
        "Distributed deep-learning training that says which rank, where and why.",
        usage="COMMAND …",
        epilog=f"{list_commands(COMMANDS)}\n\n`ronde COMMAND --help` has more.",
    )
    parser.add_argument("--version", action="store_true", help="As `ronde version`.")
    try:
        exit_code = run_command(parser, COMMANDS, arguments)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader of the output has left
        # What is still in the buffer goes nowhere: otherwise Python would complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def print_version(arguments: Sequence[str]) -> int:
    import platform

    from ronde.version import __version__

    CommandParser("version", COMMANDS["version"].help, usage="").parse(arguments)
    print(f"ronde {__version__}, Python {platform.python_version()}, {platform.machine()} {platform.system()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
