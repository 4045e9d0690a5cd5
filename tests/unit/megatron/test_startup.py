"""What is decided before torch and Megatron are imported; the CPU's stand-ins for CUDA (in a process of their own)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snip_megatron.megatron import startup
from snip_megatron.precision.errors import SnipError

REPOSITORY = Path(__file__).resolve().parents[3]


def test_unknown_compat_name_lists_the_known_ones() -> None:
    assert startup.check_compat_names(["cpu", "dataset-helpers"]) == {"cpu", "dataset-helpers"}
    with pytest.raises(SnipError, match="nonsense: unknown; choose one of cpu, dataset-helpers"):
        startup.check_compat_names(["cpu", "nonsense"])
    with pytest.raises(SnipError, match=r"restart-store: this set is never applied any more; leave the argument out$"):
        startup.check_compat_names(["restart-store"])


@pytest.mark.parametrize("given", [["--yaml-cfg", "run.yaml"], ["--yaml-cfg=run.yaml"]])
def test_arguments_of_a_file_are_refused(given: list[str]) -> None:
    with pytest.raises(SnipError, match=r"^--yaml-cfg is not supported: .* give its arguments on the command line$"):
        startup.prepare(["--snip", *given], [])
    startup.check_sources(["--snip", "--snip-dir", "yaml-cfg", "--te-precision-config-file", "run.yaml"])


def run_on_cpu(code: str) -> str:
    """Run ``code`` after ``startup.prepare`` in a fresh process without CUDA; returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    prologue = "from snip_megatron.megatron import startup; s = startup.prepare([], [])\n"
    process = subprocess.run(
        [sys.executable, "-c", prologue + code],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_cpu_answers_for_cuda() -> None:
    code = """
import random, time
import torch
from torch.utils.data import DataLoader
from snip_megatron.megatron import cpu_device
assert s.on_cpu and s.allows("cpu") and not torch.cuda.is_available()
cpu_device.install()  # a second time: nothing is wrapped twice
assert torch.zeros(2, device="cuda").device == torch.empty(1, device=0).device == torch.device("cpu")
assert torch.ones(3).to("cuda:0", torch.bfloat16).dtype == torch.bfloat16
with torch.device("meta"):
    assert torch.ones(3).device == torch.arange(3).device == torch.device("meta")
named = torch.tensor([1.0], device=torch.device("cuda", 0)).new_zeros(2, device="cuda")
assert named.type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type(torch.int32).dtype == torch.int32
x = torch.ones(2)
assert x.cuda() is x and x.pin_memory() is x and torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
# One generator: what CUDA's would give is what the CPU draws.
torch.cuda.manual_seed(7); a = torch.rand(3)
torch.manual_seed(7); assert torch.equal(a, torch.rand(3))
state = torch.cuda.get_rng_state(); b = torch.rand(3); torch.cuda.set_rng_state(state)
assert torch.equal(b, torch.rand(3))
# Iterating a loader draws no number from it.
before = torch.get_rng_state()
list(DataLoader(range(4), batch_size=2))
assert torch.equal(before, torch.get_rng_state())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()):
    start.record(); time.sleep(0.01); end.record()
assert start.elapsed_time(end) >= 10
assert torch.cuda.memory_allocated() > 1 << 20 and torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 1 << 20
assert torch.compile(lambda v: v + 1)(x)[0] == 2
# What init_process_group does: the compiler's table, which takes no function under two names, is built anew.
torch._dynamo.trace_rules.clear_lru_cache()
assert torch._dynamo.trace_rules.get_torch_obj_rule_map()
print("done", __import__("os").environ["CUDA_DEVICE_MAX_CONNECTIONS"])
"""
    assert run_on_cpu(code) == "done 1"


def test_fsdp_keeps_its_own_queue_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asserts one hardware queue, and the opposite for FSDP; what the user set stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8")
    assert startup.prepare([], []) == startup.Startup(on_cpu=False, disabled=frozenset())
    assert os.environ[name] == "8"
    for argv, value in ((["--use-megatron-fsdp"], None), (["--use-torch-fsdp2"], None), ([], "1")):
        monkeypatch.delenv(name, raising=False)
        startup.prepare(argv, ["cpu"])
        assert os.environ.get(name) == value
