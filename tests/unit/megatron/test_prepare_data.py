"""prepare-data: inputs, split, tokenizers, the real Megatron data files, and what a rerun may and may not do."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusal import refusal
from tokenizers import Tokenizer

from snip_megatron.megatron import prepare_data
from snip_megatron.precision.errors import SnipError

WORDS = ("alpha", "beta", "gamma", "delta", "return", "self", "import", "über", "naïve", "✓")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty small documents in two folders."""
    folder = tmp_path / "texts"
    for index in range(40):
        path = folder / f"part{index % 2}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = np.random.default_rng(index).choice(WORDS, 60)
        path.write_text(f"document {index}\n    " + " ".join(words) + "\n", encoding="utf-8")
    return folder


def prepare(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    return prepare_data.run(parser.parse_args([str(argument) for argument in arguments]))


def manifest(output: Path) -> dict:
    return json.loads((output / "manifest.json").read_text())


def documents(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    assert list(data.index.document_indices) == list(range(len(data) + 1))  # one sequence a document
    return [np.array(data[index]) for index in range(len(data))]  # copies: the file is unmapped with data


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_megatron_reads_back_every_file_with_its_end(texts: Path, tmp_path: Path, tokenizer: str) -> None:
    output = tmp_path / "out"
    extra = ["--vocab-size", "300"] if tokenizer == "bpe" else []
    assert prepare(texts, "--output", output, "--tokenizer", tokenizer, "--holdout", "0.2", *extra) == 0
    facts = manifest(output)
    loaded = Tokenizer.from_file(str(output / "tokenizer" / "tokenizer.json"))
    end = facts["tokenizer"]["end_of_document_id"]
    result = []
    for name in ("train", "valid"):
        part = documents(output / name)
        assert len(part) == facts[name]["files"]
        assert sum(map(len, part)) == facts[name]["tokens"]
        for document in part:
            assert document[-1] == end
            assert end not in document[:-1]
            result.append(loaded.decode(document[:-1].tolist(), skip_special_tokens=False))
    assert sorted(result) == sorted(path.read_text() for path in texts.rglob("*.txt"))
    assert facts["valid"]["files"] >= 1


BPE = prepare_data.train_bpe(iter(["the quick brown fox " * 5, "    return self.value\n" * 5]), 280)


@given(st.text(max_size=200))
@example(f"a{prepare_data.END_OF_DOCUMENT}b")
def test_tokenizers_keep_every_text(text: str) -> None:
    """The end of a document that is written in a text is text."""
    tokenizer = prepare_data.byte_tokenizer()
    (fast,) = prepare_data.encode_documents(tokenizer, [text])
    assert fast == [*text.encode(), 256]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode(text).ids == fast[:-1]
    assert tokenizer.decode(fast[:-1]) == text
    (ids,) = prepare_data.encode_documents(BPE, [text])
    assert ids.count(BPE.token_to_id(prepare_data.END_OF_DOCUMENT)) == 1
    assert BPE.decode(ids[:-1], skip_special_tokens=False) == text


def test_equal_input_gives_equal_bytes_wherever_it_lies(texts: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "moved" / "texts"
    elsewhere.parent.mkdir()
    prepare(texts, "--output", tmp_path / "a", "--vocab-size", "300")
    texts.rename(elsewhere)
    prepare(elsewhere, "--output", tmp_path / "b", "--vocab-size", "300")
    names = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert {"train.bin", "train.idx", "valid.bin", "valid.idx", "manifest.json"} <= {str(name) for name in names}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_other_files_do_not_move_a_file_across_the_split(texts: Path) -> None:
    def holdout() -> set[str]:
        files, _ = prepare_data.collect([texts], ["*"])
        train, valid = prepare_data.split(files, 0.3)
        assert len(train) + len(valid) == len(files)
        assert 0 < len(valid) < 25
        return {file.key for file in valid}

    before = holdout()
    (texts / "new.txt").write_text("something new\n")
    assert holdout() - {"texts/new.txt"} == before


def test_skipped_files_are_counted(texts: Path, tmp_path: Path) -> None:
    (texts / "binary.txt").write_bytes(b"ab\0cd")
    (texts / "latin.txt").write_bytes("für".encode("latin-1"))
    (texts / "blank.txt").write_text(" \n")
    (texts / "copy.txt").write_bytes((texts / "part0" / "00.txt").read_bytes())
    (texts / ".hidden").mkdir()
    (texts / ".hidden" / "x.txt").write_text("hidden\n")
    (texts / "dangling.txt").symlink_to(texts / "nowhere")
    files, skipped = prepare_data.collect([texts], ["*.txt"])
    assert skipped == {"binary": 1, "duplicate": 1, "empty": 1, "undecodable": 1}
    assert len(files) == 40
    assert len(prepare_data.collect([texts], ["part1/*"])[0]) == 20


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda p: None, "no such file or folder"),
        (lambda p: p.mkdir(), "holds no UTF-8 text that matches --glob *"),
        (lambda p: (p.mkdir(), (p / "x").write_bytes(b"\0")), "holds no UTF-8 text that matches --glob *"),
    ],
)
def test_bad_inputs_are_refused_by_name(texts: Path, tmp_path: Path, make, part: str) -> None:
    bad = tmp_path / "bad"
    make(bad)
    message = refusal(prepare, texts, bad, "--output", tmp_path / "out")
    assert message.startswith(f"{bad}: ")
    assert part in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--holdout", "1"], "--holdout 1.0"),
        (["--vocab-size", "256"], "--vocab-size 256: must be at least 257"),
        (["--vocab-size", "300", "--tokenizer", "bytes"], "--tokenizer bytes has 257 tokens"),
    ],
)
def test_bad_arguments_are_refused(texts: Path, tmp_path: Path, arguments: list[str], part: str) -> None:
    assert part in refusal(prepare, texts, "--output", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_one_file_has_no_holdout(texts: Path, tmp_path: Path) -> None:
    path = texts / "part0" / "00.txt"
    with pytest.raises(SnipError, match="too few for a hold-out"):
        prepare(path, "--output", tmp_path / "out")
    prepare(path, "--output", tmp_path / "out", "--holdout", "0", "--tokenizer", "bytes")
    assert manifest(tmp_path / "out")["valid"] is None
    assert not (tmp_path / "out" / "valid.bin").exists()


def test_existing_output_needs_a_word(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    same = (texts, "--output", output, "--tokenizer", "bytes")
    prepare(*same)
    written = (output / "train.bin").stat()
    with pytest.raises(SnipError, match="exists; add --overwrite"):
        prepare(*same)
    capsys.readouterr()
    assert prepare(*same, "--reuse") == 0
    assert "is current" in capsys.readouterr().out
    assert (output / "train.bin").stat() == written

    (texts / "new.txt").write_text("something new\n")
    with pytest.raises(SnipError, match="made from other text or arguments"):
        prepare(*same, "--reuse")
    (tmp_path / ".out.new").mkdir()  # of a command that was killed
    (output / "cache").mkdir()  # where Megatron keeps sample indices of the old data
    assert prepare(*same, "--reuse", "--overwrite") == 0
    assert manifest(output)["inputs"]["files"] == 41
    assert not (output / "cache").exists()

    (output / "train.bin").write_bytes(b"cut")
    assert prepare(*same, "--reuse", "--overwrite") == 0
    assert (output / "train.bin").stat().st_size == 2 * manifest(output)["train"]["tokens"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]

    output.rename(texts / "out")  # a result inside an input is no text
    assert prepare(texts, "--output", texts / "out", *same[3:], "--reuse") == 0


def test_a_folder_of_others_is_never_replaced(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep\n")
    with pytest.raises(SnipError, match="was not made by snip prepare-data"):
        prepare(texts, "--output", output, "--overwrite")
    assert [path.name for path in output.iterdir()] == ["mine.txt"]


def test_a_failure_leaves_the_old_result(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    prepare(texts, "--output", output, "--tokenizer", "bytes")
    before = (output / "manifest.json").read_bytes()

    def fail(tokenizer: Tokenizer, batch: list[str]) -> list[list[int]]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(prepare_data, "encode_documents", fail)
    with pytest.raises(SnipError, match="cannot be written"):
        prepare(texts, "--output", output, "--tokenizer", "bytes", "--holdout", "0.4", "--overwrite")
    assert (output / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]
