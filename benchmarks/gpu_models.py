"""Calls of a model on a GPU in each setting, beside ComfyUI's own call in fp16 in the same process."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from .host_time import cores_own, with_lora
from .large_models import ON_A_GPU

SETTINGS = {
    "core fp16": ("core", ""),
    "fp8": ("fp8_e4m3fn", "auto"),
    "int8": ("int8", "auto"),
    "int8 unpacked": ("int8", "fp16"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
    "core fp8": ("core", "fp8_e4m3fn"),
    "core int8": ("core", "int8"),
    "auto": ("fp16", "auto"),
    "auto, guard": ("fp16", "auto"),
    "fp16_safe": ("fp16", "fp16_safe"),
    "core nvfp4": ("core", "nvfp4"),
    "nvfp4": ("nvfp4", "auto"),
    "mxfp8": ("mxfp8", "auto"),
}
"""Setting -> storage and compute asked for; of ComfyUI's own loader, the storage of the file that it is given."""
CALLS = {
    "SDXL": ("sdxl", 77, {"size": 128, "batch": 2}),
    "Wan 1.3B": ("wan", 512, {"size": 64, "frames": 9}),
    "Flux": ("flux", 256, {"size": 128}),
}
"""Model -> family, tokens of text, latent."""
VIDEO = (1, 16, 21, 60, 104)
"""The latent of 81 frames of 832 x 480: 32,760 tokens."""
REPEATS, PAIRS, LONGEST_KERNELS = 2, 2, 8
READS = ("tolist", "item", "cpu", "__bool__")


class Model:
    """Measure one model: a file with normal weights of its widths, kept for the processes of other parts, in each setting."""

    def __init__(self, comfy, part: str, dry: bool, folder: Path):
        import folder_paths

        self.comfy, self.dry = comfy, dry
        self.name, _, self.state = part.partition(", ")
        self.family, self.tokens, self.size = CALLS[self.name]
        folder_paths.add_model_folder_path("diffusion_models", str(folder))
        self.path = folder / f"{self.family}_measured.safetensors"
        self._core = None

    def row(self, setting: str) -> dict:
        """Measure ComfyUI's own call, or that of a setting in turns with ComfyUI's."""
        from support import families

        plain = setting.removesuffix(" compiled").removesuffix(" + LoRA")
        storage, compute = SETTINGS[plain]
        if self._core is None:
            self._prepare()
        source = self._stored(compute) if storage == "core" and compute else self.path
        start = time.perf_counter()
        model = families.load(self.comfy, source, storage, compute) if storage != "core" else self._by_core(source)
        if "guard" in plain:
            model = self.comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
        if "LoRA" in setting:
            model = with_lora(model)
            if not model.patches:
                return {"problem": "no layer took the LoRA"}
        if "compiled" in setting:
            from support.compiling import COMPILER, compiled

            model = compiled(model, backend=COMPILER if self.dry else "inductor")
        sides = {"ours": model} if model is self._core else {"core": self._core, "ours": model}
        with self._lent(*sides.values()):
            row = self._measured(model, start, sides)
        if "LoRA" in setting:
            row.pop("error")  # the reference in fp32 has no LoRA
        return row

    def _measured(self, model, start: float, sides: dict) -> dict:
        """Measure the first call, later ones in turns, the kernels of one and its products."""
        from comfy.model_management import load_models_gpu
        from support.matmul_spy import MatmulSpy

        load_models_gpu(list(sides.values()))
        for side in sides.values():
            side.pre_run()
        runs = {name: partial(self._run, side) for name, side in sides.items()}
        wait()
        row = {"loaded_seconds": round(time.perf_counter() - start, 2)}
        start = time.perf_counter()
        result, row["first_peak_bytes"] = peak(runs["ours"])
        row |= {"first_seconds": round(time.perf_counter() - start, 3), "error": self._error(result)}
        taken: dict[str, list[dict]] = {name: [] for name in runs}
        for index in range(1 if self.dry else PAIRS):
            for name in sorted(runs, reverse=bool(index % 2)):
                taken[name].append(timed(runs[name], 1 if self.dry else REPEATS))
        for clock in taken["ours"][0]:
            row[clock] = statistics.median(one[clock] for one in taken["ours"])
            if "core" in taken:
                pairs = zip(taken["core"], taken["ours"], strict=True)
                row[f"{clock}_to_core"] = round(statistics.median(ours[clock] / of[clock] for of, ours in pairs), 4)
        row["peak_bytes"] = peak(runs["ours"])[1]
        row |= busy(runs["ours"])
        with MatmulSpy(model.model) as spy:
            runs["ours"]()
        row["products"] = dict(Counter(f"{' x '.join(one.operands)} to {one.result}" for one in spy.seen))
        for side in sides.values():
            side.cleanup()
        return row

    def _prepare(self) -> None:
        """Write the file, and have ComfyUI's own model in fp16, the call and its result in fp32."""
        import torch
        from support import families

        if not self.path.exists():
            self._write()
        exact = families.load(self.comfy, self.path, "fp32", "fp32")
        text = families.conditioning(self.family, length=self.tokens)
        self.call = families.capture(exact, self.family, **({} if self.dry else {"cond": text, **self.size}))
        self.x = self.call.args[0]
        if self.state == "video" and not self.dry:
            self.x = torch.randn(VIDEO, generator=torch.Generator().manual_seed(2)).to(self.x)
            self.reference = None  # in fp32 it takes half a minute, and another model of these layers has an error
        else:
            self.reference = families.replay(exact, self.call)
        del exact
        families.unload_models()
        self._core = cores_own(self.path, torch.float16)

    def _by_core(self, source: Path):
        import comfy.sd

        return self._core if source == self.path else comfy.sd.load_diffusion_model(str(source))

    def _stored(self, storage: str) -> Path:
        """Write the model in a storage with its scales as ComfyUI saves it, once."""
        from safetensors import safe_open
        from safetensors.torch import save_file
        from support import families

        target = self.path.with_name(f"{storage}_{self.path.name}")
        if not target.exists():
            tensors = families.load(self.comfy, self.path, storage, "fp16").model.diffusion_model.state_dict()
            with safe_open(str(self.path), "pt") as source:
                on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
                save_file(on_cpu, target, source.metadata())
            families.unload_models()
        return target

    def _lent(self, *models) -> contextlib.AbstractContextManager:
        """Lend the weights as under dynamic VRAM where a CPU has to show that the lines work."""
        if not self.dry or "dynamic VRAM" not in self.state:
            return contextlib.nullcontext()
        from comfy.model_management import load_models_gpu
        from support.dynamic_vram import aimdo_stubbed

        load_models_gpu(list(models))
        return aimdo_stubbed(*models, state="resident")

    def _write(self) -> None:
        """Write a file with normal weights; a small one in a dry run."""
        from support import families

        if self.dry:
            families.write_narrow(self.family, self.path.parent).replace(self.path)
        else:
            write_normal(ON_A_GPU[self.name], self.path, "cuda")

    def _run(self, patcher):
        from support import families

        return families.apply(patcher, self.call, self.x)

    def _error(self, result) -> float | None:
        """Relative error of what the model subtracts from the latent, against fp32's."""
        if self.reference is None:
            return None
        subtracted = self.x.float().cpu() - result.float().cpu()
        error = ((subtracted - self.reference.float().cpu()).norm() / self.reference.float().cpu().norm()).item()
        return float(f"{error:.2e}") if error == error else None


def write_normal(build: Callable, path: Path, device: str) -> None:
    """Write a model with normal weights, drawn on a device, that keep the size of what goes through."""
    import comfy.ops
    import torch
    from safetensors.torch import save_file
    from support.tiny_models import with_weights

    generator = torch.Generator(device).manual_seed(0)
    with with_weights():
        inner = build(device=device, dtype=torch.float16, operations=comfy.ops.disable_weight_init)[0]
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)
    save_file({key: value.contiguous().cpu() for key, value in inner.state_dict().items()}, str(path))


@contextlib.contextmanager
def clock_of_reads() -> Iterator[Callable[[], float]]:
    """Yield what this thread has spent inside of reads of tensors, where it waits for the device and spins."""
    import torch

    spent = [0.0]

    def stopped(read: Callable) -> Callable:
        def run(*args, **kwargs):
            start = time.thread_time()
            try:
                return read(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - start

        return run

    with contextlib.ExitStack() as undo:
        for name in READS:
            undo.enter_context(mock.patch.object(torch.Tensor, name, stopped(getattr(torch.Tensor, name))))
        yield lambda: spent[0]


def timed(call: Callable, repeats: int = REPEATS) -> dict[str, float]:
    """Seconds of a call over several after one that is not timed: on the wall, on the host's own thread without what it
    waits for the device, and on the device by CUDA's events."""
    import torch

    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if torch.cuda.is_available() else []
    wait()
    with clock_of_reads() as waited:
        host, start = time.thread_time(), time.perf_counter()
        for event in events[:1]:
            event.record()
        for _ in range(repeats):
            call()
        for event in events[1:]:
            event.record()
        host = (time.thread_time() - host - waited()) / repeats
    wait()
    clocks = {"seconds": (time.perf_counter() - start) / repeats, "host_seconds": host}
    return clocks | ({"device_seconds": events[0].elapsed_time(events[1]) / 1000 / repeats} if events else {})


def peak(call: Callable) -> tuple[object, int | None]:
    """Return a call's result, and the device memory that it allocated beyond what was there; None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return call(), None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    wait()
    return result, torch.cuda.max_memory_allocated() - before


def busy(call: Callable) -> dict:
    """Milliseconds of all kernels of a call, how many they are, and those that take longest; empty on a CPU."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        wait()
    micros, counts = Counter(), Counter()
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            micros[event.name[:110]] += event.time_range.elapsed_us()
            counts[event.name[:110]] += 1
    longest = {name: [counts[name], round(taken)] for name, taken in micros.most_common(LONGEST_KERNELS)}
    return {"busy_ms": round(sum(micros.values()) / 1e3, 3), "kernels": counts.total(), "longest": longest}


def wait() -> None:
    """Wait for the device."""
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        torch.cuda.synchronize()
