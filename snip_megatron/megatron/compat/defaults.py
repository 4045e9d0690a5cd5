"""Argument defaults for this machine: without a GPU, and without the extensions that Megatron's fusions need.

Only the defaults of the parser change. A value that the user gives is kept, and refused if it cannot work.
"""

import argparse
import importlib.util
from dataclasses import dataclass
from typing import Any

from snip_megatron.megatron.startup import Startup
from snip_megatron.precision.errors import SnipError


@dataclass(frozen=True)
class Default:
    """A default: ``flag`` sets ``dest`` to ``value``. No other value works if ``required`` is set."""

    flag: str
    dest: str
    value: Any
    required: bool = False


#: Defaults without a GPU: no CUDA kernels, no nccl, and weights initialised on the CPU.
CPU = (
    Default("--distributed-backend gloo", "distributed_backend", "gloo", required=True),
    Default("--transformer-impl local", "transformer_impl", "local", required=True),
    Default("--use-cpu-initialization", "use_cpu_initialization", True),
    Default("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False, required=True),
    Default("--no-masked-softmax-fusion", "masked_softmax_fusion", False, required=True),
    Default("--no-persist-layer-norm", "no_persist_layer_norm", True, required=True),
    Default("--no-rope-fusion", "apply_rope_fusion", False, required=True),
    Default("--disable-jit-fuser", "disable_jit_fuser", True),
)

#: (extension module, the default that switches off the fusion which needs it).
EXTENSIONS = (
    ("fused_weight_gradient_mlp_cuda", CPU[3]),
    ("scaled_upper_triang_masked_softmax_cuda", CPU[4]),
    ("apex", CPU[5]),
    ("transformer_engine", CPU[6]),
)


def _wanted(startup: Startup) -> list[tuple[str, Default]]:
    if startup.on_cpu:
        return [("cpu", default) for default in CPU]
    if not startup.allows("missing-extensions"):
        return []
    return [("missing-extensions", d) for module, d in EXTENSIONS if importlib.util.find_spec(module) is None]


def set_defaults(parser: argparse.ArgumentParser, startup: Startup) -> list[str]:
    """Change the defaults of ``parser``. Returns one line per compat set with its name and its flags."""
    flags: dict[str, list[str]] = {}
    for name, default in _wanted(startup):
        parser.set_defaults(**{default.dest: default.value})
        flags.setdefault(name, []).append(default.flag)
    return [f"{name}: defaults {' '.join(values)}" for name, values in flags.items()]


def check(args: argparse.Namespace, startup: Startup) -> None:
    """Raise SnipError if ``args`` requires a GPU or an extension that this machine lacks."""
    for default in CPU if startup.on_cpu else ():
        value = getattr(args, default.dest)
        if default.required and value != default.value:
            given = default.dest.replace("_", "-")
            raise SnipError(f"--{given} {value}: impossible without a CUDA device; the CPU needs {default.flag}")
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise SnipError(
            "--transformer-impl transformer_engine, Megatron's default, needs Transformer Engine, which is not"
            " installed; install it or give --transformer-impl local"
        )
