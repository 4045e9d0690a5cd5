"""Puts SNIP around a call of Megatron's ``pretrain``, in SNIP's own entry and in other training scripts."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import pretraining
from snip_megatron.megatron.startup import Startup, check_sources, say
from snip_megatron.numerics.products.selection import native_backend
from snip_megatron.precision.errors import SnipError, located
from snip_megatron.runtime.config import SnipConfig, resolve_arguments
from snip_megatron.runtime.defaults import backend_of, dominated
from snip_megatron.timing.cost_model import load_cost_model


def prepare_megatron(args: argparse.Namespace, startup: Startup, shown: Sequence[str] = ()) -> None:
    """Check the machine, apply the compat sets that ``args`` needs, and print one line per set.

    Raises SnipError if ``args`` requires what this machine lacks. ``shown`` are lines about sets that were applied
    earlier.
    """
    compat.check(args, startup)
    for line in (*shown, *compat.apply(args, startup)):
        say(line, "compat")


def configuration(args: argparse.Namespace) -> tuple[SnipConfig, list[str]]:
    """Return SNIP's configuration on this machine, and lines about defaults that were chosen.

    Raises SnipError if an argument is invalid, or two of them cannot be combined.
    """
    if not getattr(args, "snip", False):
        return resolve_arguments(args), []
    te_linears = args.transformer_impl == "transformer_engine"
    native = native_backend(args.snip_gemm or SnipConfig.gemm, te_linears=te_linears)
    config = resolve_arguments(args, native or _named_backend(args.snip_timings))
    if not config.updates and not config.late:
        return config, []
    lines = [dominated(config.budget, config.formats, native)]
    if args.snip_budget is None:
        free = "" if native else ": formats are emulated on this machine, which saves no time"
        lines.insert(
            0, f"--snip-budget {config.budget} over {','.join(config.formats)}, schedule {config.schedule}{free}"
        )
    return config, [line for line in lines if line]


def _named_backend(timings: str | None) -> str | None:
    """Return the backend of the card that ``--snip-timings`` names, for a training that emulates its formats."""
    if timings is None:
        return None
    with located(f"--snip-timings {timings}"):
        return backend_of(load_cost_model(timings))


@contextmanager
def under_snip(args: argparse.Namespace, model_config: Any) -> Iterator[None]:
    """Run a training with SNIP inside this context if ``--snip`` was given.

    The hook that converts the model is added to ``model_config.pre_wrap_hooks``. Raises SnipError if the configuration
    cannot work. It is checked before any collective is called.
    """
    config, lines = configuration(args)
    with ExitStack() as stack:
        if config.enabled:
            for line in lines:
                say(line)
            from snip_megatron.megatron.conversion import with_resolved_gemm
            from snip_megatron.megatron.setup import SnipRun

            run = SnipRun(with_resolved_gemm(config, args), args)
            stack.push(run.leave)
            run.begin(model_config)
        yield


def run_attached(
    pretrain: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any], startup: Startup
) -> Any:
    """Call a script's ``pretrain`` under SNIP.

    Raises SnipError if the configuration cannot work, or if the script did not parse SNIP's arguments. ``pretrain`` may
    be a wrapper that takes the same arguments.
    """
    call, args = pretraining.bound_call(positional, named), pretraining.parsed_arguments()
    if not hasattr(args, "snip"):
        check_sources([] if getattr(args, "yaml_cfg", None) is None else ["--yaml-cfg"])
        raise SnipError(
            "attach() finds no --snip arguments: parse with extra_args_provider=snip_arguments(<your provider, if any>)"
        )
    prepare_megatron(args, startup)
    with pretraining.hooked_model(call, on_cpu=startup.on_cpu) as model, under_snip(args, model):
        return pretrain(*call.args, **call.kwargs)
