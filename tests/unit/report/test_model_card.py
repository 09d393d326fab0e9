"""The model card beside a converted file: its figures are the file's, and whatever fails leaves the file as it is."""

import errno
import os
import re

import pytest
import torch
from halfsafe.precision.commands import cli
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.card import pack_version
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.plan.rules import Rules, rules_from
from halfsafe.precision.report import model_card
from safetensors.torch import load, save_file
from support import dialects, faults
from support.measures import relative_error

HEAD = ["storage", "tensors", "size", "scales", "mean error", "SNR", "largest error"]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def model(folder, name="in.safetensors", **extra):
    """A small Wan: four Linear layers in two blocks, a modulation, norms, a layer that the default preset keeps."""
    layers = tuple(f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("ffn.0", "ffn.2"))
    weights, _ = dialects.reference(layers)
    tensors = {f"{layer}.weight": weight for layer, weight in weights.items()}
    tensors |= {"head.modulation": torch.ones(1, 2, 384).bfloat16(), "blocks.0.norm.weight": torch.ones(64)}
    tensors |= {"time_embedding.0.weight": torch.randn(64, 64).bfloat16()} | extra
    save_file(tensors, folder / name)
    return folder / name, tensors


def converted(source, target, storage="int8", rules=None):
    """The card of a conversion, and its summary."""
    summary = convert_file(source, target, storage, rules or rules_from(), card=True)
    return target.with_suffix(".md").read_text(encoding="utf-8"), summary


def tables(text):
    """The rows of each table, by its first column's title."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.split("\n") if line[:1] == "|"
    ]
    assert {len(row) for row in rows} == {2, len(HEAD)}
    return {row[0]: row for row in rows if row[0]}


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn", "fp8_e5m2", "fp16"])
def test_the_figures_are_those_of_the_file(tmp_path, storage):
    source, tensors = model(tmp_path)
    text, summary = converted(source, tmp_path / "out.safetensors", storage)
    file = open_checkpoint(tmp_path / "out.safetensors")
    weights = read_checkpoint(file, file.metadata, "").weights
    rows = tables(text)
    for name in {weight.storage for weight in weights.values()}:
        own = {weight.name: weight for weight in weights.values() if weight.storage == name}
        assert rows[name][1] == str(len(own))
        errors = [
            relative_error(tensors[key].float(), weight.dequantize(torch.float32))
            for key, weight in own.items()
            if summary.weights[name] and (weight.quantized or weight.data.dtype != tensors[key].dtype)
        ]
        told = rows[name][4]
        assert (told == "not converted") == (not errors), (name, told, errors)
        if errors:
            mean, largest = (float(cell.split(" %")[0]) / 100 for cell in (told, rows[name][6]))
            assert mean == pytest.approx(sum(errors) / len(errors), rel=0.01, abs=1e-5)
            assert largest == pytest.approx(max(errors), rel=0.01, abs=1e-5)
    assert rows["size of this file"][1] == f"{summary.target_bytes / 1024:.2f} KiB"
    assert rows["size of the source"][1] == f"{source.stat().st_size / 1024:.2f} KiB"
    assert f"`in.safetensors` with [Halfsafe]({model_card.HALFSAFE}) {pack_version()}" in text


def test_a_weight_too_large_to_read_again_is_measured_on_rows_from_everywhere(tmp_path):
    """The first nine tenths of the rows are powers of two, which fp8 holds as they are."""
    weight = torch.randn(8192, 384).sign() / 64
    weight[-819:] = torch.randn(819, 384) * 0.05
    text, _ = converted(
        model(tmp_path, **{"blocks.0.ffn.0.weight": weight})[0], tmp_path / "a.safetensors", "fp8_e4m3fn"
    )
    file = open_checkpoint(tmp_path / "a.safetensors")
    stored = read_checkpoint(file, file.metadata, "").weights
    error = relative_error(weight, stored["blocks.0.ffn.0.weight"].dequantize(torch.float32))
    mean = float(tables(text)["fp8_e4m3fn"][4].split(" %")[0]) / 100
    others = [stored[name] for name in ("blocks.0.ffn.2.weight", "blocks.1.ffn.0.weight", "blocks.1.ffn.2.weight")]
    exact = open_checkpoint(tmp_path / "in.safetensors")
    rest = [relative_error(exact[other.name].float(), other.dequantize(torch.float32)) for other in others]
    assert 4 * mean - sum(rest) == pytest.approx(error, rel=0.1), (mean, error)


def test_the_card_says_what_stayed_why_and_how_to_load_it(tmp_path):
    rules = rules_from("blocks.1.* storage=bf16  # drifts")
    text, summary = converted(model(tmp_path)[0], tmp_path / "out.safetensors", rules=rules)
    assert text.startswith("---\ntags:\n- comfyui\n- diffusion-single-file\n- halfsafe\n- int8\n# base_model: ")
    assert "a scale for each row; rotated in groups of 64 inputs" in text
    assert "- drifts (bf16): `blocks.1.ffn.0`, `blocks.1.ffn.2`" in text
    assert "- timestep, guidance and pooled embedding (bf16): `time_embedding.0`" in text
    assert "Preset: *keep sensitive layers*.\n\n```\nblocks.1.* storage=bf16  # drifts\n```" in text
    command = "```\npython -m halfsafe convert in.safetensors out.safetensors --storage int8 --rules rules.txt\n```"
    assert command in text and str(tmp_path) not in text
    assert "into `ComfyUI/models/diffusion_models`" in text and "*Load Diffusion Model*" in text
    assert "It needs ComfyUI 0.27.0 or later." in text
    assert summary.card == "Its model card is out.md." and "out.md" in summary.text()


@pytest.mark.parametrize(
    ("rules", "said"),
    [(rules_from(), ""), (rules_from(preset="wan"), " --preset wan"), (Rules(), " --preset none")],
    ids=["default", "wan", "none"],
)
def test_the_command_on_the_card_makes_the_same_file_again(tmp_path, monkeypatch, rules, said):
    source, _ = model(tmp_path)
    text, _ = converted(source, tmp_path / "out.safetensors", rules=rules)
    made = load((tmp_path / "out.safetensors").read_bytes())
    command = re.search(r"```\npython -m halfsafe (.*)\n```", text)[1]
    assert command == f"convert in.safetensors out.safetensors --storage int8{said}"
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split(), "--force"]) == 0
    again = load((tmp_path / "out.safetensors").read_bytes())
    assert again.keys() == made.keys() and [name for name in made if not torch.equal(made[name], again[name])] == []


def test_five_hundred_layers_are_told_in_a_few_lines(tmp_path):
    """Three layers of 150 blocks, which a rule keeps, and 50 with names of their own."""
    many = {f"blocks.{n}.{kind}.weight": torch.ones(4, 16).bfloat16() for n in range(2, 152) for kind in "abc"}
    many |= {f"blocks.0.odd_{n:02}x.weight": torch.ones(4, 16).bfloat16() for n in range(50)}
    source, _ = model(tmp_path, **many)
    text, _ = converted(source, tmp_path / "out.safetensors", rules=rules_from("re:\\.([abc]|odd.*)$ storage=bf16"))
    assert "`blocks.*.a` x150, `blocks.*.b` x150, `blocks.*.c` x150, `blocks.0.odd_00x`" in text
    assert ", and 45 more patterns" in text and len(text.splitlines()) < 70


def test_what_was_measured_for_its_rules_is_on_the_card_and_nothing_else(tmp_path):
    source, _ = model(tmp_path)
    figures = "int8/auto, 0.512 s/step, 6.20 GiB, 31.2 dB, NVIDIA H200, driver 580.1, torch 2.11.0, WAN21"
    rules = rules_from(f"* storage=int8  # measured: {figures}\ntime_embedding.* storage=as_file # as measured: no")
    text, _ = converted(source, tmp_path / "a.safetensors", "as_file", rules)
    assert text.partition("## Measured\n\n")[2].partition("\n\n")[0] == f"- {figures}"
    assert "## Measured" not in converted(source, tmp_path / "b.safetensors")[0]


def test_a_checkpoint_and_a_file_of_another_kind_are_loaded_as_such(tmp_path):
    inside = {f"model.diffusion_model.{name}": tensor for name, tensor in model(tmp_path)[1].items()}
    save_file(inside | {"first_stage_model.conv.weight": torch.ones(4, 4)}, tmp_path / "whole.safetensors")
    text, _ = converted(tmp_path / "whole.safetensors", tmp_path / "a.safetensors")
    assert "`ComfyUI/models/checkpoints`" in text and "*Load Checkpoint*" in text and "single-file" not in text
    save_file({"encoder.block.0.q.weight": torch.ones(64, 64)}, tmp_path / "encoder.safetensors")
    text, _ = converted(tmp_path / "encoder.safetensors", tmp_path / "b.safetensors", "bf16")
    assert "into the folder of its source file and load it with the same node" in text and "It needs" not in text


def test_the_same_conversion_gives_the_same_card(tmp_path):
    source, _ = model(tmp_path)
    cards = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        cards.append(converted(source, tmp_path / name / "out.safetensors")[0])
    assert cards[0] == cards[1]


@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_a_file_that_exists_is_left_as_it_is(tmp_path, kind):
    source, _ = model(tmp_path)
    card = tmp_path / "out.md"
    card.write_text("mine") if kind == "file" else card.symlink_to(tmp_path / "nowhere")
    summary = convert_file(source, tmp_path / "out.safetensors", "int8", rules_from(), card=True)
    assert summary.card == "out.md exists and was left as it is: it may describe another file."
    assert card.read_text() == "mine" if kind == "file" else (card.is_symlink() and not card.exists())


def disk_full_from(point):
    """A step of a write that fails from the given one on."""
    passed = []

    def step():
        passed.append(None)
        if len(passed) > point:
            raise FULL

    return step


def test_a_disk_that_is_full_for_the_card_alone_leaves_the_file_whole(tmp_path):
    source, _ = model(tmp_path)
    target = tmp_path / "to" / "out.safetensors"
    target.parent.mkdir()
    before = faults.count(lambda: convert_file(source, target, "int8", rules_from()))
    whole = target.read_bytes()
    after = faults.count(lambda: convert_file(source, target, "int8", rules_from(), card=True))
    assert after > before
    for point in range(before, after):
        for file in target.parent.iterdir():
            file.unlink()
        with faults.watched(disk_full_from(point)):
            summary = convert_file(source, target, "int8", rules_from(), card=True)
        assert summary.card.startswith("The file is complete, its model card could not be written: ")
        assert os.strerror(errno.ENOSPC) in summary.card and summary.card in " ".join(summary.text().split())
        assert [file.name for file in target.parent.iterdir()] == ["out.safetensors"]
        assert target.read_bytes() == whole


def test_an_interrupted_conversion_leaves_no_card(tmp_path):
    source, _ = model(tmp_path)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_file(source, tmp_path / "out.safetensors", "int8", rules_from(), stop, card=True)
    assert [file.name for file in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(("options", "cards"), [([], ["out.md"]), (["--no-card"], [])])
def test_the_command_writes_a_card_unless_told_not_to(tmp_path, capsys, options, cards):
    source, _ = model(tmp_path)
    assert cli.main(["convert", str(source), str(tmp_path / "out.safetensors"), "--storage", "int8", *options]) == 0
    assert [file.name for file in tmp_path.glob("*.md")] == cards
    assert ("model card" in capsys.readouterr().out) == bool(cards)


@pytest.mark.parametrize("name", ["a`b``c", "x|y", "*_[z](u)<b>#~", "模型 \u2013 ü", " 1. -", "new\nline", "a | b"])
def test_names_of_any_characters_break_no_line_table_or_code(tmp_path, name):
    layer = name.replace("\n", "")  # a tensor's name with it is refused
    source, _ = model(tmp_path, f"{name}.safetensors", **{f"blocks.0.{layer}.weight": torch.randn(64, 64).bfloat16()})
    rules = rules_from(f"*ffn* storage=bf16  # {layer}")
    text, _ = converted(source, tmp_path / f"{name} int8.safetensors", rules=rules)
    assert text.split("\n")[0] == "---" and text.split("\n").count("---") == 2
    assert layer.replace("|", "\\|") in tables(text)["int8"][6]
    shown = name.replace("\n", "\\n")
    head = next(line for line in text.split("\n") if line.startswith("# ") and "base_model" not in line)
    fence = re.match(r"# (`+)", head)[1]
    assert fence not in shown and head == f"# {fence}{pad(shown + ' int8')}{shown} int8{pad(shown + ' int8')}{fence}"
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    assert shown not in outside or not set(shown) & set("`*_[<|")


def pad(text):
    return " " if text[0] in "` " or text[-1] in "` " else ""
