"""What a script's call of pretrain is taken for, what is said where it lacks something or Megatron is another."""

import argparse
import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from snip_megatron.megatron import attachment
from snip_megatron.megatron.attachment import run_attached
from snip_megatron.megatron.compat.pretraining import bound_call, hooked_model
from snip_megatron.megatron.startup import Startup
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import add_arguments

STARTUP = Startup(on_cpu=True, disabled=frozenset())


def call(**named: Any) -> inspect.BoundArguments:
    return bound_call((SimpleNamespace(model=None),), {"train_valid_test_dataset_provider": 1, "model_type": 2} | named)


def test_a_script_that_did_not_add_the_arguments_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace(yaml_cfg=None))
    with pytest.raises(SnipError, match="extra_args_provider=snip_arguments"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace(yaml_cfg="run.yaml"))
    with pytest.raises(SnipError, match="--yaml-cfg is not supported"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    with pytest.raises(SnipError, match="before the script parsed"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)


def test_wrong_arguments_of_pretrain_are_one_line() -> None:
    with pytest.raises(SnipError, match=r"Megatron's pretrain\(\) cannot be called like this: .*'colour'"):
        bound_call((1, 2, 3, 4), {"colour": "blue"})
    nothing = call(forward_step_func=3)
    with (
        pytest.raises(SnipError, match="neither a model configuration nor a model_provider"),
        hooked_model(nothing, on_cpu=False),
    ):
        pass


@pytest.mark.parametrize(("budget", "beaten"), [("fp4=0.75", True), ("loss=0.002", False)])
def test_a_run_says_in_one_line_if_a_uniform_format_beats_its_maps(
    monkeypatch: pytest.MonkeyPatch, budget: str, beaten: bool
) -> None:
    monkeypatch.setattr(attachment, "native_backend", lambda *a, **k: "hopper")
    parser = argparse.ArgumentParser()
    parser.set_defaults(tensor_model_parallel_size=1, transformer_impl="local")
    _, said = attachment.configuration(add_arguments(parser).parse_args(["--snip", "--snip-budget", budget]))
    assert ["fp8 everywhere beats these maps" in line for line in said] == ([True] if beaten else [])


MAY_DIFFER = {
    *("load", "save", "yaml_cfg", "data_cache_path", "per_dataset_sequences_path", "validation_set_names"),  # files
    *("non_persistent_global_ckpt_dir", "consumed_valid_samples", "split", "tokenizer_type", "fim_data"),
    *("create_attention_mask_in_dataloader", "dataloader_defer_npy_index_mmap", "dataloader_fast_cache_load"),  # data
    *("reset_attention_mask", "reset_position_ids", "check_for_nan_in_loss_and_grad", "check_for_spiky_loss"),
    *("snip", "snip_budget", "snip_gemm", "snip_timings", "optimizer_cuda_graph"),  # compared otherwise, or refused
}


def test_ranks_compare_the_arguments_that_snip_reads() -> None:
    """``args.NAME`` and ``getattr(args, "NAME")`` in the package, where ``args`` are Megatron's."""
    read = set()
    commands = {"prepare_data.py"}
    for path in Path(attachment.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.name not in commands else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner, name = node.value, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
                owner, name = node.args[0], getattr(node.args[1], "value", "")
            else:
                continue
            if ast.unparse(owner) in ("args", "self._args", "self.args", "get_args()") and isinstance(name, str):
                read.add(name)
    assert len(read) > 50
    assert read - MAY_DIFFER - {""} <= set(attachment.SHARED_ARGUMENTS)


ANOTHER_RELEASE = """
import argparse, sys
import megatron.core.package_info as info
info.__version__ = "0.20.0"
sys.modules["snip_megatron.megatron.compat"] = None  # its names may be gone: an import would be an error
from snip_megatron.attach import attach, snip_arguments
snip_arguments()(argparse.ArgumentParser()).parse_args()
attach(print)("trained")
"""


@pytest.mark.parametrize(("start", "snip"), [((), False), (("-m", "snip_megatron.attach"), True)])
def test_only_snip_refuses_another_release(start: tuple[str, ...], snip: bool, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(ANOTHER_RELEASE)
    command = [sys.executable, *start, str(script), *(["--snip"] if snip else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("own: ")]
    if snip:
        assert done.returncode == 2, done.stderr
        assert lines == ["own: megatron-core 0.20.0 is installed; snip_megatron supports >=0.19.2,<0.20"]
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("trained\n")
    assert "Traceback" not in done.stderr
