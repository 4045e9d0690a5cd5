"""Defaults of the machine: the user's value wins, and is refused if it cannot work. The hook of a step."""

import argparse
import importlib.util

import megatron.training.training as training
import pytest
from llama_arguments import arguments, megatron_parser

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat.patches import CPU, EXTENSIONS
from snip_megatron.megatron.startup import Startup
from snip_megatron.precision.errors import SnipError

ON_CPU = Startup(on_cpu=True, disabled=frozenset())
ON_GPU = Startup(on_cpu=False, disabled=frozenset())


def parse(startup: Startup, *argv: str) -> argparse.Namespace:
    parser = megatron_parser()
    compat.set_defaults(parser, startup)
    return parser.parse_args(argv)


def test_cpu_defaults_are_set_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(ON_CPU)
    assert {d.dest: getattr(args, d.dest) for d in CPU} == {d.dest: d.value for d in CPU}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("compat: cpu: defaults --distributed-backend gloo --transformer-impl local")
    compat.check(args, ON_CPU)


def test_flags_do_what_the_defaults_stand_for() -> None:
    """Each flag, parsed by Megatron itself, sets the same value: names and values cannot go stale."""
    plain = megatron_parser()
    for default in CPU:
        assert getattr(plain.parse_args(default.flag.split()), default.dest) == default.value
        assert getattr(plain.parse_args([]), default.dest) != default.value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--distributed-backend", "nccl"), "--distributed-backend nccl: impossible without a CUDA device"),
        (("--transformer-impl", "transformer_engine"), "the CPU needs --transformer-impl local"),
    ],
)
def test_impossible_on_the_cpu(argv: tuple[str, ...], message: str) -> None:
    args = parse(ON_CPU, *argv)
    with pytest.raises(SnipError, match=message):
        compat.check(args, ON_CPU)


def test_missing_extensions_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    present: set[str] = set()
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> object:
        return (object() if name in present else None) if name in EXTENSIONS else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    args = parse(ON_GPU)
    assert not args.gradient_accumulation_fusion
    assert not args.apply_rope_fusion
    assert args.distributed_backend == "nccl"
    assert args.transformer_impl == "transformer_engine"
    assert "missing-extensions: defaults --no-gradient-accumulation-fusion" in capsys.readouterr().out
    with pytest.raises(SnipError, match="needs Transformer Engine, which is not installed; install it or give --tr"):
        compat.check(args, ON_GPU)
    compat.check(parse(ON_GPU, "--transformer-impl", "local"), ON_GPU)

    present |= {"transformer_engine", "fused_weight_gradient_mlp_cuda"}
    args = parse(ON_GPU)
    assert args.gradient_accumulation_fusion
    assert args.apply_rope_fusion
    assert args.no_persist_layer_norm
    compat.check(args, ON_GPU)

    capsys.readouterr()
    args = parse(Startup(on_cpu=False, disabled=frozenset({"missing-extensions"})))
    assert capsys.readouterr().out == ""
    assert not args.no_persist_layer_norm


def test_without_a_hook_the_set_cannot_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = arguments(snip=True, transformer_impl="local")
    off = Startup(on_cpu=False, disabled=frozenset({"step-hook", "dataset-helpers"}))
    with pytest.raises(SnipError, match="--snip-no-compat step-hook: this Megatron's source has no hook"):
        compat.apply(plain, off)
    allowed = Startup(on_cpu=False, disabled=frozenset({"dataset-helpers"}))
    assert compat.apply(plain, allowed) == ["step-hook: Megatron's train_step and evaluate wrapped at run time"]
    monkeypatch.setattr(training, "SNIP_HOOKS", {}, raising=False)
    assert compat.apply(plain, off) == []
    assert compat.apply(plain, allowed) == ["step-hook: this Megatron's source has it, nothing is patched at run time"]
