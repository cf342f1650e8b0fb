"""The catalogue: names, registration, legality of everything that is registered."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelcast import kernels
from kernelcast.errors import IllegalCandidateError, InvalidProblemError, KernelcastError, UnknownNameError
from kernelcast.kernels import (
    Candidate,
    CandidateTable,
    Device,
    Operation,
    Parameter,
    ProblemSchema,
    Tolerance,
    Variant,
    Work,
    registry,
)
from kernelcast.kernels.devices import device

DEVICES = [
    Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1, memory_bandwidth=2e10),
    Device("unknown", "gpu", "nvidia", "sm80", 1),  # every fact that may be unknown is
    *(device(name) for name in ("a100", "t4", "b200", "mi300x")),
]
OPERATIONS = kernels.operation_names()

#: Dimensions that are likely to break something, the typical ones first.
SIZES = (64, 128, 1, 3, 4096, 1000, 17, 32, 100_000, 0)
#: The fastest device would take a second for more, at full rate.
MOST_FLOPS = 2**50


@st.composite
def problems(draw, name, sizes=SIZES):
    """Problems of an operation from its schema alone, so that a new operation joins by existing."""
    schema = kernels.operation(name).schema
    values = {dim.name: draw(st.sampled_from(sizes)) for dim in schema.dims}
    for option in schema.options:
        choices = option.choices or (option.default, 1, 2, 4)
        values[option.name] = draw(st.sampled_from(choices))
    alike = draw(st.sampled_from((64, 1, 3, 17)))
    dtype = draw(st.sampled_from(schema.dtypes))
    allow_tf32 = draw(st.booleans())
    try:
        built = schema.problem(dtype=dtype, allow_tf32=allow_tf32, threads=2, **values)
    except InvalidProblemError:  # what fits what is the operation's to say; equal sizes mostly do
        built = schema.problem(dtype=dtype, **{dim.name: alike for dim in schema.dims})
    assume(kernels.operation(name).flops(built) <= MOST_FLOPS)
    return built


@pytest.fixture
def catalogue():
    """The catalogue, as it was before the test when the test is over."""
    kept = dict(registry._operations), {name: dict(found) for name, found in registry._variants.items()}
    loaded = set(registry._loaded)
    yield registry
    registry._operations.clear()
    registry._operations.update(kept[0])
    registry._variants.clear()
    registry._variants.update(kept[1])
    registry._loaded.clear()
    registry._loaded.update(loaded)


def toy_operation(named):
    class Toy(Operation):
        name = named
        doc = "for the tests"
        schema = ProblemSchema(named, (), ("float32",))

        def make_inputs(self, problem, *, seed, device):
            return ()

        def reference(self, problem, *inputs):
            raise NotImplementedError

        def tolerance(self, problem):
            return Tolerance(0.0, 0.0)

        def flops(self, problem):
            return 1.0

        def traffic_bytes(self, problem):
            return 1.0

    return Toy


def toy_variant(named):
    class Toy(Variant):
        name = named
        backend = "user"
        doc = "for the tests"
        parameters = (Parameter("p", (1, 2), ""),)

        def work(self, problem, columns, device):
            return Work(1.0, 1.0)

        def build(self, problem, config):
            raise NotImplementedError

    return Toy


def test_every_folder_is_an_operation_of_its_name():
    assert {"attention", "conv2d", "gemm", "softmax"} <= set(OPERATIONS)
    assert sorted(OPERATIONS) == OPERATIONS
    for name in OPERATIONS:
        found = kernels.operation(name)
        assert found.name == found.schema.operation == name
        assert found.doc


def test_registering_twice_is_an_error(catalogue):
    cls = toy_operation("toy")
    assert registry.register_operation(cls) is cls
    assert isinstance(kernels.operation("toy"), cls)
    with pytest.raises(KernelcastError, match="'toy' is registered twice"):
        registry.register_operation(toy_operation("toy"))
    registry.register_variant("toy")(toy_variant("vendor"))
    with pytest.raises(KernelcastError, match="'vendor' of 'toy' is registered twice"):
        registry.register_variant("toy")(toy_variant("vendor"))
    with pytest.raises(KernelcastError, match="'gemm' is registered twice"):
        registry.register_operation(toy_operation("gemm"))


def test_an_unknown_operation_lists_the_known_and_the_closest():
    with pytest.raises(
        UnknownNameError, match=r"Unknown operation 'gem'. Did you mean 'gemm'\? Known: attention"
    ):
        kernels.operation("gem")
    for name in ("", "no such", "..", "kernelcast.kernels", None, 5):
        with pytest.raises(UnknownNameError, match="Known: attention"):
            kernels.operation(name)
    with pytest.raises(UnknownNameError, match="gemm"):
        kernels.problem("gemn", m=1, n=1, k=1)


def test_an_unknown_variant_lists_the_known_and_the_closest():
    with pytest.raises(UnknownNameError, match=r"variant of gemm 'splitk'. Did you mean 'split_k'\?"):
        kernels.variant("gemm", "splitk")


def test_a_variant_of_an_unknown_operation_is_an_error(catalogue):
    with pytest.raises(UnknownNameError, match="Did you mean 'gemm'"):
        registry.register_variant("gemn")(toy_variant("mine"))
    assert "gemn" not in kernels.operation_names()


def test_an_unknown_subset_is_an_error():
    described = kernels.problem("gemm", m=1, n=1, k=1)
    for listing in (kernels.candidates, kernels.refusals):
        with pytest.raises(UnknownNameError, match=r"subset 'quick'\. Known: full, default"):
            listing(described, DEVICES[0], subset="quick")


def test_the_order_of_variants_does_not_depend_on_the_order_of_imports(catalogue):
    registry.register_operation(toy_operation("toy"))
    for name in ("zeta", "vendor", "alpha", "mid"):
        registry.register_variant("toy")(toy_variant(name))
    assert list(kernels.variants("toy")) == ["vendor", "alpha", "mid", "zeta"]
    table = kernels.candidates(kernels.problem("toy"), DEVICES[0])
    assert [one.variant for one in table] == ["vendor"] * 2 + ["alpha"] * 2 + ["mid"] * 2 + ["zeta"] * 2


def test_a_variant_can_be_added_to_a_built_in_operation(catalogue):
    registry.register_variant("softmax")(toy_variant("mine"))
    described = kernels.problem("softmax", rows=4, columns=4)
    assert Candidate.of("mine", {"p": 2}) in kernels.candidates(described, DEVICES[0])
    assert next(iter(kernels.variants("softmax"))) == "vendor"


def test_backends_are_a_filter():
    described = kernels.problem("gemm", m=64, n=64, k=64, threads=2)
    both = {one.variant for one in kernels.candidates(described, DEVICES[0], backends=["vendor", "torch"])}
    torch_alone = {one.variant for one in kernels.candidates(described, DEVICES[0], backends=["torch"])}
    assert "vendor" in both
    assert torch_alone < both
    assert all(kernels.variant("gemm", name).backend == "torch" for name in torch_alone)
    assert len(kernels.candidates(described, DEVICES[0], backends=[])) == 0


def test_require_legal_says_why_not():
    cpu, described = DEVICES[0], kernels.problem("gemm", m=8, n=8, k=256, threads=2)
    legal = Candidate.of("split_k", {"split": 4})
    assert kernels.require_legal(described, cpu, legal) is kernels.variant("gemm", "split_k")
    assert kernels.require_legal(described, cpu, Candidate("vendor")).name == "vendor"
    for candidate, said in (
        (Candidate.of("split_k", {"split": 8}), "32 < 64"),
        (Candidate.of("split_k", {"split": 3}), "split is 3; it must be one of 2, 4, 8, 16, 32"),
        (Candidate.of("split_k", {"split": "4"}), "split is '4'"),
        (Candidate("split_k"), "does not have the parameters of split_k, which are: split"),
        (Candidate.of("split_k", {"split": 4, "more": 1}), "does not have the parameters"),
        (Candidate.of("vendor", {"split": 4}), "which are: none"),
        (Candidate.of("transposed", {"output": "banana"}), "one of view, copy"),
    ):
        with pytest.raises(IllegalCandidateError, match=said):
            kernels.require_legal(described, cpu, candidate)
    with pytest.raises(UnknownNameError):
        kernels.require_legal(described, cpu, Candidate("split"))


@for_each("name", OPERATIONS)
def test_the_default_has_no_parameters_and_no_rules(name):
    default = kernels.variant(name, kernels.operation(name).default_variant)
    assert default.parameters == ()
    assert default.rules == ()
    assert next(iter(kernels.variants(name))) == default.name


@for_each("name", OPERATIONS)
def test_variants_say_what_they_are(name):
    for found_name, found in kernels.variants(name).items():
        assert found.name == found_name
        assert found.backend in ("vendor", "torch", "triton", "user")
        assert found.doc
        assert all(parameter.doc for parameter in found.parameters)
        assert all(rule.reason and rule.name for rule in found.rules)
        assert len({rule.name for rule in found.rules}) == len(found.rules)
        assert len(found.source_hash()) == 16
        full, quick = found.space(), found.space("default")
        every = {full.at(row) for row in range(full.length)} if full.length < 2000 else None
        rows = [quick.at(row) for row in range(quick.length)]
        assert len(set(rows)) == len(rows)
        for one in rows:
            assert every is None or one in every
            for parameter in found.parameters:
                value = one.parameters[parameter.name]
                assert value in parameter.values, (found_name, one)
                assert type(value) is type(parameter.values[0])


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_candidate_is_legal_or_refused_exactly_once(name, data):
    described = data.draw(problems(name))
    where = data.draw(st.sampled_from(DEVICES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning of numpy is an overflow or a division by zero
        legal = list(kernels.candidates(described, where, subset="default"))
        refused = kernels.refusals(described, where, subset="default")
    assert legal[0] == kernels.operation(name).default
    every = [
        block.at(row)
        for block in (found.space("default") for found in kernels.variants(name).values())
        for row in range(block.length)
    ]
    assert sorted([*legal, *(one.candidate for one in refused)], key=lambda c: c.key) == sorted(
        every, key=lambda c: c.key
    )
    for one in refused:
        names = [rule.name for rule in kernels.variant(name, one.candidate.variant).rules]
        assert one.rule in names
        assert str(one).startswith(f"{one.candidate}: ")
    for one in legal[:: max(1, len(legal) // 5)]:
        assert kernels.require_legal(described, where, one).name == one.variant
    for one in refused[:: max(1, len(refused) // 5)]:
        with pytest.raises(IllegalCandidateError):
            kernels.require_legal(described, where, one.candidate)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_work_of_every_candidate_is_finite(name, data):
    described = data.draw(problems(name))
    where = data.draw(st.sampled_from(DEVICES))
    op = kernels.operation(name)
    assert np.isfinite([op.flops(described), op.traffic_bytes(described)]).all()
    assert min(op.flops(described), op.traffic_bytes(described)) >= 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in kernels.candidates(described, where, subset="default").blocks:
            work = (
                kernels.variant(name, block.variant)
                .work(described, block.columns, where)
                .columns(block.length)
            )
            for column in ("flops", "traffic_bytes", "scratch_bytes", "calls"):
                assert np.isfinite(work[column]).all(), (block.variant, column)
                assert (work[column] >= 0).all(), (block.variant, column)
            assert (work["calls"] >= 1).all() or not op.flops(described), block.variant
            for column in ("programs", "warps", "shared_bytes", "accumulators", "inner_steps"):
                known = work[column][~np.isnan(work[column])]
                assert np.isfinite(known).all(), (block.variant, column)
                assert (known >= 0).all(), (block.variant, column)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=examples(10), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_quick_subset_is_part_of_the_legal_candidates(name, data):
    described = data.draw(problems(name, sizes=(64, 128, 1000, 16)))
    where = data.draw(st.sampled_from(DEVICES))
    full = CandidateTable(
        block for block in kernels.candidates(described, where).blocks if block.length < 2000
    )
    variants = {block.variant for block in full.blocks}
    quick = [one for one in kernels.candidates(described, where, subset="default") if one.variant in variants]
    assert set(quick) <= set(full)


def in_a_new_process(code, tmp_path):
    """Run code where ``HERE`` is a folder that operations are also looked for in; returns what it printed."""
    preamble = f"""
        import sys, warnings
        from kernelcast.kernels import registry
        import kernelcast.kernels.ops as ops
        import kernelcast.kernels as kernels
        sys.path.insert(0, {str(tmp_path)!r})
        ops.__path__.append({str(tmp_path)!r})
    """
    source = textwrap.dedent(preamble) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


OPERATION_FILE = """
from kernelcast.kernels import Operation, ProblemSchema, Tolerance, Variant, Work
from kernelcast.kernels.registry import register_operation, register_variant

@register_operation
class Late(Operation):
    name = "late"
    doc = "for the tests"
    schema = ProblemSchema("late", (), ("float32",))
    def make_inputs(self, problem, *, seed, device): return ()
    def reference(self, problem, *inputs): ...
    def tolerance(self, problem): return Tolerance(0.0, 0.0)
    def flops(self, problem): return 1.0
    def traffic_bytes(self, problem): return 1.0

class Base(Variant):
    backend, doc = "user", "for the tests"
    def work(self, problem, columns, device): return Work(1.0, 1.0)
    def build(self, problem, config): ...
"""

VENDOR = """
@register_variant("late")
class Vendor(Base):
    name = "vendor"
"""


def test_a_new_operation_is_one_new_folder(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(OPERATION_FILE + VENDOR)
    printed = in_a_new_process(
        """
        print(kernels.operation("late").name, list(kernels.variants("late")), "late" in kernels.operation_names())
        print("gemm" in registry._operations)
        """,
        tmp_path,
    )
    assert printed == ["late ['vendor'] True", "True"]


def test_an_import_that_fails_fails_alike_the_next_time(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(
        OPERATION_FILE + "import kernelcast.kernels.ops.late.part\n"
    )
    (tmp_path / "late" / "part.py").write_text(
        "from kernelcast.kernels.ops.late import *\n" + VENDOR + "import no_such_library\n"
    )
    printed = in_a_new_process(
        """
        for attempt in range(3):
            try:
                kernels.operation("late")
            except ImportError as error:
                print(error)
        """,
        tmp_path,
    )
    assert printed == ["No module named 'no_such_library'"] * 3


def test_two_threads_that_load_an_operation_both_see_all_of_it(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(
        OPERATION_FILE + "import builtins, time; builtins.registered.set(); time.sleep(0.3)\n" + VENDOR
    )
    printed = in_a_new_process(
        """
        import builtins, threading
        builtins.registered = threading.Event()
        seen = []
        def look():
            seen.append(list(kernels.variants("late")))
        first = threading.Thread(target=look)
        first.start()
        builtins.registered.wait(10)
        second = threading.Thread(target=look)
        second.start()
        first.join(), second.join()
        print(seen)
        """,
        tmp_path,
    )
    assert printed == ["[['vendor'], ['vendor']]"]


def test_a_package_with_a_broken_operation_takes_nothing_else_away(tmp_path):
    (tmp_path / "theirs.py").write_text(OPERATION_FILE + VENDOR)
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelcast.operations]\nbroken = broken\nlate = theirs\n")
    printed = in_a_new_process(
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(kernels.operation("late").name, "gemm" in kernels.operation_names())
            print([str(each.message) for each in caught])
        """,
        tmp_path,
    )
    assert printed[0] == "late True"
    assert "operations of broken cannot be loaded (ModuleNotFoundError" in printed[1]


def test_a_variant_that_does_not_serve_a_problem_lists_no_space(monkeypatch):
    tiled = kernels.variant("gemm", "triton_tiled")
    described = kernels.problem("gemm", m=64, n=64, k=64, threads=1)
    cpu, gpu = DEVICES[0], device("a100")
    assert (tiled.serves(described, cpu), tiled.serves(described, gpu)) == (False, True)
    assert not tiled.serves(kernels.problem("gemm", m=64, n=64, k=64, dtype="bfloat16"), device("t4"))
    listed = []
    monkeypatch.setattr(
        registry, "space_of", lambda found, subset: listed.append(found.name) or found.space(subset)
    )
    kernels.candidates(described, cpu)
    assert {"vendor", "split_k"} <= set(listed)
    assert not [name for name in listed if name.startswith("triton")]


@for_each("name", OPERATIONS)
def test_rules_of_the_problem_alone_look_at_no_column(name):
    described = kernels.operation(name).schema.problem(
        **{dim.name: 64 for dim in kernels.operation(name).schema.dims}
    )
    for found in kernels.variants(name).values():
        for rule in found.rules:
            if rule.of_problem:
                for each in DEVICES:
                    met = rule.met(described, {}, each, 3)
                    assert (
                        met.tolist() == rule.met(described, found.space("default").columns, each, 3).tolist()
                    )


def test_candidates_of_given_spaces_alone():
    tiled = kernels.variant("gemm", "triton_tiled")
    some = tiled.space("default").take(np.arange(3))
    described = kernels.problem("gemm", m=4096, n=4096, k=4096, dtype="float16")
    found = registry.candidates(described, device("a100"), spaces={"triton_tiled": some})
    assert list(found) == list(CandidateTable([some]))


def test_a_listed_space_cannot_be_written_to():
    block = registry.space_of(kernels.variant("gemm", "triton_tiled"), "default")
    with pytest.raises(ValueError, match="read-only"):
        block.columns["block_m"][0] = 1
