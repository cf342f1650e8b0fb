"""Configs of vLLM's and SGLang's fused mixture-of-experts kernel: the file, the plan, and files as priors."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelcast.fused_moe as fused_moe
from kernelcast.costmodel import Prediction
from kernelcast.errors import (
    IllegalCandidateError,
    ImportFileError,
    InvalidProblemError,
    InvalidRecordError,
    KernelcastError,
    SettingsError,
)
from kernelcast.kernels import Candidate, CandidateTable, problem, require_legal
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device, device_names
from kernelcast.runtime.fused_moe import Layer, Planner, torch_name
from kernelcast.runtime.fused_moe_file import MAX_BYTES, device_label, read_file, write_file
from kernelcast.runtime.ranking import Ranking
from kernelcast.runtime.selector import Selector

H100 = device("h100")
NAME = "E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json"
CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


def tile(**values):
    """A candidate of triton_grouped; CONFIG's where nothing else is said."""
    config = {"block_m": 16, "block_n": 64, "block_k": 128, "group_m": 1, "num_warps": 4, "num_stages": 3}
    return Candidate.of("triton_grouped", config | values)


def grouped(m=32, n=28672, k=4096, **values):
    return problem("grouped_gemm", groups=8, m=m, n=n, k=k, **{"dtype": "bfloat16", "layout": "nt", **values})


def put(folder, content, name=NAME):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- names ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (NAME, (8, 14336, "NVIDIA_H100_80GB_HBM3", "", None)),
        ("E=128,N=192,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json",
         (128, 192, "AMD_Instinct_MI300X", "fp8_w8a8", (128, 128))),
        ("E=10,N=512,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics.json",
         (10, 512, "Intel(R)_Arc(TM)_Pro_B60_Graphics", "", None)),
        ("E=1,N=7168,device_name=NVIDIA_A100-SXM4-80GB,dtype=float32.json",
         (1, 7168, "NVIDIA_A100-SXM4-80GB", "float32", None)),
    ],
)  # fmt: skip
def test_a_name_says_the_layer_and_the_device(tmp_path, text, parts):
    name = fused_moe.FileName.parse(tmp_path / text)
    assert (name.experts, name.intermediate, name.device_name, name.dtype, name.block_shape) == parts
    assert str(name) == text


def test_sglang_puts_a_space_into_the_shape_of_blocks(tmp_path):
    name = "E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 64].json"
    assert fused_moe.FileName.parse(tmp_path / name).block_shape == (128, 64)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        NAME.replace(".json", ""),
        NAME.replace("E=8", "E=0"),
        NAME.replace("E=8", "E=99999999999"),
        NAME.replace("E=8,", ""),
        NAME.replace(".json", "_down.json"),
        NAME.replace(".json", ",per_channel_quant=True.json"),
    ],
)
def test_another_name_is_refused(tmp_path, name):
    with pytest.raises(ImportFileError):
        fused_moe.read(put(tmp_path, {"1": CONFIG}, name), experts_per_token=2)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3"),
        ("NVIDIA H200", "NVIDIA_H200"),
        ("NVIDIA H200 NVL", "NVIDIA_H200"),
        ("NVIDIA GH200 480GB", "NVIDIA_GH200_480GB"),
    ],
)
def test_devices_are_called_as_vllm_calls_them(name, label):
    assert device_label(name) == label


def test_torchs_name_of_most_known_cards_is_known_and_of_others_asked_for():
    asked = "mi250x-128gb"
    known = {each: torch_name(device(each)) for each in device_names() if each != asked}
    assert known["a100-sxm4-80gb"] == "NVIDIA A100-SXM4-80GB"
    assert len(set(known.values())) == len(known)
    with pytest.raises(SettingsError, match="device_name"):
        torch_name(device(asked))


# --- configs ---

powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
tiles = st.builds(
    tile,
    block_m=powers,
    block_n=powers,
    block_k=powers,
    group_m=st.integers(1, 1024),
    num_warps=st.sampled_from([1, 2, 4, 8, 16, 32]),
    num_stages=st.integers(1, 16),
)


@settings(max_examples=30)
@given(st.dictionaries(st.integers(1, 2**31 - 1), tiles, min_size=1, max_size=20), st.sampled_from(["", "3.6.0"]))  # fmt: skip
def test_what_is_written_is_read_again(tmp_path_factory, configs, version):
    folder = tmp_path_factory.mktemp("configs")
    name = fused_moe.FileName(8, 14336, "NVIDIA_H100_80GB_HBM3", "float32")
    path = write_file(folder, name, configs, version)
    assert read_file(path) == (name, dict(sorted(configs.items())), version)
    assert [each.name for each in folder.iterdir()] == [str(name)]


def test_the_words_of_a_config_are_theirs():
    assert fused_moe.config_of(tile()) == CONFIG
    assert list(fused_moe.config_of(tile())) == list(CONFIG)
    assert fused_moe.candidate_of(CONFIG) == tile()
    # As files for AMD have it.
    more = {**CONFIG, "SPLIT_K": 1, "waves_per_eu": 0, "matrix_instr_nonkdim": 16, "kpack": 2}
    assert fused_moe.candidate_of(more) == tile()


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (Candidate.of("triton_grouped_split_k", {**tile().parameters, "split_k": 4}), "no split factor"),
        (Candidate.of("triton_grouped_persistent", {**tile().parameters, "programs_per_core": 2}), "for each core"),
        (Candidate.of("vendor"), "vendor does not"),
        (Candidate.of("triton_grouped", {"block_m": 16}), "a config has block_m"),
        (tile(block_m=48), "power of two"),
        (tile(num_stages=0), "from 1 to 16"),
    ],
)  # fmt: skip
def test_what_their_kernel_cannot_do_is_not_written(tmp_path, candidate, why):
    with pytest.raises(IllegalCandidateError, match=why):
        write_file(tmp_path, fused_moe.FileName(8, 512, "NVIDIA_H200"), {1: candidate})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        ("[1]", "holds list"),
        ("{}", "has 0 configs"),
        ('{"1": 1}', "config of 1 tokens is 1"),
        ('{"-1": {}}', "key '-1'"),
        ('{"01": {}}', "key '01'"),
        ('{"\u0663": {}}', "number of tokens"),
        ('{"9999999999": {}}', "key '9999999999'"),
        ('{"triton_version": 3, "1": {}}', "triton_version"),
        ('{"1": {}, "1": {}}', "'1' comes twice"),
        ('{"1": {"BLOCK_SIZE_M": NaN}}', "NaN"),
        (json.dumps({"1": {**CONFIG, "BLOCK_SIZE_M": "16"}}), "1 tokens.*BLOCK_SIZE_M is '16'"),
        (json.dumps({"1": {**CONFIG, "BLOCK_SIZE_K": True}}), "BLOCK_SIZE_K is True"),
        (json.dumps({"1": {**CONFIG, "BLOCK_SIZE_N": 48}}), "BLOCK_SIZE_N is 48; .*power of two"),
        (json.dumps({"1": {**CONFIG, "num_warps": 10**30}}), "num_warps is 1000"),
        (json.dumps({"1": {**CONFIG, "SPLIT_K": 4}}), "SPLIT_K is 4"),
        (json.dumps({"1": {**CONFIG, "kpack": -1}}), "kpack is -1"),
        (json.dumps({"64": CONFIG, "1": {**CONFIG, "USE_TMA": False}}), "1 tokens.*'USE_TMA' is not known"),
        (json.dumps({"8": {name: 16 for name in CONFIG if name != "num_stages"}}), "8 tokens.*no num_stages"),
        (json.dumps({str(m): CONFIG for m in range(1, 5000)}), "4999 configs"),
        ('{"1": "' + "x" * MAX_BYTES + '"}', "larger than"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_and_the_key(tmp_path, content, said):
    path = tmp_path / NAME
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ImportFileError, match=said) as raised:
        fused_moe.read(path, experts_per_token=2)
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value)) < len(str(path)) + 400


@settings(max_examples=50)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_content_does_anything_but_be_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / NAME
    path.write_bytes(content)
    with pytest.raises(ImportFileError):
        fused_moe.read(path, experts_per_token=2)


def test_a_file_or_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ImportFileError, match="cannot be read"):
        fused_moe.read(tmp_path / NAME, experts_per_token=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ImportFileError, match="cannot be written"):
        planned(ms=[1]).save(tmp_path / "file")


# --- priors ---


def priors(folder, ms=(64, 1, 16), *, experts_per_token=2, name=NAME, **values):
    content = {str(m): {**CONFIG, "BLOCK_SIZE_M": 16 if m < 16 else m, **values} for m in ms}
    return fused_moe.read(put(folder, content, name), experts_per_token=experts_per_token)


def test_the_nearest_number_of_tokens_counts_the_first_of_two(tmp_path):
    found = priors(tmp_path)
    assert list(found.configs) == [64, 1, 16]
    assert found.nearest(1000).parameters["block_m"] == 64
    assert found.nearest(9) == tile(block_m=16)
    # 40 is as near to 64 as to 16: vLLM takes what comes first in the file.
    assert found.nearest(40).parameters["block_m"] == 64
    # 80 rows are 40 tokens, each sent to two experts.
    assert found.candidates(grouped(m=80)) == [tile(block_m=64)]
    assert found(grouped(m=30)) == [tile(block_m=16)]
    assert priors(tmp_path, experts_per_token=8).candidates(grouped(m=80)) == [tile(block_m=16)]


@pytest.mark.parametrize(
    ("described", "serves"),
    [
        (grouped(), True),
        (grouped(n=4096, k=14336), True),
        (grouped(n=14336), True),
        (grouped(dtype="float16"), True),
        (grouped(dtype="float32"), False),
        (grouped(n=4096, k=4096), False),
        (problem("grouped_gemm", groups=16, m=32, n=28672, k=4096, dtype="bfloat16"), False),
        (problem("gemm", m=32, n=28672, k=14336, dtype="bfloat16"), False),
    ],
)
def test_a_file_serves_the_products_of_its_layer_alone(tmp_path, described, serves):
    found = priors(tmp_path)
    assert found.serves(described) is serves
    assert len(found.candidates(described)) == serves


def test_a_file_for_another_dtype_serves_that_alone(tmp_path):
    found = priors(tmp_path, name=NAME.replace(".json", ",dtype=float32.json"))
    assert found.serves(grouped(dtype="float32"))
    assert not found.serves(grouped())
    assert not priors(tmp_path, name=NAME.replace(".json", ",dtype=fp8_w8a8.json")).serves(grouped())


def test_a_value_that_the_variant_does_not_have_becomes_the_nearest(tmp_path):
    found = priors(tmp_path, ms=(1,), GROUP_SIZE_M=64, BLOCK_SIZE_K=256, num_stages=7, num_warps=16)
    assert found.nearest(1).parameters["group_m"] == 64
    expected = tile(group_m=16, block_k=128, num_stages=5, num_warps=8)
    assert found.candidates(grouped()) == [expected]
    # 227 KiB of shared memory hold no five stages of two 256 x 128 tiles.
    large = priors(tmp_path, ms=(1,), BLOCK_SIZE_M=256, BLOCK_SIZE_N=256, num_stages=5, num_warps=8)
    assert len(large.candidates(grouped(m=4096))) == 1
    assert large.candidates(grouped(m=4096), H100) == []


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_experts_of_a_token_are_counted(tmp_path, value):
    with pytest.raises(InvalidRecordError, match="experts_per_token"):
        priors(tmp_path, experts_per_token=value)


# --- plans ---


class Ranks:
    """A selector that ranks candidates by what a test says of each product."""

    device, plan, mode = H100, None, "predict"

    def __init__(self, latency_us, source="predicted"):
        self.latency_us, self.source, self.asked = latency_us, source, []

    def rank(self, described):
        self.asked.append(described)
        up = described["k"] == 4096
        rows = [(Candidate.of("vendor"), 1.0), *((each, us[0 if up else 1]) for each, us in self.latency_us)]
        # The second product lists them the other way round.
        rows = [row for row in (rows if up else reversed(rows)) if not math.isnan(row[1])]
        table = CandidateTable.of(candidate for candidate, _ in rows)
        prediction = Prediction(
            np.log([us for _, us in rows]), np.full(len(rows), 0.1), np.ones(len(rows), dtype=bool)
        )
        return Ranking(table, prediction, self.source, "0001", "as the test says")


LAYER = Layer(8, 14336, 4096, "bfloat16", 2)
A, B, C, D = tile(block_m=16), tile(block_m=32), tile(block_m=64), tile(block_m=128)
LATENCY_US = [(A, (10.0, 50.0)), (B, (20.0, 30.0)), (C, (35.0, 20.0)), (D, (1.0, math.nan))]


def planned(**options):
    """A plan made by the roofline, for an H100."""
    values = {"experts_per_token": 2, "device": H100, "ms": [1, 64], "mode": "predict"} | options
    return fused_moe.plan(8, 14336, 4096, **values)


def test_a_layer_is_two_grouped_products():
    first, second = LAYER.problems(16)
    assert first == grouped(m=32, n=28672, k=4096)
    assert second == grouped(m=32, n=4096, k=14336)
    with pytest.raises(InvalidProblemError, match="experts_per_token"):
        dataclasses.replace(LAYER, experts_per_token=0).problems(1)


def test_a_config_is_judged_by_the_sum_of_both_products():
    """B is the first of neither. D cannot do the second product, and the vendor's call is no tile."""
    choice = Planner(Ranks(LATENCY_US), LAYER, 0).choose(16)
    assert (choice.candidate, choice.source) == (B, "predicted")
    assert choice.predicted_us == pytest.approx(50.0)
    assert math.isnan(choice.measured_us)
    assert choice.reason == "The first of 3 for both products; as the test says."


class Measures(Planner):
    """Measures what a test says of each product."""

    def __init__(self, measured_us, top_k=3):
        super().__init__(Ranks(LATENCY_US), LAYER, top_k)
        self.measured_us, self.asked = measured_us, []

    def measure(self, described, candidates):
        self.asked.append(candidates)
        if self.measured_us is None:
            raise KernelcastError("It does not fit in memory.")
        column = 0 if described["k"] == 4096 else 1
        values = np.array([self.measured_us[each][column] for each in candidates])
        return values, np.full(len(values), 0.001)


@pytest.mark.parametrize(
    ("measured_us", "winner", "total_us"),
    [
        ({A: (10.0, 50.0), B: (20.0, 45.0), C: (20.0, 20.0)}, C, 40.0),
        ({A: (10.0, 50.0), B: (20.0, 45.0), C: (20.0, math.nan)}, A, 60.0),
        # Nearer than the noise: the first of the ranking.
        ({A: (30.0, 30.0), B: (30.01, 30.01), C: (40.0, 40.0)}, B, 60.02),
    ],
)
def test_the_fastest_of_those_that_were_measured_is_taken(measured_us, winner, total_us):
    planner = Measures(measured_us)
    choice = planner.choose(16)
    assert planner.asked == [[B, C, A]] * 2
    assert (choice.candidate, choice.source) == (winner, "verified")
    assert choice.measured_us == pytest.approx(total_us)
    assert choice.reason.startswith("The fastest of 3 measured")


@pytest.mark.parametrize(
    ("measured_us", "why"),
    [(None, "It does not fit in memory"), (dict.fromkeys((A, B, C), (math.nan, 1.0)), "none of the 3 measured")],
)  # fmt: skip
def test_where_nothing_can_be_measured_the_first_of_the_ranking_stays(measured_us, why):
    choice = Measures(measured_us).choose(16)
    assert (choice.candidate, choice.source) == (B, "predicted")
    assert choice.reason.startswith(why)
    assert "so not verified" in choice.reason


def test_of_many_that_are_ranked_only_the_first_are_measured():
    planner = Measures({A: (1.0, 1.0), B: (5.0, 5.0), C: (9.0, 9.0)}, top_k=2)
    assert planner.choose(1).candidate == B
    assert planner.asked == [[B, C]] * 2


def test_a_plan_without_a_model_says_so_and_is_legal(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    made = planned()
    assert str(made.name) == NAME
    assert [choice.tokens for choice in made.choices] == [1, 64]
    for choice in made.choices:
        assert choice.source == "analytic"
        for described in LAYER.problems(choice.tokens):
            require_legal(described, H100, choice.candidate)
    with pytest.warns(fused_moe.PlanWarning, match="2 of 2 configs of E=8,N=14336.* come from the roofline"):
        path = fused_moe.write(
            tmp_path / "configs", 8, 14336, 4096, experts_per_token=2, device=H100, ms=(64, 1), mode="predict"
        )
    assert path == tmp_path / "configs" / NAME
    assert dict(fused_moe.read(path, experts_per_token=2).configs) == made.configs
    assert list(json.loads(path.read_text())) == ["triton_version", "1", "64"]
    # For a device that is not here, verify is predict.
    assert planned(mode="verify").choices == made.choices


def test_what_was_to_be_verified_and_is_not_here_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("kernelcast.runtime.fused_moe.is_here", lambda _: False)
    options = {"experts_per_token": 2, "device": H100, "ms": [1, 16], "mode": "verify"}
    with pytest.warns(fused_moe.PlanWarning) as seen:
        fused_moe.write(tmp_path, 8, 14336, 4096, **options, selector=Selector(H100, models=tmp_path))
    assert str(seen[0].message) == (
        "h100-sxm5-80gb is not in this machine, so nothing can be verified here: all 2 configs are analytic. Run it on the GPU "
        "itself to verify."
    )
    assert planned(mode="verify").hindrance.startswith("h100-sxm5-80gb is not in this machine")
    assert planned(mode="predict").hindrance == ""


def test_a_plan_by_a_model_is_written_without_a_warning(tmp_path, recwarn):
    path = fused_moe.write(
        tmp_path, 8, 14336, 4096, "float32", experts_per_token=2, ms=[16], selector=Ranks(LATENCY_US),
        device_name="NVIDIA H200 NVL", triton_version="",
    )  # fmt: skip
    assert path.name == "E=8,N=14336,device_name=NVIDIA_H200,dtype=float32.json"
    assert json.loads(path.read_text()) == {"16": {**CONFIG, "BLOCK_SIZE_M": 32}}
    assert not [each for each in recwarn if issubclass(each.category, fused_moe.PlanWarning)]


@for_each(
    ("options", "error", "said"),
    [
        ({"ms": []}, InvalidProblemError, "numbers of tokens"),
        ({"ms": [0]}, InvalidProblemError, "numbers of tokens"),
        ({"ms": [1, "2"]}, InvalidProblemError, "numbers of tokens"),
        ({"mode": "off"}, SettingsError, "predict or verify"),
        ({"top_k": 0}, SettingsError, "top_k"),
        ({"dtype": "fp8_w8a8"}, InvalidProblemError, "does not take dtype 'fp8_w8a8'"),
        ({"device": device("mi250x-128gb")}, SettingsError, "device_name"),
        ({"device": device("a100"), "selector": Ranks(LATENCY_US)}, SettingsError, "the selector is of h100"),
        ({"selector": Ranks(LATENCY_US[3:])}, IllegalCandidateError, "No config of triton_grouped is legal"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        planned(**options)


def test_a_cpu_has_no_such_kernel():
    with pytest.raises(IllegalCandidateError, match="is none"):
        planned(device=detect("cpu"))


def test_the_public_names_are_there():
    for name in fused_moe.__all__:
        assert getattr(fused_moe, name) is not None
    assert set(fused_moe.__all__) <= set(dir(fused_moe))
    with pytest.raises(AttributeError):
        fused_moe.no_such_name  # noqa: B018


@pytest.mark.gpu
def test_where_the_gpu_is_here_the_first_few_are_measured_and_recorded(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    selector = Selector(cache=False, store=tmp_path / "store", models=tmp_path / "models")
    made = fused_moe.plan(
        8, 256, 512, experts_per_token=2, ms=[4, 64], mode="verify", top_k=2, selector=selector
    )
    assert [choice.source for choice in made.choices] == ["verified", "verified"]
    assert all(choice.measured_us > 0 for choice in made.choices)
    assert made.name.device_name == device_label(torch.cuda.get_device_name())
    records = [
        line
        for path in (tmp_path / "store").glob("journal/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(records) == 8
