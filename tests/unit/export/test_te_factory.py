"""The exported quantizer factory, imported as Megatron does and asked as Transformer Engine asks."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fp8_utils import _resolve_callable_from_python_import_path

from snip_megatron.cli import main
from snip_megatron.export.te_factory import MODULE, factory_source, map_formats
from snip_megatron.gemm.transformer_engine import QUANTIZERS
from snip_megatron.precision import (
    DENSE_LAYER,
    Format,
    Gemm,
    LinearId,
    PrecisionMap,
    dense_names,
    option_id,
)

from . import documented_te as te

CLASSES = {
    Format.BF16: "IdentityQuantizer",
    Format.FP8: "Float8BlockQuantizer",
    Format.FP8_TENSOR: "Float8CurrentScalingQuantizer",
    Format.MXFP8: "MXFP8Quantizer",
    Format.NVFP4: "NVFP4Quantizer",
}
TRIPLES = list(itertools.product(QUANTIZERS, repeat=3))  # 125: every mix in one linear


def every_mix() -> PrecisionMap:
    choices = {}
    for name, three in zip(dense_names(len(TRIPLES) // 4 + 1), TRIPLES, strict=False):
        choices |= {option_id(name, gemm): fmt for gemm, fmt in zip(Gemm, three, strict=True)}
    return PrecisionMap(choices)


def export(folder: Path, precision_map: PrecisionMap) -> Path:
    source = folder / "map.json"
    source.write_text(precision_map.to_json())
    assert main(["export", "--format", "te", str(source), "--out", str(folder / "recipe")]) == 0
    return folder / "recipe"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The documented interface stands for Transformer Engine."""
    for name, module in te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    sys.modules.pop(MODULE, None)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(MODULE, None)
    factory = _resolve_callable_from_python_import_path(f"{MODULE}.quantizer_factory")  # --fp8-quantizer-factory
    module = importlib.import_module(MODULE)
    assert factory is module.quantizer_factory
    return module


class Layer(torch.nn.Module):
    """A decoder layer of Megatron with Transformer Engine's linears; ``layer_number`` counts from 1 over all stages."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.self_attention, self.mlp = torch.nn.Module(), torch.nn.Module()
        for kind in DENSE_LAYER:
            parent, name = kind.split(".")
            getattr(self, parent).add_module(name, te.Linear())


def stage(first: int, layers: int) -> torch.nn.Module:
    """A pipeline stage's chunk as Float16Module wraps it; ``first`` counts from 0."""
    model, wrapper = torch.nn.Module(), torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(Layer(first + i + 1) for i in range(layers))
    model.output_layer = te.Linear()
    wrapper.module = model
    return wrapper


def test_every_gemm_reads_both_operands_in_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: None
) -> None:
    precision_map = every_mix()
    module = load(export(tmp_path, precision_map), monkeypatch)
    recipe = te.CustomRecipe(qfactory=module.quantizer_factory)
    chunks = [stage(0, 12), stage(12, 20)]
    assert [module.name_linears(chunk) for chunk in chunks] == [48, 77]  # the last three are not named
    seen = 0
    for layer in (layer for chunk in chunks for layer in chunk.module.decoder.layers):
        for kind in DENSE_LAYER:
            name = str(LinearId("decoder", layer.layer_number - 1, kind))
            for gemm, operands in layer.get_submodule(kind).gemms(recipe).items():
                fmt = precision_map.format_of(name, Gemm(gemm))
                assert [type(operand).__name__ for operand in operands] == [CLASSES[fmt]] * 2, (name, gemm)
                seen += 1
    assert seen == 3 * 4 * 32
    for operands in chunks[0].module.output_layer.gemms(recipe).values():  # no decoder linear: bf16
        assert [type(operand).__name__ for operand in operands] == ["IdentityQuantizer"] * 2


def test_quantizers_have_the_numerics_of_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: None) -> None:
    names = dense_names(1)
    formats = (Format.NVFP4, Format.FP8, Format.FP8_TENSOR, Format.MXFP8)
    choices = {option_id(n, g): fmt for n, fmt in zip(names, formats, strict=True) for g in Gemm}
    factory = load(export(tmp_path, PrecisionMap(choices)), monkeypatch).quantizer_factory

    def ask(name: str) -> list[Any]:
        return [factory(te.QuantizerRole("linear", tensor, name)) for tensor in ("input", "weight", "grad_output")]

    nvfp4 = ask(names[0])  # one quantizer for both representations, as their formats are equal
    assert all(type(q) is te.NVFP4Quantizer and q.rowwise_usage and q.columnwise_usage for q in nvfp4)
    assert [q.with_2d_quantization for q in nvfp4] == [False, True, False]
    assert [q.stochastic_rounding for q in nvfp4] == [False, False, True]
    assert not any(q.with_rht or q.with_post_rht_amax for q in nvfp4)
    fp8 = ask(names[1])
    assert [q.block_scaling_dim for q in fp8] == [1, 2, 1]
    for q in (*fp8, *ask(names[2]), *ask(names[3])):
        assert q.dtype is te.DType.kFloat8E4M3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, powers in ((9, False), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert [q.force_pow_2_scales for q in ask(names[1])] == [powers] * 3
    mixed = choices | {option_id(names[0], Gemm.DGRAD): Format.BF16}
    hybrid = load(export(tmp_path, PrecisionMap(mixed)), monkeypatch).quantizer_factory(
        te.QuantizerRole("linear", "weight", names[0])
    )
    assert type(hybrid) is te.HybridQuantizer
    assert hybrid.columnwise_source == "original"  # δ of an operand is that of the tensor itself


def test_roles_without_a_linear_of_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: None) -> None:
    module = load(export(tmp_path, every_mix()), monkeypatch)
    name = dense_names(1)[3]
    unknown = [None, te.QuantizerRole(), te.QuantizerRole("dpa", "qkv", ""), te.QuantizerRole("linear", "bias", name)]
    for role in unknown:
        assert type(module.quantizer_factory(role)) is te.IdentityQuantizer
    recipe = te.CustomRecipe(qfactory=module.quantizer_factory)
    for linear in (stage(0, 1).module.decoder.layers[0].mlp.linear_fc1, te.Linear()):
        with pytest.raises(RuntimeError, match=f"{MODULE}.name_linears"):  # else a run would stay in bf16 unnoticed
            linear.gemms(recipe)
    with pytest.raises(ValueError, match=r"decoder\.layers\.32 is not in the map"):
        module.name_linears(stage(32, 1))
    local = stage(0, 1)
    local.module.decoder.layers[0].mlp.linear_fc1 = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="linear_fc1 is Linear, no linear of"):
        module.name_linears(local)


def test_an_earlier_transformer_engine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: None
) -> None:
    folder = export(tmp_path, every_mix())
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "HybridQuantizer")
    with pytest.raises(ValueError, match="has no HybridQuantizer"):
        load(folder, monkeypatch)


@pytest.mark.parametrize("fmt", [f for f in Format if f not in QUANTIZERS])
def test_formats_without_a_quantizer_are_refused(fmt: Format, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    choices = {option_id(n, g): Format.FP8 for n in dense_names(2) for g in Gemm}
    gemm = fmt.gemms[-1]
    choices[f"decoder.layers.1.mlp.linear_fc1:{gemm.value}"] = fmt
    source = tmp_path / "map.json"
    source.write_text(PrecisionMap(choices).to_json())
    assert main(["export", "--format", "te", str(source), "--out", str(tmp_path / "recipe")]) == 2
    error = capsys.readouterr().err
    assert f"decoder.layers.1.mlp.linear_fc1 runs {gemm.value} in {fmt.value}" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "recipe").exists()


def test_other_maps_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "map.json"
    source.write_text(PrecisionMap({}).to_json())
    assert main(["export", "--format", "te", str(source), "--out", str(tmp_path / "recipe")]) == 2
    assert "names no linear" in capsys.readouterr().err


def test_any_path_of_a_map_gives_a_module() -> None:
    formats = map_formats(every_mix(), "map")
    namespace = factory_source(formats, 'a\n"""b\\@FORMATS@é')
    compile(namespace, "module", "exec")
    assert namespace.count('decoder.layers.0.mlp.linear_fc1":') == 1


# -- an installed Transformer Engine ------------------------------------------------------------------------------
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine itself; without a GPU, NVFP4's quantizer makes its Hadamard matrix on the CPU."""
    real = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    if not hasattr(real, "HybridQuantizer"):
        pytest.skip("Transformer Engine before 2.19")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return real


def test_the_documented_interface_is_the_installed_one(installed: Any) -> None:
    unnamed = SimpleNamespace(name=None)
    installed.Linear._validate_name(unnamed)  # what its constructor calls
    assert unnamed.name.rstrip("0123456789") == te.Linear().name.rstrip("0123456789")
    names = [*CLASSES.values(), "HybridQuantizer", "QuantizerRole"]
    for ours, theirs in ((getattr(te, name), getattr(installed, name)) for name in names):
        real = inspect.signature(theirs).parameters
        mine = inspect.signature(ours).parameters
        for name, parameter in mine.items():
            assert name in real
            assert parameter.kind == real[name].kind
            if name != "fp4_dtype":
                assert parameter.default == real[name].default
        assert {name for name, p in real.items() if p.default is p.empty} <= set(mine)


def test_the_installed_recipe_takes_the_factory(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.quantization import CustomRecipeState

    precision_map = every_mix()
    module = load(export(tmp_path, precision_map), monkeypatch)
    recipe = CustomRecipe(qfactory=module.quantizer_factory)
    real_linear = installed.Linear.get_quantizer_roles
    holder = SimpleNamespace(name=None, _output_quantizer_role=None, _grad_input_quantizer_role=None)
    for name in dense_names(32)[: len(TRIPLES)]:
        holder.name = name
        quantizers = []
        for mode, count in (("forward", 3), ("backward", 2)):
            roles = real_linear(holder, fwd=mode == "forward", num_quantizers=count)
            device = torch.device("cpu")
            state = CustomRecipeState(recipe, mode=mode, num_quantizers=count, device=device, roles=roles)
            quantizers += state.make_quantizers()
        x, w, _, g, _ = quantizers
        read = {"fprop": ((w, 0), (x, 0)), "dgrad": ((w, 1), (g, 0)), "wgrad": ((x, 1), (g, 1))}
        for gemm, operands in read.items():
            for quantizer, column in operands:
                if isinstance(quantizer, installed.HybridQuantizer):
                    quantizer = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)[column]
                assert type(quantizer).__name__ == CLASSES[precision_map.format_of(name, Gemm(gemm))], (name, gemm)
    sys.modules.pop(MODULE, None)
