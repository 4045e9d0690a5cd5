"""The kinds of kernels of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.jobs.kernels import FILE, kind_of, summary


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention"),
        ("void cudnn::fusion::matmul_dq<true, 128>(void const*, void const*, void*)", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("tile_kernel", "quantisation"),
        ("exact_amax_kernel", "quantisation"),
        ("void transformer_engine::multi_tensor_adam::AdamFunctorMaster", "optimizer"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_step_is_summed_by_kind(tmp_path: Path) -> None:
    assert summary(tmp_path) is None
    rows = [["nvjet_a", 3, 1.5], ["memset", 1, 0.25], ["tile_kernel", 2, 4.0], ["nvjet_b", 1, 0.5]]
    (tmp_path / FILE).write_text(json.dumps(rows))
    found = summary(tmp_path)
    assert found is not None
    assert found["ms"] == {"quantisation": 4.0, "gemm": 2.0, "other": 0.25}
    assert found["longest"][0] == {"kernel": "tile_kernel", "launches": 2, "ms": 4.0}
