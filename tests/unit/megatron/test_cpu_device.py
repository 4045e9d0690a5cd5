"""The CPU's products of bf16 matrices, in a process of their own."""

import subprocess
import sys

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
    process = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=False)
    assert (process.stdout, process.returncode) == ("done\n", 0), process.stderr
