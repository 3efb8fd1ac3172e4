"""`ronde data upload`, `download` and `verify`: prepared data between folders and object stores, with checksums.

Files are transferred several at a time, and again after a failure. The index is removed before anything is replaced and
written when everything is there, so data that are half transferred have no index, and nobody reads them. A transfer
that was killed goes on with the files that are missing.

Ranks share the files. A download on several hosts gives each host its share: a part of the shards, with an index that
lists only these. So each host's data are a data set of its own, for Stream(…, local=True).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple, TypeVar

import msgspec

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.data.files import DataFolder, DiskFull, LocalFolder, open_folder, write_aside
from ronde.data.shards import INDEX_NAME, DataIndex, ShardInfo, read_index, write_index
from ronde.errors import DataError
from ronde.text import format_bytes
from ronde.training.agreement import check_settings

logger = logging.getLogger("ronde.data")

CHUNK_BYTES = 8 << 20
NUM_PARALLEL = 8
NUM_TRIES = 5
FIRST_PAUSE_S = 0.2
"""Before the second try; each further pause is twice as long."""
MARK_NAME = "unfinished-upload.json"
"""Says which data are being uploaded: files of these need not be uploaded again."""

Result = TypeVar("Result")


class TransferProgress(NamedTuple):
    """How far this rank has come."""

    num_files: int
    num_all_files: int
    num_bytes: int


class TransferResult(NamedTuple):
    """What one rank has done."""

    num_transferred: int
    num_bytes: int
    num_skipped: int
    """Files that were there."""


class UploadMark(msgspec.Struct, frozen=True):
    """The contents of MARK_NAME."""

    index_sha256: str


def upload(
    source: str,
    target: str,
    *,
    num_parallel: int = NUM_PARALLEL,
    group: Group | None = None,
    on_progress: Callable[[TransferProgress], object] = lambda progress: None,
    pause: Callable[[float], object] = time.sleep,
) -> TransferResult:
    """Copy prepared data of this machine to a URL or another folder. Collective: ranks, which all see the source, share
    the files."""
    members = resolve_group(group)
    check_settings(members, "upload()", {"source": source, "target": target})
    here, there = open_folder(source), open_folder(target)
    if not isinstance(here, LocalFolder):
        raise ValueError(f"{source} is not of this machine: download it first")
    _refuse_same(here, there)
    index = read_index(here)
    mark = UploadMark(hashlib.sha256(msgspec.json.encode(index)).hexdigest())
    kept: dict[str, int] = objects.call_on_first(lambda: _begin_upload(there, index, mark, pause), group=members)
    mine = _share(_all_shards(index), members)
    wanted = [shard for shard in mine if kept.get(shard.name) != shard.num_bytes]

    def carry_out(shard: ShardInfo) -> None:
        path = here.path_of(shard.name)
        if _hash_file(here, shard.name, path.stat().st_size) != (shard.num_bytes, shard.sha256):
            raise DataError(f"{path} is not what {INDEX_NAME} says: it is damaged; prepare it again")
        _retry(lambda: there.write(shard.name, path), pause)

    done = _transfer(wanted, carry_out, num_parallel, on_progress)
    members.barrier()

    def finish() -> None:
        sizes = {info.name: info.num_bytes for info in _retry(there.list_files, pause)}
        wrong = [shard.name for shard in _all_shards(index) if sizes.get(shard.name) != shard.num_bytes]
        if wrong:
            raise DataError(f"{there.where(wrong[0])} has another size than the one that was uploaded; upload it again")
        _retry(lambda: write_index(there, index), pause)
        _retry(lambda: there.remove(MARK_NAME), pause)

    objects.call_on_first(finish, group=members)
    return done._replace(num_skipped=len(mine) - len(wanted))


def _begin_upload(
    there: DataFolder, index: DataIndex, mark: UploadMark, pause: Callable[[float], object]
) -> dict[str, int]:
    """Remove the index that is there, and return the sizes of the files that need not be uploaded again."""
    try:
        sizes = {info.name: info.num_bytes for info in there.list_files()}
    except DataError:  # there is nothing yet
        sizes = {}
    same: dict[str, int] = {}
    if INDEX_NAME in sizes:
        former = {shard.name: shard.sha256 for shard in _all_shards(read_index(there))}
        same = {
            shard.name: sizes.get(shard.name, -1)
            for shard in _all_shards(index)
            if former.get(shard.name) == shard.sha256
        }
    elif MARK_NAME in sizes:
        data = there.open_range(MARK_NAME, 0, sizes[MARK_NAME]).read(0, sizes[MARK_NAME])
        try:
            if msgspec.json.decode(data, type=UploadMark) == mark:
                same = {shard.name: sizes.get(shard.name, -1) for shard in _all_shards(index)}
        except msgspec.MsgspecError:
            pass  # the mark of another version
    if INDEX_NAME not in sizes or len(same) < len(_all_shards(index)):
        _retry(lambda: there.write(MARK_NAME, msgspec.json.encode(mark)), pause)
    if INDEX_NAME in sizes and len(same) < len(_all_shards(index)):
        _retry(lambda: there.remove(INDEX_NAME), pause)
    return same


def download(
    source: str,
    target: str,
    *,
    splits: Sequence[str] = (),
    whole: bool = False,
    num_parallel: int = NUM_PARALLEL,
    group: Group | None = None,
    on_progress: Callable[[TransferProgress], object] = lambda progress: None,
    pause: Callable[[float], object] = time.sleep,
) -> TransferResult:
    """Copy prepared data to a folder of this machine. Collective. On several hosts each gets its share of the shards;
    with `whole`, each gets all of them. `splits` are those to copy, by default all."""
    members = resolve_group(group)
    check_settings(members, "download()", {"source": source, "splits": list(splits), "whole": whole})
    there, here = open_folder(source), open_folder(target)
    if not isinstance(here, LocalFolder):
        raise ValueError(f"{target} is not of this machine: download() copies to a local folder")
    _refuse_same(there, here)
    index: DataIndex = objects.call_on_first(lambda: read_index(there), group=members)
    unknown = [split for split in splits if split not in index.splits]
    if unknown:
        raise DataError(f"{source} has no split {unknown[0]!r}; it has {', '.join(index.splits)}")
    host, num_hosts, local_rank, local_size = _find_hosts(members, here)
    share = index if whole or num_hosts == 1 else take_share(index, host, num_hosts)
    if splits:
        share = msgspec.structs.replace(share, splits={split: share.splits[split] for split in splits})
    if local_rank == 0 and _index_differs(here, share):
        here.remove(INDEX_NAME)
    members.barrier()
    mine = _all_shards(share)[local_rank::local_size]
    wanted = [shard for shard in mine if not _is_there(here, shard)]
    done = _transfer(wanted, lambda shard: _fetch(there, here, shard, pause), num_parallel, on_progress)
    members.barrier()
    if local_rank == 0:
        here.remove_unfinished()
        write_index(here, share)
    members.barrier()
    return done._replace(num_skipped=len(mine) - len(wanted))


def take_share(index: DataIndex, part: int, num_parts: int) -> DataIndex:
    """The index of one host's share: of each split, the shards that are left to it when the largest go first to the
    host that has least. A pure function."""
    splits: dict[str, tuple[ShardInfo, ...]] = {}
    for split, shards in index.splits.items():
        totals, parts = [0] * num_parts, [0] * len(shards)
        for number in sorted(range(len(shards)), key=lambda number: -shards[number].num_samples):
            parts[number] = totals.index(min(totals))
            totals[parts[number]] += shards[number].num_samples
        splits[split] = tuple(shard for shard, owner in zip(shards, parts, strict=True) if owner == part)
    return msgspec.structs.replace(index, splits=splits)


def _index_differs(here: LocalFolder, index: DataIndex) -> bool:
    try:
        return read_index(here) != index
    except DataError:
        return True


def _is_there(here: LocalFolder, shard: ShardInfo) -> bool:
    path = here.path_of(shard.name)
    if not path.is_file() or path.stat().st_size != shard.num_bytes:
        return False
    return _hash_file(here, shard.name, shard.num_bytes) == (shard.num_bytes, shard.sha256)


def _fetch(there: DataFolder, here: LocalFolder, shard: ShardInfo, pause: Callable[[float], object]) -> None:
    path = here.path_of(shard.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path = here.path_of(shard.name)  # no link on its way, now that its parents are there

    def fetch() -> None:
        digest = hashlib.sha256()
        with write_aside(path) as file:
            for start in range(0, shard.num_bytes, CHUNK_BYTES):
                num_bytes = min(CHUNK_BYTES, shard.num_bytes - start)
                data = there.open_range(shard.name, start, num_bytes).read(0, num_bytes)
                if len(data) < num_bytes:
                    raise DataError(f"{there.where(shard.name)} is truncated: it ends at byte {start + len(data)}")
                digest.update(data)
                file.write(data)
            if digest.hexdigest() != shard.sha256:
                raise DataError(f"{there.where(shard.name)} has another checksum than {INDEX_NAME} says: it is damaged")

    _retry(fetch, pause)


class DamagedFile(NamedTuple):
    """A file that is not what the index says."""

    name: str
    problem: str


def verify(
    path: str,
    *,
    num_parallel: int = NUM_PARALLEL,
    group: Group | None = None,
    on_progress: Callable[[TransferProgress], object] = lambda progress: None,
    pause: Callable[[float], object] = time.sleep,
) -> list[DamagedFile]:
    """Read all shards of prepared data and return those that are missing or damaged, on all ranks. Collective."""
    members = resolve_group(group)
    folder = open_folder(path)
    index: DataIndex = objects.call_on_first(lambda: read_index(folder), group=members)
    damaged: list[DamagedFile] = []

    def check(shard: ShardInfo) -> None:
        try:
            found, sha256 = _retry(lambda: _hash_file(folder, shard.name, shard.num_bytes), pause)
        except DataError as error:
            damaged.append(DamagedFile(shard.name, str(error)))
            return
        if found != shard.num_bytes:
            damaged.append(DamagedFile(shard.name, f"it ends at byte {found} of {shard.num_bytes}"))
        elif sha256 != shard.sha256:
            damaged.append(DamagedFile(shard.name, "it has another checksum"))

    _transfer(_share(_all_shards(index), members), check, num_parallel, on_progress)
    told: list[list[DamagedFile]] = objects.allgather(sorted(damaged), group=members)
    return sorted(each for part in told for each in part)


# --- inside ----------------------------------------------------------------------------------------------------------


def _refuse_same(source: DataFolder, target: DataFolder) -> None:
    """Each removes the index of its target before it begins."""
    if isinstance(source, LocalFolder) and isinstance(target, LocalFolder):
        if source.root.resolve() == target.root.resolve():
            raise ValueError(f"{source.url} is both the source and the target; give another folder")


def _all_shards(index: DataIndex) -> list[ShardInfo]:
    return [shard for shards in index.splits.values() for shard in shards]


def _share(shards: Sequence[ShardInfo], members: Group) -> list[ShardInfo]:
    assert members.rank is not None
    return list(shards[members.rank :: members.size])


def _find_hosts(members: Group, here: LocalFolder) -> tuple[int, int, int, int]:
    """The number of this rank's host, how many hosts there are, and rank and size among the ranks of this host that
    copy to the same folder. Collective."""
    here.root.mkdir(parents=True, exist_ok=True)
    identity = here.identity()
    told: list[str] = objects.allgather(identity, group=members)
    hosts = sorted(set(told), key=told.index)
    assert members.rank is not None
    mates = [rank for rank, each in enumerate(told) if each == identity]
    return hosts.index(identity), len(hosts), mates.index(members.rank), len(mates)


def _hash_file(folder: DataFolder, name: str, num_bytes: int) -> tuple[int, str]:
    """How many of so many bytes there are, and their SHA-256."""
    digest, found = hashlib.sha256(), 0
    while found < num_bytes:
        length = min(CHUNK_BYTES, num_bytes - found)
        data = folder.open_range(name, found, length).read(0, length)
        digest.update(data)
        found += len(data)
        if len(data) < length:
            break
    return found, digest.hexdigest()


def _retry(carry_out: Callable[[], Result], pause: Callable[[float], object]) -> Result:
    """Call it until it succeeds, at most NUM_TRIES times, and once if the disk is full; then raise its error."""
    for number in range(NUM_TRIES - 1):
        try:
            return carry_out()
        except DiskFull:
            raise
        except (DataError, OSError) as error:
            logger.warning("try %d of %d failed: %s", number + 1, NUM_TRIES, error)
            pause(FIRST_PAUSE_S * 2**number)
    return carry_out()


def _transfer(
    shards: Iterable[ShardInfo],
    carry_out: Callable[[ShardInfo], None],
    num_parallel: int,
    on_progress: Callable[[TransferProgress], object],
) -> TransferResult:
    """Call it for all shards, several at a time. The first error ends it: what has begun is finished, and no more
    begins."""
    wanted = list(shards)
    num_bytes = 0
    with ThreadPoolExecutor(max(1, num_parallel), thread_name_prefix="ronde-transfer") as executor:
        running = {executor.submit(carry_out, shard): shard for shard in wanted}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                future.result()
                num_bytes += running[future].num_bytes
                on_progress(TransferProgress(number, len(wanted), num_bytes))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return TransferResult(len(wanted), num_bytes, 0)


def describe_transfer(result: TransferResult) -> str:
    """For people."""
    there = f", {result.num_skipped} were there" if result.num_skipped else ""
    return f"{result.num_transferred} files, {format_bytes(result.num_bytes)}{there}"
