"""What *Measure my card* found is kept below ComfyUI's user folder, and followed on that machine, for that model alone."""

import errno
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import folder_paths
import pytest
import torch
from halfsafe.nodes.host.load import halving as halving_of
from halfsafe.nodes.host.load import kept_speeds as host
from halfsafe.nodes.host.reporting import halved, here, routes
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.study.tradeoffs import Measurements, Tradeoff, settings_from
from support import families, tiny_models

CARD = replace(detect(profile="sm_86"), simulated=False, torch_device=torch.device("cuda"), name="NVIDIA RTX 3090")
READERS = (host, halving_of, halved, here, routes)


@pytest.fixture(scope="module")
def path(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "kept_speeds.safetensors")


@pytest.fixture(scope="module")
def model(comfy, path):
    return families.load(comfy, path, "as_file", "auto")


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card whose user folder is empty."""
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path / "user"))
    for module in READERS:
        if hasattr(module, "current_device"):
            monkeypatch.setattr(module, "current_device", lambda: CARD)
    monkeypatch.setattr(host, "nvidia_driver", lambda: "580.1")
    host._log_once.cache_clear()
    return SimpleNamespace(file=tmp_path / "user" / "__halfsafe" / "speeds.json", monkeypatch=monkeypatch)


def row(text: str, seconds: float, mode: str) -> Tradeoff:
    (setting,) = settings_from(text)
    return Tradeoff(setting, setting.storage, seconds, 100, None, 40.0, modes={mode: 3}, spread=0.001)


def measured(int8: float = 2.0, fp8: float = 1.2) -> Measurements:
    """A measurement in which int8 takes ``int8`` and unpacked fp8 ``fp8`` of bf16's time."""
    rows = [row("as_file/bf16", 1.0, "bf16"), row("int8/auto", int8, "int8"), row("fp8_e4m3fn/auto", fp8, "bf16")]
    about = CARD.label, "WAN21", "bf16", "bf16", [], (1, 16, 1, 64, 64), 7
    return Measurements(*about, row("as_file/fp32", 4.0, "fp32"), rows, "bf16", True, (CARD.name, "580.1", "2.11.0"))


def halving(file: str) -> dict:
    loader = {"folder": "diffusion_models", "names": [file], "in_8_bits": False, "size": None}
    return halving_of.halving([loader])["loaders"][0]


def test_halve_and_the_sidebar_follow_it_and_name_it(card, model, path) -> None:
    before, device = halving(path.name), routes._about_device()
    assert before["storage"] == "int8" and before["measured"] == "" and device["int8_gains"] is True
    host.keep_speeds(measured(), model)
    after, device = halving(path.name), routes._about_device()
    sentence = "(WAN21): int8 0.50 of 16 bit, fp8 unpacked 0.83 of 16 bit."
    assert after["storage"] == "fp8_e4m3fn" and after["measured"].endswith(sentence)
    assert device["int8_gains"] is False and sentence in device["sentence"] and "A10G" not in device["sentence"]
    assert "Fast products: fp16, bf16. " in device["sentence"]
    assert sentence in here._kernels()
    host.keep_speeds(measured(int8=0.6), model)
    assert halving(path.name)["storage"] == "int8" and routes._about_device()["int8_gains"] is True
    assert len(json.loads(card.file.read_text())["speeds"]) == 1, "the later one of the same model replaces it"


@pytest.mark.parametrize(
    ("int8", "fp8", "storage"),
    [(0.5, 1.2, "int8"), (2.0, 1.2, "fp8_e4m3fn"), (1.2, 1.199, "int8"), (2.0, None, "int8"), (None, 0.5, "int8")],
)
def test_int8_is_taken_unless_unpacked_fp8_was_faster_by_more_than_the_spread(card, int8, fp8, storage) -> None:
    rows = [row for row in measured(int8 or 1, fp8 or 1).rows[1:] if (int8 if "int8" in str(row.setting) else fp8)]
    found = replace(measured(), rows=[measured().rows[0], *rows])
    chosen = halving_of._faster(host.speeds_beside_16_bit(found, "2026-11-29"), "int8")
    assert (chosen or "int8") == storage, "where they do not tell, the table's for this card"


@pytest.mark.parametrize(("unpacked", "storage", "gains"), [(0.6, "int8", True), (2.0, "fp8_e4m3fn", False)])
def test_where_int8_is_unpacked_its_products_promise_nothing(card, model, path, unpacked, storage, gains) -> None:
    """*Halve* chooses a storage and no compute: on this card the product of compute=int8 is not what it gives."""
    hopper = replace(detect(profile="sm_90"), simulated=False, torch_device=torch.device("cuda"), name=CARD.name)
    for module in READERS:
        card.monkeypatch.setattr(module, "current_device", lambda: hopper, raising=False)
    products = row("int8/int8", 0.3, "int8")
    own = [row("int8/auto", unpacked, "bf16"), products]
    host.keep_speeds(replace(measured(), rows=[measured().rows[0], *own, measured().rows[-1]]), model)
    assert halving(path.name)["storage"] == storage and "int8 unpacked" in halving(path.name)["measured"]
    assert routes._about_device()["int8_gains"] is gains


def test_auto_does_not_follow_it(card, model) -> None:
    from halfsafe.precision.plan.auto import smallest_storage

    host.keep_speeds(measured(), model)
    assert smallest_storage(host.current_device())[0] == "int8", "a seed keeps its picture"
    assert halving_of.halving([])["storage"] == "int8"


def test_it_is_not_followed_for_a_model_of_another_size_or_kind(card, model, path, models_dir) -> None:
    host.keep_speeds(measured(), model)
    larger = tiny_models.wan(models_dir / "diffusion_models" / "kept_speeds_larger.safetensors", blocks=3)
    other = tiny_models.flux(models_dir / "diffusion_models" / "kept_speeds_other.safetensors")
    for file in (larger, other):
        found = halving(file.name)
        assert (found["storage"], found["measured"]) == ("int8", ""), file


def test_the_same_size_of_another_architecture_is_another_model() -> None:
    kept = host.Kept({}, "WAN21_T2V", 1000, [])
    assert kept.is_of("WAN21_T2V", 1010) and not kept.is_of("Flux", 1000) and not kept.is_of("WAN21_T2V", 1100)


@pytest.mark.parametrize("what", ["device", "driver", "torch", "comfyui", "comfy-kitchen", "halfsafe"])
def test_it_is_not_followed_by_another_machine_or_version(card, model, path, what) -> None:
    host.keep_speeds(measured(), model)
    machine = host._machine(CARD)
    card.monkeypatch.setattr(host, "_machine", lambda device: {**machine, what: "another"})
    assert halving(path.name)["measured"] == ""
    card.monkeypatch.setattr(host, "_machine", lambda device: machine)
    assert halving(path.name)["measured"]


@pytest.mark.parametrize("device", [replace(CARD, simulated=True), replace(CARD, torch_device=torch.device("cpu"))])
def test_nothing_is_kept_or_followed_for_a_simulated_device_or_a_cpu(card, model, path, device) -> None:
    host.keep_speeds(measured(), model)
    for module in READERS:
        card.monkeypatch.setattr(module, "current_device", lambda: device, raising=False)
    assert halving(path.name)["measured"] == "" and host.speeds_of(model) == []
    card.file.unlink()
    host.keep_speeds(measured(), model)
    assert not card.file.exists()


def test_a_loaded_model_tells_it_and_a_text_encoder_does_not(card, model) -> None:
    host.keep_speeds(measured(), model)
    assert host.speeds_of(model) and host.speeds_of(SimpleNamespace(model=torch.nn.Linear(1, 1))) == []


def change(text: str, **values) -> bytes:
    data = json.loads(text)
    data["speeds"][0].update(values)
    return json.dumps(data).encode()


DAMAGED = {
    "empty": lambda text: b"",
    "cut": lambda text: text.encode()[:-40],
    "not JSON": lambda text: b"\xff\xfe\x00",
    "a list": lambda text: b"[]",
    "foreign": lambda text: b'{"a": 1}',
    "nested": lambda text: b'{"speeds": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "no list": lambda text: b'{"speeds": 1}',
    "too large": lambda text: text.encode() + b" " * host.MOST_BYTES,
    "a text of another kind": lambda text: change(text, architecture=["a"]),
    "a machine of another kind": lambda text: change(text, machine=1),
    "a list as a machine": lambda text: change(text, machine=["a"]),
    "a ratio of text": lambda text: change(
        text, speeds=[{**json.loads(text)["speeds"][0]["speeds"][0], "ratio": "ab"}]
    ),
    "a ratio of NaN": lambda text: text.replace("0.5,", "NaN,").encode(),
    "a ratio that no float holds": lambda text: text.replace("0.5,", f"1{'0' * 400},").encode(),
    "an unknown field": lambda text: change(text, speeds=[{"another": 1}]),
    "a long text": lambda text: change(text, architecture="a" * 1000),
    "parameters of another kind": lambda text: change(text, parameters=None),
    "parameters that no float holds": lambda text: change(text, parameters=10**400),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_file_is_not_used_and_told_in_one_line(card, model, path, caplog, damage) -> None:
    host.keep_speeds(measured(), model)
    text = card.file.read_text()
    assert "0.5," in text
    card.file.write_bytes(DAMAGED[damage](text))
    with caplog.at_level(logging.WARNING, "halfsafe"):
        found = [halving(path.name)["measured"] for _ in range(3)]
    assert found == [""] * 3
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "speeds.json is damaged or not of Halfsafe" in told[0], told
    host.keep_speeds(measured(), model)
    assert halving(path.name)["measured"], "the next measurement replaces it"


@pytest.mark.parametrize("fault", ["full disk", "read-only folder", "a file in place of the folder"])
def test_what_cannot_be_written_is_told_and_fails_nothing(card, model, caplog, fault) -> None:
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC if fault == "full disk" else errno.EROFS, "no")

    if fault == "full disk":
        card.monkeypatch.setattr("os.fsync", fail)
    elif fault == "read-only folder":
        card.monkeypatch.setattr("pathlib.Path.mkdir", fail)
    else:
        card.file.parent.parent.mkdir()
        card.file.parent.write_text("")
    with caplog.at_level(logging.WARNING, "halfsafe"):
        host.keep_speeds(measured(), model)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "this measurement is not kept for later runs" in told and "speeds.json" in told
    assert not card.file.exists() and not list(card.file.parent.parent.rglob("*.part"))


def test_the_file_stays_small_and_says_nothing_of_a_person(card, model, monkeypatch, tmp_path) -> None:
    for number in range(host.MOST + 5):
        monkeypatch.setattr(host, "_identity", lambda patcher, number=number: (f"Architecture{number}", 1))
        host.keep_speeds(measured(), model)
    data = json.loads(card.file.read_text())
    assert len(data["speeds"]) == host.MOST and data["speeds"][0]["architecture"] == f"Architecture{host.MOST + 4}"
    assert card.file.stat().st_size < host.MOST_BYTES
    assert {*data["speeds"][0]} == {"machine", "architecture", "parameters", "speeds"}
    assert str(tmp_path) not in card.file.read_text() and "seed" not in card.file.read_text()


def test_measure_precisions_keeps_what_it_measured(comfy, card, model, monkeypatch) -> None:
    from halfsafe.nodes.host.study import tradeoffs

    kept = []
    monkeypatch.setattr(tradeoffs, "keep_speeds", lambda found, patcher: kept.append((found, patcher)))
    latent = {"samples": torch.zeros_like(families.noise(model))}
    inputs = {"latent_image": latent, "positive": families.conditioning("wan"), "seed": 1}
    comfy.run("HalfsafeMeasurePrecisions", model=model, candidates="as_file/bf16", **inputs)
    ((found, patcher),) = kept
    assert [str(row.setting) for row in found.rows] == ["as_file/bf16"]
    assert host._identity(patcher) == host._identity(model)
