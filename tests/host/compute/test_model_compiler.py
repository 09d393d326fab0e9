"""ComfyUI's model compiler around calls of ours: none begins a graph in an open one, keeps what a block allocated, or allocates otherwise.

What it asks of a model's call, by that source and ``comfy_aimdo/malloc_graph.py`` 0.6.0: between ``malloc_graph_begin`` and
``malloc_graph_end`` of a thread no other graph is begun; what is allocated in a block is freed in it (else a "rogue"); each
block allocates what the one of its name before it did (else a "graph break"). aimdo itself goes on after the last two. The
first call is not compared with later ones: MiniMax H3 has one timestep in it, of picture and sound, and two in the others.
"""

import contextlib
from dataclasses import dataclass, field

import comfy.cli_args
import comfy.model_prefetch
import comfy.ops
import pytest
import torch
from comfy.ldm.minimax.model import MiniMaxH3Model
from comfy.ldm.modules.attention import optimized_attention
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.guard.clamps import ClampWatch
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.replay.model_compiler import compiler_off
from halfsafe.nodes.host.study.analysis import analyze_model
from halfsafe.nodes.host.study.calibrate import calibrate_model
from halfsafe.nodes.host.study.sampling import Inputs
from halfsafe.nodes.host.study.tradeoffs import measure_model
from halfsafe.precision.arithmetic.proofs import Missed
from halfsafe.precision.base.nested import tensors_in
from halfsafe.precision.study.tradeoffs import settings_from
from support import families, model_files, rare_families
from support.guarding import guarded, inside, nan_at, report_of
from support.leaf_operations import LeafOperations
from support.summing import accumulation
from torch.multiprocessing.reductions import StorageWeakRef

BLOCK = "block"
QUEUE = ["a queue"]
QWEN_HEADS = 2
operations = comfy.ops.manual_cast


class GraphError(BaseException):
    """What the recorder raises; no ``Exception``, which a guard or a check may catch."""


@dataclass
class Scope:
    """What was allocated in a block or outside of all of them: bytes of each, and those that may live yet."""

    name: str
    sizes: list[int] = field(default_factory=list)
    alive: list[StorageWeakRef] = field(default_factory=list)


class Recorder(LeafOperations):
    """Sees each allocation of this thread while a graph is open. ``calls``: graphs ended; ``aborted``: those cleaned up while open."""

    def __init__(self):
        super().__init__()
        self.scopes: list[Scope] = []
        self.patterns: dict[str, list[int]] = {}
        self.calls = self.aborted = 0
        self.paused = False

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if self.scopes and not self.paused:
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
            for tensor in tensors_in([result]):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.scopes[-1].sizes.append(storage.nbytes())
                    self.scopes[-1].alive.append(StorageWeakRef(storage))
        return result

    def begin(self) -> None:
        if comfy.cli_args.args.disable_comfy_compiler:
            return
        if self.scopes:
            raise GraphError("a graph is begun in one that is open")
        self.scopes.append(Scope("call"))

    def iterate(self, name: str | None) -> None:
        if self.scopes and self.scopes[-1].name == BLOCK:
            self._pop()
        if self.scopes and name:
            self.scopes.append(Scope(name))

    def end(self) -> None:
        if self.scopes:
            self._pop()
            self.calls += 1
            self.patterns = {} if self.calls == 1 else self.patterns

    def cleanup(self) -> None:
        self.aborted += bool(self.scopes)
        self.scopes, self.patterns = [], {}

    def _pop(self) -> None:
        scope = self.scopes.pop()
        rogues = [size for size, one in zip(scope.sizes, scope.alive, strict=True) if not one.expired()]
        if rogues:
            raise GraphError(f"rogues of a {scope.name}: {rogues} bytes")
        if self.patterns.setdefault(scope.name, scope.sizes) != scope.sizes:
            raise GraphError(f"a {scope.name} allocates {scope.sizes}, one before it {self.patterns[scope.name]}")

    @contextlib.contextmanager
    def pause(self):
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


@contextlib.contextmanager
def comfy_compiler(whole_call: type | None = None):
    """Record the calls of this thread.

    ``whole_call``: a class of models whose graph is open during all of ``forward``, as of MiniMax H3; others open theirs in
    ``make_prefetch_queue`` and end it after their last block, as Qwen-Image 2.1. None has a ``finally`` for it.
    """
    recorder = Recorder()

    def pop(queue, device, module, dtype=None, **options) -> None:
        recorder.iterate(module and BLOCK)
        if module is None and not whole_call:
            recorder.end()

    def queue(*args):
        if not whole_call:
            recorder.begin()
        return QUEUE

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
        patch.setattr(comfy.model_prefetch, "cleanup_malloc_graph", recorder.cleanup, raising=False)
        patch.setattr(comfy.model_prefetch, "prefetch_queue_pop", pop)
        patch.setattr(comfy.model_prefetch, "make_prefetch_queue", queue)
        patch.setattr(comfy.model_prefetch, "pause_malloc_graph", recorder.pause, raising=False)
        if whole_call:
            patch.setattr(whole_call, "forward", _recorded(recorder, whole_call.forward))
        yield recorder
        assert comfy.cli_args.args.disable_comfy_compiler is False, "left off"


def _recorded(recorder: Recorder, forward):
    def run(self, x, *args, **kwargs):
        if comfy.cli_args.args.disable_comfy_compiler:
            return forward(self, x, *args, **kwargs)
        out = [torch.empty_like(part) for part in x]
        recorder.begin()
        made = forward(self, x, *args, **kwargs)
        for place, part in zip(out, made, strict=True):
            place.copy_(part)
        del made, part
        recorder.end()
        return out

    return run


class Block(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = operations.LayerNorm(dim, elementwise_affine=False, dtype=torch.bfloat16)
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(self, name, operations.Linear(dim, dim, bias=False, dtype=torch.bfloat16))
        self.up = operations.Linear(dim, dim * 3, bias=False, dtype=torch.bfloat16)
        self.down = operations.Linear(dim * 3, dim, bias=False, dtype=torch.bfloat16)

    def text(self, states, options):
        """Adds to the states of the text; returns its keys and values."""
        normed = self.norm(states)
        keys, values = self.to_k(normed), self.to_v(normed)
        states.add_(
            self.to_out(optimized_attention(self.to_q(normed), keys, values, QWEN_HEADS, transformer_options=options))
        )
        return keys, values

    def forward(self, x, scale, gate, kept, options):
        normed = self.norm(x) * (1 + scale)
        keys, values = (torch.cat(pair, 1) for pair in zip(kept, (self.to_k(normed), self.to_v(normed)), strict=True))
        x.addcmul_(
            self.to_out(optimized_attention(self.to_q(normed), keys, values, QWEN_HEADS, transformer_options=options)),
            gate,
        )
        return x.add_(self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


class QwenImage21(torch.nn.Module):
    """A small model in the form of ComfyUI's Qwen-Image 2.1 (``comfy/ldm/qwen_image21/model.py``, 0.37), which 0.30 does not have.

    It keeps keys and values of the text for the steps of a run, its blocks add to the picture in place, and its graph of the
    compiler is open around its blocks. ``filled``: how often keys and values of a text were made.
    """

    def __init__(self, context: int, dim: int = 64, channels: int = 16, blocks: int = 3):
        super().__init__()
        self.dtype = torch.bfloat16
        self.txt_in = operations.Linear(context, dim, dtype=torch.bfloat16)
        self.img_in = operations.Linear(channels, dim, dtype=torch.bfloat16)
        self.modulation = operations.Linear(dim, 2 * dim, dtype=torch.bfloat16)
        self.transformer_blocks = torch.nn.ModuleList(Block(dim) for _ in range(blocks))
        self.proj_out = operations.Linear(dim, channels, dtype=torch.bfloat16)
        self.prefix_cache, self.prefix_cache_enabled, self.filled = {}, True, 0

    def reset_prefix_cache(self, enabled: bool) -> None:
        self.prefix_cache, self.prefix_cache_enabled = {}, enabled

    def forward(self, x, timestep, context, *, transformer_options, **kwargs):
        rows, text = self.img_in(x.flatten(2).transpose(1, 2)), self.txt_in(context)
        scale, gate = self.modulation(timestep.to(x.dtype).cos().reshape(-1, 1, 1).expand(-1, 1, rows.shape[-1])).chunk(
            2, -1
        )
        off = transformer_options.get("qwen_image21_cache", {}).get("device") == "off" or not self.prefix_cache_enabled
        key = tuple(context.shape), tuple(transformer_options["uuids"])
        cache = {} if off else self.prefix_cache.setdefault(key, {})
        queue = comfy.model_prefetch.make_prefetch_queue(list(self.transformer_blocks), x.device, transformer_options)
        for index, block in enumerate(self.transformer_blocks):
            comfy.model_prefetch.prefetch_queue_pop(queue, x.device, block)
            rows = block(
                rows, scale, gate, self._kept(block, index, text, cache, off, transformer_options), transformer_options
            )
        comfy.model_prefetch.prefetch_queue_pop(queue, x.device, None) if queue else None
        return self.proj_out(rows).transpose(1, 2).reshape(x.shape)

    def _kept(self, block, index: int, text, cache: dict, off: bool, options: dict):
        if off:
            return block.text(text, options)
        if index not in cache:
            self.filled += 1
            with getattr(comfy.model_prefetch, "pause_malloc_graph", contextlib.nullcontext)():
                cache[index] = block.text(text, options)
        return cache[index]


def loaded_qwen(path, loud: float = 1.0):
    """A patcher of ComfyUI's, loaded from a small Qwen-Image file, with this model in the place of its own.

    ``loud``: a factor on the feed-forward of block 1.
    """
    patcher = comfy.sd.load_diffusion_model(str(path))
    torch.manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        model = QwenImage21(families.CONTEXT_WIDTH["qwen_image"])
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.0)
            weight.mul_(loud if name in ("transformer_blocks.1.up.weight", "transformer_blocks.1.down.weight") else 1.0)
    patcher.model.diffusion_model = model.requires_grad_(False).eval()
    return patcher


@pytest.fixture(scope="module")
def minimax(models_dir):
    return rare_families.write("minimax_h3", models_dir / "diffusion_models" / "compiled_h3.safetensors")


@pytest.fixture(scope="module")
def loud(minimax):
    return families.write_scaled(minimax, minimax.with_name("loud_h3.safetensors"), rare_families.LOUD["minimax_h3"])


@pytest.fixture(scope="module")
def qwen(models_dir):
    return families.write_narrow("qwen_image", models_dir / "diffusion_models")


def sampled(model, steps=3):
    """A latent of a MiniMax H3 and the recorder of its run."""
    with comfy_compiler(MiniMaxH3Model) as recorder:
        latent = rare_families.sample(model, "minimax_h3", steps)
        assert not recorder.scopes
    return latent, recorder


def test_the_models_themselves_keep_the_contract(minimax, qwen):
    assert sampled(families.stock(minimax))[1].calls == 3
    with comfy_compiler() as recorder:
        families.sample(loaded_qwen(qwen), "qwen_image", steps=3)
    assert recorder.calls == 3


@pytest.mark.parametrize(("compute", "recorded"), [("bf16", 3), ("fp16_safe", 2), ("fp32", 3)])
def test_calls_under_a_plan_keep_it(comfy, minimax, compute, recorded):
    """Where a plan is there, the first call measures, with the compiler off."""
    assert sampled(families.load(comfy, minimax, "as_file", compute))[1].calls == recorded


@pytest.mark.parametrize(("storage", "compute"), [("fp8_e4m3fn", "fp8"), ("int8", "int8")])
def test_8_bit_layers_with_a_lora_keep_it(comfy, minimax, ampere, storage, compute):
    layers = {f"blocks.{block}.mlp.fc2": (256, 512) for block in range(2)}
    model = families.load(comfy, minimax, storage, compute)
    model = load_lora_for_models(model, None, model_files.lora(layers, rank=4), 1.0, 0.0)[0]
    assert sampled(model)[1].calls >= 2


def test_fp16_sums_keep_it(comfy, minimax, ampere):
    model = accumulation(
        comfy, families.load(comfy, minimax, "fp16", "fp16"), fp16_accumulation="auto", attention="auto"
    )
    assert sampled(model)[1].calls == 2


def test_blocks_that_run_otherwise_than_others_are_not_compiled(comfy, loud):
    """Block 1 has a layer that is scaled or in fp32, which allocates more than that of block 0."""
    assert sampled(families.load(comfy, loud, "as_file", "fp16_safe"))[1].calls == 0


def test_repeats_of_the_guard_and_what_it_widens_keep_it(comfy, loud):
    expected, _ = sampled(families.load(comfy, loud, "fp32", "fp32"))
    model = guarded(comfy, families.load(comfy, loud, "fp16", "fp16"))
    latent, recorder = sampled(model)
    assert report_of(model).verdict == "recovered" and (latent - expected).norm() < 0.02 * expected.norm()
    assert recorder.calls == 0, "the first call asks the weights for NaN, and those after it are widened in one block"


def test_a_layer_that_the_guard_widens_in_one_block_is_not_compiled(comfy, minimax):
    """It allocates an fp32 result, which the same layer of the next block does not."""
    model = guarded(comfy, families.load(comfy, minimax, "fp16", "fp16"))
    sampled(model)
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.wider({next(name for name in state.plan.modes if name.startswith("blocks.0.")): "fp16_wide"}))
    assert sampled(model)[1].calls == 0


def test_repeats_that_change_nothing_are_not_compiled_either(comfy, minimax):
    """A call that fails once is made again with every operation watched, and once more as it was."""
    model = guarded(comfy, inside(families.load(comfy, minimax, "fp16", "fp16"), nan_at(2)))
    assert sampled(model)[1].calls == 2 and report_of(model).verdict == "device_fault", "all but the first"


def test_a_check_keeps_it(comfy, minimax):
    """The call that is checked is watched by hooks that keep samples: it is not compiled either."""
    model = guarded(comfy, families.load(comfy, minimax, "fp16", "fp16"), check="first step")
    assert sampled(model)[1].calls == 2
    assert [one.left_out for one in report_of(model).checks] == [""]


@pytest.fixture
def failing(monkeypatch):
    """Block 1 of a MiniMax H3 raises in its third call."""
    from comfy.ldm.minimax.model import DiTBlock

    own, calls = DiTBlock.forward, []

    def run(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 4:
            raise RuntimeError("expected scalar type Half but found Float")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(DiTBlock, "forward", run)
    return calls


def test_a_call_that_is_made_again_after_an_error_finds_no_graph_open(comfy, minimax, failing, monkeypatch):
    """As where a layer ran that was never measured: the call that failed left its graph open."""
    monkeypatch.setattr(Missed, "any", property(lambda self: len(failing) == 4, lambda self, value: None))
    _, recorder = sampled(families.load(comfy, minimax, "as_file", "fp16_safe"))
    assert recorder.aborted == 1 and recorder.calls == 1 and len(failing) > 6


def test_an_error_leaves_no_graph_open(comfy, minimax, failing):
    with comfy_compiler(MiniMaxH3Model) as recorder:
        with pytest.raises(RuntimeError, match="scalar type"):
            rare_families.sample(guarded(comfy, families.load(comfy, minimax, "as_file", "bf16")), "minimax_h3", 3)
        assert recorder.aborted == 1 and not recorder.scopes


def qwen_sampled(model):
    with comfy_compiler() as recorder:
        families.sample(model, "qwen_image", steps=3)
        assert not recorder.scopes
    return recorder


@pytest.mark.parametrize(("compute", "recorded"), [("bf16", 3), ("fp16_safe", 2), ("fp32", 3)])
def test_a_graph_around_the_blocks_alone_is_kept_too(comfy, qwen, compute, recorded):
    plain = loaded_qwen(qwen)
    assert qwen_sampled(families.with_compute(comfy, plain, compute)).calls == recorded
    assert plain.model.diffusion_model.filled == 3, "keys and values of three blocks, made once"


def test_a_guard_and_a_check_on_it_keep_it(comfy, qwen):
    model = guarded(comfy, families.with_compute(comfy, loaded_qwen(qwen, loud=3e3), "fp16"))
    assert qwen_sampled(model).calls == 0 and report_of(model).verdict == "recovered"
    model = guarded(comfy, families.with_compute(comfy, loaded_qwen(qwen), "fp16"), check="first step")
    assert qwen_sampled(model).calls == 2 and report_of(model).checks[0].left_out == ""


def test_watching_for_clamps_keeps_nothing():
    with comfy_compiler() as recorder, ClampWatch(torch.device("cpu")) as watch:
        recorder.begin()
        for _ in range(2):
            recorder.iterate("block")
            torch.nan_to_num(torch.full((3,), 70000.0).half())
        recorder.iterate(None)
        recorder.end()
    assert watch.largest.isinf().any()


@pytest.mark.parametrize("what", ["analysis", "measurement", "calibration"])
def test_what_is_measured_is_not_compiled(comfy, minimax, what):
    model = families.load(comfy, minimax, "as_file", "bf16")
    latent = {"samples": rare_families.latent("minimax_h3", model)}
    given = Inputs(rare_families.conditioning("minimax_h3"), None, latent, 1)
    with comfy_compiler(MiniMaxH3Model) as recorder:
        if what == "analysis":
            analyze_model(model, given, "fp8_e4m3fn", 25.0, True)
        elif what == "calibration":
            calibrate_model(model, given, None)
        else:
            measure_model(model, given, settings_from("as_file/fp16_safe\nint8/auto"))
    assert recorder.calls == 0


@pytest.mark.parametrize("before", [False, True])
def test_the_compiler_is_off_until_the_last_has_left_then_as_before(monkeypatch, before):
    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", before, raising=False)
    with compiler_off:
        with compiler_off:
            pass
        assert comfy.cli_args.args.disable_comfy_compiler is True
    assert comfy.cli_args.args.disable_comfy_compiler is before


def test_a_comfyui_without_it_gets_no_setting(monkeypatch):
    monkeypatch.delattr(comfy.cli_args.args, "disable_comfy_compiler", raising=False)
    with compiler_off:
        assert not hasattr(comfy.cli_args.args, "disable_comfy_compiler")


@pytest.mark.parametrize("what", ["kept", "other"])
def test_the_recorder_sees_what_it_is_for(minimax, what):
    """A tensor that is kept over the end of a block, and one that block 0 alone has."""
    kept, model = [], families.stock(minimax)

    def hook(block, args):
        made = torch.empty(7).fill_(0) if what == "kept" or block is blocks[0] else None
        kept.append(made if what == "kept" else None)

    blocks = model.model.diffusion_model.blocks
    for block in blocks:
        block.register_forward_pre_hook(hook)
    with (
        pytest.raises(GraphError, match="rogues" if what == "kept" else "one before it"),
        comfy_compiler(MiniMaxH3Model),
    ):
        rare_families.sample(model, "minimax_h3", 2)


def test_the_recorder_sees_a_graph_in_a_graph():
    with pytest.raises(GraphError, match="open"), comfy_compiler() as recorder:
        recorder.begin()
        recorder.begin()
