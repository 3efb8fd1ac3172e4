"""Mistakes on the command line of `ronde serve`, and in its section of a job file, are named before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["nothing"], 1, "there is no model at nothing"),
        (["model.onnx", "--handler", "json:Missing"], 2, "json"),
        (["model.onnx", "--replicas", "0"], 2, "at least 1"),
        (["model.onnx", "--max-batchs", "3"], 2, "did you mean --max-batch"),
        (["model.onnx", "--name", "a/b"], 2, "letters"),
        (["model.onnx", "--certificate", "x"], 2, "private key"),
        (["model.onnx", "-H", "localhost:1", "--replicas", "2"], 2, "slot"),
        (["bad.yaml"], 2, "line 3: unknown key 'replika'"),
        (["empty.yaml"], 2, "there is no model to serve"),
        (["model.onnx"], 1, "model.onnx"),
        (["model.onnx", "--token-file", "none"], 2, "none"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    reason: str,
) -> None:
    (tmp_path / "bad.yaml").write_text("serve:\n  model: model.onnx\n  replika: 2\n")
    (tmp_path / "empty.yaml").write_text("serve:\n  replicas: 2\n")
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff no model")
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["serve", *arguments, "--port", "0"])
    except SystemExit as ended:
        found = int(str(ended.code))
    assert (found, reason in (printed := capsys.readouterr().err)) == (code, True), printed
    assert "listening" not in printed
