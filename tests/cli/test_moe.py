"""``kernelcast export-moe``."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kernelcast.cli import export_moe as moe
from kernelcast.errors import KernelcastError

LAYER = ["--experts", "8", "--intermediate", "14336", "--hidden", "4096", "--per-token", "2"]
FILE = "E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command, which alone is in the application, into tmp_path/configs."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    app = typer.Typer()
    moe.attach(app)

    def call(*words):
        return CliRunner().invoke(app, [*LAYER, "--output", str(tmp_path / "configs"), *words])

    return call


def test_the_file_is_written_and_shown(run, tmp_path):
    done = run("--device", "h100", "--mode", "predict", "--tokens", "16,1")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "configs" / FILE).read_text())
    assert [key for key in content if key != "triton_version"] == ["1", "16"]
    assert "analytic" in done.output
    assert "NVIDIA_H100_80GB_HBM3" in done.output
    assert "come from the roofline" in done.stderr


@pytest.mark.parametrize(("words", "label"), [(["--mode", "verify"], "Warning:"), ([], "Note:")])
def test_what_cannot_be_verified_here_is_said(run, monkeypatch, words, label):
    monkeypatch.delenv("KERNELCAST_MODE", raising=False)
    monkeypatch.setattr("kernelcast.runtime.fused_moe.is_here", lambda _: False)
    said = (
        "h100-sxm5-80gb is not in this machine, so nothing can be verified here: all 2 configs are analytic."
    )
    done = run("--device", "h100", "--tokens", "16,1", *words)
    assert done.exit_code == 0
    assert f"{label} {said}" in done.stderr
    done = run("--device", "h100", "--tokens", "16,1", "--json", "--overwrite", *words)
    assert json.loads(done.stdout)["hindrance"].startswith(said)
    done = run("--device", "h100", "--tokens", "16,1", "--json", "--overwrite", "--mode", "predict")
    assert json.loads(done.stdout)["hindrance"] == ""
    assert "not in this machine" not in done.stderr


def test_a_file_that_is_there_stays_unless_told_otherwise(run, tmp_path):
    words = ["--device", "h100", "--mode", "predict", "--tokens", "16"]
    path = tmp_path / "configs" / FILE
    path.parent.mkdir()
    path.write_text("mine")
    done = run(*words)
    assert isinstance(done.exception, KernelcastError)
    assert str(done.exception) == f"{path}: it exists already. Name another folder, or add --overwrite."
    assert path.read_text() == "mine"
    assert run(*words, "--overwrite").exit_code == 0
    assert "16" in json.loads(path.read_text())


def test_a_token_goes_to_no_more_experts_than_there_are(run):
    done = run("--device", "h100", "--mode", "predict", "--per-token", "9")
    assert isinstance(done.exception, KernelcastError)
    assert "experts_per_token is 9 of 8 experts" in str(done.exception)


def test_the_figures_as_json(run, tmp_path):
    done = run("--device", "a100", "--mode", "predict", "--tokens", "64", "--dtype", "float32", "--json")
    found = json.loads(done.stdout)
    assert found["path"].endswith("E=8,N=14336,device_name=NVIDIA_A100-SXM4-80GB,dtype=float32.json")
    [config] = found["configs"]
    assert (config["tokens"], config["source"], config["measured_us"]) == (64, "analytic", None)
    assert config["predicted_us"] > 0
    assert (
        json.loads((tmp_path / "configs" / found["path"]).read_text())["64"]["BLOCK_SIZE_M"]
        == (config["config"]["block_m"])
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "h100", "--tokens", "1,x"], "--tokens is '1,x'"),
        (["--device", "h100", "--tokens", ","], "--tokens is ','"),
        (["--device", "h100", "--dtype", "int8"], "does not take dtype 'int8'"),
        (["--device", "mi250x-128gb"], "device_name"),
        (["--device", "h100", "--mode", "tune"], "predict or verify"),
    ],
)
def test_what_cannot_be_written_is_said(run, words, said):
    done = run(*words)
    assert isinstance(done.exception, KernelcastError)
    assert said in str(done.exception)
