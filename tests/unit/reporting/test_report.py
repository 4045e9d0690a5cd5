"""The report as a file: structure, escaping, nothing from the network, and what its figures hold."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import synthetic_run
from plotly.offline import get_plotlyjs

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.reporting.figures import MAX_POINTS, thin
from snip_megatron.reporting.report import write_report
from snip_megatron.runtime.run_directory import RunDirectory

URL_ATTRIBUTES = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background", "xlink:href"}
VOID = {"meta", "input", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements, text by element id, scripts; checks that elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif data.strip():
            self.texts.append(data.strip())

    def ids(self) -> set[str]:
        return {attributes["id"] for _, attributes in self.elements if attributes.get("id")}

    def data(self, name: str):
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        index = next(i for i, attributes in enumerate(scripts) if attributes.get("id") == name)
        return json.loads(self.scripts[index])


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(whole_run) -> Page:
    return page_of(whole_run)


def test_nothing_is_loaded(page):
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        for name in URL_ATTRIBUTES & attributes.keys():
            assert attributes[name].startswith("#"), (tag, name, attributes[name])
    templates = (Path(__file__).parents[3] / "snip_megatron/reporting/templates").iterdir()
    for template in templates:
        text = template.read_text()
        assert "http:" not in text
        assert "https:" not in text
        assert "@import" not in text
        assert "url(" not in text


def test_policy_allows_exactly_the_scripts_of_the_page(page):
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["img-src"] == "data: blob:"
    executable = [s for s, (_, a) in zip(page.scripts, scripts_of(page), strict=True) if "type" not in a]
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in executable]
    assert directives["script-src"].split() == [f"'sha256-{h}'" for h in hashes]
    assert executable[0] == get_plotlyjs()


def scripts_of(page: Page):
    return [element for element in page.elements if element[0] == "script"]


def test_all_figures_are_there(page):
    assert {"loss", "map", "harm", "slider", "formats", "choices-table"} <= page.ids()
    loss = page.data("figures-data")["loss"]["data"]
    assert [trace["name"] for trace in loss] == ["training loss", "validation", "map adopted", "guard"]
    assert loss[0]["x"] == list(range(synthetic_run.STEPS))
    assert loss[2]["x"] == [15, 35, 55, 75, 95]
    assert loss[3]["x"] == [57]
    *formats, asked = page.data("figures-data")["formats"]["data"]
    assert [trace["name"] for trace in formats] == ["fp4", "fp8", "bf16"]
    assert [trace["x"] for trace in formats] == [[0, 15, 35, 55, 75, 95, synthetic_run.STEPS - 1]] * 3
    assert [trace["y"] for trace in formats] == [[0.0, *[0.75] * 6], [0.0, *[0.25] * 6], [1.0, *[0.0] * 6]]
    assert set(asked["y"]) == {0.75}


def test_the_grid_is_the_map(page, whole_run):
    payload = page.data("maps-data")
    assert [m["step"] for m in payload["maps"]] == [15, 35, 55, 75, 95]
    assert payload["layers"] == list(range(6))
    assert len(payload["rows"]) == 12
    for entry in payload["maps"]:
        recorded = PrecisionMap.from_json((whole_run / "maps" / f"step_{entry['step']}.json").read_text())
        scores = json.loads((whole_run / "scores" / f"step_{entry['step'] - 5}.json").read_text())["scores"]
        for r, row in enumerate(payload["rows"]):
            for c, layer in enumerate(payload["layers"]):
                key = f"{row['stack']}.layers.{layer}.{row['path']}:{row['gemm']}"
                assert payload["formats"][entry["codes"][r][c]]["name"] == recorded.choices[key].value
                shown = payload["scores"][entry["scores"]][r][c]["fp4"]
                assert shown == pytest.approx(
                    [scores[key]["fp4"][n] for n in ("delta_loss", "delta_weight", "q")], rel=1e-3
                )
                assert payload["harms"][entry["scores"]][r][c] == shown[2]  # fp4 is the costliest


def test_a_bf16_run(tmp_path):
    page = page_of(synthetic_run.write_run(tmp_path / "run", updates=0, faults=False))
    assert page.data("maps-data") is None
    figures = page.data("figures-data")
    assert figures["loss"] is not None
    assert figures["formats"] is None
    assert "No fault is recorded." in page.texts
    assert "slider" not in page.ids()


def test_granularity_layer_and_a_missing_linear(tmp_path):
    qkv, fc2 = "decoder.layers.3.self_attention.linear_qkv", "mtp.layers.7.mtp_model_layer.mlp.experts.linear_fc2"
    with RunDirectory(tmp_path, {}, overwrite=False, resume_step=None) as run:
        run.write("maps", 4, PrecisionMap(choices={qkv: Format.FP4, fc2: Format.FP8}, version=1).to_json())
        run.write_scores(4, {qkv: {"fp4": {"q": 1.5}, "<b>": {"q": 2.0}}}, version=1)
        run.event(4, "adopt", version=1)
    payload = page_of(tmp_path).data("maps-data")
    assert payload["layers"] == [3, 7]
    assert [row["label"] for row in payload["rows"][::3]] == ["qkv · fprop", "mtp experts fc2 · fprop"]
    codes = payload["maps"][0]["codes"]
    assert codes == [[Format.FP4.code, None]] * 3 + [[None, Format.FP8.code]] * 3
    assert payload["scores"][0][0] == [{"fp4": [None, None, 1.5]}, None]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u2028 & \"'{{ 7*7 }}"


def test_everything_from_the_files_is_escaped(tmp_path):
    path = tmp_path / "<b>run"
    with RunDirectory(
        path, {HOSTILE: {HOSTILE: HOSTILE}}, overwrite=False, resume_step=None, facts={"a": HOSTILE}
    ) as run:
        for step in range(3):
            run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.5)
        run.event(0, "probe", kind=HOSTILE, seconds=1.0)
        run.event(0, "submit", version=1)
        run.event(1, "adopt", version=1, status=HOSTILE, achieved_per_stage={HOSTILE: 0.5, "0": 0.5})
        run.write("maps", 1, PrecisionMap.uniform(["decoder.layers.0.mlp.linear_fc1"], Format.FP4, version=1).to_json())
        run.event(2, "guard", reason=HOSTILE)
        run.event(2, HOSTILE)
    (path / "maps" / "step_2.json").write_text(json.dumps({"schema": HOSTILE}))
    page = page_of(path)
    assert len(scripts_of(page)) == 4
    assert not any(tag in ("img", "b") for tag, _ in page.elements)
    assert page.data("maps-data")["maps"][0]["status"] == HOSTILE
    data = [text for text, (_, a) in zip(page.scripts, scripts_of(page), strict=True) if "type" in a]
    assert not any(set(text) & set("<>&") for text in data)
    figures = page.data("figures-data")
    texts = [t for trace in figures["loss"]["data"] for t in trace.get("text", [])]
    assert any("alert" in text for text in texts)
    assert not any("<script" in text or "<img" in text for text in texts)  # plotly reads some HTML in texts
    assert any("{{ 7*7 }}" in text for text in page.texts)


def test_thin_keeps_spikes_ends_and_gaps():
    steps = list(range(100_000))
    losses: list[float | None] = [1.0 + 1e-6 * (step % 7) for step in steps]
    losses[54_321], losses[77_777] = 9.0, -9.0
    losses[200:400] = [None] * 200
    x, y = thin(steps, losses)
    assert len(x) <= 2 * MAX_POINTS
    assert x == sorted(x)
    assert {9.0, -9.0, None} <= set(y)
    assert thin([1, 2], [None, 3.0]) == ([1, 2], [None, 3.0])


def test_damaged_records_are_said_and_no_part_of_the_page_denies_them(tmp_path):
    run = synthetic_run.write_run(tmp_path / "run", updates=2, steps=50, faults=False)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[20] = lines[20][:9] + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 50, "lo')  # the last one is being written
    for file in (run / "maps").iterdir():
        file.write_text("{")
    page = page_of(run)
    assert f"{run / 'metrics.jsonl'}: one damaged line, the first is line 21" in page.texts
    assert "2 maps were adopted, but their files cannot be read." in page.texts
    assert not any("has adopted none" in text for text in page.texts)
    assert "files unreadable or damaged: 3" in page.texts
