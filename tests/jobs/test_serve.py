"""`ronde serve` with real processes: clients, kills, poison, another model, the end."""

from __future__ import annotations

import concurrent.futures
import http.client
import io
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.commands import ROOT, output_of
from tests.jobs.kit import SshHosts
from tests.jobs.service import TOKEN, RunningService, serving
from tests.limits import LONG_TEST_S, PATIENCE_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)
EXAMPLE = ROOT / "examples/serving"
INFER = "/v2/models/colors/infer"

HANDLER = '''
"""A handler that does what the first number of a request says."""

import os
import signal
import time
from pathlib import Path

from ronde.serve import Handler

HERE = Path(__file__).parent


class Obedient(Handler):
    def preprocess(self, inputs):
        order = float(inputs["pixels"].flat[0])
        if order == 100:
            raise ValueError("100 is refused")
        if order == 101:
            raise KeyError("101 fails")
        return inputs

    def predict(self, inputs):
        orders = set(inputs["pixels"][:, 0, 0, 0].tolist())
        if 102 in orders:
            with (HERE / "deaths").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        if 103 in orders:
            (HERE / "waiting").touch()
            while not (HERE / "go-on").exists():
                time.sleep(0.01)
        return super().predict(inputs)
'''


def jpeg(color: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (80, 60), color).save(file, "JPEG")
    return file.getvalue()


def body(*orders: float) -> tuple[bytes, dict[str, str]]:
    """A request whose pictures have these numbers in all pixels."""
    values = np.stack([np.full((3, 32, 32), order, np.float32) for order in orders])
    tensor = {"name": "pixels", "shape": values.shape, "datatype": "FP32"}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": values.nbytes}}]}).encode()
    return text + values.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


def scores(reply: Any) -> Any:
    (output,) = reply["outputs"]
    return np.array(output["data"]).reshape(output["shape"])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    output_of([sys.executable, EXAMPLE / "make_model.py", folder / "colors"])
    (folder / "obedient.py").write_text(HANDLER)
    return folder


@pytest.fixture(scope="module")
def service(project: Path) -> Iterator[RunningService]:
    flags = ["--handler", "obedient:Obedient", "--replicas", "2", "--threads", "1", "--max-batch", "8"]
    flags += ["--max-body-bytes", "1000000", "--max-waiting", "100", "--body-timeout-s", "1"]
    with serving(project, "colors", *flags) as running:
        yield running


@pytest.mark.leaves(reason="Triton's client keeps the event loop of gevent")
def test_tritons_client_is_answered(service: RunningService) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"127.0.0.1:{service.port}")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("colors", headers=headers)
    assert not client.is_model_ready("colours", headers=headers)
    assert client.get_server_metadata(headers=headers)["extensions"] == ["binary_tensor_data", "model_repository"]
    metadata = client.get_model_metadata("colors", headers=headers)
    assert metadata["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, 3, 32, 32]}]
    values = np.random.default_rng(0).random((2, 3, 32, 32), np.float32)
    expected = 10 * values.mean(axis=(2, 3))
    for is_binary in (True, False):
        given = triton.InferInput("pixels", values.shape, "FP32")
        given.set_data_from_numpy(values, binary_data=is_binary)
        for outputs in (None, [triton.InferRequestedOutput("scores", binary_data=not is_binary)]):
            for compression in (None, "gzip", "deflate"):
                found = client.infer(
                    "colors",
                    [given],
                    outputs=outputs,
                    request_id="7",
                    headers={**headers},  # the client adds to it
                    request_compression_algorithm=compression,
                )
                assert np.allclose(found.as_numpy("scores"), expected, rtol=1e-5)
                assert found.get_response()["id"] == "7"
    with pytest.raises(triton.InferenceServerException, match="token"):
        client.infer("colors", [given])
    with pytest.raises(triton.InferenceServerException, match="no model 'colours'"):
        client.infer("colours", [given], headers=headers)
    client.close()


def test_bad_requests_get_a_clear_error_and_the_next_is_answered(service: RunningService) -> None:
    before = service.metric("replicas_lost_total")
    good, headers = body(1)
    wrong: list[tuple[bytes, dict[str, str], int, str]] = [
        (b"{", {}, 400, "JSON"),
        (good, {"Inference-Header-Content-Length": "999999"}, 400, "Inference-Header-Content-Length"),
        (good[:-1], headers, 400, "bytes are left"),
        (good + b"x", headers, 400, "belong to no input"),
        (body(float("nan"))[0], headers, 400, "NaN"),
        (bytes(1_000_001), {}, 413, "larger"),
        (*body(100), 400, "100 is refused"),
        (*body(101), 500, "101 fails"),
        (good.replace(b"FP32", b"INT8"), headers, 400, "datatype"),
    ]
    for data, given, status, reason in wrong:
        found, reply, _ = service.ask(INFER, data, given)
        assert (found, reason in reply["error"]) == (status, True), (found, reply, reason)
    for path, method, status in (
        ("/v2/models/colors/versions/9/infer", "POST", 404),
        (INFER, "GET", 405),
        ("/x", "GET", 404),
    ):
        assert service.ask(path, good if method == "POST" else None, headers, method)[0] == status
    status, reply, _ = service.ask(INFER, good, headers)
    assert status == 200 and np.allclose(scores(reply), 10)
    assert service.metric("replicas_lost_total") == before


def test_a_bad_request_in_a_batch_concerns_nobody_else(service: RunningService) -> None:
    orders = [1, 100, 2, 101, 3, 4, 5, 6] * 4
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = [*pool.map(lambda order: service.ask(INFER, *body(order)), orders)]
    for order, (status, reply, _) in zip(orders, replies, strict=True):
        assert status == {100: 400, 101: 500}.get(order, 200)
        assert status != 200 or np.allclose(scores(reply), 10 * order)


@pytest.mark.leaves(reason="Triton's client keeps the event loop of gevent")
def test_killed_replicas_are_replaced_and_no_request_fails(service: RunningService) -> None:
    triton = pytest.importorskip("tritonclient.http")
    stop, failures, num_done = threading.Event(), [], [0]

    def load(order: float) -> None:
        client = triton.InferenceServerClient(f"127.0.0.1:{service.port}", network_timeout=300.0)
        values = np.full((1, 3, 32, 32), order, np.float32)
        given = triton.InferInput("pixels", values.shape, "FP32")
        given.set_data_from_numpy(values)
        while not stop.is_set():
            try:
                found = client.infer("colors", [given], headers={"Authorization": f"Bearer {TOKEN}"})
                assert np.allclose(found.as_numpy("scores"), 10 * order)
                num_done[0] += 1
            except Exception as error:
                failures.append(error)
        client.close()

    threads = [threading.Thread(target=load, args=(order,)) for order in (1.0, 2.0, 3.0, 4.0)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            service.wait_until(lambda: service.metric("replicas_ready") == 2)
            enough = num_done[0] + 20
            service.wait_until(lambda enough=enough: num_done[0] > enough)
            lost = service.metric("replicas_lost_total")
            service.replicas()[0].kill()
            service.wait_until(lambda lost=lost: service.metric("replicas_lost_total") > lost)
        service.wait_until(lambda: service.metric("replicas_ready") == 2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.leaves(reason="the service, which other tests use as well, has other replicas then")
def test_a_request_that_kills_replicas_is_set_aside_and_never_takes_all(service: RunningService, project: Path) -> None:
    service.wait_until(lambda: service.metric("replicas_ready") == 2)
    lost = service.metric("replicas_lost_total")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        poison = pool.submit(service.ask, INFER, *body(102))
        while not poison.done():
            for status, _, _ in pool.map(lambda order: service.ask(INFER, *body(order)), (1, 2, 3, 4)):
                assert status == 200
        status, reply, _ = poison.result()
    assert (status, "two replicas have died" in reply["error"]) == (500, True), (reply, service.printed)
    assert service.metric("replicas_lost_total") == lost + 2
    status, reply, _ = service.ask(INFER, *body(102))  # the same again is refused at once
    assert (status, "equal request" in reply["error"]) == (500, True)
    assert (project / "deaths").read_text() == "xx"
    assert service.metric("requests_set_aside_total") == 1
    service.wait_until(lambda: service.metric("replicas_ready") == 2)


def test_a_full_queue_refuses_with_503_and_predicts_only_what_somebody_waits_for(
    service: RunningService, project: Path
) -> None:
    service.wait_until(lambda: service.metric("replicas_ready") == 2)
    before = service.metric("batch_rows_sum")
    with concurrent.futures.ThreadPoolExecutor(140) as pool:
        first = []
        for number in (1, 2):  # one after the other, so that each blocks a replica
            first.append(pool.submit(service.ask, INFER, *body(103)))
            service.wait_until(lambda number=number: service.metric("requests_sent") == number)
        service.wait_until((project / "waiting").exists)
        leaving = [http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S) for _ in range(30)]
        data, headers = body(*[7] * 8)  # each is a whole batch, and more than is read at a time
        for client in leaving:
            client.request("POST", INFER, data, {"Authorization": f"Bearer {TOKEN}", **headers})
        # Behind those that are predicted, each replica has one more.
        service.wait_until(lambda: (service.metric("requests_sent"), service.metric("requests_waiting")) == (4, 28))
        for client in leaving:
            client.close()
        service.wait_until(lambda: service.metric("requests_waiting") == 0)
        orders = range(1000, 1138)
        others = [pool.submit(service.ask, INFER, *body(order)) for order in orders]
        service.wait_until(lambda: any(each.done() and each.result()[0] == 503 for each in others))
        assert service.ask("/v2/health/ready")[0] == 200
        (project / "go-on").touch()
        results = [each.result() for each in others]
    assert {each.result()[0] for each in first} == {200}
    assert {status for status, _, _ in results} == {200, 503}
    for order, (status, reply, given) in zip(orders, results, strict=True):
        if status == 200:
            assert np.allclose(scores(reply), 10 * order, rtol=1e-5)
        else:
            assert int(given["retry-after"]) >= 1
    num_answered = sum(status == 200 for status, _, _ in results)
    assert service.metric("batch_rows_sum") - before == 2 + 2 * 8 + num_answered


@pytest.mark.leaves(reason="the service, which other tests use as well, has other replicas then")
def test_another_model_replaces_the_first_and_a_broken_one_does_not(service: RunningService, project: Path) -> None:
    service.wait_until(lambda: service.metric("replicas_ready") == 2)
    shutil.copytree(project / "colors", project / "before")
    stop, seen, failures = threading.Event(), set(), []

    def load() -> None:
        while not stop.is_set():
            status, reply, _ = service.ask(INFER, *body(1))
            if status != 200:
                failures.append(reply)
            else:
                seen.add((reply["model_version"], round(float(scores(reply)[0, 0]))))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        make = "from pathlib import Path; import make_model; make_model.make_model(Path({!r}), {})"
        output_of([sys.executable, "-c", make.format(str(project / "colors"), 20.0)], cwd=EXAMPLE)
        status, reply, _ = service.ask("/v2/repository/models/colors/load", b"{}")
        assert (status, reply["changed"], reply["version"]) == (200, True, "2"), reply
        service.wait_until(lambda: ("2", 20) in seen)
        assert service.ask("/v2/repository/models/colors/load", b"")[1]["changed"] is False
        damaged = (project / "colors/model.onnx").read_bytes()
        (project / "colors/model.onnx").write_bytes(damaged[:-40])
        status, reply, _ = service.ask("/v2/repository/models/colors/load", b"{}")
        assert (status, "damaged" in reply["error"]) == (400, True), reply
        # One that cannot be loaded, although its checksums are right.
        other = (
            "from ronde.serve.model import *; import msgspec; r = Path('colors'); (r / 'model.onnx').write_bytes(b'x');"
        )
        other += "m = msgspec.json.decode((r / 'model.json').read_bytes(), type=ModelMetadata); write_metadata(r, m)"
        output_of([sys.executable, "-c", other], cwd=project)
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("the model was not changed")
        lost = service.metric("replicas_lost_total")
        service.replicas()[0].kill()  # the next one loads the model that is served, not the one that is in the folder
        service.wait_until(lambda: service.metric("replicas_lost_total") > lost)
        service.wait_until(lambda: service.metric("replicas_ready") == 2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        shutil.rmtree(project / "colors")
        (project / "before").rename(project / "colors")
    assert failures == []
    assert seen == {("1", 10), ("2", 20)}
    status, reply, _ = service.ask(INFER, *body(1))
    assert (status, reply["model_version"]) == (200, "2")


def test_the_end_answers_what_was_asked_and_leaves_nothing(project: Path) -> None:
    (project / "go-on").unlink(missing_ok=True)
    (project / "waiting").unlink(missing_ok=True)
    with (
        serving(project, "colors", "--handler", "obedient:Obedient") as service,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        asked = pool.submit(service.ask, INFER, *body(103))
        service.wait_until((project / "waiting").exists)
        replicas = service.replicas()
        service.process.send_signal(signal.SIGTERM)
        service.wait_for("SIGTERM: ")
        (project / "go-on").touch()
        assert asked.result()[0] == 200
        assert service.process.wait(60) == 0
        assert [each for each in replicas if each.is_running()] == []
        assert TOKEN not in service.printed


def test_photos_are_answered_as_the_example_says(project: Path) -> None:
    shutil.copy(EXAMPLE / "photos.py", project)
    (project / "job.yaml").write_text("serve:\n  model: colors\n  handler: photos:PhotoHandler\n  replicas: 1\n")
    with serving(project, "job.yaml") as service:
        for color, label in (((250, 10, 10), "red"), ((10, 10, 250), "blue")):
            status, reply, _ = service.ask(INFER, jpeg(color), {"Inference-Header-Content-Length": "0"})
            assert status == 200, reply
            found = {each["name"]: each["data"] for each in reply["outputs"]}
            assert found["label"] == [label] and 0.9 < found["probability"][0] <= 1
        for data in (b"no photo", jpeg((1, 2, 3))[:100]):
            status, reply, _ = service.ask(INFER, data, {"Inference-Header-Content-Length": "0"})
            assert (status, "no JPEG" in reply["error"]) == (400, True)


ASK = """
import http.client, json, sys
from pathlib import Path
port, body, length, token = int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), sys.argv[3], sys.argv[4]
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
for _ in range(int(sys.argv[5])):
    headers = {"Authorization": "Bearer " + token, "Inference-Header-Content-Length": length}
    connection.request("POST", "/v2/models/colors/infer", body, headers)
    reply = connection.getresponse()
    print(reply.status, json.loads(reply.read())["outputs"][0]["data"][0])
connection.request("GET", "/metrics", headers={"Authorization": "Bearer " + token})
print(connection.getresponse().read().decode())
"""


def test_replicas_of_other_hosts_get_the_model_from_the_front(hosts: SshHosts, project: Path, tmp_path: Path) -> None:
    _, b, c = hosts.addresses
    data, headers = body(3)
    (tmp_path / "body").write_bytes(data)
    (tmp_path / "ask.py").write_text(ASK)
    command = hosts.command("colors", "-H", f"{b}:1,{c}:1", "--port", "0", verb="serve")
    with serving(project, command=command) as service:

        def ask(count: int) -> str:
            words: list[str | Path] = [sys.executable, tmp_path / "ask.py", str(service.port), tmp_path / "body"]
            words += [headers["Inference-Header-Content-Length"], TOKEN, str(count)]
            return output_of([*hosts.exec(0), *words])

        service.wait_until(lambda: "replicas_ready 2" in ask(1))
        assert ask(20).count("200 30.0") == 20
        replicas = [each for each in hosts.processes(1) if "function_rank" in " ".join(each.cmdline())]
        replicas[0].kill()
        assert ask(20).count("200 30.0") == 20
        service.wait_until(lambda: "replicas_ready 2" in ask(1))
