"""Which configurations of the field SNIP accepts, and how much of their linears a map reaches.

    python -m benchmarks.quality.coverage CHECKOUT [--bridge FOLDER] [--out docs/coverage.md]

CHECKOUT is a folder with ``tests/functional_tests/test_cases`` of Megatron-LM's repository; recipes of Megatron Bridge
are added by ``--bridge``. Each configuration passes the validation of Megatron or Bridge and SNIP's in a process of its
own, as on a GPU with all optional packages; its model is then built on the meta device and its linears are looked up
as conversion does. No GPU is needed. Transformer Engine must be importable.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import yaml

from benchmarks.quality import bridge_recipes
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig, add_arguments, resolve_arguments

FOLDERS = ("gpt", "moe", "mixtral", "hybrid", "nemotron")
SNIP = ("--snip", "--snip-budget", "fp4=0.5", "--snip-formats", "fp8,fp4")
_RANKS = 8
_TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "32000")  # no download, no file
_FILES = (
    "--load",
    "--save",
    "--data-path",
    "--pretrained-checkpoint",
    "--vocab-file",
    "--merge-file",
    "--tokenizer-model",
    "--tokenizer-type",
)
_ONE_WORD = ("--step-batch-size-schedule",)  # though it has spaces


@dataclass(frozen=True)
class Verdict:
    """What became of one configuration.

    Attributes:
        case: folder and name.
        by: who refuses it: "Megatron", "Bridge", "SNIP" or "build"; empty if it is accepted.
        why: the line of the refusal.
        reached: share of the FLOPs of all linears that a map covers.
        stock: paths of linears that stay in bf16.
    """

    case: str
    by: str = ""
    why: str = ""
    reached: float = 0.0
    stock: tuple[str, ...] = ()


def cases(checkout: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield folder and name, the arguments and the environment of each configuration that trains."""
    root = checkout / "tests" / "functional_tests" / "test_cases"
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*/model_config.yaml")):
            body = yaml.safe_load(path.read_text(encoding="utf-8"))
            if body.get("MODE", "pretraining") == "pretraining" and body.get("MODEL_ARGS"):
                yield f"{folder}/{path.parent.name}", body["MODEL_ARGS"], body.get("ENV_VARS") or {}


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return the words of a command line. Files that are not here are left out: nothing is loaded.

    Args:
        arguments: name of an argument → its value. Several words may stand in brackets, as Megatron's tests take them.
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is False or name in _FILES:
            continue
        words.append(name)
        if value is not True:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [text] if name in _ONE_WORD else re.sub(r"^\[([^][]*)\]$", r"\1", text).split()
    return [*words, *_TOKENIZER]


def ranks_of(words: list[str]) -> int:
    """Return a number of ranks that the parallel sizes divide: 8 or the next one."""

    def size(name: str) -> int:
        return int(words[words.index(name) + 1]) if name in words else 1

    tensor, stages = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    expert_tensor = size("--expert-tensor-parallel-size") if "--expert-tensor-parallel-size" in words else tensor
    inner = math.lcm(tensor * size("--context-parallel-size"), expert_tensor * size("--expert-model-parallel-size"))
    least = inner * stages
    return least * max(1, _RANKS // least)


def configuration(case: str, fields: dict[str, Any], environment: dict[str, Any]) -> Verdict:
    """Judge a configuration of Megatron's in this process, whose state it spoils."""
    from megatron.training import arguments

    from snip_megatron.megatron.compat import pretraining
    from snip_megatron.megatron.datasets import check_kind_of_data

    words = [*command_line(fields), *SNIP]
    if {"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(words):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")  # as SNIP's entry leaves it
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.environ |= {"WORLD_SIZE": str(ranks_of(words)), "RANK": "1", "LOCAL_RANK": "0"}
    sys.argv = ["pretrain_gpt", *words]
    card = (10, 0) if re.search("gb_?200", case) else (9, 0)
    with on_cards(card), mock.patch.object(arguments, "get_device_arch_version", return_value=card[0]):
        try:
            args = pretraining.parse_arguments(_provide)
            model = pretraining.model_config(args)
        except SnipError as error:
            return Verdict(case, "Megatron", str(error))

        def of_entry(config: SnipConfig) -> argparse.Namespace:
            check_kind_of_data(args)
            return args

        return _checked(case, resolve_arguments(args), of_entry, model)


def recipe(case: str, make: Callable[[], Any]) -> Verdict:
    """Judge a recipe of Megatron Bridge in this process, whose state it spoils."""
    from snip_megatron import bridge
    from snip_megatron.megatron.compat import bridge as bridge_compat

    with on_cards((9, 0) if "h100" in case else (10, 0)):
        try:
            container = bridge_recipes.finished(make, bridge_compat.let_snip_choose)
        except SnipError as error:
            return Verdict(case, "SNIP", str(error))
        except Exception as error:
            return Verdict(case, "Bridge", f"{type(error).__name__}: {error}")
        snip = SnipConfig(enabled=True, budget=Budget.parse(SNIP[2], "budget"), formats=("fp8", "fp4"))
        return _checked(case, snip, lambda config: bridge.bridge_arguments(container), container.model)


def on_cards(card: tuple[int, int]) -> ExitStack:
    """Return a context in which there seem to be eight cards of a capability."""
    from snip_megatron.megatron import validate

    machine = ExitStack()
    for name, value in (("is_available", True), ("device_count", 8), ("get_device_capability", card)):
        machine.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
    machine.enter_context(mock.patch.object(validate, "check_measurable"))
    return machine


def _checked(
    case: str, config: SnipConfig, arguments: Callable[[SnipConfig], argparse.Namespace], model: Any
) -> Verdict:
    """Judge arguments and build the model."""
    from snip_megatron.megatron import times, validate
    from snip_megatron.megatron.compat.meta_model import CannotBuildError
    from snip_megatron.megatron.conversion import linears_on_meta

    try:
        args = arguments(config)
        validate.check(config, args)
        linears = linears_on_meta(args, model)
        validate.check_model(config, args, linears)
        times.layout_of(args, linears.covered, config).kinds  # noqa: B018  which a run records
    except CannotBuildError as error:
        return Verdict(case, "build", str(error))
    except SnipError as error:
        return Verdict(case, "SNIP", str(error))
    covered = math.fsum(row.flops for row in linears.covered)
    uncovered = math.fsum(row.flops for row in linears.uncovered)
    paths = tuple(dict.fromkeys(f"{row.id.stack} {row.id.path}" for row in linears.uncovered))
    return Verdict(case, reached=covered / (covered + uncovered), stock=paths)


def _provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.error = _refuse  # type: ignore[method-assign]
    parser.set_defaults(tokenizer_type="GPT2BPETokenizer")  # as Megatron's entries have it
    return add_arguments(parser)


def _refuse(message: str) -> NoReturn:
    raise SnipError(message)


def in_a_child(judge: Callable[..., Verdict], case: str, *arguments: Any) -> Verdict:
    """Judge one configuration in a copy of this process, since Megatron keeps global state."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            verdict = judge(case, *arguments)
        except BaseException as error:  # what no one line says is a fault of ours
            verdict = Verdict(case, "fault", " ".join(f"{type(error).__name__}: {error}".split())[:300])
        with os.fdopen(write, "w") as pipe:
            json.dump(asdict(verdict), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Verdict(case, "fault", "the process of the check died")
    body = json.loads(text)
    return Verdict(**body | {"stock": tuple(body["stock"])})


_PAGE = """# Coverage of the field's configurations

Written by `python -m benchmarks.quality.coverage CHECKOUT --bridge FOLDER --out docs/coverage.md`. *Accepted*: the
arguments pass SNIP's checks, and the model is built on the meta device, where its linears are looked up as conversion
does, and the layout that a run records is made. *In reach*: a precision map covers the FLOPs of all linears of decoder
and MTP.
"""


def section(title: str, host: str, verdicts: list[Verdict]) -> str:
    """Return the part of the page on all configurations of one host."""
    counted = [each for each in verdicts if each.by != host]
    lines = [f"## {title}", "", "| folder | configurations | accepted | every FLOP in reach |", "|---|---:|---:|---:|"]
    for folder in (*dict.fromkeys(_folder(each) for each in counted), "all"):
        in_folder = [each for each in counted if folder in ("all", _folder(each))]
        accepted = [each for each in in_folder if not each.by]
        whole = sum(not each.stock for each in accepted)
        lines.append(f"| {folder} | {len(in_folder)} | {len(accepted)} | {whole} |")
    for by, meaning in (
        ("SNIP", "Refused by SNIP"),
        ("build", "Accepted, but not built on the meta device"),
        ("fault", "Faults of the check"),
    ):
        reasons = Counter(_reason(each.why) for each in verdicts if each.by == by)
        if reasons:
            lines += ["", f"{meaning}:", "", "| configurations | why |", "|---:|---|"]
            lines += [f"| {count} | {why} |" for why, count in reasons.most_common()]
    uncounted = len(verdicts) - len(counted)
    lines += ["", f"Not counted are {uncounted} more, which {host} itself refuses or whose sizes are not known."]
    parts = Counter(path for each in counted if not each.by for path in each.stock)
    if parts:
        lines += ["", "Linears that stay in bf16 in accepted configurations:", "", "| configurations | linear |"]
        lines += ["|---:|---|", *(f"| {count} | {path} |" for path, count in parts.most_common())]
    return "\n".join(lines) + "\n"


def _folder(verdict: Verdict) -> str:
    return verdict.case.rpartition("/")[0]


def _reason(why: str) -> str:
    """Return a refusal as a cell of a table."""
    return re.sub(r"\s+", " ", why).replace("|", "\\|")[:220]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout of Megatron-LM")
    parser.add_argument(
        "--bridge", type=Path, help="folder with megatron/bridge: src of a checkout, or a wheel's files"
    )
    parser.add_argument("--out", type=Path, help="page to write; default: standard output")
    parser.add_argument("--only", default="", metavar="A,B,…", help="judge only configurations whose names begin so")
    asked = parser.parse_args()
    from snip_megatron.megatron.startup import prepare

    prepare([], [])  # before Megatron is imported; children share what is imported here
    import megatron.core.tokenizers.text  # noqa: F401  most of the time of a check, if a child imports it

    import snip_megatron.megatron.conversion
    import snip_megatron.megatron.validate  # noqa: F401

    def judged(judge: Callable[..., Verdict], cases: Iterable[tuple[Any, ...]]) -> list[Verdict]:
        verdicts = []
        for case, *arguments in cases:
            if case.startswith(tuple(asked.only.split(","))):
                verdicts.append(in_a_child(judge, case, *arguments))
                print(json.dumps(asdict(verdicts[-1])), file=sys.stderr, flush=True)
        print(Counter(each.by or "accepted" for each in verdicts), file=sys.stderr)
        return verdicts

    parts = [_PAGE, section("Megatron-LM's functional tests", "Megatron", judged(configuration, cases(asked.checkout)))]
    if asked.bridge is not None:
        bridge_recipes.enter(asked.bridge)
        parts += [section("Megatron Bridge's recipes", "Bridge", judged(recipe, bridge_recipes.recipes()))]
        parts += [bridge_recipes.NOTE]
    text = "\n".join(parts)
    if asked.out is None:
        print(text)
    else:
        asked.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
