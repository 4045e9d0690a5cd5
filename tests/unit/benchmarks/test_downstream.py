"""Questions from held-out files: what they hold, that they can be drawn again, and how results are compared."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.downstream import add_paired, table
from benchmarks.quality.downstream_tasks import (
    CHOICE_LINES,
    CHOICES,
    CONTEXT_LINES,
    LEAST_CHARACTERS,
    held_out_texts,
    make_items,
)
from snip_megatron.megatron import prepare_data


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
    few = make_items(TEXTS, 12, 3, LONGEST)
    assert few == make_items(TEXTS, 12, 3, LONGEST) != make_items(TEXTS, 12, 4, LONGEST)
    assert sum("alpha" in item.context for item in few) == 6
    assert not any(
        "short" in item.context or "x\n" in item.context for item in items
    )  # no wrong choices, no full lines


def row(label: str, policy: str, seed: int, right: str) -> dict[str, Any]:
    figures = dict.fromkeys(("acc", "acc_norm"), right.count("1") / len(right))
    figures |= dict.fromkeys(("acc_stderr", "acc_norm_stderr"), 0.0)
    run = {"kind": "from_warm", "label": label, "policy": policy, "budget": 0.8, "seed": seed, "average_share": 0.9}
    counts = {"questions": len(right), "texts": 1, "bits_per_byte": 1.0, "validation": {"map": 2.0, "bf16": 1.9}}
    return run | figures | counts | {"right": {"acc": right, "acc_norm": right}}


def test_a_run_is_compared_with_bf16_of_its_seed_question_by_question() -> None:
    rows = [
        row("bf16", "bf16", 1, "1010"),
        row("bf16", "bf16", 2, "1111"),
        row("auto, 90 %", "snip", 1, "1110"),
        row("bf16 with an option", "bf16", 2, "0111"),
        row("auto, 90 %", "snip", 3, "1110"),
    ]
    add_paired(rows)
    assert [each.get("paired", {}).get("acc", {}).get("mean") for each in rows] == [None, None, 0.25, -0.25, None]
    assert rows[2]["paired"]["acc"]["stderr"] == pytest.approx(0.25)  # std of (0, 1, 0, 0) is 1/2
    facts = dict.fromkeys(("model", "device", "date", "commit", "experiment", "seed", "command"), "x")
    page = table(facts | {"trained_tokens": 1, "versions": {}, "rows": rows})
    assert "| auto, 90 % | 1 | 90.0 % | 2.0000 | 1.9000 | 75.0 ± 0.0 | 75.0 ± 0.0 | 1.0000 | +25.0 ± 25.0 |" in page


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
