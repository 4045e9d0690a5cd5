"""The sets of fprops that are forced."""

from benchmarks.quality.forward_sets import sets_of
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id

NAMES = [f"decoder.layers.{n}.{path}" for n in range(3) for path in ("self_attention.linear_qkv", "mlp.linear_fc1")]


def test_kinds_are_of_later_blocks_and_a_map_has_the_fprops_that_it_puts_into_fp4() -> None:
    def chosen(*fp4: str) -> PrecisionMap:
        choices = {option_id(name, gemm): Format.FP8 for name in NAMES for gemm in Gemm}
        choices |= {option_id(name, Gemm.DGRAD): Format.FP4 for name in NAMES}
        return PrecisionMap(choices=choices | {option_id(name, Gemm.FPROP): Format.FP4 for name in fp4})

    found = {each.kind: each.names for each in sets_of(NAMES, {"a": chosen(*NAMES[:3]), "b": chosen(NAMES[2])})}
    assert (found["all"], found["block 0"]) == (tuple(NAMES), tuple(NAMES[:2]))
    assert found["mlp"] == found["mlp.linear_fc1"] == (NAMES[3], NAMES[5])
    assert (found["mlp.linear_fc1 odd"], found["mlp.linear_fc1 even"]) == ((NAMES[3],), (NAMES[5],))
    assert (found["a"], found["b"], found["a without b"]) == (tuple(NAMES[:3]), (NAMES[2],), tuple(NAMES[:2]))
    assert "b without a" not in found
