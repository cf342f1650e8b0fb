"""Feature schemas: what they infer, their hash, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import ArtifactError, ModelError
from kernelcast.featurizer import FEATURE_VERSION, FeatureSchema
from kernelcast.featurizer.schema import Coding
from kernelcast.kernels import Candidate, CandidateTable, Problem


def toy(m, *, dtype="float32", **options):
    return Problem("toy", (("m", m), ("n", 4)), dtype, tuple(options.items()))


def table(*candidates):
    return CandidateTable.of(candidates)


def tiled(**config):
    return Candidate.of("tiled", config)


PROBLEMS = [
    toy(8, layout="nt", stride=3, flag=True),
    toy(9, dtype="float16", layout="nn", stride=5, flag=False),
]
TABLES = [
    table(Candidate("vendor"), tiled(block=64, order="row", fast=True)),
    table(tiled(block=32, order="column", fast=False), Candidate.of("other", {"block": 2})),
]
SCHEMA = FeatureSchema.infer(PROBLEMS, TABLES, with_work=False)


def test_what_is_inferred():
    assert (
        FeatureSchema(
            operation="toy",
            dims=("m", "n"),
            dtypes=("float16", "float32"),
            options=(Coding("layout", ("nn", "nt")), Coding("stride"), Coding("flag", ("False", "True"))),
            variants=(("other", ("block",)), ("tiled", ("block", "fast", "order")), ("vendor", ())),
            parameters=(
                Coding("block"),
                Coding("fast", ("False", "True")),
                Coding("order", ("column", "row")),
            ),
            with_work=False,
            seen=(("block", (2, 32, 64)),),
        )
        == SCHEMA
    )
    assert SCHEMA.version == FEATURE_VERSION


def test_the_order_of_the_data_does_not_count():
    backwards = FeatureSchema.infer(PROBLEMS[::-1], TABLES[::-1], with_work=False)
    assert backwards == SCHEMA
    assert backwards.hash == SCHEMA.hash


def test_a_schema_survives_json():
    read = FeatureSchema.from_dict(json.loads(json.dumps(SCHEMA.to_dict())))
    assert read == SCHEMA
    assert read.hash == SCHEMA.hash


@for_each(
    "changes",
    [
        {"operation": "other"},
        {"dims": ("n", "m")},
        {"dtypes": ("float32",)},
        {"options": SCHEMA.options[:2]},
        {"options": (Coding("layout", ("nt", "nn")), *SCHEMA.options[1:])},
        {"variants": SCHEMA.variants[1:]},
        {"parameters": (Coding("block", ("2",)), *SCHEMA.parameters[1:])},
        {"with_work": True},
        {"seen": (("block", (2, 32)),)},
        {"version": FEATURE_VERSION + 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_field_changes_the_hash(changes):
    assert dataclasses.replace(SCHEMA, **changes).hash != SCHEMA.hash


def test_another_version_is_refused():
    with pytest.raises(ArtifactError, match=rf"version {FEATURE_VERSION + 1}.*Train the model again"):
        FeatureSchema.from_dict({**SCHEMA.to_dict(), "version": FEATURE_VERSION + 1})


@for_each("field", list(SCHEMA.to_dict()))
def test_a_field_that_is_missing_or_of_another_type_is_refused(field):
    whole = SCHEMA.to_dict()
    lacking = {name: value for name, value in whole.items() if name != field}
    with pytest.raises(ArtifactError, match=field):
        FeatureSchema.from_dict(lacking)
    if field in ("operation", "with_work"):
        return
    for wrong in (None, 5, [5], [["a"]], float("inf"), {"a": 1}, "text"):
        if field == "version" and wrong == 5:
            continue
        try:
            read = FeatureSchema.from_dict({**copy.deepcopy(whole), field: wrong})
        except ArtifactError:
            continue
        # What is read all the same is another schema, and says so by its hash.
        assert read.hash != SCHEMA.hash


def test_problems_of_several_kinds_are_refused():
    with pytest.raises(ModelError, match="no problem"):
        FeatureSchema.infer([], [], with_work=False)
    others = (Problem("other", (("m", 1), ("n", 4)), "float32"), Problem("toy", (("m", 1),), "float32"))
    for other in others:
        with pytest.raises(ModelError, match="same operation and dimensions"):
            FeatureSchema.infer([toy(1), other], [], with_work=False)


def test_two_versions_of_a_variant_are_both_known_whatever_their_order():
    old, new = table(tiled(block=1)), table(tiled(block=1, order="row"))
    schema = FeatureSchema.infer([toy(1)], [old, new], with_work=False)
    assert schema.variants == (("tiled", ("block",)), ("tiled", ("block", "order")))
    assert FeatureSchema.infer([toy(1)], [new, old], with_work=False) == schema


def test_a_parameter_of_two_types_is_a_category():
    mixed = [table(tiled(block=8)), table(Candidate.of("other", {"block": "large"}))]
    assert FeatureSchema.infer([toy(1)], mixed, with_work=False).parameters == (
        Coding("block", ("8", "large")),
    )


def test_how_values_become_numbers():
    number, category = Coding("p"), Coding("p", ("a", "b"))
    assert number.encode(5) == 5.0
    assert category.encode("b") == 1.0
    for coding, value in ((category, "c"), (category, 1), (number, "5"), (number, True)):
        assert np.isnan(coding.encode(value))
    assert Coding("p", ("False", "True")).encode(True) == 1.0


@given(
    st.one_of(
        st.lists(st.integers(-(2**53), 2**53), min_size=1),
        st.lists(st.booleans(), min_size=1),
        st.lists(st.sampled_from(["a", "b", "True", "1", ""]), min_size=1),
    ),
    st.sampled_from([Coding("p"), Coding("p", ("False", "True")), Coding("p", ("1", "a", "b"))]),
)
def test_a_column_is_encoded_as_its_values_are(values, coding):
    found = coding.encode_column(np.array(values))
    np.testing.assert_array_equal(found, [coding.encode(value) for value in values])
    assert found.dtype == np.float64
