"""Questions from held-out files: what they hold, that they can be drawn again, and how results are compared."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from benchmarks.quality.downstream import add_paired, models
from benchmarks.quality.downstream_tasks import (
    CHOICE_LINES,
    CHOICES,
    CONTEXT_LINES,
    LEAST_CHARACTERS,
    held_out_texts,
    make_items,
    write_tasks,
)
from snip_megatron.errors import SnipError
from snip_megatron.evaluation.results import Results
from snip_megatron.megatron.data import prepare_data


def text(name: str, lines: int) -> str:
    return "".join(f"{name} = number({i}, 'the value of line {i} of {name}')\n" for i in range(lines))


TEXTS = [text("alpha", 200), text("beta", 90), text("short", CONTEXT_LINES + CHOICE_LINES), "x\n" * 500]


LONGEST = 500


def test_the_right_choice_comes_next_and_the_wrong_ones_from_elsewhere_in_the_file() -> None:
    items = make_items(TEXTS, 1000, 1, LONGEST)
    assert len({(item.context, item.choices[item.answer]) for item in items}) == len(items) > 20
    for item in items:
        (source,) = [text for text in TEXTS if item.context in text]
        before, _, after = source.partition(item.context)
        assert len(set(item.choices)) == CHOICES
        assert item.context.count("\n") == CONTEXT_LINES
        for i, choice in enumerate(item.choices):
            assert choice.count("\n") == CHOICE_LINES
            assert len("".join(choice.split())) >= LEAST_CHARACTERS
            assert after.startswith(choice) == (i == item.answer)
            assert choice in before or choice in after  # does not overlap the context
    assert {item.answer for item in items} == set(range(CHOICES))
    assert not any(
        "short" in item.context or "x\n" in item.context for item in items
    )  # no wrong choices, no full lines


def test_a_seed_draws_the_same_questions_from_all_texts_alike() -> None:
    items = make_items(TEXTS, 12, 3, LONGEST)
    assert items == make_items(TEXTS, 12, 3, LONGEST) != make_items(TEXTS, 12, 4, LONGEST)
    assert sum("alpha" in item.context for item in items) == 6


def test_choices_fit_in_the_context_of_the_model() -> None:
    """lm_eval shortens the text before a choice, and asserts that the choice itself fits."""
    size = max(len(choice.encode()) for item in make_items(TEXTS, 1000, 1, LONGEST) for choice in item.choices)
    fitting = make_items(TEXTS, 1000, 1, size - 1)
    assert fitting
    assert all(len(choice.encode()) < size for item in fitting for choice in item.choices)


def test_tasks_hold_questions_and_texts(tmp_path: Path) -> None:
    items = make_items(TEXTS, 5, 1, LONGEST)
    write_tasks(tmp_path, TEXTS, items, characters=10)
    for name, rows in (("held_out_lines", 5), ("held_out_text", len(TEXTS))):
        task = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        source = Path(task["dataset_kwargs"]["data_files"]["test"])
        body = [json.loads(line) for line in source.read_text().splitlines()]
        assert (task["task"], len(body)) == (name, rows)
        assert task["doc_to_target"] in body[0]
    assert body[0] == {"text": TEXTS[0][:10]}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_held_out_files_are_read_back_from_their_tokens(tmp_path: Path, tokenizer: str) -> None:
    texts = {f"{i}.txt": f"\n\tnaïve {i} ☃  <|endoftext|> .\r\n" * 5 for i in range(8)}
    source = tmp_path / "text"
    source.mkdir()
    for name, content in texts.items():
        (source / name).write_bytes(content.encode())
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    given = [str(source), "--output", str(tmp_path / "data"), "--tokenizer", tokenizer, "--holdout", "0.4"]
    assert prepare_data.run(parser.parse_args(given)) == 0
    held = held_out_texts(tmp_path / "data")
    assert held
    assert set(held) < set(texts.values())


def test_differences_are_taken_question_by_question() -> None:
    rows = [
        {"kind": "from_warm", "seed": 1, "policy": "bf16", "label": "bf16", "right": {"acc": "1100"}},
        {"kind": "from_warm", "seed": 1, "policy": "snip", "label": "snip", "right": {"acc": "1010"}},
        {
            "kind": "from_warm",
            "seed": 2,
            "policy": "snip",
            "label": "snip",
            "right": {"acc": "1111"},
        },  # has no bf16 beside it
    ]
    add_paired(rows)
    assert rows[1]["paired"] == {"acc": {"mean": 0.0, "stderr": pytest.approx((2 / 3) ** 0.5 / 2)}}
    assert "paired" not in rows[0] | rows[2]


def test_a_comparison_without_kept_weights_is_refused(tmp_path: Path) -> None:
    results = Results(Path("r.json"), {}, {}, runs={"a": {"id": "a", "status": "done"}, "b": {"id": "b", "status": ""}})
    with pytest.raises(SnipError, match=r'holds no weights of a run of r\.json; give the --work .* "save": true'):
        models(results, tmp_path, tmp_path, batch=1)
    for identity in "ab":
        (tmp_path / "runs" / identity / "checkpoint").mkdir(parents=True)
    assert [model.run["id"] for model in models(results, tmp_path, tmp_path, batch=1)] == ["a"]
