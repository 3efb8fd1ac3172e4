"""Files with what each rank printed, and what happens when they cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.errors import StartFailed
from ronde.launch.output.files import RankOutputFiles


def test_the_files_of_a_rank_may_have_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "rank-7.out").write_text("not of this kind")
    files = RankOutputFiles(str(tmp_path / "new"), num_ranks=11, print_message=pytest.fail, horovod_layout=True)
    files.write(3, "err", b"\r50%\xff\x00")
    files.write(3, "err", b"\r100%\r\n")
    assert (tmp_path / "new" / "rank.03" / "stderr").read_bytes() == b"\r50%\xff\x00\r100%\r\n", "it is written at once"
    files.close()
    assert (tmp_path / "new" / "rank.10" / "stdout").read_bytes() == b""
    assert (tmp_path / "new" / "rank-7.out").exists()


def test_files_of_an_earlier_run_are_overwritten_or_removed_and_others_left_alone(tmp_path: Path) -> None:
    others = {"notes.txt", "rank-7.txt", "rank-7.out.gz", "my-rank-7.out", "rank-x.out"}
    for name in {"rank-0.out", "rank-7.out", "rank-7.err", "rank-00.out", *others}:
        (tmp_path / name).write_text("old")
    (tmp_path / "rank-8.out").mkdir()
    RankOutputFiles(str(tmp_path), num_ranks=2, print_message=pytest.fail).close()
    new = {"rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err"}
    assert {path.name for path in tmp_path.iterdir()} == new | others | {"rank-8.out"}
    assert all((tmp_path / name).read_text() == "" for name in new)
    assert all((tmp_path / name).read_text() == "old" for name in others)


def test_more_ranks_than_descriptors_are_no_problem(tmp_path: Path) -> None:
    files = RankOutputFiles(str(tmp_path), num_ranks=300, print_message=pytest.fail)
    for part in (b"a", b"b", b"c"):
        for rank in range(300):
            files.write(rank, "out", part)
    assert len(list(Path("/proc/self/fd").iterdir())) < 250
    files.close()
    assert all((tmp_path / f"rank-{rank:03}.out").read_bytes() == b"abc" for rank in range(300))


def test_a_full_disk_is_reported_once_and_the_other_files_go_on(tmp_path: Path) -> None:
    for name in ("rank-0.out", "rank-1.out"):
        (tmp_path / name).symlink_to("/dev/full")
    messages: list[str] = []
    files = RankOutputFiles(str(tmp_path), num_ranks=3, print_message=messages.append)
    for rank in (0, 0, 1, 2):
        files.write(rank, "out", b"data")
    assert messages == [
        f"cannot write {tmp_path}/rank-0.out: No space left on device; the job goes on, the file stays incomplete"
    ]
    files.close()
    assert messages[1:] == [f"incomplete output files: {tmp_path}/rank-0.out, {tmp_path}/rank-1.out"]
    assert (tmp_path / "rank-2.out").read_bytes() == b"data"
    files.close()
    assert len(messages) == 2


def test_a_file_that_failed_stays_a_true_beginning(tmp_path: Path) -> None:
    files = RankOutputFiles(str(tmp_path), num_ranks=1, print_message=lambda words: None)
    files.write(0, "out", b"one ")
    files.close()
    path = tmp_path / "rank-0.out"
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    files.write(0, "out", b"two ")
    path.unlink()
    (tmp_path / "kept").rename(path)
    files.write(0, "out", b"three ")
    files.close()
    assert path.read_bytes() == b"one "


def test_a_folder_that_cannot_be_made_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StartFailed, match=r"cannot make the output file .*/taken/logs: Not a directory"):
        RankOutputFiles(str(tmp_path / "taken" / "logs"), num_ranks=1, print_message=pytest.fail)
