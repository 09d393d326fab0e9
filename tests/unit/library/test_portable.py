"""Settings as plain data, in this process and in others: two Ray actors, each with its shard of a model."""

import subprocess
import sys

import pytest
import torch
from halfsafe.precision import apply, portable_apply, restore
from halfsafe.precision.errors import HalfsafeError
from safetensors.torch import save_file
from support.measures import relative_error
from support.shipped import ROOT

SETTINGS = {"compute": "fp16_safe", "storage": "fp8_e4m3fn", "rules": "0 storage=bf16"}


def shard(seed: int) -> torch.nn.Sequential:
    """Half of a toy model; its first layer's products pass fp16's range."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).eval()
    with torch.no_grad():
        layers[0].weight *= 1e3
        layers[2].weight *= 1e-3
    return layers


def test_settings_are_the_arguments():
    x = torch.randn(4, 64)
    one, other = shard(0), shard(0)
    with apply(one, SETTINGS) as handle, apply(other, **SETTINGS) as named, torch.inference_mode():
        assert torch.equal(one(x), other(x)) and handle.modes() == named.modes()
        assert handle.stored == named.stored == {"0": "bf16", "2": "fp8_e4m3fn"}


def test_an_unknown_setting_is_named():
    with pytest.raises(HalfsafeError, match=r"no setting dtype\. Use: compute, storage, rules, keep"):
        apply(shard(0), {"dtype": "fp16"})


def test_the_portable_function_returns_the_module_with_the_settings_on_it():
    model = shard(0)
    assert portable_apply()(model, SETTINGS) is model and "fp8_e4m3fn" in repr(model[2])
    restore(model)


def test_the_package_itself_gives_the_library(tmp_path):
    (tmp_path / "halfsafe").symlink_to(ROOT, target_is_directory=True)
    code = "import halfsafe, torch; halfsafe.apply(torch.nn.Linear(8, 8).eval(), {'compute': 'bf16'}); print(hasattr(halfsafe, 'NODES'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip(
        "ray", reason="RAY IS NOT INSTALLED: the test with two Ray actors did not run (pip install ray)"
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_two_ray_actors_apply_the_settings_to_their_shards(ray, tmp_path):
    shards = [shard(0), shard(1)]
    files = [tmp_path / f"shard{number}.safetensors" for number in (0, 1)]
    for file, part in zip(files, shards, strict=True):
        save_file(part.state_dict(), file)

    class Holder:
        def __init__(self, file: str):
            from safetensors.torch import load_file

            self.part = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).eval()
            self.part.load_state_dict(load_file(file))

        def run(self, function, *args):
            self.part = function(self.part, *args)

        def call(self, x):
            with torch.inference_mode():
                return self.part(x)

        def seen(self):
            import sys

            found = [name for name in ("bf16", "fp8_e4m3fn") if name in repr(self.part)]
            return found, "halfsafe" in sys.modules

    actors = [ray.remote(Holder).remote(str(file)) for file in files]
    assert ray.get([actor.seen.remote() for actor in actors]) == [([], False)] * 2
    ray.get([actor.run.remote(portable_apply(), SETTINGS) for actor in actors])
    x = torch.randn(4, 64)
    found = ray.get(actors[1].call.remote(ray.get(actors[0].call.remote(x))))
    assert ray.get([actor.seen.remote() for actor in actors]) == [(["bf16", "fp8_e4m3fn"], True)] * 2
    for part in shards:
        apply(part, SETTINGS)
    with torch.inference_mode():
        expected = shards[1](shards[0](x))
    assert relative_error(expected, found) < 2e-3, "an actor has threads of its own, and its sums their order"
