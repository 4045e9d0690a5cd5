"""Policies with a fixed map: which formats they take from the candidates, and where."""

import pytest
from dense_names import dense_names

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, misplaced
from snip_megatron.sensitivity.policies import FIXED, POLICIES, fixed_map, formats_of

NAMES = dense_names(20)
HARDWARE = [("mxfp8", "nvfp4"), ("mxfp8", "mxfp4"), ("bf16", "mxfp8", "nvfp4", "nvfp4_46", "nvfp4_hadamard")]


def made(policy: str, *formats: str, names: list[str] = NAMES) -> PrecisionMap:
    found = fixed_map(policy, names, formats=formats)
    assert found is not None
    return found


@pytest.mark.parametrize("formats", [(), ("fp8", "fp4"), *HARDWARE])
@pytest.mark.parametrize("policy", FIXED)
def test_a_map_covers_every_gemm_with_formats_that_may_run_there(policy: str, formats: tuple[str, ...]) -> None:
    assert policy in POLICIES
    found = made(policy, *formats)
    used = {(g, found.format_of(n, g)) for n in NAMES for g in Gemm}
    assert not [misplaced(fmt, g) for g, fmt in used if misplaced(fmt, g)]
    assert {fmt for _, fmt in used} == formats_of(policy, formats)


@pytest.mark.parametrize(
    ("formats", "eight", "four"),
    [
        ((), "fp8", "fp4"),
        (("fp8", "fp4"), "fp8", "fp4"),
        (("mxfp8", "nvfp4", "nvfp4_46"), "mxfp8", "nvfp4"),
        (("mxfp4_hadamard", "mxfp4", "mxfp8"), "mxfp8", "mxfp4"),
        (("fp8_tensor", "fp8"), "fp8", "fp4"),
        (("fp8_tensor", "fp4"), "fp8_tensor", "fp4"),
    ],
)
def test_uniform_maps_take_the_candidate_of_their_size(formats: tuple[str, ...], eight: str, four: str) -> None:
    assert formats_of("uniform-fp8", formats) == {Format(eight)}
    assert formats_of("uniform-fp4", formats) == {Format(four)}


@pytest.mark.parametrize(("formats", "low"), [((), "nvfp4"), (HARDWARE[0], "nvfp4"), (HARDWARE[1], "mxfp4")])
def test_nvidias_recipe(formats: tuple[str, ...], low: str) -> None:
    found = made("nvidia", *formats)
    for name in NAMES:
        own = [found.format_of(name, g).value for g in Gemm]
        assert own == (["bf16"] * 3 if LinearId.parse(name).layer >= 17 else [low, low, f"{low}_hadamard"])
    small = made("nvidia", names=dense_names(2))
    assert [small.format_of(n, Gemm.FPROP).value for n in dense_names(2)] == ["nvfp4"] * 4 + ["bf16"] * 4
