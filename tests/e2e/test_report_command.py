"""`snip report RUN` as a user calls it."""

import gzip
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from snip_command import ROOT, SNIP, refused, snip_alone

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.run_directory import RunDirectory


@pytest.fixture
def recorded(tmp_path) -> Path:
    path = tmp_path / "run"
    with RunDirectory(path, {"policy": "snip"}, overwrite=False, resume_step=None) as run:
        for step in range(5):
            run.metric(step, loss=5.0 - step, grad_norm=1.0, fp4_fraction=0.0)
        run.write("maps", 3, PrecisionMap.uniform(["decoder.layers.0.mlp.linear_fc1"], Format.FP4, version=1).to_json())
        run.event(3, "adopt", version=1, achieved=1.0)
    return path


def test_writes_the_page_and_says_where(recorded, tmp_path):
    process = snip_alone("report", "run", cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.strip() == "run/report.html"
    assert "</html>" in (recorded / "report.html").read_text(encoding="utf-8")


def test_sensitivity_ranks_what_the_map_chose_about(recorded, tmp_path):
    absent = refused("report", str(recorded), "--sensitivity")
    assert "no map with scores" in absent
    process = snip_alone("report", "examples/recorded_run", "--sensitivity")
    assert (process.returncode, process.stderr) == (0, "")
    head, *rows = process.stdout.splitlines()
    assert "in nats of training loss" in head
    assert rows[0].split()[2:] == ["self_attention.linear_qkv:fprop", "#" * 24, "22", "fp8_tensor"]
    assert rows[12] == "The 20 most sensitive of 264:"
    assert rows[14].endswith(" decoder.layers.0.self_attention.linear_qkv:fprop")


def test_live_serves_the_page_until_it_is_interrupted(recorded, tmp_path):
    command = [*SNIP, "report", "run", "--live", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        url, tunnel = server.stdout.readline().split()[0], server.stdout.readline()
        with urllib.request.urlopen(url, timeout=60) as answer:
            page = gzip.decompress(answer.read()).decode()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    assert "<h1>run</h1>" in page
    port = urllib.parse.urlsplit(url).port
    assert f"ssh -L {port}:127.0.0.1:{port} " in tunnel


@pytest.mark.parametrize(
    "arguments",
    [
        ("absent",),
        ("run/config.json",),
        ("run", "--port", "1"),
        ("run", "--json", "--out", "page.html"),
        ("run", "run"),
    ],
)
def test_bad_input_is_one_line(recorded, tmp_path, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("report", *arguments)
