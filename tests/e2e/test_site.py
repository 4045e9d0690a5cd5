"""The site of the documentation builds without a warning, of a dead link too, and all of it is local."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = set()
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|source|object|link)\b[^>]*>", page.read_text(encoding="utf-8"))
        for tag in tags:
            if 'rel="canonical"' not in tag:
                loaded |= set(re.findall(r"\b(?:src|href|data)=[\"']?([^\"'\s>]+)", tag))
    assert any(target.endswith(".js") for target in loaded)
    assert not {target for target in loaded if re.match(r"(https?:)?//", target)}
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
