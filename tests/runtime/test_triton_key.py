"""The keys of a tuned kernel's calls, its configs as candidates, and the rankings without a model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast import triton
from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Problem
from kernelcast.runtime.triton_configs import (
    MeasuredKey,
    candidates_of,
    config_key,
    distance,
    nearest,
    spread,
)
from kernelcast.runtime.triton_key import (
    Signature,
    TunedKey,
    code_hash,
    function_of,
    kernel_of,
    operation_name,
    source_hash,
    variant_name,
)


class Tensor:
    """What a key may see of a tensor; asking for a value is an error."""

    def __init__(self, dtype="torch.float16", pointer=0, device="cuda:0"):
        self.dtype, self.pointer, self.device = dtype, pointer, device

    def data_ptr(self):
        return self.pointer

    def __getattr__(self, name):
        raise AttributeError(name)

    def __bool__(self):
        raise AssertionError("a value was read")

    __eq__ = __lt__ = __int__ = __float__ = item = __bool__
    __hash__ = object.__hash__


class Config:
    """What is asked of a ``triton.Config``."""

    def __init__(self, hook=None, **values):
        self.values, self.pre_hook = values, hook

    def all_kwargs(self):
        return dict(self.values)


def kernel(x, y, n, stride, flag: tl.constexpr, BLOCK: tl.constexpr):  # noqa: F821
    """The names and annotations count; it is never run."""


class Jitted:
    """As ``@triton.jit`` makes it."""

    def __init__(self, fn, **options):
        self.fn, self.cache_key = fn, "a source"
        self.do_not_specialize = options.get("do_not_specialize", ())
        self.do_not_specialize_on_alignment = options.get("do_not_specialize_on_alignment", ())


NAMES = ("x", "y", "n", "stride", "flag", "BLOCK")


def signature(**options):
    return Signature(NAMES, ["n", "missing"], Jitted(kernel, **options))


SIZES = st.integers(min_value=0, max_value=2**40)
ARGUMENTS = st.tuples(
    st.builds(Tensor, st.sampled_from(["torch.float16", "torch.float32"]), st.integers(0, 40)),
    st.builds(Tensor, st.sampled_from(["torch.float16", "torch.int8"]), st.integers(0, 40)),
    SIZES,
    SIZES,
    st.sampled_from([True, False, 1, 0, "a", None]),
).map(lambda values: dict(zip(NAMES, values, strict=False)))


def facts(values):
    """All that may count of some arguments, written independently of the code."""

    def of_integer(value):
        return value == 1, value % 16 == 0, value < 2**31

    return (
        *((values[name].dtype, values[name].pointer % 16 == 0) for name in "xy"),
        values["n"], of_integer(values["stride"]), type(values["flag"]), values["flag"],
    )  # fmt: skip


@settings(max_examples=examples(60))
@given(ARGUMENTS, ARGUMENTS)
def test_keys_are_equal_exactly_if_all_that_counts_is(one, other):
    made = signature()
    same = facts(one) == facts(other)
    assert (made.key(list(one.values()), {}) == made.key(list(other.values()), {})) == same
    described = [made.describe(list(values.values()), {}) for values in (one, other)]
    assert (described[0] == described[1]) == same


@given(ARGUMENTS, st.integers(0, 5))
def test_arguments_by_position_and_by_name_give_one_key(values, split):
    made = signature()
    names = list(values)
    args, kwargs = (
        [values[name] for name in names[:split]],
        {name: values[name] for name in names[split:][::-1]},
    )
    key = made.key(list(values.values()), {})
    assert made.key(args, {"grid": (1,), "warmup": False, **kwargs}) == key
    assert made.key(args, kwargs) == key
    assert made.describe(args, kwargs) == made.describe(list(values.values()), {})
    hash(key)


@given(ARGUMENTS)
def test_the_key_begins_as_tritons_and_ends_with_the_device(values):
    key = signature().key(list(values.values()), {})
    assert key[:3] == (values["n"], values["x"].dtype, values["y"].dtype)
    assert key[-1] == "cuda:0"


def test_what_a_kernel_does_not_specialise_on_is_no_part_of_its_key():
    values = [Tensor(), Tensor(), 8, 32, True]
    for option, same in (
        ({}, False),
        ({"do_not_specialize": ["stride"]}, True),
        ({"do_not_specialize": [3]}, True),
        ({"do_not_specialize_on_alignment": ["stride"]}, True),
    ):
        made = signature(**option)
        assert (made.key(values, {}) == made.key([*values[:3], 33, True], {})) is same
    unaligned = signature(do_not_specialize_on_alignment=["x", "stride"])
    assert unaligned.key(values, {}) == unaligned.key([Tensor(pointer=8), *values[1:]], {})
    assert unaligned.key(values, {}) != unaligned.key([*values[:3], 1, True], {})


def test_tuples_descriptors_and_nothing_have_keys_too():
    class Descriptor:
        def __init__(self, block):
            self.base, self.block_shape = Tensor(), block

    made = signature()
    rows = [
        [(Tensor(), 4), None, 8, 1.0, True],
        [(Tensor("torch.int8"), 4), None, 8, 1.0, True],
        [(Tensor(), 16), None, 8, 1.0, True],
        [Descriptor([16, 16]), None, 8, 1.0, True],
        [Descriptor([16, 32]), None, 8, 1.0, True],
        [Descriptor([16, 32]), Tensor(), 8, True, True],
    ]
    keys = [made.key(row, {}) for row in rows]
    assert len(set(keys)) == len(keys)
    assert keys[3][-1] == "cuda:0"
    assert made.describe(rows[0], {}).problem("triton.k").dtype == "float16"


def test_a_call_as_a_problem():
    described = signature().describe([Tensor(), Tensor("torch.int8"), 8, 32, "causal"], {})
    problem = described.problem("triton.k", threads=2)
    assert problem.dims == (("n", 8),)
    assert dict(problem.options) == {"flag": "causal", "dtypes": "float16,int8", "specialization": "AAidc"}
    assert (problem.dtype, problem.threads) == ("float16", 2)
    assert Problem.from_dict(problem.to_dict()) == problem
    nothing = signature().describe([None, None, -8], {}).problem("triton.k")
    assert (nothing.dtype, nothing["n"]) == ("unknown", -8)
    with pytest.raises(InvalidProblemError):
        Problem("triton.k", (("n", -8),), "float16")


def test_every_fact_of_a_tuned_key_changes_its_digest():
    key = TunedKey("triton.k", "abc", "{}", "dev", ("2.13", "3.9"))
    digests = {key.digest}
    for field in fields(key):
        other = ("2.13", "3.10") if field.name == "environment" else "other"
        digests.add(replace(key, **{field.name: other}).digest)
    assert len(digests) == 1 + len(fields(key))


def test_names_of_kernels():
    def inner():
        pass

    jitted = Jitted(inner)
    assert operation_name(jitted).endswith("test_triton_key.test_names_of_kernels._locals_.inner")
    assert operation_name(jitted).startswith("triton.")
    assert variant_name(jitted) == "triton_inner"
    inner.__qualname__ = "k" * 300
    assert len(operation_name(jitted)) == 120
    assert operation_name(jitted) != operation_name(Jitted(kernel))
    inner.__module__ = "__main__"
    assert operation_name(jitted).split(".")[1] in ("__main__", "pytest", "py")
    assert function_of(jitted) is inner
    assert kernel_of(jitted) is jitted


def test_the_source_hash_knows_the_kernel_and_the_heuristics_above_it():
    class Heuristics:
        def __init__(self, fn, values):
            self.fn, self.values = fn, values

    one = Jitted(kernel)
    other = Jitted(kernel)
    other.cache_key = "another source"
    hashes = [
        source_hash(one),
        source_hash(other),
        source_hash(Heuristics(one, {"BLOCK": lambda given: given["n"]})),
        source_hash(Heuristics(one, {"BLOCK": lambda given: 2 * given["n"]})),
        source_hash(Heuristics(one, {"B": lambda given: given["n"]})),
    ]
    assert len(set(hashes)) == len(hashes)
    assert source_hash(Jitted(kernel)) == hashes[0]
    assert code_hash(lambda x: x in {1, 2}) == code_hash(lambda x: x in {2, 1})
    assert code_hash(lambda x: lambda: x + 1) != code_hash(lambda x: lambda: x + 2)


def test_configs_as_candidates_have_one_set_of_parameters():
    made = candidates_of(
        [
            Config(B=16, flag=True, maxnreg=64, p=0.5),
            Config(B=32, flag=False, p=None),
            Config(B=64, flag=True, p=1),
        ],
        "v",
    )
    assert [each.parameters for each in made] == [
        {"B": 16, "flag": True, "maxnreg": 64, "p": "0.5"},
        {"B": 32, "flag": False, "maxnreg": 0, "p": "None"},
        {"B": 64, "flag": True, "maxnreg": 0, "p": "1"},
    ]
    assert {each.variant for each in made} == {"v"}
    assert candidates_of([], "v") == []
    assert candidates_of([Config()], "v")[0].parameters == {}


def test_the_key_of_a_config_is_that_of_what_it_says_and_its_hook():
    keys = [
        config_key(Config(B=16)), config_key(Config(B=32)), config_key(Config(C=16)),
        config_key(Config(B=16, hook=lambda given: 1)), config_key(Config(B=16, hook=lambda given: 2)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert config_key(Config(A=1, B=16)) == config_key(Config(B=16, A=1))


CONFIGS = st.lists(
    st.builds(Config, B=st.sampled_from([16, 32, 64]), w=st.integers(1, 8), k=st.sampled_from(["a", "b"])),
    max_size=12,
)


@settings(max_examples=examples(30))
@given(CONFIGS)
def test_a_spread_has_every_config_once_the_first_declared_first(configs):
    order = spread(configs)
    assert sorted(order) == list(range(len(configs)))
    assert order[:1] == [0][: len(configs)]


def test_a_spread_goes_to_the_ends_before_the_middle():
    assert spread([Config(B=size) for size in (64, 16, 32, 128, 1024)]) == [0, 4, 1, 3, 2]
    assert spread([Config(B=16, kind=kind) for kind in ("a", "a", "b")]) == [0, 2, 1]


def problem(n, dtypes="float16"):
    return Problem("triton.k", (("n", n),), "float16", (("dtypes", dtypes),))


def test_distances_are_in_doublings():
    assert distance(problem(15), problem(31)) == 1.0
    assert distance(problem(15), problem(15)) == 0.0
    assert distance(problem(15), problem(15, "int8")) == 2.0


def test_the_nearest_keys_rank():
    configs = [Config(B=size) for size in (16, 32, 64, 128)]
    k16, k32, k64, k128 = map(config_key, configs)
    assert nearest(configs, problem(90), []) is None
    assert nearest(configs, problem(90), [MeasuredKey(problem(90), {})]) is None
    assert nearest(configs, problem(90), [MeasuredKey(problem(90), {"of another kernel": 1.0})]) is None
    # All of one key: its order.
    whole = MeasuredKey(problem(90), {k16: 4.0, k32: 2.0, k64: 1.0, k128: 8.0})
    assert nearest(configs, problem(90), [whole]) == [2, 1, 0, 3]
    # The winner of the nearest key, whatever won on those further away; nothing else tells 16 and 32 apart.
    measured = [
        MeasuredKey(problem(10), {k16: 1.0, k32: 2.0}),
        MeasuredKey(problem(1000), {k16: 2.0, k32: 1.0}),
    ]
    assert nearest(configs, problem(11), measured)[0] == 0
    assert nearest(configs, problem(900), measured)[0] == 1
    # The same key in another dtype is further away than the key beside it.
    measured = [
        MeasuredKey(problem(10, "int8"), {k16: 1.0, k32: 2.0}),
        MeasuredKey(problem(11), {k16: 2.0, k32: 1.0}),
    ]
    assert nearest(configs, problem(10), measured)[0] == 1


def test_what_is_not_known_is_tried_before_what_is_known_to_be_slow():
    configs = [Config(B=size) for size in (16, 32, 1024, 2048)]
    k16, k32, _, _ = map(config_key, configs)
    order = nearest(configs, problem(90), [MeasuredKey(problem(90), {k16: 1.0, k32: 3.0})])
    assert order[0] == 0
    assert set(order[1:3]) == {2, 3}
    assert order[3] == 1


@settings(max_examples=examples(30))
@given(CONFIGS, st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9), st.integers(0, 2000)), max_size=8))
def test_the_nearest_keys_rank_every_config_once(configs, timings):
    keys = [config_key(config) for config in configs]
    measured = [MeasuredKey(problem(n), {keys[at]: float(ms)}) for at, ms, n in timings if at < len(keys)]
    order = nearest(configs, problem(100), measured)
    assert order is None if not measured else sorted(order) == list(range(len(configs)))


def test_the_public_module_imports_nothing_heavy():
    code = (
        "import sys, kernelcast.triton; from kernelcast import triton; assert set(triton.__all__) <= set(dir(triton)); "
        "print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert triton.__all__ == ["autotune", "perf_model", "record"]
    with pytest.raises(AttributeError, match="no_such_name"):
        triton.no_such_name  # noqa: B018
