from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kernelcast.datasets import journal as journal_module
from kernelcast.datasets.journal import Journal, lock_journal, prepare_store, read_journal
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.errors import StoreError
from kernelcast.kernels import Candidate, Device, problem

# Forked writers start in milliseconds, and a forked writer is what a data loader or a server has.
fork = multiprocessing.get_context("fork")


def record(number: int, writer: int = 0) -> Measurement:
    return Measurement(
        problem=problem("gemm", m=writer + 1, n=32, k=16),
        candidate=Candidate.of("split_k", {"split": number}),
        device="test",
        device_fingerprint="f" * 16,
        environment=Environment(),
        protocol=Protocol("test"),
        samples_us=(1.5, float(number + 1)),
    )


def read_all(root: Path) -> list[Measurement]:
    return [each for path in sorted((root / "journal").iterdir()) for each in read_journal(path)]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    written = [record(number) for number in range(20)]
    with Journal(tmp_path / "store") as journal:
        for each in written:
            journal.append(each)
            # On the disk when append returns, not when the journal is closed.
            assert read_all(tmp_path / "store")[-1] == each
    assert read_all(tmp_path / "store") == written


def test_a_journal_without_records_has_no_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "store"):
        pass
    assert list((tmp_path / "store" / "journal").iterdir()) == []


def test_a_torn_last_line_is_no_record_and_no_fault(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for number in range(3):
            journal.append(record(number))
    (path,) = (tmp_path / "journal").iterdir()
    whole = path.read_bytes()
    last = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for cut in (last, last + 1, last + 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert list(read_journal(path)) == [record(0), record(1)]
    path.write_bytes(whole)
    assert len(list(read_journal(path))) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", "line 2: not JSON"),
        (b"[1]", "line 2: not a record"),
        (b"{}", "line 2: Not a measurement"),
        (json.dumps({**record(1).to_dict(), "schema": 2}).encode(), "line 2: The record has schema 2"),
        (json.dumps({**record(1).to_dict(), "problem": {}}).encode(), "line 2: Not a measurement"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with Journal(tmp_path) as journal:
        journal.append(record(0))
    (path,) = (tmp_path / "journal").iterdir()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(StoreError, match=message):
        list(read_journal(path))


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"schema": 2}')
    with pytest.raises(StoreError, match=r"has schema 2; this kernelcast reads up to 1. Upgrade"):
        Journal(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "1"}', '{"schema": 0}', "[1]"])
def test_a_broken_version_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"store\.json"):
        Journal(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be created.*--store"):
        Journal(tmp_path / "file" / "store")


def test_a_store_that_takes_no_journal_is_refused_at_once(tmp_path: Path, monkeypatch) -> None:
    with Journal(tmp_path) as journal:
        journal.append(record(0))

    def refused(*_: object, **where: Path) -> None:
        assert where["dir"] == tmp_path / "journal"
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(StoreError, match=r"Cannot write to the store .*: Read-only file system\..*--store"):
        Journal(tmp_path)
    monkeypatch.undo()
    before = sorted(tmp_path.rglob("*"))
    Journal(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_copied_without_its_empty_folders_can_be_written(tmp_path: Path) -> None:
    prepare_store(tmp_path)
    for name in ("devices", "journal", "parquet"):
        (tmp_path / name).rmdir()
    with Journal(tmp_path) as journal:
        journal.append(record(0))
    assert read_all(tmp_path) == [record(0)]


def test_a_device_is_kept_once(tmp_path: Path) -> None:
    device = Device(name="d", kind="cpu", vendor="intel", architecture="x86_64", cores=2)
    with Journal(tmp_path) as journal:
        journal.record_device(device)
        journal.record_device(device)
    (path,) = (tmp_path / "devices").iterdir()
    assert path.name == f"{device.fingerprint}.json"
    assert Device.from_dict(json.loads(path.read_text())) == device


def _append_until_killed(root: Path, writer: int, done: Connection) -> None:
    with Journal(root) as journal:
        for number in range(10**6):
            journal.append(record(number, writer))
            done.send(number)


def test_kill_9_loses_no_completed_record(tmp_path: Path) -> None:
    promised: set[str] = set()
    for writer in range(5):
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=_append_until_killed, args=(tmp_path, writer, sender))
        child.start()
        sender.close()
        for _ in range(10 + writer):
            promised.add(record(receiver.recv(), writer).id)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        # What was sent before the kill arrived was promised too.
        while receiver.poll():
            try:
                promised.add(record(receiver.recv(), writer).id)
            except EOFError:
                break
        receiver.close()
    found = [each.id for each in read_all(tmp_path)]
    assert promised <= set(found)
    assert len(found) == len(set(found))
    # At most the record that was being written when the kill came was not promised.
    assert len(found) <= len(promised) + 5


def _append_many(root: Path, writer: int) -> None:
    with Journal(root) as journal:
        for number in range(50):
            journal.append(record(number, writer))


def test_sixteen_processes_append_at_once(tmp_path: Path) -> None:
    writers = [fork.Process(target=_append_many, args=(tmp_path / "new", writer)) for writer in range(16)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0] * 16
    assert len(list((tmp_path / "new" / "journal").iterdir())) == 16
    expected = {record(number, writer).id for number in range(50) for writer in range(16)}
    assert sorted(each.id for each in read_all(tmp_path / "new")) == sorted(expected)


def test_threads_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:

        def run(writer: int) -> None:
            for number in range(20):
                journal.append(record(number, writer))

        threads = [threading.Thread(target=run, args=(writer,)) for writer in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(list((tmp_path / "journal").iterdir())) == 1
    assert len({each.id for each in read_all(tmp_path)}) == 80


def _append_to_parents(journal: Journal) -> None:
    journal.append(record(1))


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(record(0))
        child = fork.Process(target=_append_to_parents, args=(journal,))
        child.start()
        child.join()
        journal.append(record(2))
    assert len(list((tmp_path / "journal").iterdir())) == 2
    assert {each.id for each in read_all(tmp_path)} == {record(number).id for number in range(3)}


def _fill_the_disk(root: Path) -> None:
    with Journal(root) as journal:
        journal.append(record(0))
        length = next((root / "journal").iterdir()).stat().st_size
        # A limit on file sizes cuts the second record short, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + length // 2, resource.RLIM_INFINITY))
        with pytest.raises(StoreError, match="cut short"):
            journal.append(record(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        journal.append(record(2))


def test_a_record_cut_short_by_a_full_disk_spoils_no_other(tmp_path: Path) -> None:
    child = fork.Process(target=_fill_the_disk, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert {each.id for each in read_all(tmp_path)} == {record(0).id, record(2).id}


def test_only_a_finished_journal_can_be_locked(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(record(0))
        (path,) = (tmp_path / "journal").iterdir()
        assert lock_journal(path) is None
    descriptor = lock_journal(path)
    assert descriptor is not None
    os.close(descriptor)
    assert lock_journal(tmp_path / "journal" / "none.jsonl") is None


@pytest.mark.parametrize("compaction", ["has it locked", "has removed it"])
def test_a_file_that_a_compaction_saw_empty_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compaction: str
) -> None:
    lock = journal_module._try_lock
    folder = tmp_path / "journal"
    held: list[int | None] = []

    def after_a_compaction(descriptor: int) -> bool:
        """The compaction comes between the making of the file and its locking, the first time."""
        if not held:
            (path,) = folder.iterdir()
            held.append(lock_journal(path))
            if compaction == "has removed it":
                path.unlink()
                os.close(held[0])
        return lock(descriptor)

    monkeypatch.setattr(journal_module, "_try_lock", after_a_compaction)
    with Journal(tmp_path) as journal:
        journal.append(record(0))
    assert len(held) == 1
    assert read_all(tmp_path) == [record(0)]
    if compaction == "has it locked":
        os.close(held[0])
