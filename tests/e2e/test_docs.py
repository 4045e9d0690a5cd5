"""The documents are true: links resolve, figures are those of the result files, arguments exist, the drawing fits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import check_results
from snip_megatron.tools.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "snip_megatron", "launch", "patches", "benchmarks")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md")))
)
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (ROOT / page).parent.joinpath(target.partition("#")[0]).exists(), f"{page}: {target}"


def table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the first table of a page of results whose header begins with ``header``."""
    lines = (ROOT / "docs/results" / page).read_text().partition(f"\n{header}")[2].partition("\n\n")[0].splitlines()[2:]
    assert lines, f"{page}: no table {header}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def result(link: str) -> Path:
    """Return the file of the first link in a cell."""
    target = re.search(r"\]\(([^)]+)\)", link)
    assert target, f"no link: {link}"
    return (ROOT / "docs/results" / target[1]).resolve()


def figure_rows() -> list[tuple[str, str, Path]]:
    """(what, figures, linked file) of the tables whose columns are what, figures, conditions and ``shown by``."""
    rows = [row for page in ("dense-speed.md", "cost.md") for row in table(page, "| what | figures | conditions |")]
    return [(what, figures, result(link)) for what, figures, _, link in rows]


def test_every_figure_links_to_a_result():
    rows = figure_rows()
    assert len(rows) >= 6
    assert all(path.is_relative_to(ROOT / "benchmarks/results") for _, _, path in rows)
    text = README.replace(README.partition("## What it gives")[2].partition("\n## ")[0], "")
    assert not re.findall(r"\d[\d.,]*\s?×", text), "a speed outside of the table"


def written(figures: str) -> dict[str, float]:
    """``fp8 1.41×, fp4 numerics 1.39×`` → {fp8: 1.41, fp4: 1.39}."""
    return {name: float(value) for name, value in re.findall(r"(\w+)(?: numerics)? (\d\.\d+)×", figures)}


def trainings(body: dict) -> dict[str, float]:
    """Speedups of a result of ``benchmarks/job.py`` under the names of the table."""
    speedup = body["speedup"]
    fused = {name: speedup[f"snip_{name}_fused_graphs"] for name in ("fp8_tensor", "fp8")}
    return fused | {"tensorwise": speedup["te_fp8_tensor_graphs"]}


def host_times(body):
    """Host times of replayed linears over Transformer Engine's bf16 linear."""
    us = body["host_us"]
    of_bf16 = us["bf16 Transformer Engine fused accumulation"]
    return {name: us[f"snip {name} C++"] / of_bf16 for name in ("fp8", "fp8_tensor", "fp4")}


RESULTS = {
    "a training of": trainings,
    "one linear": lambda body: body["geomean"],
    "four Llama": lambda body: body["speedup"],
    "host time of": host_times,
    "memory": lambda body: body["saved_inputs"],
    "an update's": lambda body: {"update": body["over_bf16_pass"]["update"]},
}
"""How a row of the tables begins → what its result file says."""


@pytest.mark.parametrize("word", RESULTS)
def test_figures_are_those_of_the_json_files(word):
    ((_, figures, path),) = [row for row in figure_rows() if row[0].startswith(word)]
    shown = written(figures) or {"update": float(figures.strip(" ×"))}
    true = RESULTS[word](json.loads(path.read_text()))
    assert len(shown) >= (1 if "update" in shown else 3)
    assert shown == {name: round(true[name], 2) for name in shown}


@pytest.mark.parametrize(
    ("page", "header", "ours", "bf16", "speedup", "file"),
    [
        ("dense-speed.md", "| model | card | `--snip` alone |", 2, 3, 2, 6),
        ("mixtures.md", "| model | cards | `--snip` alone |", 2, 3, 4, 2),
    ],
)
def test_step_times_are_those_of_the_jobs(
    page: str, header: str, ours: int, bf16: int, speedup: int, file: int
) -> None:
    rows = table(page, header)
    assert len(rows) >= 5
    for row in rows:
        ms = json.loads(result(row[file]).read_text())["ms"]
        snip, plain = ms["snip_default_graphs"], min(time for name, time in ms.items() if name.startswith("bf16"))
        assert f"{snip:.0f}" in row[ours]
        assert re.match(rf"{plain:.0f}\b", row[bf16])
        assert row[speedup] == "–" or f"{plain / snip:.2f}" in row[speedup]


def test_every_result_is_named_and_they_stay_small() -> None:
    assert check_results.main() == 0


@pytest.mark.parametrize(("column", "rivals", "figures"), [(1, "bf16", 6), (2, "te_fp8", 3)])
def test_what_the_default_gives_is_what_its_trainings_measured(column: int, rivals: str, figures: int) -> None:
    rows = [line.strip("|").split("|") for line in README.splitlines() if re.match(r"\| (dense|mixture)", line)]
    gains = [
        (re.search(r"H[12]00", card or row[0]), *gain)
        for row in rows
        for card, *gain in re.findall(r"(H[12]00: )?\[([\d.]+)×\]\(([^)]+)\) \((\d+) → (\d+) ms", row[column])
    ]
    assert len(gains) == figures
    for card, gain, file, before, after in gains:
        body = json.loads((ROOT / file).read_text())
        snip = body["ms"]["snip_default_graphs"]
        rival = min(time for name, time in body["ms"].items() if name.startswith(rivals))
        assert card
        assert card[0] in body["device"]
        assert (gain, before, after) == (f"{rival / snip:.2f}", f"{rival:.0f}", f"{snip:.0f}")


def test_every_argument_and_command_that_is_named_exists():
    help_text = subprocess.run(
        [sys.executable, "-c", "from snip_megatron.runtime.config import add_arguments as a; import argparse as p;"
         "q = p.ArgumentParser(); a(q); print(*(s for x in q._actions for s in x.option_strings))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *(p for p in PAGES if p.startswith("docs/") and not p.endswith("tried-and-left-out.md")),
    ):  # the changelog and that page name what went
        text = (ROOT / page).read_text()
        assert "--snip" in help_text
        named = {name.rstrip("-") for name in re.findall(r"--snip[a-z-]*", text)}
        unknown = {
            n for n in named - set(help_text) if n != "--snip" and not any(k.startswith(n + "-") for k in help_text)
        }
        assert not unknown, f"{page}: {unknown}"
        commands = set(re.findall(r"`snip ([a-z-]+)", text))
        assert commands <= set(COMMANDS), f"{page}: {commands - set(COMMANDS)}"
    assert set(re.findall(r"`snip ([a-z-]+)`", README)) == set(COMMANDS)


def test_every_room_has_a_line_in_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {path.parent.name for path in (ROOT / "snip_megatron").glob("*/__init__.py")}
    assert not {name for name in folders if f"{name}/" not in text}


@pytest.mark.parametrize("script", ["draw_rooms.py", "argument_tables.py"])
def test_what_is_generated_is_what_the_code_says(script: str):
    command = [sys.executable, str(ROOT / "docs" / script), "--check"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
