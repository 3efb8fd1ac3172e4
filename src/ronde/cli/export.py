"""`ronde export`: makes a model folder of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ronde.cli.arguments import CommandParser, parse_option, print_error
from ronde.errors import RondeError

DESCRIPTION = """Make a model folder of a checkpoint: model.onnx, and model.json with inputs,
outputs, labels and preprocessing.

  ronde export runs/7/checkpoints --model mymodels:make_model \\
      --example-input image=float32:1x3x64x64 --output models/photos
  ronde export model.keras --example-input x=float32:1x10 --output models/scores
  ronde export job.yaml

CHECKPOINT is a folder or URL of ronde's checkpoints, or a file of weights (.pt,
.safetensors, .keras, .weights.h5). The exported model is compared with the
original at batches of 1, 2 and 7 samples. A job file has the same in its section
`export`."""


def export(arguments: Sequence[str]) -> int:
    parser = CommandParser("export", DESCRIPTION, usage="CHECKPOINT [FLAGS]\n       ronde export JOB.yaml [FLAGS]")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Weights, or a job file.")
    parser.add_flag("--output", metavar="FOLDER", help="Model folder to make. Default: model.")
    parser.add_flag("--model", metavar="MODULE:FACTORY", help="Returns the model, without weights.")
    help = "Keyword argument of the factory. Repeatable."
    parser.add_argument("--model-option", metavar="NAME=VALUE", action="append", type=parse_option, help=help)
    help = "An input, with the batch first, as in image=float32:1x3x64x64, or NAME=FILE.npy. Repeatable."
    parser.add_argument("--example-input", metavar="NAME=DTYPE:SHAPE", action="append", help=help)
    parser.add_flag("--to", metavar="onnx|own", help="ONNX, or the framework's own format. Default: onnx.")
    parser.add_flag("--outputs", metavar="NAME,…", type=lambda text: text.split(","), help="Names of the outputs.")
    help = "Names of classes: a file with one in each line, or a folder of prepared data."
    parser.add_flag("--labels", metavar="FILE|DATA", help=help)
    parser.add_flag("--name", metavar="NAME", help="Of the model. Default: that of the folder.")
    parser.add_flag("--part", metavar="NAME", help="Part of the checkpoint with the weights. Default: model.")
    parser.add_flag("--step", metavar="N", type=int, help="Step of the checkpoint. Default: the latest.")
    parser.add_flag("--framework", metavar="NAME", help="Default: that of what the factory returns.")
    parser.add_flag("--tolerance", metavar="X", type=float, help="Largest relative difference. Default: 0.001.")
    parser.add_argument("--trust", action="store_true", default=None, help="Load pickles: they may run code.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    flags = vars(parser.parse(arguments))
    as_json = flags.pop("json")
    given = {name: value for name, value in flags.items() if value is not None}
    if "model_option" in given:
        given["model_options"] = dict(given.pop("model_option"))
    try:
        _export(given, as_json=as_json)
    except (ValueError, ModuleNotFoundError) as error:
        return print_error(parser.prog, error)
    except (RondeError, OSError) as error:
        print_error(parser.prog, error)
        return 1
    return 0


def _export(given: dict[str, Any], *, as_json: bool) -> None:
    from ronde.launch.config import read_section
    from ronde.launch.named_functions import search_modules_beside
    from ronde.serve.export import ExportOptions, export_model

    job_file = ""
    if given["checkpoint"].endswith((".yaml", ".yml")):
        job_file = given.pop("checkpoint")
        options = msgspec.structs.replace(read_section(job_file, "export", ExportOptions), **given)
    else:
        options = ExportOptions(**{"output": "model", **given})
    if options.to not in ("onnx", "own"):
        raise ValueError(f"--to must be onnx or own, got {options.to!r}")
    if options.model or options.trust:
        search_modules_beside(job_file)
    result = export_model(options, on_progress=lambda text: print(text, file=sys.stderr, flush=True))
    metadata = result.folder.metadata
    if as_json:
        facts = {
            "output": str(result.folder.path),
            "fingerprint": result.folder.fingerprint,
            "max_difference": result.max_difference,
            "metadata": metadata,
        }
        print(msgspec.json.encode(facts).decode())
        return
    print(f"{result.folder.path}: {metadata.kind}, differs from the original by at most {result.max_difference:.1g}")
    for noun, tensors in (("input", metadata.inputs), ("output", metadata.outputs)):
        for each in tensors:
            print(f"  {noun}  {each.describe()}")
