"""Packs: equal selections give equal files, and nothing that was changed is used."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
import warnings
import zipfile
from dataclasses import replace

import pytest

from kernelcast.errors import ImportFileError, InvalidRecordError, KernelcastError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, Selection, SelectionCache, pack
from kernelcast.runtime.cache import CacheEntry
from kernelcast.runtime.cache_key import canonical
from kernelcast.runtime.pack import ImportedPack, PackedSelections, import_pack, read_pack, write_pack

HERE = detect("cpu")


def entry(m=8, split=4, *, at=1000.0, torch=None, source="verified", **values):
    described = problem("gemm", m=m, n=64, k=4096, threads=2)
    key = CacheKey.of(described, HERE, 3)
    if torch:
        key = replace(key, environment=replace(key.environment, torch=torch))
    candidate = Candidate.of("split_k", {"split": split})
    selection = Selection(described, HERE.name, candidate, source, measured_us=2.0, default_us=3.0, **values)
    return CacheEntry(key, selection, at)


ENTRIES = [entry(8), entry(16, 2), entry(8, 8, torch="1.0")]


def same(one, other):
    return [each.to_dict() for each in one] == [each.to_dict() for each in other]


# --- Writing ---


def test_equal_selections_give_equal_bytes_and_names(tmp_path):
    one = write_pack(tmp_path / "a.zip", ENTRIES)
    other = write_pack(tmp_path / "deeper.zip", [*ENTRIES[::-1], ENTRIES[0]])
    assert one.read_bytes() == other.read_bytes()
    assert one.name.removeprefix("a-") == other.name.removeprefix("deeper-")
    with zipfile.ZipFile(one) as archive:
        content = archive.read("selections.jsonl")
    assert one.name == f"a-{hashlib.sha256(content).hexdigest()[:16]}.zip"
    assert PackedSelections(one).sha256 == hashlib.sha256(content).hexdigest()
    # Packed again under its own name, it keeps the name.
    assert write_pack(one, read_pack(one)) == one
    assert len(list(tmp_path.iterdir())) == 2
    changed = write_pack(tmp_path / "a.zip", [*ENTRIES[:2], entry(8, 8, torch="1.1")])
    assert changed.name != one.name


def test_of_one_key_the_later_is_packed_and_only_what_was_verified(tmp_path):
    file = write_pack(
        tmp_path / "x", [entry(8, 2, at=5.0), entry(8, 4, at=6.0), entry(9, source="predicted")]
    )
    assert file.name.startswith("x-")
    assert same(read_pack(file), [entry(8, 4, at=6.0)])
    with pytest.raises(KernelcastError, match="no verified selection to pack"):
        write_pack(tmp_path / "y.zip", [entry(9, source="predicted")])
    assert len(list(tmp_path.iterdir())) == 1


def test_entries_come_back_as_they_were(tmp_path):
    told = [entry(8, reason='Ä "quoted"\n\ud800 reason'), entry(9, predicted_us=1e-7, confidence=0.1 + 0.2)]
    assert same(read_pack(write_pack(tmp_path / "x.zip", told)), sorted(told, key=lambda e: e.key.digest))


# --- Looking up ---


def test_a_pack_answers_its_keys_and_gives_others_as_priors(tmp_path):
    file = write_pack(tmp_path / "x.zip", ENTRIES)
    for path in (tmp_path, file):
        path.chmod(0o555)
    packed = PackedSelections(str(file))
    assert len(packed) == 3
    assert [packed.get(each.key).to_dict() for each in ENTRIES] == [
        each.selection.to_dict() for each in ENTRIES
    ]
    assert packed.get(replace(ENTRIES[0].key, top_k=4)) is None
    cache = SelectionCache(None, pack=packed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(ENTRIES[0].key).candidate == Candidate.of("split_k", {"split": 4})
        newer = replace(ENTRIES[0].key, environment=replace(ENTRIES[0].key.environment, driver="9"))
        assert cache.get(newer) is None
    priors = cache.priors(ENTRIES[0].selection.problem, HERE)
    assert sorted(dict(each.config)["split"] for each in priors) == [4, 8]
    assert cache.priors(problem("gemm", m=8, n=64, k=4097, threads=2), HERE) == []
    tmp_path.chmod(0o755)


def test_a_pack_comes_before_the_disk_until_its_candidate_fails(tmp_path):
    key = ENTRIES[0].key
    own = replace(ENTRIES[0].selection, candidate=Candidate.of("split_k", {"split": 16}))
    SelectionCache(tmp_path / "cache").put(key, own)
    cache = SelectionCache(tmp_path / "cache", pack=PackedSelections(write_pack(tmp_path / "x.zip", ENTRIES)))
    assert cache.get(key).candidate == ENTRIES[0].selection.candidate
    cache.evict(key)
    assert cache.get(key) is None
    assert cache.priors(own.problem, HERE) == [Candidate.of("split_k", {"split": 8})]
    cache.put(key, own)
    assert cache.get(key) is own


# --- Importing ---


def test_an_import_merges_and_keeps_what_is_later(tmp_path):
    file = write_pack(tmp_path / "x.zip", ENTRIES)
    cache = SelectionCache(tmp_path / "cache")
    assert import_pack(cache, file) == ImportedPack(added=3)
    assert import_pack(cache, file) == ImportedPack(kept=3)
    assert same(cache.entries(), sorted(ENTRIES, key=lambda e: (e.key.place, e.key.digest)))
    assert write_pack(tmp_path / "again.zip", cache.entries()).read_bytes() == file.read_bytes()
    cache.add(entry(8, 2, at=2000.0))
    later = write_pack(tmp_path / "y.zip", [entry(8, 16, at=1500.0), entry(16, 16, at=1500.0), entry(32)])
    assert import_pack(cache, later) == ImportedPack(added=1, replaced=1, kept=1)
    fresh = SelectionCache(tmp_path / "cache")
    assert [fresh.get(entry(m).key).candidate.parameters["split"] for m in (8, 16, 32)] == [2, 16, 4]
    # What is of another environment is no answer, and a guess.
    assert Candidate.of("split_k", {"split": 8}) in fresh.priors(ENTRIES[0].selection.problem, HERE)


# --- What is refused ---


def zipped(path, members, method=zipfile.ZIP_STORED):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two members of one name
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, data in members:
                archive.writestr(name, data)


def manifest_of(content, **values):
    told = {
        "format": pack.PACK_FORMAT,
        "selections": content.count(b"\n"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return canonical({**told, **values}).encode() + b"\n"


def lines_of(*entries):
    return b"".join(canonical(each.to_dict()).encode() + b"\n" for each in entries)


GOOD = lines_of(*sorted(ENTRIES[:2], key=lambda e: e.key.digest))
BAD = {
    "no zip": lambda p: p.write_bytes(b"PK no"),
    "empty": lambda p: p.write_bytes(b""),
    "another zip": lambda p: zipped(p, [("manifest.json", b"{}")]),
    "one more": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD)), ("selections.jsonl", GOOD), ("x", b"")]
    ),
    "twice": lambda p: zipped(p, [("pack.json", manifest_of(GOOD))] * 2 + [("selections.jsonl", GOOD)]),
    "outside": lambda p: zipped(p, [("pack.json", manifest_of(GOOD)), ("../selections.jsonl", GOOD)]),
    "absolute": lambda p: zipped(p, [("/etc/pack.json", manifest_of(GOOD)), ("selections.jsonl", GOOD)]),
    "bomb": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD)), ("selections.jsonl", b"\n" * 2**24)], zipfile.ZIP_DEFLATED
    ),
    "packed": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD)), ("selections.jsonl", GOOD)], zipfile.ZIP_BZIP2
    ),
    "large manifest": lambda p: zipped(p, [("pack.json", b" " * 10_000), ("selections.jsonl", GOOD)]),
    "no manifest": lambda p: zipped(p, [("pack.json", b"[1]"), ("selections.jsonl", GOOD)]),
    "nested manifest": lambda p: zipped(p, [("pack.json", b"[" * 4000), ("selections.jsonl", GOOD)]),
    "newer": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD, format="kernelcast-selections-2")), ("selections.jsonl", GOOD)]
    ),
    "another digest": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD, sha256="0" * 64)), ("selections.jsonl", GOOD)]
    ),
    "another count": lambda p: zipped(
        p, [("pack.json", manifest_of(GOOD, selections=9)), ("selections.jsonl", GOOD)]
    ),
    **{
        name: lambda p, content=content: zipped(
            p, [("pack.json", manifest_of(content)), ("selections.jsonl", content)]
        )
        for name, content in {
            "no entry": b"{}\n",
            "nested": b"[" * 50_000 + b"\n",
            "no text": b"\xff\xfe\n",
            "no end": GOOD[:-1],
            "blank": GOOD + b"\n",
            "twice the same": GOOD + GOOD,
            "out of order": b"\n".join([*GOOD.splitlines()[::-1], b""]),
            "not verified": lines_of(entry(source="predicted")),
            "spaced": json.dumps(ENTRIES[0].to_dict()).encode() + b"\n",
            "foreign digest": canonical({**ENTRIES[0].to_dict(), "digest": "0" * 64}).encode() + b"\n",
        }.items()
    },
}


@pytest.mark.parametrize("how", BAD)
def test_a_hostile_or_broken_pack_is_refused_by_name_and_nothing_is_imported(tmp_path, how):
    file = tmp_path / "suspect.zip"
    BAD[how](file)
    cache = SelectionCache(tmp_path / "cache")
    with pytest.raises(ImportFileError, match=r"suspect\.zip") as caught:
        import_pack(cache, file)
    assert len(str(caught.value)) < 1000
    with pytest.raises(ImportFileError, match=r"suspect\.zip"):
        PackedSelections(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suspect.zip"]


def test_a_missing_or_enormous_file_is_refused(tmp_path):
    with pytest.raises(ImportFileError, match="there is no such file"):
        read_pack(tmp_path / "none.zip")
    with pytest.raises(ImportFileError, match="it is a folder; a pack is one file"):
        read_pack(tmp_path)
    with (tmp_path / "large.zip").open("wb") as file:
        file.truncate(pack.MAX_PACK_BYTES + 1)
    with pytest.raises(ImportFileError, match="more than any pack"):
        read_pack(tmp_path / "large.zip")


def test_the_name_is_held_to_the_content(tmp_path):
    file = write_pack(tmp_path / "x.zip", ENTRIES)
    own = shutil.copy(file, tmp_path / "renamed.zip")
    assert same(read_pack(own), read_pack(file))
    false = shutil.copy(file, tmp_path / "x-0123456789abcdef.zip")
    with pytest.raises(ImportFileError, match="the pack was changed"):
        read_pack(false)


def test_a_pack_with_any_changed_byte_is_refused_or_says_the_same(tmp_path):
    file = write_pack(tmp_path / "x.zip", ENTRIES)
    content, entries = file.read_bytes(), read_pack(file)
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        try:
            assert same(read_pack(file), entries)
        except ImportFileError:
            refused += 1
    assert refused > 130


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(archive, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_pack(tmp_path / "x.zip", ENTRIES)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename.startswith(str(tmp_path / "x-"))
    assert list(tmp_path.iterdir()) == []


def test_what_was_decided_on_a_busy_machine_is_so_in_a_pack(tmp_path):
    told = [entry(8, busy=True), entry(9)]
    found = read_pack(write_pack(tmp_path / "x.zip", told))
    assert {each.selection.problem["m"]: each.selection.busy for each in found} == {8: True, 9: False}
    # Packs and entries of before there was the field are read as they were written.
    assert "busy" not in told[1].to_dict()["selection"]


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_what_does_not_say_whether_the_machine_was_busy_is_no_selection(value):
    told = {**entry(8).selection.to_dict(), "busy": value}
    with pytest.raises(InvalidRecordError, match="must be true or false"):
        Selection.from_dict(told)


def test_a_name_of_a_directory_is_a_file_error(tmp_path):
    with pytest.raises(OSError, match="none"):
        write_pack(tmp_path / "none" / "x.zip", ENTRIES)
