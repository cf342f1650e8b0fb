"""The compiled walk and the one in numpy give the same answers, and nothing that is passed leads the compiled one astray."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from kernelcast.costmodel import Forest
from kernelcast.costmodel import walk as walking
from kernelcast.costmodel.walk import Walk

compiled = pytest.mark.skipif(
    walking.engine() != "compiled", reason="kernelcast was installed without a C compiler"
)

#: Few values, so that thresholds are hit; among them what compares in a way of its own.
VALUES = np.array(
    [-np.inf, -3e38, -2.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 0.5, 1.0, 2.0, 3e38, np.inf], np.float32
)


def forest(trees, depth, width=5, *, seed=0, base=0.25):
    rng = np.random.default_rng(seed)
    nodes = (1 << depth) - 1
    return Forest(
        rng.integers(0, 2 * width, (trees, nodes)),
        rng.choice(VALUES, (trees, nodes)),
        rng.normal(size=(trees, nodes + 1)),
        base=base,
        width=width,
    )


def rows_of(count, width=5, *, seed=1):
    rng = np.random.default_rng(seed)
    return rng.choice(np.append(VALUES, np.float32(np.nan)), (count, width))


def by_definition(each, rows):
    """One row and tree after the other, as Forest's attributes say."""
    found = []
    for row in rows:
        total = 0.0
        for feature, threshold, leaf in zip(each.feature, each.threshold, each.leaf, strict=True):
            node = 0
            while node < len(feature):
                value = row[feature[node] % each.width]
                right = feature[node] >= each.width if np.isnan(value) else value >= threshold[node]
                node = 2 * node + 1 + int(right)
            total += float(leaf[node - len(feature)])
        found.append(total + each.base)
    return found


def both(forests):
    walks = Walk(forests), Walk(forests, native=False)
    assert [each.engine for each in walks] == [walking.engine(), "numpy"]
    return walks


@pytest.mark.parametrize("depth", range(17))
def test_trees_of_any_depth_are_walked_by_the_definition(depth):
    each, rows = forest(3, depth, seed=depth), rows_of(40)
    for walk in both([each]):
        np.testing.assert_allclose(walk.predict(rows)[0], by_definition(each, rows), rtol=0, atol=1e-9)


def test_forests_of_several_depths_and_any_number_of_trees():
    # The trees are walked in groups of up to ten.
    forests = [forest(trees, trees % 8, seed=trees, base=trees / 8) for trees in (0, *range(1, 35), 101)]
    rows = rows_of(9)
    compiled_one, plain = (walk.predict(rows) for walk in both(forests))
    assert compiled_one.shape == (36, 9)
    np.testing.assert_allclose(compiled_one, plain, rtol=0, atol=1e-9)
    for place in (0, 1, 10, 11, 21, 35):
        np.testing.assert_allclose(
            plain[place], by_definition(forests[place], rows), rtol=0, atol=1e-9, err_msg=str(place)
        )


@pytest.mark.parametrize("width", [1, 7, 3000])
def test_a_row_is_predicted_alone_as_among_many(width):
    forests = [forest(23, 4, width), forest(2, 6, width, seed=1)]
    rows = rows_of(2000, width)
    found, plain = (walk.predict(rows) for walk in both(forests))
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-9)
    walk = Walk(forests)
    for count in (0, 1, 2, 63, 64, 65, 511, 1999):
        assert walk.predict(rows[:count]).tolist() == found[:, :count].tolist()
    for row in range(0, 2000, 97):
        assert walk.predict(rows[row : row + 1])[:, 0].tolist() == found[:, row].tolist()


def test_a_node_at_zero_sends_both_zeros_right_and_what_is_missing_as_it_says():
    for feature, right in ((0, False), (1, True)):
        each = Forest(np.array([[feature]]), np.zeros((1, 1)), np.array([[1.0, 2.0]]), base=0.0, width=1)
        rows = np.array([[0.0], [-0.0], [-1e-45], [1e-45], [np.nan], [-np.nan]], np.float32)
        for walk in both([each]):
            missing = 2.0 if right else 1.0
            assert walk.predict(rows)[0].tolist() == [2.0, 2.0, 1.0, 2.0, missing, missing]


def test_arrays_of_any_layout_are_taken():
    rows = rows_of(20)
    unaligned = np.frombuffer(b"?" + rows.tobytes(), np.uint8)[1:].view(np.float32).reshape(rows.shape)
    assert not unaligned.flags.aligned
    frozen = rows.copy()
    frozen.flags.writeable = False
    wide = np.repeat(rows, 2, axis=1)
    layouts = {
        "float64": rows.astype(np.float64),
        "columns": np.asfortranarray(rows),
        "strided": wide[:, ::2],
        "backwards": rows[::-1].copy()[::-1],
        "unaligned": unaligned,
        "bytes swapped": rows.astype(">f4"),
        "read only": frozen,
    }
    for walk in both([forest(12, 4)]):
        wanted = walk.predict(rows).tolist()
        for name, given in layouts.items():
            before = given.tobytes()
            assert walk.predict(given).tolist() == wanted, name
            assert given.tobytes() == before


def test_arrays_of_trees_of_any_layout_are_taken():
    each = forest(12, 4)
    same = Forest(
        np.asfortranarray(each.feature),
        np.asfortranarray(each.threshold),
        np.repeat(each.leaf, 2, axis=1)[:, ::2],
        base=each.base,
        width=each.width,
    )
    rows = rows_of(20)
    for ours, theirs in zip(both([each]), both([same]), strict=True):
        assert ours.predict(rows).tolist() == theirs.predict(rows).tolist()


def test_more_columns_than_a_compiled_node_can_name_are_walked_in_numpy():
    nodes = np.arange(2 * 65535).reshape(2, 65535)
    each = Forest(nodes, np.zeros(nodes.shape), np.ones((2, 65536)), base=0.5, width=2**17)
    walk = Walk([each])
    assert walk.engine == "numpy"
    assert walk.predict(np.zeros((1, 2**17), np.float32)).tolist() == [[2.5]]


def test_a_walk_is_of_the_trees_as_they_were_and_can_be_copied():
    each, rows = forest(12, 4), rows_of(20)
    wanted = each.predict(rows)
    walks = both([each])
    for again in (pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
        assert again.predict(rows).tolist() == wanted.tolist()
    for walk in walks:
        for again in (pickle.loads(pickle.dumps(walk)), copy.deepcopy(walk)):
            assert again.engine == walk.engine
            assert again.predict(rows).tolist() == walk.predict(rows).tolist()
    each.threshold[:], each.leaf[:], each.feature[:] = np.nan, np.nan, 2**30
    for walk in walks:
        np.testing.assert_allclose(walk.predict(rows)[0], wanted, rtol=0, atol=1e-9)


@compiled
def test_a_long_walk_lets_other_threads_run():
    walk, rows = Walk([forest(200, 8)]), rows_of(20_000)
    wanted = walk.predict(rows)
    seen, over = [], threading.Event()

    def ask():
        seen.append(np.array_equal(walk.predict(rows), wanted))
        over.set()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    old = sys.getswitchinterval()
    turns = 0
    try:
        # Whoever waits for the lock now gets it only if it is given away.
        sys.setswitchinterval(1000.0)
        for thread in threads:
            thread.start()
        while not over.is_set():
            turns += 1
            over.wait(0.0005)
    finally:
        sys.setswitchinterval(old)
    for thread in threads:
        thread.join()
    assert seen == [True, True]
    assert turns > 1


def packed(**changes):
    """pack() of two trees of depth 2 over two of three features, with something changed."""
    parts = {
        "width": 3,
        "looked_at": np.array([0, 5], np.int32),
        "depth": 2,
        "base": 0.5,
        "column": np.zeros((2, 3), np.uint16),
        "threshold": np.zeros((2, 3), np.float32),
        "leaf": np.ones((2, 4), np.float32),
    }
    parts |= changes
    one = tuple(parts[name] for name in ("depth", "base", "column", "threshold", "leaf"))
    return walking._walk.pack(parts["width"], parts["looked_at"], parts.get("forests", (one,)))


@compiled
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 0}, "width 0"),
        ({"width": 2**20 + 1}, "width 1048577"),
        ({"width": 2}, "feature 5 of twice 2"),
        ({"looked_at": np.array([-1, 5], np.int32)}, "feature -1 of twice 3"),
        ({"looked_at": np.array([0, 5], np.int64)}, "looked_at: values of the format"),
        ({"looked_at": np.zeros(65537, np.int32)}, "65537 columns"),
        ({"looked_at": np.zeros(0, np.int32)}, "column 0 of 0"),
        ({"looked_at": [0, 5]}, "buffer|bytes-like"),
        ({"depth": -1}, "depth: -1"),
        ({"depth": 17}, "depth: 17"),
        ({"depth": 3}, "column: 12 bytes; 14"),
        ({"depth": 4}, "leaf: 32 bytes"),
        ({"depth": 1}, "column: 12 bytes; 8"),
        ({"column": np.full((2, 3), 2, np.uint16)}, "column 2 of 2"),
        ({"column": np.array([[0] * 3, [0, 0, 65535]], np.uint16)}, "column 65535 of 2"),
        ({"column": np.zeros((2, 2), np.uint16)}, "column: 8 bytes; 12"),
        ({"column": np.zeros((2, 3), np.int16)}, "column: values of the format h"),
        ({"column": np.zeros((3, 2), np.uint16).T[:, :3]}, "contiguous"),
        ({"threshold": np.zeros((2, 2), np.float32)}, "threshold: 16 bytes; 24"),
        ({"threshold": np.zeros((2, 3), np.float64)}, "threshold: values of the format d"),
        ({"leaf": np.ones((1, 4), np.float32)}, "column: 12 bytes; 6"),
        ({"leaf": np.ones((2, 3), np.float32)}, "leaf: 24 bytes"),
        ({"leaf": b"1234" * 8}, "leaf: values of the format B"),
        ({"base": "x"}, "real number"),
        ({"forests": ()}, "0 forests"),
        ({"forests": (5,)}, "tuple"),
        ({"forests": ((1, 2),)}, "a forest is"),
        ({"forests": [1]}, "tuple"),
    ],
    ids=str,
)  # fmt: skip
def test_forests_that_do_not_fit_together_are_not_packed(changes, said):
    assert packed() is not None
    with pytest.raises((ValueError, TypeError, BufferError), match=said):
        packed(**changes)


@compiled
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"features": np.zeros((4, 2), np.float32)}, "rows of 3"),
        ({"features": np.zeros((4, 4), np.float32)}, "rows of 3"),
        ({"features": np.zeros(12, np.float32)}, "rows of 3"),
        ({"features": np.zeros((4, 3))}, "features: values of the format d"),
        ({"features": np.zeros((4, 6), np.float32)[:, ::2]}, "contiguous"),
        ({"features": np.zeros((3, 4), np.float32).T}, "contiguous"),
        ({"features": bytes(48)}, "features: values of the format"),
        ({"features": None}, "buffer|bytes-like"),
        ({"features": np.zeros((5, 3), np.float32)}, r"\[1, 5\]"),
        ({"out": np.zeros((1, 3))}, r"\[1, 4\]"),
        ({"out": np.zeros((2, 4))}, r"\[1, 4\]"),
        ({"out": np.zeros(4)}, r"\[1, 4\]"),
        ({"out": np.zeros((1, 4), np.float32)}, "out: values of the format f"),
        ({"out": np.zeros((1, 8))[:, ::2]}, "contiguous"),
        ({"out": np.frombuffer(bytes(32)).reshape(1, 4)}, "read-only|writable"),
        ({"out": np.zeros(33, np.uint8)[1:].view(np.float64).reshape(1, 4)}, "aligned"),
        ({"packed": None}, "PyCapsule"),
        ({"packed": np.zeros(3)}, "PyCapsule"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_do_not_fit_the_forests_are_not_walked(change, said):
    given = {"packed": packed(), "features": np.zeros((4, 3), np.float32), "out": np.zeros((1, 4))}
    walking._walk.walk(*given.values())
    assert given["out"].tolist() == [[2.5] * 4]
    with pytest.raises((ValueError, TypeError, BufferError), match=said):
        walking._walk.walk(*{**given, **change}.values())
    with pytest.raises(TypeError, match="takes 3 arguments; 2 were given"):
        walking._walk.walk(given["packed"], given["features"])


WITHOUT = """
import sys, types
import numpy as np
{before}
from kernelcast.costmodel import Forest
from kernelcast.costmodel.walk import Walk, engine
forest = Forest(np.zeros((1, 1), int), np.ones((1, 1)), np.array([[2.0, 3.0]]), base=0.5, width=1)
print(engine(), Walk([forest]).engine, forest.predict(np.array([[0.0], [1.0]], np.float32)).tolist())
"""


RAISES = """
import importlib.machinery
class Raises:
    def find_spec(self, name, *rest):
        if name.endswith(("._walk", "._tiles")):
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise OSError("built for another machine")
sys.meta_path.insert(0, Raises())
"""


def test_doctor_says_why_numpy_is_used():
    text = """
import sys
{before}
from kernelcast.costmodel import walk
from kernelcast.featurizer import tiles
print(walk.described_engine(), tiles.described_engine(), sep="; ")
"""
    absent = "sys.modules['kernelcast.costmodel._walk'] = sys.modules['kernelcast.featurizer._tiles'] = None"
    failed = "numpy (import failed: OSError: built for another machine)"
    for before, said in ((absent, "numpy (not compiled)"), (RAISES, failed)):
        done = subprocess.run(
            [sys.executable, "-c", text.format(before=before)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{said}; {said}"


@pytest.mark.parametrize(
    "before",
    [
        "sys.modules['kernelcast.costmodel._walk'] = None",
        "old = sys.modules['kernelcast.costmodel._walk'] = types.ModuleType('old'); old.VERSION = 0",
        RAISES,
    ],
    ids=["absent", "of an older version", "raises"],
)
def test_without_a_compiled_walk_that_fits_numpy_walks(before):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(before=before)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "numpy numpy [2.5, 3.5]"
