"""Load models in the storage and compute dtype the device is good at."""

import os

from comfy_api.latest import io

from ..precision.base.message import Message
from ..precision.files.safetensors_file import open_checkpoint
from ..precision.plan.rules import rules_from
from .host.guard.model import look_at_results
from .host.load import controlnet, encoders, files, models
from .host.reporting.badge import control_ui, encoder_ui, model_ui
from .host.reporting.halved import control_memory_ui, memory_ui
from .inputs import LOAD, checked_rules, compute_input, rules_input, schema, storage_input

NO_FILE = "none"


class _Loader(io.ComfyNode):
    """A node that loads files of one of ComfyUI's folders: it runs again when one of them has changed."""

    FOLDER = ""

    @classmethod
    def fingerprint_inputs(cls, **inputs) -> str:
        """Return the size of each file, shards included, and the time of its last change."""
        names = [name for key, name in inputs.items() if "_name" in key and name not in (None, "", NO_FILE)]
        opened = (open_checkpoint(files.model_path(cls.FOLDER, name)) for name in names)
        stats = (os.stat(file) for checkpoint in opened for file in checkpoint.files)
        return ", ".join(Message("{0} bytes at {1}", found.st_size, found.st_mtime_ns) for found in stats)


def _file_input(name: str, folder: str) -> io.Combo.Input:
    return io.Combo.Input(name, options=files.model_files(folder))


def _vae_dtype_input(name: str) -> io.Combo.Input:
    return io.Combo.Input(name, options=["auto", "fp16", "bf16", "fp32"], default="auto")


class LoadDiffusionModel(_Loader):
    FOLDER = "diffusion_models"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeLoadDiffusionModel",
            LOAD,
            search_aliases=[
                "out of memory",
                "oom",
                "low vram",
                "vram",
                "halve the memory",
                "fp8 loader",
                "unet loader",
                "dtype",
                "quantize",
                "fp8",
                "fp8 scaled",
                "int8",
                "precision",
                "bf16",
                "fp16",
            ],
            has_intermediate_output=True,
            inputs=[
                _file_input("model_name", cls.FOLDER),
                storage_input(),
                compute_input(),
                rules_input(),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model_name, storage, compute, rules=None) -> io.NodeOutput:
        path = files.model_path(cls.FOLDER, model_name)
        model = models.load_diffusion_model(path, storage, compute, checked_rules(rules) or rules_from())
        look_at_results(model)
        return io.NodeOutput(model, ui=model_ui(model) | memory_ui(model_name, model))


class LoadCheckpoint(_Loader):
    FOLDER = "checkpoints"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeLoadCheckpoint",
            LOAD,
            search_aliases=["fp8 checkpoint", "ckpt", "sdxl fp8", "dtype", "precision", "vae fp32", "no-half-vae"],
            has_intermediate_output=True,
            inputs=[
                _file_input("ckpt_name", cls.FOLDER),
                storage_input(),
                compute_input(),
                storage_input("clip_storage"),
                _vae_dtype_input("vae_dtype"),
                rules_input(),
            ],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, ckpt_name, storage, compute, clip_storage, vae_dtype, rules=None) -> io.NodeOutput:
        path = files.model_path(cls.FOLDER, ckpt_name)
        model = models.load_diffusion_model(path, storage, compute, checked_rules(rules) or rules_from(), whole=True)
        look_at_results(model)
        clip = encoders.load_checkpoint_text_encoder(path, clip_storage)
        vae = encoders.load_vae(path, vae_dtype, whole=True)
        loaded = [model, clip.patcher] if clip else [model]
        held = memory_ui(ckpt_name, *loaded)
        return io.NodeOutput(model, clip, vae, ui=model_ui(model) | held)


class LoadCLIP(_Loader):
    FOLDER = "text_encoders"

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = files.model_files(cls.FOLDER)
        more = [
            io.Combo.Input(f"clip_name{number}", options=[NO_FILE, *names], default=NO_FILE, optional=True)
            for number in (2, 3, 4)
        ]
        return schema(
            "HalfsafeLoadCLIP",
            LOAD,
            search_aliases=["text encoder", "t5 fp8", "clip fp8", "dual clip loader", "umt5", "dtype", "precision"],
            has_intermediate_output=True,
            inputs=[
                io.Combo.Input("clip_name1", options=names),
                io.Combo.Input("type", options=encoders.text_encoder_types()),
                storage_input(),
                compute_input(),
                *more,
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(
        cls, clip_name1, type, storage, compute, clip_name2=NO_FILE, clip_name3=NO_FILE, clip_name4=NO_FILE
    ) -> io.NodeOutput:
        names = [name for name in (clip_name1, clip_name2, clip_name3, clip_name4) if name != NO_FILE]
        paths = [files.model_path(cls.FOLDER, name) for name in names]
        clip = encoders.load_text_encoder(paths, type, storage, compute)
        return io.NodeOutput(clip, ui=encoder_ui(clip) | memory_ui(" + ".join(names), clip.patcher))


class LoadControlNet(_Loader):
    FOLDER = "controlnet"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeLoadControlNet",
            LOAD,
            search_aliases=[
                "control net",
                "controlnet fp8",
                "int8",
                "quantize",
                "dtype",
                "controlnet",
                "fp8",
                "precision",
            ],
            has_intermediate_output=True,
            inputs=[
                _file_input("control_net_name", cls.FOLDER),
                storage_input(),
                compute_input(),
                rules_input(),
            ],
            outputs=[io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, control_net_name, storage, compute, rules=None) -> io.NodeOutput:
        path = files.model_path(cls.FOLDER, control_net_name)
        control = controlnet.load_control_net(path, storage, compute, checked_rules(rules) or rules_from())
        shown = control_ui(control) | control_memory_ui(control_net_name, control)
        return io.NodeOutput(control, ui=shown)


class LoadVAE(_Loader):
    FOLDER = "vae"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeLoadVAE",
            LOAD,
            search_aliases=["vae fp32", "vae dtype", "no-half-vae", "fp32-vae", "precision"],
            has_intermediate_output=True,
            inputs=[
                _file_input("vae_name", cls.FOLDER),
                _vae_dtype_input("dtype"),
            ],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, vae_name, dtype) -> io.NodeOutput:
        vae = encoders.load_vae(files.model_path(cls.FOLDER, vae_name), dtype)
        return io.NodeOutput(vae, ui=encoder_ui(vae))


NODES = [LoadDiffusionModel, LoadCheckpoint, LoadCLIP, LoadControlNet, LoadVAE]
