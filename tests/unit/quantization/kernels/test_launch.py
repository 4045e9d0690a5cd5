"""Remembered launches: what must compile again, what must not, and that the numbers of a launch reach the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from snip_megatron.quantization.kernels import launch as triton_launch
from snip_megatron.quantization.kernels.launch import launch


class Kernel:
    """Stands for a Triton kernel: counts compilations and launches."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.compiled: list[dict[str, Any]] = []
        self.dtypes: list[torch.dtype] = []
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def first(*arguments: Any, **named: Any) -> Any:
            self.compiled.append(named)
            self.dtypes = [a.dtype for a in arguments if isinstance(a, torch.Tensor)]
            return Compiled(self) if self.compiles else None

        return first


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_compiled", {})


MEMORY = torch.zeros(64)
ALIGNED = MEMORY[(-MEMORY.data_ptr() % 16) // 4 :][:16]
OPTIONS = {"num_warps": 8}


class Elsewhere:
    """The same address on another device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.data_ptr, self.view = tensor.dtype, tensor.data_ptr, tensor.view

    def get_device(self) -> int:
        return 1


def run(kernel: Kernel, **changes: Any) -> None:
    arguments = {
        "grid": (3, 2), "tensors": (ALIGNED, ALIGNED), "dtypes": (torch.float32, torch.int32),
        "numbers": (128, 256), "counters": (7, -1), "constants": {"ROW": 8}, "options": OPTIONS,
    }  # fmt: skip
    launch(kernel, **(arguments | changes))


def test_the_second_launch_takes_the_remembered_kernel_with_all_arguments_in_order() -> None:
    kernel = Kernel()
    run(kernel)
    run(kernel, grid=(5, 6), counters=(9, 2**31 - 1))
    assert kernel.compiled == [{"ROW": 8, "num_warps": 8}]
    grid, arguments = kernel.launched[0]
    assert grid == (5, 6, 1)
    assert kernel.dtypes == [torch.float32, torch.int32]
    assert arguments[:2] == (ALIGNED.data_ptr(), ALIGNED.data_ptr())
    assert arguments[2:] == (128, 256, 9, 2**31 - 1, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": (ALIGNED, ALIGNED[1:])},
        {"dtypes": (torch.float32, torch.float64)},
        {"tensors": (ALIGNED, Elsewhere(ALIGNED))},
        {"numbers": (128, 1)},
        {"counters": (7, 2**31)},
        {"constants": {"ROW": 4}},
        {"options": {"num_warps": 4}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_triton_would_compile_again_is_compiled_again(changes: dict[str, Any]) -> None:
    kernel = Kernel()
    run(kernel)
    run(kernel, **changes)
    run(kernel, **changes)
    assert len(kernel.compiled) == 2
    assert len(kernel.launched) == 1


def test_two_kernels_are_two_and_an_interpreted_one_is_never_remembered() -> None:
    first, second, interpreted = Kernel(), Kernel(), Kernel(compiles=False)
    for kernel in (first, second, interpreted, interpreted):
        run(kernel)
    assert [len(k.compiled) for k in (first, second, interpreted)] == [1, 1, 2]
    assert not first.launched
    assert not second.launched
