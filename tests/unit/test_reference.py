"""The pages of docs/reference say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ronde.launch.driver.monitor import JobStatus, RankStatus, RoundRecord
from ronde.observe.stacks import RankStack
from tools.reference import FOLDER, pages


@pytest.mark.parametrize(("path", "text"), [pytest.param(path, text, id=path.name) for path, text in pages().items()])
def test_a_generated_page_is_fresh(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "the page is stale; run `make docs`"


def test_classes_are_shown_with_their_parameters_and_attributes_unless_these_are_for_ronde_itself() -> None:
    page = pages()[FOLDER / "names.md"]
    for shown in (
        "ronde.Bucket(count: int, dtype: str='float32', ",
        "ronde.Memory(address: int, shape: tuple[int, ...], dtype: str, device: str='cpu', ",
        "ronde.SshOptions(*, port: int=0, ",
        "\n- `count`: Number of elements, at least 1.",
        "\n- `request(to: int, header: bytes=b'', payload: Any=None, *, wait: bool=True) -> Any`: ",
        "\n- `ranks`: The members, ",
        "\n- `peer`: The rank that is gone.",
        "\n- `joined`: ",
        "\n- `payload: Any`: An array, or None.",
    ):
        assert shown in page, shown
    for hidden in ("ronde.Mailbox(", "ronde.Plan(", "object_key", "shared_id", "`number`"):
        assert hidden not in page, hidden


def test_classes_and_functions_of_tensorflow_and_keras_are_shown_as_their_sources_have_them() -> None:
    tensorflow, keras = pages()[FOLDER / "tensorflow.md"], pages()[FOLDER / "keras.md"]
    for shown in (
        "ronde.tensorflow.broadcast(x: Any, *, root: int=0, group: Group | None=None, name: str | None=None) -> Any\n",
        "\n- `dataset`: The batches of this rank as a tf.data.Dataset",
        "\n- `consumed`: How many samples",
        "\n- `set_epoch(epoch: int) -> None`: ",
        "\n- `bucket_mb: float | None = None`: ",
    ):
        assert shown in tensorflow, shown
    assert "ronde.tensorflow.ShardedDataset(" not in tensorflow
    assert "- `ronde.keras.callbacks.TrackState(state: State, *, commit_every: int | None=100)`: Keeps" in keras
    assert "ronde.keras.SyncBatchNormalization(*args: Any, group: Group | None=None, **kwargs: Any)" in keras
    assert "on_epoch_begin" not in keras


@pytest.mark.parametrize(
    ("heading", "structs"),
    [("ronde top --json", [JobStatus, RankStatus, RoundRecord]), ("ronde stack --json", [RankStack])],
    ids=["top", "stack"],
)
def test_every_field_of_the_json_output_is_documented(heading: str, structs: list[type[msgspec.Struct]]) -> None:
    page = (FOLDER / "json.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {name for struct in structs for name in struct.__struct_fields__}
