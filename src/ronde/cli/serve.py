"""`ronde serve`: predictions over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ronde.cli.arguments import CommandParser, print_error, whole_number
from ronde.cli.arguments import number as number_type
from ronde.cli.run import add_host_options
from ronde.errors import RondeError
from ronde.exit_codes import INTERRUPTED_CODE

DESCRIPTION = """Serve a model over HTTP, with the Open Inference Protocol (v2).

  ronde serve exported/alexnet --replicas 2
  ronde serve model.onnx --handler photos:JpegClassifier --port 9000
  ronde serve job.yaml

MODEL is a folder that `ronde export` has made, or a file of ONNX. A job file has
the same in its section `serve`; flags are stronger. The service listens on
127.0.0.1, and clients have to send a token, which is in a file that it names.
SIGTERM ends it when what was asked is answered; SIGHUP loads the model again."""


def serve(arguments: Sequence[str]) -> int:
    parser = CommandParser("serve", DESCRIPTION, usage="MODEL [FLAGS]\n       ronde serve JOB.yaml [FLAGS]")
    _add_flags(parser)
    given = {name: value for name, value in vars(parser.parse(arguments)).items() if value is not None}
    try:
        from ronde.launch.output.printer import open_standard_printer
        from ronde.serve.service import run_service

        path = given["model"]
        job_file = path if path.endswith((".yaml", ".yml")) else ""
        run_service(_make_options(given, job_file), open_standard_printer, _print_event, job_file=job_file)
    except (ValueError, ModuleNotFoundError) as error:
        return print_error(parser.prog, error)
    except (RondeError, OSError) as error:
        print_error(parser.prog, error)
        return 1
    except KeyboardInterrupt:  # before signals are handled, or after
        return INTERRUPTED_CODE
    return 0


def _add_flags(parser: CommandParser) -> None:
    seconds = number_type(0)
    model = parser.add_argument_group("Model and replicas")
    parser.add_argument(
        "model", metavar="MODEL", help="Folder or file of a model, or a job file, which ends with .yaml."
    )

    def add(group: Any, flag: str, metavar: str, help: str, **more: Any) -> None:
        group.add_argument(flag, metavar=metavar, help=help, **more)

    add(model, "--name", "NAME", "Name of the model in URLs. Default: that in its metadata.")
    add(model, "--handler", "MODULE:CLASS", "Class with preprocess, predict and postprocess.")
    add(model, "--replicas", "N", "Processes that predict. Default: all slots of the hosts, or 1.", type=whole_number)
    add(model, "--threads", "N", "Threads of one replica. Default: the cores, shared by all.", type=whole_number)
    http = parser.add_argument_group("Clients")
    add(http, "--host", "ADDRESS", "Where to listen; 0.0.0.0 for all addresses. Default: 127.0.0.1.")
    add(http, "--port", "PORT", "Default: 8000; 0 for any free one.", type=int)
    add(http, "--token-file", "FILE", "Token of clients. Default: $RONDE_SERVE_TOKEN, or a new one.")
    http.add_argument("--no-token", action="store_true", default=None, help="Answer everybody who can connect.")
    add(http, "--certificate", "FILE", "Certificate chain for TLS.")
    add(http, "--private-key", "FILE", "Private key of the certificate.")
    add(http, "--allowed-host", "NAME", "Name in the header Host. Repeatable.", action="append", dest="allowed_hosts")
    add(http, "--max-body-bytes", "N", "The largest request. Default: 64 MiB.", type=whole_number)
    add(http, "--max-buffered-bytes", "N", "The largest sum of requests. Default: 1 GiB.", type=whole_number)
    add(http, "--max-connections", "N", "Default: 4096.", type=whole_number)
    add(http, "--body-timeout-s", "S", "For a client to send its request. Default: 30.", type=seconds)
    http.add_argument("--allow-nan", action="store_true", default=None, help="Inputs may hold NaN.")
    batches = parser.add_argument_group("Batches and time limits")
    add(batches, "--max-batch", "N", "The most samples predicted together. Default: 32.", type=whole_number)
    help = "How long requests may wait for company while all replicas are busy. Default: 2."
    add(batches, "--max-delay-ms", "MS", help, type=seconds)
    add(batches, "--max-waiting", "N", "Requests that wait; others get 503. Default: 1000.", type=whole_number)
    add(batches, "--timeout-s", "S", "How long a request may take. Default: 60.", type=seconds)
    help = "A replica that takes longer for a batch is replaced. Default: 60."
    add(batches, "--predict-timeout-s", "S", help, type=seconds)
    add(batches, "--load-timeout-s", "S", "For loading a model that replaces another. Default: 300.", type=seconds)
    add(batches, "--drain-s", "S", "At the end, for answering what was asked. Default: 30.", type=seconds)
    help = "At the end, how long to be not ready before connections are refused. Default: 0."
    add(batches, "--drain-delay-s", "S", help, type=seconds)
    add_host_options(parser)


def _make_options(given: dict[str, Any], job_file: str) -> Any:
    from ronde.launch.config import read_section
    from ronde.serve.service import ServeOptions

    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if not job_file:
        return ServeOptions(**given)
    del given["model"]
    return msgspec.structs.replace(read_section(job_file, "serve", ServeOptions), **given)


def _print_event(text: str) -> None:
    print(f"[ronde] {text}", file=sys.stderr, flush=True)
