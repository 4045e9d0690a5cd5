"""`snip prepare-data` as a user runs it."""

import json
from pathlib import Path

from snip_command import snip_alone


def test_the_standard_library_is_prepared(tmp_path: Path) -> None:
    output = tmp_path / "data"
    given = "--glob json/*.py --glob email/*.py --tokenizer bytes --holdout 0.2"
    made = snip_alone("prepare-data", "--output", output, *given.split())
    assert made.returncode == 0, made.stderr
    assert "tokenizing train: 100%" in made.stderr
    assert "Traceback" not in made.stderr
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["train"]["tokens"] == manifest["train"]["bytes"] + manifest["train"]["files"]
    assert f"unigram entropy of the hold-out: {manifest['valid']['unigram_entropy_nats']:.4f}" in made.stdout
    last = made.stdout.splitlines()[-1]
    assert f"--train-data-path {output}/train --valid-data-path {output}/valid" in last
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {output}/tokenizer" in last
