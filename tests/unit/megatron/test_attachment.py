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
from llama_arguments import arguments
from megatron.core import package_info
from megatron.training import global_vars

from snip_megatron.megatron import attachment
from snip_megatron.megatron.attachment import prepare_megatron, run_attached
from snip_megatron.megatron.compat.pretraining import bound_call, hooked_model
from snip_megatron.megatron.startup import COMPAT_SETS, SUPPORTED, Startup
from snip_megatron.precision.errors import SnipError

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
        hooked_model(nothing),
    ):
        pass


MAY_DIFFER = {
    *("load", "save", "yaml_cfg", "data_cache_path", "per_dataset_sequences_path", "validation_set_names"),  # files
    *("data_path", "train_data_path"),  # files
    *("non_persistent_global_ckpt_dir", "consumed_valid_samples", "split", "tokenizer_type", "fim_data"),
    *("create_attention_mask_in_dataloader", "dataloader_defer_npy_index_mmap", "dataloader_fast_cache_load"),  # data
    *("reset_attention_mask", "reset_position_ids", "check_for_nan_in_loss_and_grad", "check_for_spiky_loss"),
    # compared otherwise, or refused
    *("snip", "snip_budget", "snip_gemm", "snip_timings", "snip_map", "snip_blame", "snip_blame_folder"),
    *("snip_host_recipe", "snip_graphed_experts", "fake_process_group", "optimizer_cuda_graph", "use_checkpoint_args"),
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
info.__version__ = "1.2.3"
import megatron.core.rerun_state_machine as rerun
del rerun.RerunDataIterator
from snip_megatron.attach import attach, snip_arguments
snip_arguments()(argparse.ArgumentParser()).parse_args()
attach(print)("trained")
"""


@pytest.mark.parametrize(("start", "snip"), [((), False), (("-m", "snip_megatron.attach"), True)])
def test_only_snip_refuses_a_newer_release_that_lacks_a_name(
    start: tuple[str, ...], snip: bool, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(ANOTHER_RELEASE)
    command = [sys.executable, *start, str(script), *(["--snip"] if snip else [])]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in process.stderr.splitlines() if line.startswith("own: ")]
    if snip:
        assert process.returncode == 2, process.stderr
        newer = f"own: megatron-core 1.2.3 is newer than the releases that were tested ({SUPPORTED}) and differs: "
        assert len(lines) == 1
        assert lines[0].startswith(f"{newer}ImportError: cannot import name 'RerunDataIterator'")
    else:
        assert process.returncode == 0, process.stderr
        assert process.stdout.endswith("trained\n")
    assert "Traceback" not in process.stderr


def test_a_newer_release_that_lacks_nothing_runs_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(snip=False, transformer_impl="local")
    startup = Startup(on_cpu=False, disabled=frozenset(COMPAT_SETS))
    prepare_megatron(args, startup)
    monkeypatch.setattr(package_info, "__version__", "0.21.0")
    assert capsys.readouterr().out == ""
    prepare_megatron(args, startup)
    notice = f"compat: megatron-core 0.21.0 is newer than the releases that were tested ({SUPPORTED})\n"
    assert capsys.readouterr().out == notice
