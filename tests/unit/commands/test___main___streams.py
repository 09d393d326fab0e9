"""`python -m halfsafe` with output of any encoding, full or closed output, interrupts, and files that change meanwhile."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from halfsafe import __main__ as cli
from halfsafe.precision.commands import convert as convert_module
from halfsafe.precision.files.safetensors_file import open_checkpoint
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[3]
# What is started in the background of a shell ignores interrupts, and so do its children.
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and devices")


def model(path, value=1.0):
    save_file({"blocks.0.ffn.0.weight": torch.full((64, 64), value)}, path)
    return path


def run(*arguments, before="", environ=None, **options):
    """The command in a process of its own, after a line of Python."""
    code = f"import runpy, sys; {before}\nsys.argv = ['halfsafe', *sys.argv[1:]]; runpy.run_path({str(ROOT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120} | options
    return subprocess.run(command, env=os.environ | (environ or {}), **options)


@pytest.mark.parametrize(("encoding", "name"), [("cp1252", "模型"), ("utf-8", "\udce9")])
def test_any_name_is_printed_in_any_encoding(tmp_path, encoding, name):
    if os.name != "posix" and name == "\udce9":
        pytest.skip("a name of bytes that are no text")
    source, target = model(tmp_path / f"{name}.safetensors"), tmp_path / f"{name}-out.safetensors"
    done = run("convert", source, target, "--storage", "bf16", environ={"PYTHONIOENCODING": encoding})
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert b"-out.safetensors:" in done.stdout and target.exists()


@posix
def test_output_that_cannot_be_written_is_told_and_the_work_is_done(tmp_path):
    source, target = model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    with open("/dev/full", "wb") as full:
        done = run("convert", source, target, "--storage", "bf16", stdout=full)
    assert done.returncode == 2 and target.exists() and b"Traceback" not in done.stderr
    assert b"halfsafe: Standard output cannot be written (No space left on device)" in done.stderr
    target.unlink()
    with open("/dev/full", "wb") as full:
        done = run("convert", source, target, "--storage", "bf16", stderr=full)
    assert done.returncode == 0 and target.exists() and b"out.safetensors:" in done.stdout


@posix
@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (float("nan"), 1)])
def test_a_pipe_without_a_reader_leaves_the_exit_code_as_it_is(tmp_path, value, code):
    reader, writer = os.pipe()
    os.close(reader)
    done = run("scan", model(tmp_path / "in.safetensors", value), stdout=writer)
    os.close(writer)
    assert done.returncode == code and b"Traceback" not in done.stderr and b"Broken" not in done.stderr


@posix
@pytest.mark.parametrize("module", ["argparse", "torch", "halfsafe.precision.commands.convert"])
def test_an_interrupt_while_it_starts_is_one_line_and_130(tmp_path, module):
    interrupt = f"""{LISTENING}
class Interrupts:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            import os, signal
            os.kill(os.getpid(), signal.SIGINT)
for name in [name for name in sys.modules if name.partition('.')[0] == 'argparse']:
    del sys.modules[name]
sys.meta_path.insert(0, Interrupts)
"""
    done = run("convert", model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors", "--storage", "bf16", before=interrupt)
    assert (done.returncode, done.stderr) == (130, b"halfsafe: interrupted\n")
    assert not (tmp_path / "out.safetensors").exists()


@posix
def test_an_interrupt_after_the_work_changes_nothing(tmp_path):
    after = f"{LISTENING}; import atexit, os; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    done = run("convert", model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors", "--storage", "bf16", before=after)
    assert (done.returncode, b"interrupted" in done.stderr) == (0, False), done.stderr
    assert len(open_checkpoint(tmp_path / "out.safetensors")) == 1


@pytest.fixture
def listening():
    """As a process in the foreground of a shell: pytest itself may have been started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@posix
@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_while_it_works_is_one_line_and_130(tmp_path, capsys, monkeypatch, listening, count):
    sources = [model(tmp_path / f"{number}.safetensors") for number in range(count)]
    (tmp_path / "out").mkdir()
    original = convert_module.read_checkpoint

    def interrupted(*arguments):
        if threading.current_thread() is threading.main_thread() or count > 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(convert_module, "read_checkpoint", interrupted)
    code = cli.main(["convert", *map(str, sources), str(tmp_path / "out"), "--storage", "bf16"])
    err = capsys.readouterr().err
    assert code == 130 and err.endswith("halfsafe: interrupted\n") and "Traceback" not in err


def test_a_target_that_appears_meanwhile_is_left_as_it_is(tmp_path, capsys, monkeypatch):
    source, target = model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    original = convert_module.read_checkpoint

    def appearing(*arguments):
        target.write_bytes(b"of another program")
        return original(*arguments)

    monkeypatch.setattr(convert_module, "read_checkpoint", appearing)
    command = ["convert", str(source), str(target), "--storage", "bf16"]
    assert cli.main(command) == 2 and "--force" in capsys.readouterr().err
    assert target.read_bytes() == b"of another program"
    assert cli.main([*command, "--force"]) == 0 and len(open_checkpoint(target)) == 1


@posix
def test_a_source_that_is_replaced_meanwhile_is_read_as_it_was(tmp_path, monkeypatch):
    source, target = model(tmp_path / "in.safetensors", 1.0), tmp_path / "out.safetensors"
    original = convert_module.read_checkpoint

    def replaced(*arguments):
        opened = original(*arguments)
        os.replace(model(tmp_path / "new.safetensors", 2.0), source)
        return opened

    monkeypatch.setattr(convert_module, "read_checkpoint", replaced)
    assert cli.main(["convert", str(source), str(target), "--storage", "bf16"]) == 0
    assert load_file(target)["blocks.0.ffn.0.weight"].unique().tolist() == [1.0]


@posix
def test_a_source_that_is_cut_meanwhile_is_one_line_of_error(tmp_path):
    source = tmp_path / "in.safetensors"
    save_file({f"blocks.{n}.weight": torch.ones(512, 512) for n in range(4)}, source)
    (tmp_path / "halfsafe_cut.py").write_text(
        "import os, sys\n"
        "class Cuts:\n"
        "    done = False\n"
        "    def write(self, text):\n"
        "        if '%' in text and not Cuts.done:\n"
        f"            Cuts.done = True; os.truncate({str(source)!r}, 1_500_000)\n"
        "        return sys.__stderr__.write(text)\n"
        "    def __getattr__(self, name): return getattr(sys.__stderr__, name)\n"
        "sys.stderr = Cuts()\n"
    )
    for arguments in (["convert", source, tmp_path / "out.safetensors", "--storage", "bf16"], ["scan", source]):
        save_file({f"blocks.{n}.weight": torch.ones(512, 512) for n in range(4)}, source)
        done = run(*arguments, before="import halfsafe_cut", environ={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 2 and b"while it was read" in done.stderr and b"Traceback" not in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_a_folder_of_parts_and_index_is_one_model(tmp_path, capsys):
    names = [f"m-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"blocks.{number}.ffn.0.weight": torch.ones(64, 64)}, tmp_path / name)
    table = ", ".join(f'"blocks.{number}.ffn.0.weight": "{name}"' for number, name in enumerate(names))
    (tmp_path / "m.safetensors.index.json").write_text(f'{{"weight_map": {{{table}}}}}')
    files = sorted(map(str, tmp_path.iterdir()))
    (tmp_path / "out").mkdir()
    for order in (files, files[::-1]):
        assert cli.main(["convert", *order, str(tmp_path / "out"), "--storage", "bf16", "--force"]) == 0
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.safetensors"]
    assert len(open_checkpoint(tmp_path / "out" / "m.safetensors")) == 2
    capsys.readouterr()
    assert cli.main(["scan", *files]) == 0 and capsys.readouterr().out.count("no problem found") == 1


def test_a_folder_that_is_no_comfyui_is_an_error(tmp_path, capsys):
    for folder in (tmp_path / "nonexistent", tmp_path):
        assert cli.main(["doctor", "--comfyui", str(folder)]) == 2
        assert capsys.readouterr().err == f"halfsafe: {folder} is no ComfyUI: it has no comfy/ops.py. Give the folder that ComfyUI's main.py is in.\n"
