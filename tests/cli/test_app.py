"""The command line as a whole: help with examples, one sentence for what is wrong, exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import typer
from cases import for_each
from cli_lab import command_line

from kernelcast.cli import app as application
from kernelcast.cli import collect, commands, common
from kernelcast.errors import InvalidProblemError, KernelcastError


def runner(app, monkeypatch, capsys, tmp_path):
    """What runs an application as ``kernelcast``: (exit status, standard output, standard error)."""
    monkeypatch.setattr(application, "app", app)
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        status = application._run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def leaves(command, words=()):
    """(words, command) of every command below a group."""
    if not hasattr(command, "commands"):
        return [(words, command)]
    return [found for name, inner in command.commands.items() for found in leaves(inner, (*words, name))]


def test_an_operation_is_named_by_the_same_options_everywhere():
    app = typer.Typer()
    app.callback()(application._options)
    commands.attach(app)
    spellings = {
        words: set(option.opts)
        for words, command in leaves(typer.main.get_command(app))
        for option in command.params
        if {"--op", "--operation"} & set(option.opts)
    }
    assert {("data", "export"), ("data", "prune"), ("import", "table"), ("plan",), ("tune",)} <= set(
        spellings
    )
    assert {words: found for words, found in spellings.items() if found != {"--op", "--operation"}} == {}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command line."""
    return runner(command_line(), monkeypatch, capsys, tmp_path)


@pytest.fixture
def own(monkeypatch, capsys, tmp_path):
    """Runs an application that the test may add to: ``own.app``."""
    app = typer.Typer(no_args_is_help=True)
    app.callback()(application._options)
    run = runner(app, monkeypatch, capsys, tmp_path)
    run.app = app
    return run


BAD = {
    "unknown operation": (["kernels", "gem", "m=1"], "Did you mean 'gemm'?"),
    "unknown operation of select": (["select", "gem", "m=1"], "Did you mean 'gemm'?"),
    "unknown dimension": (["kernels", "gemm", "m=1", "n=1", "k=1", "q=1"], "no dimension or option 'q'"),
    "missing dimension": (["select", "gemm", "m=1"], "needs the dimension 'n'"),
    "no dimensions": (["select", "gemm"], "needs the dimension 'm'"),
    "a word": (["kernels", "gemm", "m=abc", "n=1", "k=1"], "m is 'abc'"),
    "a fraction": (["kernels", "gemm", "m=1.5", "n=1", "k=1"], "m is '1.5'"),
    "negative": (["kernels", "gemm", "m=-1", "n=1", "k=1"], "m is -1"),
    "enormous": (["kernels", "gemm", f"m={10**30}", "n=1", "k=1"], "below 2**40"),
    "given twice": (["kernels", "gemm", "m=1", "m=2"], "m is given twice"),
    "no equals sign": (["kernels", "gemm", "m"], "not of the form NAME=VALUE"),
    "no value": (["kernels", "gemm", "m="], "not of the form NAME=VALUE"),
    "no name": (["kernels", "gemm", "=1"], "not of the form NAME=VALUE"),
    "Python's own name": (["kernels", "gemm", "self=1", "m=1", "n=1", "k=1"], "no dimension or option 'self'"),
    "another of Python's": (["kernels", "gemm", "operation_name=1"], "no dimension or option 'operation_name'"),
    "unknown dtype": (["kernels", "gemm", "m=1", "n=1", "k=1", "dtype=float8"], "float8"),
    "dtype of a number": (["kernels", "gemm", "m=1", "n=1", "k=1", "dtype=8"], "does not take dtype 8"),
    "unknown layout": (["kernels", "gemm", "m=1", "n=1", "k=1", "layout=xy"], "one of nn, nt, tn, tt"),
    "unknown device": (["kernels", "gemm", "m=1", "n=1", "k=1", "--device", "h999"], "Unknown device 'h999'"),
    "unknown device of select": (["select", "gemm", "m=1", "n=1", "k=1", "--device", "h999"], "Unknown device"),
    "why without a problem": (["kernels", "gemm", "--why"], "Name a problem"),
    "device without a problem": (["kernels", "--device", "h100"], "Name a problem"),
    "unknown mode": (["select", "gemm", "m=1", "n=1", "k=1", "--mode", "guess"], "one of off, cached"),
    "no candidates": (["select", "gemm", "m=1", "n=1", "k=1", "--top-k", "0"], "--top-k"),
    "neither problem nor file": (["collect"], "--problems FILE"),
    "both problem and file": (["collect", "gemm", "m=1", "--problems", "x.txt"], "--problems FILE"),
    "missing file": (["collect", "--problems", "/no/such/file.txt"], "/no/such/file.txt"),
    "folder for a file": (["collect", "--problems", "/"], "/"),
    "unknown subset": (["collect", "gemm", "m=1", "n=1", "k=1", "--subset", "half"], "full, default or auto"),
    "bad duration": (["collect", "gemm", "m=1", "n=1", "k=1", "--budget", "soon"], "soon"),
    "no time": (["collect", "gemm", "m=1", "n=1", "k=1", "--budget", "0s"], "0s"),
    "not a number of seconds": (["collect", "gemm", "m=1", "n=1", "k=1", "--seconds", "nan"], "--seconds"),
    "endless": (["collect", "gemm", "m=1", "n=1", "k=1", "--seconds", "inf"], "timing plan"),
    "no rounds": (["collect", "gemm", "m=1", "n=1", "k=1", "--rounds", "0"], "--rounds"),
    "rounds of a word": (["collect", "gemm", "m=1", "n=1", "k=1", "--rounds", "many"], "--rounds"),
    "unknown option": (["kernels", "--colour"], "--colour"),
    "unknown command": (["kernel"], "kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_status_2(run, name, tmp_path):
    arguments, expected = BAD[name]
    status, out, err = run(*arguments)
    assert status == 2
    lines = [line for line in err.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1
    assert expected in lines[0]
    assert lines[0].endswith((".", "]", "?", "k=64", "threads", "'kernel'.")) or "--" in lines[0]
    assert "Traceback" not in err + out
    assert out == ""
    assert not (tmp_path / "home" / "store").exists()


@pytest.mark.parametrize("name", ["unknown operation", "missing file", "bad duration"])
def test_debug_shows_the_traceback_and_the_same_status(run, name):
    arguments, expected = BAD[name]
    status, _, err = run("--debug", *arguments)
    assert status == 2
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("Error: ")
    assert expected in err.splitlines()[-1]
    # It does not stick.
    assert "Traceback" not in run(*arguments)[2]


def test_an_error_of_several_lines_is_printed_as_one(own):
    @own.app.command("fail")
    def fail():
        raise KernelcastError("First line,\n  second line.")

    assert own("fail") == (2, "", "Error: First line, second line.\n")


def test_a_file_error_names_the_file(own):
    @own.app.command("fail")
    def fail():
        open("/no/such/folder/x")  # noqa: PTH123, SIM115

    assert own("fail") == (2, "", "Error: /no/such/folder/x: No such file or directory.\n")


def test_other_errors_are_not_hidden(own):
    @own.app.command("fail")
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        own("fail")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_is_status_130(own, error):
    @own.app.command("fail")
    def fail():
        raise error

    assert own("fail") == (130, "", "Interrupted.\n")


def test_a_negative_answer_is_status_1_without_a_word(own):
    @own.app.command("fail")
    def fail():
        raise typer.Exit(1)

    assert own("fail") == (1, "", "")


def test_warnings_are_sentences_and_only_those_for_users(own):
    @own.app.command("warn")
    def warn():
        warnings.simplefilter("always")
        warnings.warn("The folder is full.", UserWarning, stacklevel=1)
        warnings.warn("for developers", DeprecationWarning, stacklevel=1)

    before = warnings.showwarning
    assert own("warn") == (0, "", "Warning: The folder is full.\n")
    assert warnings.showwarning is before


def test_without_arguments_help_is_shown(run):
    status, out, err = run()
    assert status == 2
    assert "kernels" in out + err
    assert "Error" not in out + err


@pytest.mark.parametrize("module", commands.MODULES)
def test_help_of_every_command_holds_an_example(module, monkeypatch, capsys):
    from importlib import import_module

    alone = typer.Typer()
    alone.callback()(lambda: None)
    import_module(f"kernelcast.cli.{module}").attach(alone)
    (command,) = typer.main.get_command(alone).commands.values()
    monkeypatch.setenv("COLUMNS", "80")
    names = [[command.name, name] for name in getattr(command, "commands", ())]
    for path in names or [[command.name]]:
        assert application._run([*path, "--help"]) == 0
        out = capsys.readouterr().out
        assert "Example" in out
        # The usage line, and the example itself.
        assert out.count(f"kernelcast {' '.join(path)}") >= 2
        # Defaults in brackets are not eaten as markup.
        assert "[default: ]" not in out


def test_defaults_that_the_environment_sets_are_shown(run):
    assert "[default: $KERNELCAST_HOME/store]" in run("collect", "--help")[1]
    assert "[default: $KERNELCAST_MODE, or verify]" in run("select", "--help")[1]


def test_commands_are_attached_once():
    app = typer.Typer()
    commands.attach(app)
    count = len(app.registered_commands) + len(app.registered_groups)
    commands.attach(app)
    assert len(app.registered_commands) + len(app.registered_groups) == count == len(commands.MODULES)


@pytest.mark.slow
def test_the_installed_command_and_its_exit_status(tmp_path):
    command = [sys.executable, "-c", "from kernelcast.cli import main; main()"]
    environment = {**os.environ, "KERNELCAST_HOME": str(tmp_path), "PYTHONSAFEPATH": "1"}

    def call(*arguments):
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)

    done = call("kernels", "gemm")
    assert done.returncode == 0
    assert "vendor" in done.stdout
    failed = call("kernels", "gem")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("Error: Unknown operation 'gem'")
    assert failed.stderr.count("\n") == 1
    # A reader that goes away is no error.
    piped = subprocess.run(
        f"{sys.executable} -c 'from kernelcast.cli import main; main()' kernels --json | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        env=environment,
    )
    assert piped.returncode == 0
    assert piped.stderr == ""


# --- What the commands share ---


def test_values_are_typed():
    words = ["m=64", "layout=nt", "causal=true", "flag=False", "text=5x"]
    assert common.parse_values(words) == {
        "m": 64, "layout": "nt", "causal": True, "flag": False, "text": "5x"
    }  # fmt: skip
    with pytest.raises(InvalidProblemError, match="given twice"):
        common.parse_values(["m=1", "m=1"])


def test_json_has_no_numbers_that_json_lacks(capsys, tmp_path):
    import json

    data = {"a": float("nan"), "b": [float("inf"), 1.5, (2, "x")], 3: {"c": None}}
    common.print_json(data)
    expected = {"a": None, "b": [None, 1.5, [2, "x"]], "3": {"c": None}}
    assert json.loads(capsys.readouterr().out) == expected
    common.write_json(tmp_path / "x.json", data)
    assert json.loads((tmp_path / "x.json").read_text()) == expected


def test_names_are_split_at_commas():
    assert common.split_names(" timm, random,") == ["timm", "random"]
    assert common.split_names(None) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), (None, None)]
)
def test_durations(text, seconds):
    assert collect.parse_duration(text) == seconds


@for_each("text", ["", "s", "-5", "0", "1d", "nan", "inf", "1e400h", "ten"])
def test_bad_durations(text):
    with pytest.raises(KernelcastError, match="not a positive number"):
        collect.parse_duration(text)
