"""Settings measured in the real ComfyUI: what a row says ran, its figures are right, and the loaded model is left alone."""

import math
import weakref
from dataclasses import replace

import numpy
import pytest
import torch
from halfsafe.nodes.host.comfyui.model_facts import model_facts
from halfsafe.nodes.host.load import devices
from halfsafe.nodes.host.reporting import badge
from halfsafe.nodes.host.study import tradeoffs as host
from halfsafe.nodes.host.study.sampling import picture_of
from halfsafe.nodes.host.study.step_timer import StepTimer
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.message import Message
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.study.tradeoffs import Setting, Tradeoff, settings_from
from safetensors.torch import load_file
from support import families, int8_models, tiny_models
from support.matmul_spy import MatmulSpy
from support.measures import sqnr_db
from support.model_files import WAN_LINEARS, in_dialect, lora
from support.page_words import untranslated

NODE = "HalfsafeMeasurePrecisions"
MATRICES = ("Linear", "Conv2d", "Conv3d")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "measured.safetensors")


@pytest.fixture(scope="module")
def model(comfy, path):
    return families.load(comfy, path, "as_file", "auto")


def latent(model) -> dict:
    return {"samples": torch.zeros_like(families.noise(model))}


def measured(comfy, model, *candidates: str, **inputs):
    """The measurements behind the node, and the node's outputs: table, rules and chart."""
    found, measure_model = [], host.measure_model

    def spy(*args):
        found.append(measure_model(*args))
        return found[0]

    inputs = {"latent_image": latent(model), "positive": families.conditioning("wan"), "seed": 1, **inputs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "measure_model", spy)
        outputs = comfy.run(NODE, model=model, candidates="\n".join(candidates), **inputs)
    return found[0], *outputs


def final(model, seed=1) -> torch.Tensor:
    """The latent that ComfyUI's euler sampler ends with after as many steps as are measured."""
    import comfy.sample

    start, cond = latent(model)["samples"], families.conditioning("wan")
    noise = comfy.sample.prepare_noise(start, seed)
    return comfy.sample.sample(model, noise, host.STEPS, 1.0, "euler", "simple", cond, cond, start, seed=seed)


class Watched:
    """What each run did in its second step: the products by layer, and each layer's weight."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.products: list[dict] = []
        self.weights: list[dict] = []
        real = StepTimer.step

        def step(timer, executor, model, *args):
            if len(timer.seconds) != 1:
                return real(timer, executor, model, *args)
            with MatmulSpy(model.diffusion_model) as spy:
                result = real(timer, executor, model, *args)
            layers = {
                name: module
                for name, module in model.diffusion_model.named_modules()
                if type(module).__name__ in MATRICES
            }
            self.products.append({name: made for name, made in spy.by_layer().items() if name in layers})
            self.weights.append(
                {name: getattr(module.weight, "_qdata", module.weight).dtype for name, module in layers.items()}
            )
            return result

        patch.setattr(StepTimer, "step", step)


def as_the_row_says(row: Tradeoff, products: dict) -> bool:
    """Whether as many layers multiplied in each mode as a row says; a CPU's products with rounded operands can be several."""
    # An int8 layer's rotation of its input is a product of its own in comfy-kitchen.
    own = [[product for product in made if "int8" in product.modes] or made for made in products.values()]
    possible = [set.intersection(*(product.modes for product in made)) for made in own]
    sure = {mode: sum(modes == {mode} for modes in possible) for mode in row.modes}
    most = {mode: sum(mode in modes for modes in possible) for mode in row.modes}
    return sum(row.modes.values()) == len(products) and all(
        sure[mode] <= count <= most[mode] for mode, count in row.modes.items()
    )


SETTINGS = {
    "as_file/bf16": (torch.bfloat16, "bf16"), "fp16/fp16": (torch.float16, "fp16"), "fp32/fp32": (torch.float32, "fp32"),
    "as_file/fp16_safe": (torch.bfloat16, "fp16_wide"), "int8/int8": (torch.int8, "int8"), "fp8_e4m3fn/bf16": (torch.float8_e4m3fn, "bf16"),
}  # fmt: skip
"""Setting -> the dtype its weights are held in, and the mode of most layers: inside of blocks fp16_safe's results are fp16."""


def test_every_row_ran_what_it_says(comfy, model, monkeypatch):
    watched = Watched(monkeypatch)
    found, table, _, chart = measured(comfy, model, *SETTINGS)
    assert chart.shape[0] == 1 and chart.shape[-1] == 3 and table.count("\n") > len(SETTINGS)
    rows = [found.reference, *found.rows]
    turns = [*rows, *reversed(rows)]
    assert len(turns) == len(watched.products) and [str(row.setting) for row in found.rows] == list(SETTINGS)
    for row, products, weights in zip(turns, watched.products, watched.weights, strict=True):
        assert as_the_row_says(row, products), (row, products)
        dtype, mode = SETTINGS.get(str(row.setting), (torch.bfloat16, "fp32"))
        assert weights["blocks.0.ffn.0"] == dtype and row.modes[mode] == max(row.modes.values()), row
        assert not row.problem and row.seconds > 0 and str(row.setting) in table
        halves = found.rows[0].weight_bytes / 2 * dtype.itemsize
        assert row.weight_bytes == pytest.approx(halves, rel=0.02 if dtype.itemsize > 1 else 0.6)


def test_the_snr_is_that_of_the_loaders_own_run(comfy, path, model):
    found, *_ = measured(comfy, model, "int8/auto", "fp8_e4m3fn/bf16", "auto/auto")
    reference = final(families.load(comfy, path, "as_file", "fp32"))
    for row in found.rows:
        alone = final(families.load(comfy, path, row.setting.storage, row.setting.compute))
        assert row.snr_db == pytest.approx(sqnr_db(reference, alone), abs=0.05), row
    assert found.rows[0].snr_db > 20


def test_settings_that_come_to_the_same_are_measured_once(comfy, model, path):
    found, *_ = measured(comfy, model, "as_file/bf16", "bf16/bf16", "fp16/bf16")
    assert [row.names for row in found.rows] == ["as_file/bf16 = bf16/bf16", "fp16/bf16"]
    one, other = (final(families.load(comfy, path, storage, "bf16")) for storage in ("as_file", "bf16"))
    assert torch.equal(one, other)


def with_lora(model):
    from comfy.sd import load_lora_for_models

    tensors = lora({"blocks.1.ffn.2": tuple(model.model.diffusion_model.blocks[1].ffn[2].weight.shape)}, size=30.0)
    return load_lora_for_models(model, None, tensors, 1.0, 0)[0]


def test_a_lora_stays_on_whatever_holds_the_weights(comfy, model, path):
    found, *_ = measured(comfy, with_lora(model), "int8/bf16", "as_file/bf16")
    reference = final(with_lora(families.load(comfy, path, "as_file", "fp32")))
    assert sqnr_db(reference, final(families.load(comfy, path, "as_file", "fp32"))) < 15
    for row in found.rows:
        alone = final(with_lora(families.load(comfy, path, row.setting.storage, row.setting.compute)))
        assert row.snr_db == pytest.approx(sqnr_db(reference, alone), abs=0.1) and row.snr_db > 25, row


def test_an_overflow_is_told_and_the_rest_goes_on(comfy, path):
    planted = families.write_scaled(
        path, path.with_name("measured_overflowing.safetensors"), families.OVERFLOWS["wan"]["ffn"]
    )
    model = families.load(comfy, planted, "as_file", "fp32")
    guarded = comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
    found, table, *_ = measured(comfy, guarded, "as_file/fp16", "as_file/fp16_safe")
    overflowing, safe = found.rows
    assert overflowing.problem == "NaN or Inf in step 1. NaN Guard names the layer." and overflowing.problem in table
    assert safe.works and safe.snr_db > 40 and all(best is safe for best in found.best.values())
    gained = replace(
        found,
        reference=replace(found.reference, seconds=1e9, spread=0.0),
        rows=[replace(row, spread=0.0) for row in found.rows],
    )
    assert str(gained.rules.own[0]).startswith("* storage=as_file compute=fp16_safe")


def test_what_the_device_cannot_is_a_row_with_the_reason(comfy, model, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    found, table, *_ = measured(comfy, model, "as_file/bf16", "fp8_e4m3fn/fp8", "as_file/fp16")
    assert [row.works for row in found.rows] == [False, False, True]
    assert all(
        row.problem.startswith("not on RTX 20xx, T4 (Turing): ") and row.problem in table for row in found.rows[:2]
    )


def halved_by_core(comfy, path):
    return comfy.core["UNETLoader"]().load_unet(path.name, "fp8_e4m3fn")[0]


HOW_LOADED = {
    "halved to fp8": lambda comfy, path: families.load(comfy, path, "fp8_e4m3fn", "auto"),
    "halved to int8": lambda comfy, path: families.load(comfy, path, "int8", "auto"),
    "some layers by rules": lambda comfy, path: families.load(
        comfy, path, "as_file", "auto", rules_from("blocks.0.* storage=int8")
    ),
    "weight_dtype of ComfyUI's loader": halved_by_core,
    "ComfyUI's loader, in fp32 on a CPU": lambda comfy, path: families.stock(path),
}
"""Ways to load one file: none of them holds the weights as they are in it."""


BEFORE_A_RELEASE = ("halved to fp8", "ComfyUI's loader, in fp32 on a CPU")


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.release) if how in BEFORE_A_RELEASE else how for how in HOW_LOADED],
)
def test_the_reference_is_the_file_whatever_its_loader_made_of_it(comfy, path, model, how):
    given = HOW_LOADED[how](comfy, path)
    settings = ("as_file/bf16", "int8/auto", "fp8_e4m3fn/auto")
    found, table, *_ = measured(comfy, given, *settings)
    of_file, *_ = measured(comfy, model, *settings)
    assert [row.snr_db for row in found.rows] == pytest.approx([row.snr_db for row in of_file.rows], abs=0.01)
    assert found.reference.storages == of_file.reference.storages and found.is_of_file and found.storage == "bf16"
    in_file = sum(tensor.nbytes for tensor in load_file(path).values())
    assert found.rows[0].weight_bytes == pytest.approx(in_file, rel=0.01), "as_file is what the file takes"
    assert f"weights of the file in bf16 (loaded in {found.given}, measured from the file)" in table


def test_a_file_partly_in_int8_stays_the_reference_after_a_halving(comfy, path):
    """Both are int8 by name."""
    first = [layer for layer in WAN_LINEARS if layer.startswith("blocks.0.")]
    mixed = in_dialect(path, path.with_name("measured_mixed.safetensors"), int8_models.int8, layers=first)
    loaded = families.load(comfy, mixed, "as_file", "auto")
    halved = families.load(comfy, mixed, "int8", "auto")
    (of_file, *_), (found, *_) = (measured(comfy, given, "as_file/bf16", "int8/auto") for given in (loaded, halved))
    assert [row.snr_db for row in found.rows] == pytest.approx([row.snr_db for row in of_file.rows], abs=0.01)
    assert found.rows[0].weight_bytes == of_file.rows[0].weight_bytes > 1.15 * of_file.rows[1].weight_bytes


def test_loras_stay_on_the_weights_of_the_file(comfy, path, model):
    given, of_file = (with_lora(one) for one in (families.load(comfy, path, "fp8_e4m3fn", "auto"), model))
    (found, *_), (wanted, *_) = (measured(comfy, one, "as_file/bf16", "int8/auto") for one in (given, of_file))
    assert [row.snr_db for row in found.rows] == pytest.approx([row.snr_db for row in wanted.rows], abs=0.01)
    assert found.rows[0].snr_db != measured(comfy, model, "as_file/bf16")[0].rows[0].snr_db


@pytest.mark.parametrize(
    "loader", ["HalfsafeLoadCheckpoint", pytest.param("CheckpointLoaderSimple", marks=pytest.mark.release)]
)
def test_a_full_checkpoint_is_read_as_one(comfy, models_dir, monkeypatch, loader):
    """Marks outside of the diffusion model can tell how it predicts."""
    path, read, real = (
        tiny_models.narrow_sd15_checkpoint(models_dir / "checkpoints" / "measured.safetensors"),
        [],
        host.load_onto,
    )
    options = {"storage": "fp8_e4m3fn", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"}
    given = (
        comfy.run(loader, ckpt_name=path.name, **options)[0]
        if loader.startswith("Halfsafe")
        else comfy.core[loader]().load_checkpoint(path.name)[0]
    )
    monkeypatch.setattr(host, "load_onto", lambda *args: read.append(args[5]) or real(*args))
    text = [[torch.randn(1, 8, 768, generator=torch.Generator().manual_seed(3)), {}]]
    found, *_ = measured(comfy, given, "as_file/fp32", positive=text)
    assert read == [True] and found.given != found.storage == "fp16" and found.rows[0].snr_db == math.inf


def test_a_model_whose_file_is_not_known_is_compared_with_itself_and_says_so(comfy, path):
    model = families.load(comfy, path, "fp8_e4m3fn", "auto")
    model.cached_patcher_init = None
    found, table, *_ = measured(comfy, model, "as_file/fp32", "fp8_e4m3fn/bf16", "bf16/fp32", "fp8_e5m2/bf16")
    assert found.storage == "fp8_e4m3fn" and "fp8_e4m3fn" in found.reference.storages and not found.is_of_file
    same, loaded, unpacked, other = found.rows
    assert same.snr_db == math.inf and unpacked.snr_db > 60 and set(unpacked.storages) <= {"bf16", "fp32"}
    assert "fp8_e4m3fn" in loaded.storages and "fp8_e5m2" in other.storages and other.snr_db < loaded.snr_db
    assert loaded.storage == same.storage == "fp8_e4m3fn" and other.storage == "fp8_e5m2"
    assert "weights as loaded, in fp8_e4m3fn: their file is not known" in table


def test_the_samplers_cfg_is_sampled_with(comfy, model, monkeypatch):
    from comfy import sample as sampling

    seen, real = [], sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *args, **more: seen.append(args[3]) or real(*args, **more))
    negative = {"negative": families.conditioning("wan", seed=9)}
    for given in ({}, negative, negative | {"cfg": 6.5}, {"cfg": 6.5}):
        measured(comfy, model, "as_file/bf16", **given)
    assert seen == [1.0] * 4 + [4.0] * 4 + [6.5] * 4 + [1.0] * 4


@pytest.mark.parametrize("setting", ["int8/auto", "fp8_e4m3fn/fp16_safe", "fp8_e5m2/fp32"])
def test_the_rules_give_loaders_and_compute_dtype_what_was_measured(comfy, path, model, monkeypatch, setting):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    (asked,) = settings_from(setting)
    automatic = host._planned(model, Setting("as_file", "auto")).compute.choice.used
    assert automatic == "fp16"
    rules = Tradeoff(asked, asked.storage).rules_for(automatic, model_facts(model).layers)
    by_option = families.load(comfy, path, asked.storage, asked.compute)
    by_rules = families.load(comfy, path, "auto", "auto", rules)
    loaded = families.with_compute(comfy, families.load(comfy, path, asked.storage, "auto"), "auto", rules)
    reference = final(families.load(comfy, path, "as_file", "fp32"))
    measured_db, wanted = sqnr_db(reference, final(by_option)), families.report(comfy, by_option)["layers"]
    for made in (by_rules, loaded):
        assert sqnr_db(reference, final(made)) > measured_db - 0.5
        found = families.report(comfy, made)["layers"]
        assert [layer["storage"] == asked.storage for layer in found] == [
            layer["storage"] == asked.storage for layer in wanted
        ]
    if asked.compute in ("auto", automatic):
        assert [layer["mode"] for layer in families.report(comfy, by_rules)["layers"]] == [
            layer["mode"] for layer in wanted
        ]


@pytest.mark.parametrize(("error", "stop_at"), [("interrupt", 130), ("ValueError", 240), ("none", 0)])
def test_nothing_is_left_on_the_model(comfy, model, path, monkeypatch, error, stop_at):
    from comfy import model_management as management
    from comfy import ops
    from comfy.sd import load_lora_for_models

    tensors = lora({"blocks.0.ffn.2": tuple(model.model.diffusion_model.blocks[0].ffn[2].weight.shape)})
    model = load_lora_for_models(families.load(comfy, path, "as_file", "bf16"), None, tensors, 1.0, 0)[0]
    families.unload_models()
    wrappers = {kind: dict(values) for kind, values in model.wrappers.items()}
    weights = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    errors = {
        "interrupt": management.InterruptProcessingException(),
        "ValueError": ValueError("in the middle"),
        "none": None,
    }
    real, count = ops.run_every_op, iter(range(10**6))

    def op():
        if next(count) == stop_at and errors[error]:
            raise errors[error]
        real()

    monkeypatch.setattr(ops, "run_every_op", op)
    try:
        measured(comfy, model, "as_file/fp16", "int8/auto", "fp16/fp16_safe")
        assert error == "none" and next(count) > 240
    except (management.InterruptProcessingException, ValueError) as raised:
        assert raised is errors[error]
    monkeypatch.undo()
    after = model.model.state_dict()
    assert after.keys() == weights.keys() and all(torch.equal(after[name], weights[name]) for name in weights)
    assert not any("forward" in vars(module) for module in model.model.modules())
    assert {kind: dict(values) for kind, values in model.wrappers.items()} == wrappers and not model.backup


@pytest.mark.parametrize("study", ["HalfsafeMeasurePrecisions", "HalfsafeAnalyzeLayers", "HalfsafeCalibrate"])
def test_no_report_tells_of_a_run_that_only_measures(comfy, model, monkeypatch, study):
    """The report of the one node is of the user's model and of the user's runs."""
    told = []
    monkeypatch.setattr(badge, "send", lambda event, data, messages: told.append(data["token"]))
    planned = comfy.run("HalfsafeAutoPrecision", model=model, goal="balanced")[0]
    before = badge.report_json(planned)
    options = {
        "HalfsafeMeasurePrecisions": {"candidates": "fp8_e4m3fn/auto"},
        "HalfsafeAnalyzeLayers": {"candidate": "fp8_e4m3fn", "target_snr_db": 25.0, "sensitive_layers": "keep high"},
    }
    comfy.run(
        study,
        model=planned,
        latent_image=latent(model),
        positive=families.conditioning("wan"),
        seed=1,
        **options.get(study, {}),
    )
    assert told == [] and badge.report_json(planned) == before
    final(planned)
    assert len(told) == 1


def failing(monkeypatch, error: Exception, *calls: int) -> None:
    """Make some runs of the sampler fail."""
    real, count = host.sample, iter(range(100))

    def sampled(*args, **more):
        if next(count) in calls:
            raise error
        return real(*args, **more)

    monkeypatch.setattr(host, "sample", sampled)


@pytest.mark.parametrize(("error", "problem"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
    (NotImplementedError('"addmm" not implemented for \'Half\'\nmore'), '"addmm" not implemented for \'Half\''),
    (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore"), "CUBLAS_STATUS_NOT_SUPPORTED"),
])  # fmt: skip
def test_a_setting_that_fails_is_a_row_and_the_next_goes_on(comfy, model, monkeypatch, error, problem):
    failing(monkeypatch, error, 1)
    found, table, *_ = measured(comfy, model, "fp32/fp32", "int8/auto")
    assert found.rows[0].problem == problem and problem in table and found.rows[1].works


def test_why_the_reference_gave_no_result_is_said_in_chinese(comfy, model, monkeypatch):
    failing(monkeypatch, HalfsafeError(Message("NaN or Inf in step {0}.", 1), "NaN Guard names the layer."), 0)
    with pytest.raises(HalfsafeError) as caught:
        measured(comfy, model, "fp32/fp32")
    assert untranslated(str(caught.value)) == []


def test_an_error_of_the_reference_ends_the_node(comfy, model, monkeypatch):
    """Words of an error, here "memory", do not decide what it is."""
    failing(monkeypatch, RuntimeError("unsupported memory format option"), 0)
    with pytest.raises(
        HalfsafeError, match="The reference as_file/fp32 gave no result to compare with: unsupported memory format"
    ):
        measured(comfy, model, "int8/auto")


def test_where_fp32_does_not_fit_the_reference_is_fp16_safe(comfy, model, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), 0)
    found, table, *_ = measured(comfy, model, "as_file/fp16")
    assert found.reference.setting == Setting("as_file", "fp16_safe") and found.rows[0].snr_db > 40
    assert "against as_file/fp16_safe" in table
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), 0, 1)
    with pytest.raises(HalfsafeError, match="as_file/fp16_safe gave no result to compare with: out of memory"):
        measured(comfy, model, "as_file/fp16")


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0).item()


def test_several_seeds_tell_whether_a_setting_draws_the_same_picture(comfy, path, model):
    """By ComfyUI's own runs with each seed; the pictures are those of the worst."""
    found, table, _, chart = measured(comfy, model, "fp8_e4m3fn/bf16", seeds=3)
    one, *_, alone = measured(comfy, model, "fp8_e4m3fn/bf16")
    (row,), exact, rounded = (
        found.rows,
        families.load(comfy, path, "as_file", "fp32"),
        families.load(comfy, path, "fp8_e4m3fn", "bf16"),
    )
    latents = [[final(each, seed) for each in (exact, rounded)] for seed in (1, 2, 3)]
    assert row.cosines == pytest.approx([cosine(*pair) for pair in latents], abs=1e-5)
    assert (
        row.snr_db == pytest.approx(min(sqnr_db(*pair) for pair in latents), abs=0.05) and len(row.timed) == 3 * 3 + 1
    )
    worst = min(latents, key=lambda pair: cosine(*pair))
    assert all(
        (picture == picture_of(model, [latent])).mean() > 0.99
        for picture, latent in zip(row.pictures, worst, strict=True)
    )
    assert "over 3 seeds" in table and chart.shape[1] > alone.shape[1] and chart.shape[2] == alone.shape[2]
    assert one.rows[0].cosines == pytest.approx(row.cosines[:1], abs=1e-6) and not one.rows[0].pictures


def test_the_pictures_are_comfyuis_previews(comfy, model, models_dir):
    from latent_preview import Latent2RGBPreviewer

    latent = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    known = model.model.latent_format
    colours = known.latent_rgb_factors, known.latent_rgb_factors_bias, known.latent_rgb_factors_reshape
    theirs = Latent2RGBPreviewer(*colours).decode_latent_to_preview(model.model.process_latent_in(latent))
    ours = picture_of(model, [latent])
    assert ours.shape == (8, 8, 3) and abs(ours.astype(int) - numpy.array(theirs).astype(int)).max() <= 1
    assert picture_of(model, [latent.flatten(1)]) is None, "of sound, say"


class Clock:
    """A clock of which each step of a sampler takes the next of some times; the last one is taken on."""

    def __init__(self, patch: pytest.MonkeyPatch, *steps: float):
        self.now, self.steps, real = 0.0, [*steps], StepTimer.step

        def step(timer, executor, *args):
            def run(*given):
                result = executor(*given)
                self.now += self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
                return result

            return real(timer, run, *args)

        patch.setattr(StepTimer, "step", step)
        patch.setattr(StepTimer, "_now", lambda timer: self.now)


FIRST, SECOND = host.STEPS, host.TURN


def test_what_drifts_between_the_turns_is_in_the_spread(comfy, model, monkeypatch):
    """Each row's own steps are even; the machine is twice as fast when the second turn comes."""
    Clock(monkeypatch, *[2.0] * 3 * FIRST, 1.0)
    found, *_ = measured(comfy, model, "as_file/bf16", "as_file/fp16")
    for row in (found.reference, *found.rows):
        assert row.timed == [2.0, 2.0, 2.0, 1.0] and (row.seconds, row.spread) == (2.0, 1.0)
    assert "balanced" not in found.best and found.took[1] == 3 * FIRST * 2.0 + 3 * SECOND * 1.0


def test_the_time_of_a_setting_is_free_of_what_it_takes_to_come_to_it(comfy, model, monkeypatch):
    """Weights of another storage are made twice, and the first step of each run is a warm-up."""
    one_row = [[9.0, *[1.0] * (FIRST - 1)], [9.0, *[1.0] * (SECOND - 1)]]
    clock = Clock(monkeypatch, *one_row[0] * 2, *one_row[1] * 2)
    real = host.load_onto

    def load(*args):
        clock.now += 1000.0
        return real(*args)

    monkeypatch.setattr(host, "load_onto", load)
    found, *_ = measured(comfy, model, "int8/auto")
    assert (
        clock.now > 2000.0 and [(row.seconds, row.spread) for row in (found.reference, *found.rows)] == [(1.0, 0.0)] * 2
    )


def test_what_computes_as_the_reference_is_known_by_what_ran(comfy, path, model, monkeypatch):
    """``auto`` of a CPU is fp32 for an fp16 file that ComfyUI does not list for fp16."""
    Clock(monkeypatch, *[2.0] * FIRST, *[1.0] * (FIRST + SECOND), 2.0)
    found, table, *_ = measured(comfy, model, "as_file/fp32")
    assert found.has_drifted and [*found.best] == ["balanced", "quality", "speed", "memory"], (
        "one setting needs no rank"
    )
    said = "as_file/fp32 and the reference compute the same; their times differ by more than the spread"
    assert said in " ".join(table.split())
    assert not found.rows[0].computes_as(measured(comfy, model, "as_file/bf16")[0].rows[0])


def test_a_setting_that_fails_in_the_second_turn_is_a_row_with_the_reason(comfy, model, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory")
    failing(monkeypatch, error, 2)
    found, *_ = measured(comfy, model, "as_file/bf16")
    assert found.rows[0].problem == "out of memory" and found.reference.works is False
    failing(monkeypatch, error, 3)
    found, *_ = measured(comfy, model, "as_file/bf16")
    assert found.rows[0].works and found.reference.is_noisy and not found.reference.problem


def test_one_other_model_is_held_at_a_time(comfy, model, monkeypatch):
    made, real = [], host.load_onto

    def load(*args):
        assert [ref for ref in made if ref() is not None] == []
        fresh = real(*args)
        made.append(weakref.ref(fresh.model))
        return fresh

    monkeypatch.setattr(host, "load_onto", load)
    measured(comfy, model, "int8/auto", "fp32/fp32", "as_file/bf16", "fp8_e4m3fn/auto")
    assert len(made) == 6 and not any(ref() for ref in made)


def test_a_stock_loaders_model_with_a_negative_prompt(comfy, path):
    found, *_ = measured(
        comfy, families.stock(path), "int8/bf16", "fp8_e4m3fn/auto", negative=families.conditioning("wan", seed=9)
    )
    alone, *_ = measured(comfy, families.stock(path), "int8/bf16")
    assert all(row.works and row.snr_db > 15 for row in found.rows) and found.rows[0].snr_db != alone.rows[0].snr_db


def test_a_row_names_the_card_and_its_driver(comfy, model, monkeypatch, tmp_path):
    """NVIDIA's driver as Linux tells it, in the words of either of its modules; "-" where there is none."""
    told = tmp_path / "version"
    monkeypatch.setattr(devices, "DRIVER", told)
    found, *_ = measured(comfy, model, "as_file/auto")
    card, driver, built = found.machine
    assert (card, driver, built) == (host.current_device().name, "-", torch.__version__)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    ):
        told.write_text(f"{line}\nGCC version:  gcc version 13.2.0\n", encoding="utf-8")
        assert host.nvidia_driver() in ("550.54.15", "580.159.04") and host.nvidia_driver() in line


def test_candidates_are_checked_before_the_prompt_runs(comfy):
    node = comfy.nodes[NODE]
    assert node.validate_inputs(candidates="int8/auto") is True and node.validate_inputs() is True
    assert "line 2" in node.validate_inputs(
        candidates="int8/auto\nint9/auto"
    ) and "no candidate" in node.validate_inputs(candidates="")
