"""`python -m halfsafe`: exit codes, one-line errors, JSON, progress, 80 columns; and that the module really starts."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfsafe.precision.commands import cli, convert
from halfsafe.precision.files.safetensors_file import open_checkpoint
from safetensors.torch import load_file, save_file
from support import dialects, tiny_models

ROOT = Path(__file__).resolve().parents[3]
COLUMNS = 80
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and devices")


@pytest.fixture
def source(tmp_path):
    return dialects.scaled_fp8(tmp_path / "in.safetensors", *dialects.reference())


def plain(path, value=1.0):
    save_file({"blocks.0.ffn.0.weight": torch.full((64, 64), value)}, path)
    return path


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def in_a_process(*arguments, before="", **options):
    """The command in a process of its own, after a line of Python."""
    code = f"import runpy, sys; {before}\nsys.argv = ['halfsafe', *sys.argv[1:]]; runpy.run_path({str(ROOT)!r}, run_name='__main__')"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120} | options
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False, **options)


def test_inspect(capsys, source):
    code, out, err = run(capsys, "inspect", source)
    assert (
        code == 0
        and err == ""
        and "scaled_fp8" in out
        and "clipped at 448" in out
        and "none in headers and scales; --values reads the values too" in out
    )
    code, out, _ = run(capsys, "inspect", source, "--json")
    found = json.loads(out)
    assert code == 0 and found["scales"] == {"tensor": 2} and not found["values"]


def test_inspect_exits_one_on_a_problem_and_scan_is_inspect_with_values(capsys, source, tmp_path):
    bad, lost = plain(tmp_path / "bad.safetensors", float("nan")), tmp_path / "lost.safetensors"
    save_file({"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.my_scale": torch.ones(1)}, lost)
    for command in (["scan"], ["inspect", "--values"]):
        code, out, _ = run(capsys, *command, source)
        assert code == 0 and re.search(r"problems +none\n", out) and "scaled_fp8" in out
        code, out, _ = run(capsys, *command, bad)
        assert (
            code == 1
            and re.search(r"problems +1\n", out)
            and "blocks.0.ffn.0.weight: 4096 of 4096 values are NaN" in out
        )
        code, out, _ = run(capsys, *command, bad, "--json")
        assert code == 1 and json.loads(out)["problems"][0]["kind"] == "nan" and json.loads(out)["values"]
    assert run(capsys, "inspect", bad)[0] == 0, "no value was read"
    code, out, _ = run(capsys, "inspect", lost)
    assert code == 1 and "a.my_scale" in out


def test_scan_of_several_files_goes_on_after_one_that_cannot_be_read(capsys, source, tmp_path):
    bad = plain(tmp_path / "bad.safetensors", float("nan"))
    code, out, err = run(capsys, "scan", source, tmp_path / "none.safetensors", bad)
    assert code == 2 and out.index(str(source)) < out.index(str(bad)) and err.count("halfsafe: ") == 1
    code, out, _ = run(capsys, "scan", source, bad, "--json")
    assert code == 1 and [len(file["problems"]) for file in json.loads(out)["files"]] == [0, 1]


def test_the_parts_of_a_sharded_model_are_scanned_once(capsys, tmp_path):
    parts = [tmp_path / f"m-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, part in enumerate(parts):
        save_file({f"blocks.{number}.ffn.0.weight": torch.randn(8, 8)}, part)
    code, out, _ = run(capsys, "scan", *parts)
    assert code == 0 and len(re.findall(r"tensors +2, 2 layers", out)) == 1


def test_convert_writes_refuses_and_overwrites(capsys, source, tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"
    monkeypatch.setattr(cli, "QUIET", 0)
    code, out, err = run(capsys, "convert", source, target, "--storage", "fp8_e4m3fn")
    assert code == 0 and "2 fp8_e4m3fn" in out and err.endswith("KiB\n") and "100 % converted of " in err
    monkeypatch.setattr(cli, "QUIET", math.inf)
    before = target.read_bytes()
    code, out, err = run(capsys, "convert", source, target, "--storage", "bf16")
    assert code == 2 and out == "" and "--force" in err and target.read_bytes() == before
    code, out, err = run(capsys, "convert", source, target, "--storage", "bf16", "--force", "--json")
    assert code == 0 and err == "" and json.loads(out)["weights"] == {"bf16": 4}
    assert open_checkpoint(target)["blocks.0.ffn.0.weight"].dtype == torch.bfloat16
    for wrong, problem in (
        (source, "same file"),
        (tmp_path, "not the name of a .safetensors file"),
        (tmp_path / "a.gguf", "not the name"),
    ):
        code, _, err = run(capsys, "convert", source, wrong, "--storage", "bf16", "--force")
        assert code == 2 and problem in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_convert_takes_rules_and_a_preset(capsys, source, tmp_path, encoding):
    rules, target = tmp_path / "rules.txt", tmp_path / "out.safetensors"
    rules.write_text("*.ffn.2 storage=bf16\n", encoding=encoding)
    run(capsys, "convert", source, target, "--storage", "fp8_e4m3fn", "--rules", rules, "--preset", "none")
    assert open_checkpoint(target)["blocks.0.ffn.2.weight"].dtype == torch.bfloat16
    rules.write_text("*.ffn.2 colour=red\n", encoding=encoding)
    for wrong, said in ((rules, "line 1"), (tmp_path / "no", str(tmp_path / "no"))):
        code, _, err = run(capsys, "convert", source, target, "--storage", "bf16", "--rules", wrong, "--force")
        assert code == 2 and said in err


@pytest.mark.parametrize("command", ["inspect", "scan"])
def test_errors_are_one_line_and_exit_two(capsys, tmp_path, command):
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    names = [
        tmp_path / "missing.safetensors",
        tmp_path / "page.safetensors",
        tmp_path,
        tmp_path / f"{'x' * 300}.safetensors",
    ]
    for file in names:
        code, out, err = run(capsys, command, file)
        assert code == 2 and out == "" and err.startswith("halfsafe: ") and err.count("\n") == 1 and str(file) in err
    assert run(capsys, command, tmp_path / "a\0b.safetensors")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspct"], ["inspect"], ["plan", "a"], ["convert", "a", "b"], ["convert", "a", "b", "--storage", "fp4"],
    ],
)  # fmt: skip
def test_wrong_usage_exits_two(arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2


@pytest.mark.parametrize("arguments", [[], ["--help"], ["inspect", "--help"], ["inspct"]])
def test_what_needs_no_file_is_answered_before_torch_is_imported(arguments):
    code = "import runpy, sys; sys.argv[0] = sys.argv.pop(1)\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit: pass\nfinally: sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "__main__.py"), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout) == ("--help" in arguments or not arguments)


def test_progress_is_a_line_every_tenth(capsys, monkeypatch):
    monkeypatch.setattr(cli, "QUIET", 0)
    progress = cli._progress(1000, "read", "wan.safetensors")
    for _ in range(1000):
        progress(1)
    assert [line[:5] for line in capsys.readouterr().err.splitlines()] == [f"{n:3d} %" for n in range(10, 101, 10)]
    cli._progress(0, "read", "none")(0)
    assert capsys.readouterr().err == ""


def test_inspect_names_the_model(capsys, tmp_path):
    shapes = {"head.modulation": (1, 2, 8), "blocks.0.ffn.0.weight": (32, 8)}
    save_file(
        {f"model.diffusion_model.{name}": torch.randn(shape) for name, shape in shapes.items()},
        tmp_path / "wan.safetensors",
    )
    assert re.search(r"  model +Wan\n", run(capsys, "inspect", tmp_path / "wan.safetensors")[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of models: one of Wan's names, a scaled one, one with NaN in a layer of a long name."""
    folder = tmp_path_factory.mktemp("columns")
    tiny_models.wan(folder / "wan.safetensors")
    dialects.scaled_fp8(folder / "scaled.safetensors", *dialects.reference())
    name = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_out.0"
    save_file({f"{name}.weight": torch.full((4, 4), float("nan"))}, folder / "nan.safetensors")
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "--help", "inspect --help", "scan --help", "convert --help", "doctor --help", "inspect wan.safetensors",
        "inspect scaled.safetensors", "scan wan.safetensors nan.safetensors", "doctor",
        "convert wan.safetensors out.safetensors --storage fp8_e4m3fn --force",
    ],
)  # fmt: skip
def test_what_a_command_prints_fits_eighty_columns(command, files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(files)
    try:
        cli.main(command.split())
    except SystemExit as exit:
        assert not exit.code
    out, err = capsys.readouterr()
    assert out and [line for line in (out + err).splitlines() if len(line) > COLUMNS and len(line.split()) > 1] == []


def test_starts_as_a_module_with_the_folder_installed_as_halfsafe(tmp_path, source):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "halfsafe").symlink_to(ROOT, target_is_directory=True)
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "halfsafe", "inspect"]
    done = subprocess.run(
        [*command, str(source), "--json"], capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stderr == "" and json.loads(done.stdout)["dialect"] == "scaled_fp8"


def test_a_file_that_is_not_there_is_named(capsys, tmp_path):
    code, out, err = run(capsys, "inspect", tmp_path / "no")
    assert code == 2 and out == "" and err.startswith(f"halfsafe: {tmp_path / 'no'}: cannot be opened")


def test_starts_from_any_folder_name(tmp_path, source):
    (tmp_path / "Some Pack").symlink_to(ROOT, target_is_directory=True)
    command = [sys.executable, str(tmp_path / "Some Pack"), "inspect", str(source), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["dialect"] == "scaled_fp8", done.stderr


@pytest.mark.parametrize("form", [["-m", "halfsafe"], ["halfsafe"]])
def test_without_torch_it_says_what_to_install(tmp_path, form):
    (tmp_path / "halfsafe").symlink_to(ROOT, target_is_directory=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", *form, "doctor"], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("halfsafe: torch, ") and f"{sys.executable} -m pip install torch" in done.stderr


@pytest.mark.parametrize(("encoding", "name"), [("cp1252", "模型"), ("utf-8", "\udce9")])
def test_any_name_is_printed_in_any_encoding(tmp_path, monkeypatch, encoding, name):
    if os.name != "posix" and name == "\udce9":
        pytest.skip("a name of bytes that are no text")
    source, target = plain(tmp_path / f"{name}.safetensors"), tmp_path / f"{name}-out.safetensors"
    printed = {}
    for stream in ("stdout", "stderr"):
        printed[stream] = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, stream, printed[stream])
    code = cli.main(["convert", str(source), str(target), "--storage", "bf16"])
    monkeypatch.undo()
    printed["stdout"].flush()
    assert code == 0 and b"-out.safetensors:" in printed["stdout"].buffer.getvalue() and target.exists()


@posix
def test_a_pipe_without_a_reader_leaves_the_exit_code_as_it_is(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = in_a_process("scan", plain(tmp_path / "in.safetensors", float("nan")), stdout=writer)
    os.close(writer)
    assert done.returncode == 1 and b"Traceback" not in done.stderr and b"Broken" not in done.stderr


@posix
def test_an_interrupt_while_it_works_is_one_line_and_130_and_leaves_no_file(tmp_path):
    interrupt = """import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupts:
    def find_spec(name, path=None, target=None):
        if name == 'halfsafe.precision.commands.convert':
            import os
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts)
"""
    done = in_a_process(
        "convert",
        plain(tmp_path / "in.safetensors"),
        tmp_path / "out.safetensors",
        "--storage",
        "bf16",
        before=interrupt,
    )
    assert (done.returncode, done.stderr) == (130, b"halfsafe: interrupted\n")
    assert os.listdir(tmp_path) == ["in.safetensors"]


@posix
def test_a_source_that_is_replaced_meanwhile_is_read_as_it_was(tmp_path, capsys, monkeypatch):
    source, target = plain(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    original = convert.read_checkpoint

    def replaced(*arguments):
        opened = original(*arguments)
        os.replace(plain(tmp_path / "new.safetensors", 2.0), source)
        return opened

    monkeypatch.setattr(convert, "read_checkpoint", replaced)
    assert run(capsys, "convert", source, target, "--storage", "bf16")[0] == 0
    assert load_file(target)["blocks.0.ffn.0.weight"].unique().tolist() == [1.0]


@posix
def test_output_that_cannot_be_written_is_told_and_the_work_is_done(tmp_path):
    source, target = plain(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    with open("/dev/full", "wb") as full:
        done = in_a_process("convert", source, target, "--storage", "bf16", stdout=full)
    assert done.returncode == 2 and target.exists() and b"Traceback" not in done.stderr
    assert b"halfsafe: Standard output cannot be written (No space left on device)" in done.stderr


def test_a_target_that_appears_meanwhile_is_left_as_it_is(tmp_path, capsys, monkeypatch):
    source, target = plain(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    original = convert.read_checkpoint

    def appearing(*arguments):
        target.write_bytes(b"of another program")
        return original(*arguments)

    monkeypatch.setattr(convert, "read_checkpoint", appearing)
    assert run(capsys, "convert", source, target, "--storage", "bf16")[0] == 2
    assert target.read_bytes() == b"of another program"
    assert run(capsys, "convert", source, target, "--storage", "bf16", "--force")[0] == 0
