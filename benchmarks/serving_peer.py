"""The peer of serving.py: a plain Starlette application that predicts with ONNX Runtime in each of uvicorn's workers.

    uvicorn serving_peer:app --workers 3        with MODEL in the environment

It reads the same requests (Open Inference Protocol with one binary input) and sends the same replies, without checks,
token, limits or batching: what one writes first.
"""

from __future__ import annotations

import json
import os

import numpy as np
import onnxruntime
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

session_options = onnxruntime.SessionOptions()
session_options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(os.environ["MODEL"], session_options, providers=["CPUExecutionProvider"])


async def infer(request: Request) -> Response:
    body = await request.body()
    length = int(request.headers["inference-header-content-length"])
    tensor = json.loads(body[:length])["inputs"][0]
    (output,) = session.run(None, {tensor["name"]: np.frombuffer(body[length:], np.float32).reshape(tensor["shape"])})
    data = output.tobytes()
    described = {
        "name": "y",
        "datatype": "FP32",
        "shape": output.shape,
        "parameters": {"binary_data_size": len(data)},
    }
    text = json.dumps({"model_name": "mlp", "model_version": "1", "outputs": [described]}).encode()
    return Response(text + data, headers={"inference-header-content-length": str(len(text))})


app = Starlette(routes=[Route("/v2/models/mlp/infer", infer, methods=["POST"])])
