"""Updates in one launch against torch's AdamW in float64, by Triton's interpreter."""

from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SIZES = ((5000, 8), (2048, 3, 4096))
"""Of two groups of parameters. The second has one whose blocks are not aligned."""
GROUPS = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0})
COMMON = {"betas": (0.9, 0.95), "eps": 1e-8}


class FusedAdam(torch.optim.AdamW):
    """An optimizer with the parameter groups of Transformer Engine's FusedAdam. It counts its own steps."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, **COMMON, weight_decay=0.0)
        self.own_steps = 0
        for group in self.param_groups:
            group["bias_correction"] = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        super().step(closure)
        self.own_steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for each in group["params"]:
                self.state[each]["step"].fill_(group["step"])


def parameters(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(size, generator=generator).to(dtype) for size in sizes] for sizes in SIZES]


def groups_of(tensors: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
    return [{"params": each, **options} for each, options in zip(tensors, GROUPS, strict=True)]


def train(steps: int, clips: bool, replaced: int | None) -> dict[str, Any]:
    """Train with the update in one launch, and with torch's in float64. From step ``replaced`` on, gradients are
    other tensors than before.
    """
    from snip_megatron.megatron.compat import host_work

    ours, truth = parameters(torch.float32), parameters(torch.float64)
    inner, reference = FusedAdam(groups_of(ours)), torch.optim.AdamW(groups_of(truth), **COMMON)
    flat = [each for group in ours for each in group]
    models = [each.bfloat16() for each in flat[:-1]] + [flat[-1]]  # the last is FP32 in the model too
    copies = SimpleNamespace(shards=lambda: list(zip(flat, models, strict=True)), is_current=False)
    config = SimpleNamespace(log_num_zeros_in_grad=False)
    optimizer = SimpleNamespace(optimizer=inner, config=config, get_parameters=lambda: flat)
    update = host_work._Update(optimizer, copies)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    written = []
    for step in range(steps):
        for each, true in zip(flat, (each for group in truth for each in group), strict=True):
            gradient = torch.randn(each.shape, generator=generator)
            if each.grad is None or step == replaced:
                each.grad = torch.empty_like(each)
            each.grad.copy_(gradient)
            true.grad = gradient.double()
        if clips and step:  # Megatron's own clipping, which runs in the first step, wants a GPU
            norm = torch.stack([each.grad.norm() for each in flat if each.grad is not None]).norm()
            host_work._clip(flat, 1.0, norm if step % 2 else norm.item())
            torch.nn.utils.clip_grad_norm_([each for group in truth for each in group], 1.0)
        gradients = [each.grad.clone() for each in flat if each.grad is not None]
        inner.step()
        written.append(copies.is_current)
        if copies.is_current:
            assert all(torch.equal(each.grad, before) for each, before in zip(flat, gradients, strict=True))
            for model, each in zip(models[:-1], flat, strict=False):  # the interpreter rounds to bf16 towards zero
                torch.testing.assert_close(model.float(), each, rtol=2**-7, atol=0)
        reference.step()
    errors = [
        float((a.double() - b).abs().max()) for a, b in zip(flat, (e for group in truth for e in group), strict=True)
    ]
    steps_of = [group["step"] for group in inner.param_groups]
    del update
    return {"error": max(errors), "own": inner.own_steps, "written": written, "steps": steps_of}


@pytest.mark.parametrize("replaced", [None, 3])
def test_each_group_is_updated_in_one_launch(interpreter: ProcessPoolExecutor, replaced: int | None) -> None:
    """The first step, which creates the moments, is the optimizer's own."""
    result = interpreter.submit(train, 5, True, replaced).result(timeout=300)
    assert result["error"] < 1e-6
    assert (result["own"], result["steps"]) == (1, [5, 5])
    assert result["written"] == [False, True, True, True, True]


def test_gradients_are_not_clipped_where_megatron_clips_none(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(train, 3, False, None).result(timeout=300)["error"] < 1e-6


def test_megatron_chooses_gradients_of_the_norm_again_when_they_are_other_tensors() -> None:
    from snip_megatron.megatron.compat import host_work

    models = [torch.nn.Parameter(torch.zeros(6)) for _ in range(3)]
    mains = [torch.nn.Parameter(torch.zeros(3)) for _ in models]
    groups: list[str | None] = []

    def choose(group: str | None = None) -> list[torch.Tensor | None]:
        groups.append(group)
        return [each.grad for each in mains[:2]]  # the third is another rank's

    optimizer = SimpleNamespace(
        shard_fp32_from_float16_groups=[mains], model_float16_groups=[models],
        shard_fp32_groups=[], model_fp32_groups=[], get_grads_for_grad_norm=choose,
        _copy_main_params_to_model_params=None, _copy_model_grads_to_main_grads=None,
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=3, end=6)},
    )  # fmt: skip
    copies = host_work._Copies(optimizer)

    def step() -> list[float]:
        copies.take_gradients()
        chosen = copies.gradients_of_norm()
        for each in mains:
            each.grad = None  # as Megatron does between steps
        return [each[0].item() for each in chosen]

    for number, model in enumerate(models):
        model.main_grad = torch.full((6,), float(number + 1))
    assert (step(), step(), groups) == ([1.0, 2.0], [1.0, 2.0], [None])
    models[1].main_grad = torch.full((6,), 5.0)
    assert (step(), step(), groups) == ([1.0, 5.0], [1.0, 5.0], [None, None])
    copies.take_gradients()
    copies.gradients_of_norm("mtp")
    assert groups[2:] == ["mtp"]
    mains[0].grad = torch.ones(3)  # not the one that was taken
    assert copies.gradients_of_norm()[0][0] == 1.0
    assert groups[3:] == [None]
