"""``snip calibrate`` on a GPU: the product's kernels under its clock give a table that cost models read."""

import torch

from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.calibration import Workload, calibrate
from snip_megatron.timing.cost_model import CostModel, LinearShape
from snip_megatron.timing.measure import Measurer, clock_for
from snip_megatron.timing.table import TimingTable

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
WORKLOAD = Workload(
    gemms=((512, 512, 512), (2048, 4096, 1024)),
    activations=((512, 512), (2048, 4096)),
    weights=((512, 512), (4096, 1024)),
    attention=((1024, 8, 128), (512, 8, 64)),
)


def test_a_table_of_this_gpu() -> None:
    clock = clock_for(torch.device("cuda", torch.cuda.current_device()))
    measurer = Measurer(select_backend("auto").backend, clock, FORMATS)
    table = calibrate(measurer, WORKLOAD, {}, 120.0)
    assert table.about["complete"], table.about["notes"]
    assert table.device == torch.cuda.get_device_name()
    assert (set(table.gemms), set(table.attention)) == (set(WORKLOAD.gemms), set(WORKLOAD.attention))
    assert TimingTable.from_json(table.to_json()) == table
    model = CostModel(table)
    shape = LinearShape(2048, 4096, 1024)
    assert not model.extrapolated(shape)
    assert all(model.seconds(shape, gemm, fmt) > 0 for gemm in Gemm for fmt in model.formats)
