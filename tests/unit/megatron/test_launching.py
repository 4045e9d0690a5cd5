"""Host seconds of Megatron's layers: which of them are no measurement. The measurement: ``tests/e2e``."""

from __future__ import annotations

from snip_megatron.megatron.conversion import formats_in_use
from snip_megatron.megatron.launching import candidates, lost_in_noise
from snip_megatron.precision import Format
from snip_megatron.timing.table import Launching


def test_formats_whose_layers_took_no_time_are_named() -> None:
    """Without the note, predictions with such a table would be as if launching took no time."""
    layer = {Format.BF16: 1e-9, Format.FP8: 2e-3, Format.FP4: 1e-9}
    said = lost_in_noise(Launching("local", layer, microbatch=1e-9, step=1e-9))
    assert said is not None
    assert said.startswith("the time of launching a layer in bf16, fp4 is lost in noise")
    assert lost_in_noise(Launching("local", dict.fromkeys(layer, 1e-6), microbatch=1e-9, step=1e-9)) is None


def test_the_backend_is_chosen_for_the_measured_formats() -> None:
    """Blackwell's does not run the default candidates, so that ``auto`` would measure another one."""
    for formats in ((Format.NVFP4, Format.MXFP8), (Format.FP8,)):
        assert formats_in_use(candidates("auto", formats)) == {*formats}
    assert candidates("auto", ()).formats  # a table of bf16 alone
