"""The factory that ``snip export --format te`` writes, loaded as Megatron does, on Transformer Engine's own classes."""

import ast
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fp8_utils import _resolve_callable_from_python_import_path

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

import transformer_engine.pytorch as te
from dense_names import dense_names
from te_models import dense
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.quantization import CustomRecipeState

from snip_megatron.numerics.products.transformer_engine import FACTORY_MODULE as MODULE
from snip_megatron.numerics.products.transformer_engine import QUANTIZERS
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.tools.cli import main

pytestmark = pytest.mark.skipif(not hasattr(te, "HybridQuantizer"), reason="needs Transformer Engine 2.19 or later")
TRIPLES = list(itertools.product(QUANTIZERS, repeat=3))  # every mix in one linear


@pytest.fixture(autouse=True)
def hadamard_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVFP4's quantizer makes its matrix on the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    yield
    sys.modules.pop(MODULE, None)


def load(folder: Path, precision_map: PrecisionMap, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (folder / "map.json").write_text(precision_map.to_json())
    assert main(["export", "--format", "te", str(folder / "map.json"), "--out", str(folder / "recipe")]) == 0
    monkeypatch.syspath_prepend(str(folder / "recipe"))
    sys.modules.pop(MODULE, None)
    factory = _resolve_callable_from_python_import_path(f"{MODULE}.quantizer_factory")  # --fp8-quantizer-factory
    module = importlib.import_module(MODULE)
    assert factory is module.quantizer_factory
    source = ast.parse(Path(str(module.__file__)).read_text())  # a file for jobs without this package
    imports = [node for node in ast.walk(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("snip" in ast.unparse(node) for node in imports)
    return module


def gemms(linear: Any, factory: Any) -> dict[Gemm, list[Any]]:
    """The quantizers of both operands of each GEMM, as Transformer Engine asks for them."""
    quantizers = []
    for mode, count in (("forward", 3), ("backward", 2)):
        roles = te.Linear.get_quantizer_roles(linear, fwd=mode == "forward", num_quantizers=count)
        recipe, device = CustomRecipe(qfactory=factory), torch.device("cpu")
        state = CustomRecipeState(recipe, mode=mode, num_quantizers=count, device=device, roles=roles)
        quantizers += state.make_quantizers()
    x, w, _, g, _ = quantizers
    read = {Gemm.FPROP: ((w, 0), (x, 0)), Gemm.DGRAD: ((w, 1), (g, 0)), Gemm.WGRAD: ((x, 1), (g, 1))}

    def side(quantizer: Any, column: int) -> Any:
        if isinstance(quantizer, te.HybridQuantizer):
            assert quantizer.columnwise_source == "original"  # δ of an operand is that of the tensor itself
            return (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)[column]
        return quantizer

    return {gemm: [side(*operand) for operand in operands] for gemm, operands in read.items()}


def test_every_gemm_reads_both_operands_in_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {
        Format.BF16: te.IdentityQuantizer,
        Format.FP8: te.Float8BlockQuantizer,
        Format.FP8_TENSOR: te.Float8CurrentScalingQuantizer,
        Format.MXFP8: te.MXFP8Quantizer,
        Format.NVFP4: te.NVFP4Quantizer,
    }
    names = dense_names(len(TRIPLES) // 4 + 1)[: len(TRIPLES)]
    mixes = {
        option_id(n, gemm): f
        for n, three in zip(names, TRIPLES, strict=True)
        for gemm, f in zip(Gemm, three, strict=True)
    }
    factory = load(tmp_path, PrecisionMap(mixes), monkeypatch).quantizer_factory
    for name in names:
        holder = SimpleNamespace(name=name, _output_quantizer_role=None, _grad_input_quantizer_role=None)
        for gemm, operands in gemms(holder, factory).items():
            assert [type(each) for each in operands] == [classes[mixes[option_id(name, gemm)]]] * 2, (name, gemm)


@pytest.mark.parametrize("tensor", ["input", "weight", "grad_output"])
def test_a_columnwise_tensor_scale_is_written_beside_the_rowwise_one(
    tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper, Transformer Engine 2.20.2 cannot quantise per tensor for the columnwise representation alone."""
    quantizer = load(tmp_path, PrecisionMap({dense_names(1)[0]: Format.FP8}), monkeypatch).quantizer
    for other in ("bf16", "fp8", "mxfp8"):
        formats = [other, other, other]
        formats[{"input": 2, "weight": 1, "grad_output": 2}[tensor]] = "fp8_tensor"
        columnwise = quantizer(tuple(formats), tensor).columnwise_quantizer
        assert (columnwise.rowwise_usage, columnwise.columnwise_usage) == (True, True)
        rowwise = quantizer(("fp8_tensor",) * 2 + (other,), "input").rowwise_quantizer
        assert (rowwise.rowwise_usage, rowwise.columnwise_usage) == (True, False)


def test_quantizers_have_the_numerics_of_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, formats = dense_names(1), (Format.NVFP4, Format.FP8)
    choices = dict(zip(names, formats, strict=False))
    factory = load(tmp_path, PrecisionMap(choices), monkeypatch).quantizer_factory

    def ask(name: str) -> list[Any]:
        return [factory(te.QuantizerRole("linear", tensor, name)) for tensor in ("input", "weight", "grad_output")]

    nvfp4 = ask(names[0])  # one quantizer for both representations, as their formats are equal
    assert all(q.rowwise_usage and q.columnwise_usage for q in nvfp4)
    assert [q.with_2d_quantization for q in nvfp4] == [False, True, False]
    assert [q.stochastic_rounding for q in nvfp4] == [False, False, True]
    assert not any(q.with_rht or q.with_post_rht_amax for q in nvfp4)
    assert [q.block_scaling_dim for q in ask(names[1])] == [1, 2, 1]


def test_linears_are_named_in_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_parallel_of_one: None
) -> None:
    name = "decoder.layers.1.mlp.linear_fc2"
    module = load(tmp_path, PrecisionMap(dict.fromkeys(dense_names(2), Format.MXFP8)), monkeypatch)
    model = dense(num_layers=2)
    linear = model.get_submodule(name)
    with pytest.raises(RuntimeError, match=f"{MODULE}.name_linears"):  # else a run would stay in bf16 unnoticed
        gemms(linear, module.quantizer_factory)
    assert module.name_linears(model) == 8
    assert type(gemms(linear, module.quantizer_factory)[Gemm.WGRAD][0]) is te.MXFP8Quantizer
    for role in (None, te.QuantizerRole("dpa", "qkv", ""), te.QuantizerRole("linear", "bias", name)):
        assert type(module.quantizer_factory(role)) is te.IdentityQuantizer
    model.decoder.layers[1].layer_number = 33
    with pytest.raises(ValueError, match=r"decoder\.layers\.32 is not in the map"):
        module.name_linears(model)
    model.decoder.layers[1].layer_number = 2
    model.decoder.layers[1].mlp.linear_fc2 = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="linear_fc2 is Linear, no linear of"):
        module.name_linears(model)


def test_checkpoints_keep_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_parallel_of_one: None
) -> None:
    """Megatron's experts read the states of their linears while a checkpoint is saved, and refuse a custom recipe."""
    model = dense(num_layers=1, num_moe_experts=4, moe_ffn_hidden_size=128, moe_grouped_gemm=True)
    paths = ("self_attention.linear_qkv", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
    names = [f"decoder.layers.0.{path}" for path in paths]
    module = load(tmp_path, PrecisionMap(dict.fromkeys(names, Format.FP8)), monkeypatch)
    assert module.name_linears(model) == 3
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for each in model.modules():
        if isinstance(each, te.Linear | te.LayerNormLinear | te.GroupedLinear):  # as after a forward
            each.fp8, each.fp8_meta["recipe"] = True, CustomRecipe(qfactory=module.quantizer_factory)
    saved = [state.data for key, state in model.sharded_state_dict().items() if key.endswith("_extra_state")]
    assert saved
    assert all(state is None or not state.numel() for state in saved)
