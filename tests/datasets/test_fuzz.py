"""A part of the fuzz of import files and store files; benchmarks/fuzz_files.py runs all of it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fuzz_files
from fuzz_mutations import PACKINGS, bomb, mutate, pack
from fuzz_seeds import A100, make_store, seeds

from kernelcast.datasets import Store, import_files, importers


def test_every_seed_is_sound_and_every_importer_has_one(tmp_path: Path) -> None:
    found = seeds(tmp_path)
    assert {seed.importer for seed in found} == set(importers())
    for seed in found:
        (tmp_path / seed.name).write_bytes(seed.content)
        (tmp_path / "beside.json").write_bytes(seed.beside)
        options = {
            name: value.replace("{beside}", str(tmp_path / "beside.json"))
            for name, value in seed.options.items()
        }
        summary = import_files(
            seed.importer,
            [str(tmp_path / seed.name)],
            device=A100,
            workload="fuzz",
            store=tmp_path / "store",
            options=options,
        )
        assert summary.added + summary.known > 0
    assert Store(tmp_path / "store").check() == []
    make_store(tmp_path / "sound")
    assert len(Store(tmp_path / "sound").ids()) == 12
    assert Store(tmp_path / "sound").check() == []


def test_mutations_follow_from_the_seed_and_change_something(tmp_path: Path) -> None:
    content = b'{"a": [1, 2.5, "x"],\n"b": {"c": null}}\nd,e,f\n'
    made = [mutate(content, random.Random(number)) for number in range(200)]
    assert made == [mutate(content, random.Random(number)) for number in range(200)]
    assert sum(mutated != content for mutated, _ in made) > 180
    for kind in set(PACKINGS) - {"gzip bomb", "zip bomb"}:
        name, packed = pack("a.txt", content, kind, random.Random(1))
        assert name.startswith("a.txt")
        assert (packed == content) is (kind == "plain")
    assert len(bomb(b"")) > 2**24


def test_what_a_fault_looks_like() -> None:
    from kernelcast.errors import ImportFileError

    def refuse(message: str) -> str:
        raise ImportFileError("a.txt", message)

    judged = {
        message: fuzz_files._judged(lambda message=message: refuse(message), ["a.txt"])[0]
        for message in ("it is broken.", "two\nlines", "x" * 2000, "odd \ud800")
    }
    assert list(judged.values()) == ["refused", "unclear", "unclear", "unclear"]
    assert fuzz_files._judged(lambda: refuse("it is broken."), ["b.txt"])[0] == "unclear"
    assert fuzz_files._judged(lambda: str(1 / 0), ["a.txt"])[0] == "crash"
    assert fuzz_files._judged(lambda: "3 new", []) == ("accepted", "3 new")


@pytest.mark.slow
def test_no_mutated_file_crashes_hangs_or_is_kept_in_part(tmp_path: Path) -> None:
    found = fuzz_files.run(150, seed=20, folder=tmp_path, limit_seconds=120.0)
    assert [each["case"] for each in found] == list(range(150))
    assert [each for each in found if each["outcome"] in fuzz_files.FAULTS] == []
    outcomes = {each["outcome"] for each in found}
    assert {"accepted", "refused"} <= outcomes
    page = fuzz_files.result(found, 20)
    assert page["tables"][0]["rows"][-1][:2] == ["all", 150]
