"""The documents are true: links resolve, figures are those of the result files, arguments exist, the drawing fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snip_megatron.cli import COMMANDS

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


def figure_rows(page: str = "docs/results.md") -> list[tuple[str, str, Path]]:
    """(what, figures, linked file) of the table of figures in a page: the first one with the column ``shown by``."""
    table = (ROOT / page).read_text().partition("| shown by |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()][1:]
    found = []
    for what, figures, link in rows:
        target = re.search(r"\]\(([^)]+)\)", link)
        assert target, f"no link: {what}"
        found.append((what.strip(), figures, (ROOT / page).parent.joinpath(target[1]).resolve()))
    return found


def test_every_figure_links_to_a_result_and_those_of_the_readme_are_among_them():
    rows, shown = figure_rows(), figure_rows("README.md")
    assert len(rows) >= 8
    assert all(path.is_relative_to(ROOT / "benchmarks/results") for _, _, path in rows)
    assert len(shown) >= 3
    assert all(row in rows for row in shown)
    rest = README.replace(README.partition("## What it gives")[2].partition("\n## ")[0], "")
    assert not re.findall(r"\d[\d.,]*\s?×", rest), "a speed outside of the table"


def written(figures: str) -> dict[str, float]:
    """``fp8 1.41×, fp4 numerics 1.39×`` → {fp8: 1.41, fp4: 1.39}."""
    return {name: float(value) for name, value in re.findall(r"(\w+)(?: numerics)? (\d\.\d+)×", figures)}


def trainings(body: dict, suffix: str) -> dict[str, float]:
    """Speedups of a result of ``benchmarks/job.py`` under the names of the table."""
    names = {
        "fp8_tensor": "snip_fp8_tensor",
        "fp8": "snip_fp8",
        "tensorwise": "te_fp8_tensor",
        "blockwise": "te_fp8_block",
    }
    return {shown: body["speedup"][name + suffix] for shown, name in names.items()}


def fused_trainings(body: dict) -> dict[str, float]:
    speedup = body["speedup"]
    fused = {name: speedup[f"snip_{name}_fused_graphs"] for name in ("fp8_tensor", "fp8")}
    return fused | {"tensorwise": speedup["te_fp8_tensor_graphs"]}


def host_times(body):
    """Host times of replayed linears over Transformer Engine's bf16 linear."""
    us = body["host_us"]
    of_bf16 = us["bf16 Transformer Engine fused accumulation"]
    return {name: us[f"snip {name} C++"] / of_bf16 for name in ("fp8", "fp8_tensor", "fp4")}


RESULTS = {
    "graphs": lambda body: trainings(body, "_graphs"),
    "eager": lambda body: trainings(body, ""),
    "fusions": fused_trainings,
    "linear": lambda body: body["geomean"],
    "layer": lambda body: body["speedup"],
    "host": host_times,
    "memory": lambda body: body["saved_inputs"],
    "update": lambda body: {"update": body["over_bf16_pass"]["update"]},
}


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("graphs", "a training of"),
        ("eager", "the same without CUDA"),
        ("fusions", "with CUDA graphs and"),
        ("linear", "one linear"),
        ("layer", "four Llama"),
        ("host", "host time of"),
        ("memory", "memory"),
        ("update", "an update's"),
    ],
)
def test_figures_are_those_of_the_json_files(kind, word):
    ((_, figures, path),) = [row for row in figure_rows() if row[0].startswith(word)]
    body = json.loads(path.read_text())
    shown = written(figures) or {"update": float(figures.strip(" ×"))}
    true = RESULTS[kind](body)
    assert len(shown) >= (1 if kind == "update" else 3)
    assert shown == {name: round(true[name], 2) for name in shown}


def test_figures_in_brackets_are_those_without_fusions():
    ((_, figures, path),) = [row for row in figure_rows() if row[0].startswith("with CUDA graphs and")]
    speedup = json.loads(path.read_text())["speedup"]
    unfused = [round(speedup[f"snip_{name}_graphs"], 2) for name in ("fp8_tensor", "fp8")]
    assert [float(figure) for figure in re.findall(r"\((\d\.\d+)×", figures)] == unfused


def test_what_the_default_gives_is_what_its_training_measured():
    gain = README.partition("| gain | ")[2].partition(" |\n")[0]
    ms = json.loads((ROOT / re.search(r"\]\(([^)]+)\)", gain)[1]).read_text())["ms"]
    default = ms["snip_default_graphs"]
    others = [ms[name] for name in ("bf16_graphs", "te_fp8_tensor_graphs", "te_fp8_block_graphs")]
    assert [int(x) for x in re.findall(r"(\d+) ms", gain)] == [round(each + 1e-9) for each in (default, *others)]
    assert re.findall(r"(\d\.\d+)×", gain) == [f"{each / default:.2f}" for each in others]


def cells(path: Path, *starts: str) -> list[list[str]]:
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in path.read_text().splitlines() if "|" in line]
    return [row for row in rows if row[: len(starts)] == list(starts)]


def test_figures_are_those_of_the_tables():
    rows = {path.name.partition("_")[0]: (figures, path) for _, figures, path in figure_rows()}
    figures, path = rows["solver"]
    shares = [row for row in cells(path) if re.fullmatch(r"70b, \d formats, fp4", row[0])]
    seconds = [float(row[4].split(",")[1]) for row in shares]
    assert f"{max(seconds):.2f} s in {sum(int(row[2]) for row in shares)} " in figures
    figures, path = rows["proxy"]
    drifts = cells(path, "drift: all")
    assert f"{drifts[0][3]}, {drifts[1][3]}, {drifts[2][3]} (min-rel-err: " in figures
    assert [row[8].replace("-", "−") for row in drifts] == re.findall(r"−0\.\d+", figures)
    compared = [
        (figures, path)
        for _, figures, path in figure_rows()
        if path.name.startswith("compare_") and "-time_" not in path.name and "fp4_" not in path.name
    ]
    assert len(compared) == 2
    for figures, path in compared:
        for name, value in re.findall(r"([a-z-]+) (0\.\d+)", figures):
            assert [row[4].split()[0] for row in cells(path, "75 %", name)][:1] == [value], name
    figures, path = rows["staleness"]
    assert [row[6] for row in cells(path, "late", "200")] == [figures.strip()]


def test_figures_of_schedules_are_those_of_the_table():
    shown = [row for row in figure_rows() if "-time_" in row[2].name]
    assert len(shown) == 2, "one row for each model"
    labels = {"`auto`": "snip, auto", "`late-forward`": "late-forward", "one map": "snip, static"}
    for _, figures, path in shown:
        for part in figures.strip().split("; "):
            label = next(name for name in labels if part.startswith(name))
            true = [cells(path, f"{budget} %", labels[label])[0][4].split()[0] for budget in (80, 90, 95)]
            assert part.removeprefix(label).strip().split(", ") == true


def test_figures_of_blackwells_formats_are_those_of_the_tables():
    page = (ROOT / "docs" / "results.md").read_text().partition("| 125 M model | [")[2].partition("\n\n")[0]
    paths = [ROOT / "docs" / link for link in re.findall(r"\]\((.*?)\)", page)]
    labels = {
        "NVIDIA's recipe": "nvidia",
        "one map of `snip`": "snip, static",
        "`auto`": "snip, auto",
        "`backward-first`": "backward-first",
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]
    assert (len(paths), len(rows)) == (2, 5)
    for what, *values in rows:
        name, _, share = what.rpartition(", ")
        budget = "–" if name.startswith("NVIDIA") else {"83 %": "83.33 %", "95 %": "95 %"}[share]
        assert [cells(path, budget, labels[name])[0][4].split()[0] for path in paths] == values


def test_figures_of_steps_with_graphs_on_two_gpus_are_those_of_the_files():
    ((_, figures, path),) = [row for row in figure_rows() if "both with CUDA graphs" in row[0]]
    files = {"tensor": "tp2", "context": "cp2", "data": "dp2", "pipeline": "pp2"}
    shown = dict(re.findall(r"(\w+) parallel (\d\.\d+)", figures))
    assert shown.keys() == files.keys()
    for word, name in files.items():
        ms = json.loads(path.with_name(path.name.replace("tp2", name)).read_text())["ms"]
        assert shown[word] == f"{ms['snip_fp4_75_graphs'] / ms['bf16_graphs']:.2f}"


def test_figures_of_steps_without_graphs_on_two_gpus_are_those_of_the_files():
    ((_, figures, path),) = [row for row in figure_rows() if row[0].startswith("the same, neither with CUDA graphs")]
    shown = dict(re.findall(r"(\w+) parallel (\d\.\d+)", figures))
    assert shown.keys() == {"context", "tensor"}
    for word, name in (("context", "cp2"), ("tensor", "tp2")):
        ms = json.loads(path.with_name(path.name.replace("cp2", name)).read_text())["ms"]
        assert shown[word] == f"{ms['snip_fp4_75'] / ms['bf16']:.2f}"


def test_every_argument_and_command_that_is_named_exists():
    help_text = subprocess.run(
        [sys.executable, "-c", "from snip_megatron.config import add_arguments as a; import argparse as p;"
         "q = p.ArgumentParser(); a(q); print(*(s for x in q._actions for s in x.option_strings))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *(p for p in PAGES if p.startswith("docs/")),
    ):  # the changelog names what went
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


def test_no_command_of_the_readme_is_cut_off():
    """The site's column of text holds 85 characters of code in a window of 1,400 px, and GitHub's about 100."""
    blocks = re.findall(
        r"^```.*?\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 84]


def test_every_room_has_a_line_in_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {path.parent.name for path in (ROOT / "snip_megatron").glob("*/__init__.py")}
    assert not {name for name in folders if f"{name}/" not in text}


def test_the_drawing_is_what_the_imports_say():
    command = [sys.executable, str(ROOT / "docs" / "draw_rooms.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_screenshots_are_small():
    pictures = list((ROOT / "docs" / "images").glob("*.png"))
    assert len(pictures) == 4
    assert all(picture.stat().st_size <= 200_000 for picture in pictures)
