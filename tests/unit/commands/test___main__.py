"""`python -m halfsafe`: exit codes, one-line errors, JSON, progress; and that the module really starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfsafe import __main__ as cli
from halfsafe.precision.files.safetensors_file import open_checkpoint
from safetensors.torch import save_file
from support import dialects

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def source(tmp_path):
    return dialects.scaled_fp8(tmp_path / "in.safetensors", *dialects.reference())


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_inspect(capsys, source):
    code, out, err = run(capsys, "inspect", source)
    assert code == 0 and err == "" and "scaled_fp8" in out and "clipped at 448" in out
    code, out, _ = run(capsys, "inspect", source, "--json")
    assert code == 0 and json.loads(out)["scales"] == {"tensor": 2}


def test_scan_exits_one_on_a_problem(capsys, source, tmp_path):
    code, out, _ = run(capsys, "scan", source)
    assert code == 0 and "no problem found" in out
    save_file({"a.weight": torch.tensor([[float("nan")]])}, tmp_path / "bad.safetensors")
    code, out, _ = run(capsys, "scan", tmp_path / "bad.safetensors")
    assert code == 1 and "1 problem\n" in out and "a.weight: 1 of 1 values are NaN" in out
    code, out, _ = run(capsys, "scan", tmp_path / "bad.safetensors", "--json")
    assert code == 1 and json.loads(out)["problems"][0]["kind"] == "nan"


def test_convert_writes_refuses_and_overwrites(capsys, source, tmp_path):
    target = tmp_path / "out.safetensors"
    code, out, err = run(capsys, "convert", source, target, "--storage", "fp8_e4m3fn")
    assert code == 0 and "2 fp8_e4m3fn" in out and "100 % converted" in err
    before = target.read_bytes()
    code, out, err = run(capsys, "convert", source, target, "--storage", "bf16")
    assert code == 2 and out == "" and "--force" in err and target.read_bytes() == before
    code, out, _ = run(capsys, "convert", source, target, "--storage", "bf16", "--force", "--json")
    assert code == 0 and json.loads(out)["weights"] == {"bf16": 4}
    assert open_checkpoint(target)["blocks.0.ffn.0.weight"].dtype == torch.bfloat16
    code, _, err = run(capsys, "convert", source, source, "--storage", "bf16", "--force")
    assert code == 2 and "same file" in err


def test_convert_takes_rules_and_a_preset(capsys, source, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text("*.ffn.2 storage=bf16\n", encoding="utf-8")
    target = tmp_path / "out.safetensors"
    run(capsys, "convert", source, target, "--storage", "fp8_e4m3fn", "--rules", rules, "--preset", "none")
    assert open_checkpoint(target)["blocks.0.ffn.2.weight"].dtype == torch.bfloat16
    rules.write_text("*.ffn.2 colour=red\n")
    code, _, err = run(capsys, "convert", source, target, "--storage", "bf16", "--rules", rules, "--force")
    assert code == 2 and "line 1" in err
    code, _, err = run(capsys, "convert", source, target, "--storage", "bf16", "--rules", tmp_path / "no", "--force")
    assert code == 2 and str(tmp_path / "no") in err


@pytest.mark.parametrize("command", ["inspect", "scan"])
def test_errors_are_one_line_and_exit_two(capsys, tmp_path, command):
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    for file in (tmp_path / "missing.safetensors", tmp_path / "page.safetensors", tmp_path):
        code, out, err = run(capsys, command, file)
        assert code == 2 and out == "" and err.startswith("halfsafe: ") and err.count("\n") == 1 and str(file) in err


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["inspect"], ["convert", "a", "b"], ["convert", "a", "b", "--storage", "fp4"],
        *(["plan", "a", f"--memory={size}"] for size in ("nan", "inf", "1e400", "-1", "much")),
    ],
)  # fmt: skip
def test_wrong_usage_exits_two(arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and torch.__version__.split("+")[0] in out
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0 and isinstance(json.loads(out), dict)


def test_progress_is_a_bar_on_a_terminal_and_ten_lines_elsewhere(capsys, monkeypatch):
    progress = cli.Progress(1000, "read")
    for _ in range(1000):
        progress(1)
    assert [line[:5] for line in capsys.readouterr().err.splitlines()] == [f"{n:3d} %" for n in range(0, 101, 10)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = cli.Progress(1000, "read")
    for _ in range(1000):
        progress(1)
    bar = capsys.readouterr().err
    assert bar.count("\r") == 201 and bar.endswith(" 1 s left\n") and len({len(text) for text in bar.rstrip().split("\r")[1:]}) == 1 and "#" * 20 in bar


@pytest.mark.parametrize("total", [0, 1000])
def test_progress_tells_no_time_before_anything_is_done(capsys, total):
    cli.Progress(total, "converted")(0)
    assert capsys.readouterr().err == ""


def test_starts_as_a_module_with_the_folder_installed_as_halfsafe(tmp_path, source):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "halfsafe").symlink_to(ROOT, target_is_directory=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "halfsafe", "inspect", str(source), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dialect"] == "scaled_fp8" and done.stderr == ""
    done = subprocess.run(
        [*command[:3], "inspect", "no"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 2 and done.stderr.startswith("halfsafe: no: cannot be opened")


def test_starts_from_any_folder_name(tmp_path, source):
    (tmp_path / "Some Pack").symlink_to(ROOT, target_is_directory=True)
    command = [sys.executable, str(tmp_path / "Some Pack"), "inspect", str(source), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dialect"] == "scaled_fp8"


@pytest.mark.parametrize("form", [["-m", "halfsafe"], ["halfsafe"]])
@pytest.mark.parametrize("arguments", [["doctor"], ["--help"]])
def test_without_torch_it_says_what_to_install(tmp_path, form, arguments):
    (tmp_path / "halfsafe").symlink_to(ROOT, target_is_directory=True)
    command = [sys.executable, "-S", *form, *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("halfsafe: torch, ") and f"{sys.executable} -m pip install torch" in done.stderr


def test_plan_takes_a_devices_name(capsys, source):
    code, out, _ = run(capsys, "plan", source, "--device", "RTX 3060 12GB", "--json")
    assert code == 0 and json.loads(out)["device"]["profile"] == "sm_86"
    with pytest.raises(SystemExit) as exit:
        cli.main(["plan", str(source), "--device", "voodoo 2"])
    assert exit.value.code == 2 and "no device profile 'voodoo 2'" in capsys.readouterr().err


def test_inspect_and_plan_name_the_model(capsys, tmp_path):
    shapes = {"head.modulation": (1, 2, 8), "blocks.0.ffn.0.weight": (32, 8), "patch_embedding.weight": (1536, 16, 1, 2, 2)}
    names = {f"model.diffusion_model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(names, tmp_path / "wan.safetensors")
    assert "  model       Wan 2.1 1.3B\n" in run(capsys, "inspect", tmp_path / "wan.safetensors")[1]
    assert "Wan 2.1 1.3B" in run(capsys, "plan", tmp_path / "wan.safetensors", "--device", "cpu")[1]


@pytest.fixture
def files(source, tmp_path):
    """A sound file, one with NaN, one that is none, and a second sound one."""
    save_file({"a.weight": torch.full((64, 64), float("nan"))}, tmp_path / "nan.safetensors")
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    save_file({"blocks.0.ffn.0.weight": torch.randn(64, 64)}, tmp_path / "plain.safetensors")
    return [source, tmp_path / "nan.safetensors", tmp_path / "page.safetensors", tmp_path / "plain.safetensors"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_scan_takes_many_files_and_exits_with_the_worst(capsys, files, jobs):
    code, out, err = run(capsys, "scan", *files, "--jobs", jobs)
    assert code == 2 and out.endswith("4 files: 1 with problems, 2 without, 1 not read\n")
    assert [out.index(str(file)) for file in (files[0], files[1], files[3])] == sorted(out.index(str(f)) for f in (files[0], files[1], files[3]))
    assert err.count("halfsafe: ") == 1 and str(files[2]) in err and err.count("100 % read") == 1
    code, out, _ = run(capsys, "scan", files[0], files[1], "--json", "--jobs", jobs)
    assert code == 1 and [len(file["problems"]) for file in json.loads(out)["files"]] == [0, 1]
    code, out, _ = run(capsys, "scan", files[2], files[0], "--json")
    assert code == 2 and "error" in json.loads(out)["files"][0]


@pytest.mark.parametrize("jobs", [1, 3])
def test_convert_takes_many_files_into_a_folder(capsys, files, tmp_path, jobs):
    folder = tmp_path / "out"
    folder.mkdir()
    code, out, err = run(capsys, "convert", *files, folder, "--storage", "bf16", "--jobs", jobs)
    assert code == 2 and out.endswith("4 files: 2 converted, 2 failed\n") and err.count("halfsafe: ") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["in.safetensors", "plain.safetensors"]
    code, out, err = run(capsys, "convert", files[0], files[3], folder, "--storage", "bf16", "--json")
    assert code == 2 and all("--force" in file["error"] for file in json.loads(out)["files"])
    code, out, err = run(capsys, "convert", files[0], files[3], folder, "--storage", "bf16", "--force", "--jobs", jobs)
    assert code == 0 and err.count("100 % converted") == 1


def test_convert_of_many_is_what_each_alone_gives(capsys, files, tmp_path):
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    for file in (files[0], files[3]):
        run(capsys, "convert", file, tmp_path / "alone" / file.name, "--storage", "fp8_e4m3fn")
    run(capsys, "convert", files[0], files[3], tmp_path / "together", "--storage", "fp8_e4m3fn", "--jobs", 2)
    for file in (files[0], files[3]):
        assert (tmp_path / "alone" / file.name).read_bytes() == (tmp_path / "together" / file.name).read_bytes()


def test_convert_of_many_refuses_what_cannot_be_meant(capsys, source, tmp_path):
    code, _, err = run(capsys, "convert", source, source, tmp_path / "one.safetensors", "--storage", "bf16")
    assert code == 2 and "is not a folder" in err
    other = tmp_path / "deeper" / source.name
    other.parent.mkdir()
    other.write_bytes(source.read_bytes())
    code, _, err = run(capsys, "convert", source, other, tmp_path / "deeper", "--storage", "bf16", "--force")
    assert code == 2 and "would both become" in err
    with pytest.raises(SystemExit):
        cli.main(["scan", str(source), "--jobs", "0"])


def test_rules_may_begin_with_a_byte_order_mark(capsys, source, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text("* storage=bf16\n", encoding="utf-8-sig")
    code, out, _ = run(capsys, "convert", source, tmp_path / "out.safetensors", "--storage", "fp8_e4m3fn", "--rules", rules)
    assert code == 0 and "matches no layer" not in out
    assert {tensor.dtype for name, tensor in open_checkpoint(tmp_path / "out.safetensors").items() if name.endswith(".weight")} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", f"{'x' * 300}-00001-of-00002"])
def test_a_name_that_the_system_has_none_of_is_one_line_of_error(capsys, source, tmp_path, name):
    path = tmp_path / f"{name}.safetensors"
    for arguments in (["inspect", path], ["convert", source, path, "--storage", "bf16"], ["convert", path, tmp_path / "a.safetensors", "--storage", "bf16"]):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and "halfsafe: " in err and "Traceback" not in err


def test_the_parts_of_a_sharded_model_become_one_file(capsys, tmp_path):
    parts = [tmp_path / f"m-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, part in enumerate(parts):
        save_file({f"blocks.{number}.ffn.0.weight": torch.randn(64, 64)}, part)
    folder = tmp_path / "out"
    folder.mkdir()
    assert run(capsys, "convert", *parts, folder, "--storage", "bf16")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["m.safetensors"]
    assert len(open_checkpoint(folder / "m.safetensors")) == 2
    assert run(capsys, "scan", *parts)[1].count("0 problems") <= 1
