"""Which formats a run may ask a GEMM backend for: what a backend that lacks one refuses at the start."""

from pathlib import Path

from snip_megatron.megatron.conversion import formats_in_use
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_directory import RunDirectory

NVFP4, MXFP8, BF16 = Format.NVFP4, Format.MXFP8, Format.BF16


def test_formats_of_a_configuration(tmp_path: Path) -> None:
    written = tmp_path / "map.json"
    written.write_text(PrecisionMap(choices={"decoder.layers.0.mlp.linear_fc1": MXFP8}).to_json())
    pinned = ("*.linear_fc1=bf16", "*.linear_fc2=fp8")
    expected = {
        SnipConfig(): {Format.FP8, Format.FP4},
        SnipConfig(formats=("mxfp8", "nvfp4"), pin=pinned): {MXFP8, NVFP4, BF16, Format.FP8},
        SnipConfig(map=str(written)): {MXFP8},
        SnipConfig(policy="uniform-fp4"): {Format.FP4},
        SnipConfig(policy="uniform-fp4", formats=("mxfp8", "nvfp4"), pin=("*.linear_fc1=bf16",)): {NVFP4, BF16},
        SnipConfig(policy="bf16"): {BF16},
        SnipConfig(policy="nvidia"): {NVFP4, Format.NVFP4_HADAMARD, BF16},
    }
    for config, formats in expected.items():
        assert formats_in_use(config) == formats


def test_formats_of_replayed_maps(tmp_path: Path) -> None:
    """A backend that lacks some formats must know them before the first map."""
    with RunDirectory(tmp_path / "run", {}, overwrite=False, resume_step=None) as run:
        for step, fmt in ((3, NVFP4), (7, BF16)):
            run.event(step, "adopt", version=step)
            run.write("maps", step, PrecisionMap(choices={"decoder.layers.0.mlp.linear_fc1": fmt}).to_json())
    assert formats_in_use(SnipConfig(replay=str(tmp_path / "run"))) == {NVFP4, BF16}
