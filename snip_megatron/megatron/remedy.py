"""What leaves the culprits of a verdict in bf16: pins and a map, Megatron's file and arguments, Transformer Engine's
module, and the time that a step then takes.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from snip_megatron.megatron.times import option_times
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.numerics.products.transformer_engine import FACTORY_MODULE, QUANTIZERS, factory_source
from snip_megatron.precision import Format, Formats, Gemm, LinearId, LinearRow, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.recipes import SUBSTITUTIONS, collapse, stage_file
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.storage import write_atomically
from snip_megatron.sensitivity.blame import Blame, Remedy
from snip_megatron.timing.table import TimingTable, load_table, packaged_table


@dataclasses.dataclass(frozen=True)
class RemedyWriter:
    """Writes the remedies of the steps of a job."""

    config: SnipConfig
    args: argparse.Namespace
    rows: Sequence[LinearRow]  # the linears of the model that the job may quantise
    recipe: HostRecipe | None = None  # Megatron's own recipe. None if the formats are those of a map of SNIP

    def write(self, blame: Blame, formats: PrecisionMap, folder: Path) -> Blame:
        """Write the files of a remedy beside the verdict. Returns the verdict with it. Nothing without a culprit."""
        culprits = [culprit for culprit in blame.culprits if culprit.confirmed]
        if not culprits:
            return blame
        keys = list(dict.fromkeys(f"{culprit.linear}:{culprit.gemm}" for culprit in culprits))
        linears = {LinearId.parse(culprit.linear): Format.BF16 for culprit in culprits}
        remedied = remedied_map(formats, [row.name for row in self.rows], keys)
        notes: list[str] = []
        stem = f"blame_{blame.step}"
        module = self._module(remedied, folder / f"{stem}_te", notes)
        if self.recipe is None:
            path = folder / f"{stem}_map.json"
            write_atomically(path, remedied.to_json().encode())
            pins = tuple(word for key in keys for word in ("--snip-pin", f"{key}=bf16"))
            whole = {LinearId.parse(row.name): collapse(remedied.formats_of(row.name)) for row in self.rows}
            notes += [f"in Megatron's file {text}" for fmt, text in SUBSTITUTIONS.items() if fmt in whole.values()]
            remedy = Remedy(pins, map=str(path), megatron=self._precision_file(whole, folder / stem, notes))
        else:  # linears that no pattern of the file matches keep the job's own recipe
            remedied = remedied_map(formats, [row.name for row in self.rows], [*map(str, linears)])
            arguments = self._first_and_last(list(linears))
            remedy = Remedy((), megatron=self._precision_file(linears, folder / stem, notes), arguments=arguments)
        slowdown = None
        try:
            slowdown = self._slowdown(formats, remedied, folder)
            if self.recipe is not None:
                notes.append("its cost in speed is predicted by times of SNIP's kernels in formats of the same size")
        except SnipError as error:
            notes.append(f"what it costs in speed is not known: {error}")
        remedy = dataclasses.replace(remedy, recipe=module, slowdown=slowdown, notes=tuple(notes))
        return dataclasses.replace(blame, remedy=remedy)

    # -- files -------------------------------------------------------------------------------------------------
    def _precision_file(self, formats: Mapping[LinearId, Format], path: Path, notes: list[str]) -> str | None:
        """Write Megatron's precision file, or a folder with that of each pipeline stage. Returns its path."""
        if (self.args.virtual_pipeline_model_parallel_size or 1) > 1:
            notes.append("no file for Megatron: it cannot tell the chunks of a virtual pipeline apart")
            return None
        layers: dict[int, list[int]] = {stage: [] for stage in range(self.args.pipeline_model_parallel_size)}
        for row in self.rows:
            if row.id.stack == "decoder":
                layers[row.stage].append(row.id.layer)
        texts = {
            stage: stage_file(formats, stage, range(min(each), max(each) + 1) if each else range(0), len(layers))
            for stage, each in layers.items()
        }
        if len(texts) == 1:
            path = path.with_name(f"{path.name}_megatron.yaml")
            write_atomically(path, texts[0].encode())
            return str(path)
        path = path.with_name(f"{path.name}_megatron")
        for stage, text in texts.items():
            write_atomically(path / f"stage_{stage}.yaml", text.encode())
        notes.append("a rank takes Megatron's file of its pipeline stage: stage_$((RANK * PP / WORLD_SIZE)).yaml")
        return str(path)

    def _module(self, remedied: PrecisionMap, folder: Path, notes: list[str]) -> str | None:
        """Write Transformer Engine's module. Returns its path."""
        formats: dict[LinearId, Formats] = {
            LinearId.parse(row.name): remedied.formats_of(row.name) for row in self.rows
        }
        unknown = {fmt.value for three in formats.values() for fmt in three if fmt not in QUANTIZERS}
        if self.recipe is not None and (self.recipe.name == "delayed" or self.recipe.hybrid):
            unknown = {str(self.recipe)}
        if unknown:
            notes.append(f"no module for Transformer Engine: it has no quantizer for {', '.join(sorted(unknown))}")
            return None
        path = folder / f"{FACTORY_MODULE}.py"
        write_atomically(path, factory_source(formats, f"the remedy {folder.name}").encode())
        return str(path)

    def _first_and_last(self, linears: Sequence[LinearId]) -> tuple[str, ...]:
        """Return Megatron's arguments that keep the first and last layers in bf16, if few layers have all culprits."""
        args = self.args
        assert self.recipe is not None
        count = args.num_layers
        if self.recipe.name == "delayed" or any(linear.stack != "decoder" for linear in linears):
            return ()
        start, end = bf16_ends(args)
        layers = [linear.layer for linear in linears]
        start = max([start, *(layer + 1 for layer in layers if layer < count // 2)])
        end = max([end, *(count - layer for layer in layers if layer >= count // 2)])
        if start + end > max(1, count // 4) or max(start, end) > count // args.pipeline_model_parallel_size:
            return ()
        counts = "--num-layers-at-start-in-bf16", str(start), "--num-layers-at-end-in-bf16", str(end)
        return ("--first-last-layers-bf16", *counts)

    # -- time --------------------------------------------------------------------------------------------------
    def _slowdown(self, before: PrecisionMap, after: PrecisionMap, folder: Path) -> float:
        """Return the predicted time of a step under ``after`` over that under ``before``. Raises SnipError."""
        names = {row.name: row.stage for row in self.rows}
        formats = {Format.BF16, *(fmt for name in names for fmt in before.formats_of(name))}
        times = option_times(self.config, self.args, self.rows, self._table(folder), formats)
        if times is None:
            raise SnipError("there are no times of this job's GEMMs; give --snip-timings")
        seconds = times.step_seconds(before, names), times.step_seconds(after, names)
        if seconds[0] is None or seconds[1] is None:
            raise SnipError("the planner does not know all of a step of this model")
        return round(seconds[1][1] / seconds[0][1], 4)

    def _table(self, folder: Path) -> TimingTable | None:
        """Return the times that the job's run has measured, or those of its card. None without a card."""
        if self.config.timings is not None:
            return None
        beside_map = [] if self.config.map is None else [Path(self.config.map).parent.parent]
        for run in (folder, *beside_map):
            if (run / TIMINGS).exists():
                return TimingTable.load(run / TIMINGS)
        if not torch.cuda.is_available():
            return None
        device = torch.cuda.get_device_name()
        return load_table(packaged_table(device), device)


def bf16_ends(args: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of first and last layers that ``--first-last-layers-bf16`` keeps in bf16."""
    if not args.first_last_layers_bf16:
        return 0, 0
    return args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16


def remedied_map(formats: PrecisionMap, names: Sequence[str], keys: Sequence[str]) -> PrecisionMap:
    """Return ``formats`` of all linears, with the GEMMs or linears of ``keys`` in bf16."""
    gemms = {key if ":" in key else option_id(key, gemm) for key in keys for gemm in Gemm}
    choices = {option_id(name, gemm): formats.format_of(name, gemm) for name in names for gemm in Gemm}
    return PrecisionMap(choices | dict.fromkeys(gemms, Format.BF16))
