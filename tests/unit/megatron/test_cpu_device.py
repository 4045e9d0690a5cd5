"""The CPU's stand-ins for CUDA, and its products of bf16 matrices, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

CODE = """
import torch
from snip_megatron.megatron import cpu_device

torch.manual_seed(0)
a, b = torch.randn(64, 96), torch.randn(96, 32)
x, w, g = torch.randn(4, 9, 96).bfloat16(), torch.randn(33, 96).bfloat16(), torch.randn(4, 9, 33).bfloat16()
q, k, bias = torch.randn(8, 5, 16).bfloat16(), torch.randn(8, 16, 7).bfloat16(), torch.randn(33).bfloat16()
of_torch = a @ b

cpu_device.install()
assert torch.equal(a @ b, of_torch)

def same(actual, expected):
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected.bfloat16())

x.requires_grad_(); w.requires_grad_()
y = torch.nn.functional.linear(x, w)
y.backward(g)
same(y, x.float() @ w.float().t())
same(x.grad, g.float() @ w.float())
same(w.grad, g.float().flatten(0, 1).t() @ x.float().flatten(0, 1))
flat = x.detach().flatten(0, 1)
same(torch.addmm(bias, flat, w.detach().t(), beta=2), 2 * bias.float() + flat.float() @ w.detach().float().t())
same(torch.bmm(q, k), torch.bmm(q.float(), k.float()))
uninitialised = torch.full((8, 5, 7), float("nan"), dtype=torch.bfloat16)  # as attention's buffer may be
same(torch.baddbmm(uninitialised, q, k, beta=0.0, alpha=0.5), 0.5 * torch.bmm(q.float(), k.float()))
same(torch.empty(0, 96).bfloat16() @ w.detach().t(), torch.empty(0, 33))
print("done")
"""


def test_products_are_rounded_once_and_say_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


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
