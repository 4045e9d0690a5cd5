"""Tasks for lm-evaluation-harness from the hold-out of ``snip prepare-data``, without a download.

``held_out_lines`` shows the model lines of a held-out file and four blocks of lines from the same file. One of them is
what comes next. ``held_out_text`` is the likelihood of the beginnings of held-out files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LINES, TEXT = "held_out_lines", "held_out_text"
CONTEXT_LINES, CHOICE_LINES, CHOICES = 24, 4, 4
LEAST_CHARACTERS = 80
"""A block of lines with fewer characters, spaces not counted, is no choice: it could follow almost anything."""
MOST_CHARACTERS = 6000
"""Characters that context and choice may have together. lm_eval drops the beginning of what is too long for a model."""


@dataclass(frozen=True)
class Item:
    """A question: which of ``choices`` follows ``context``? ``answer`` is the position of the one that does."""

    context: str
    choices: list[str]
    answer: int


def held_out_texts(data: Path) -> list[str]:
    """Return the held-out files of a folder of ``snip prepare-data``.

    Raises:
        ValueError: a file's tokens do not decode to a text that has these tokens.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    texts = []
    for tokens in IndexedDataset(str(data / "valid")):
        ids = tokens[:-1].tolist()  # the last one ends the document
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            raise ValueError(f"{data}: file {len(texts)} of the hold-out is not what its tokens decode to")
        texts.append(text)
    return texts


def make_items(texts: Sequence[str], count: int, seed: int, longest: int) -> list[Item]:
    """Draw at most ``count`` questions, about equally many from each text. The same seed gives the same questions.

    The wrong choices are blocks of as many lines elsewhere in the file. No two choices of a question overlap or are
    equal, and none overlaps the context.

    Args:
        texts: the held-out files.
        count: number of questions.
        seed: the seed.
        longest: the model's context in tokens. A choice has at most as many bytes, and so at most as many tokens.
    """
    shuffler = random.Random(seed)
    waiting = [_items(text, random.Random(f"{seed} {i}"), longest) for i, text in enumerate(texts)]
    shuffler.shuffle(waiting)
    items: list[Item] = []
    while waiting and len(items) < count:
        drawn = [(source, next(source, None)) for source in waiting]
        items += [item for _, item in drawn if item is not None]
        waiting = [source for source, item in drawn if item is not None]
    return items[:count]


def _items(text: str, shuffler: random.Random, longest: int) -> Iterator[Item]:
    """Yield the questions of one text, whose right choices do not overlap."""
    lines = text.splitlines(keepends=True)
    blocks = ((i, _block(lines, i)) for i in range(0, len(lines) - CHOICE_LINES + 1, CHOICE_LINES))
    starts = [i for i, block in blocks if _is_full(block) and len(block.encode()) <= longest]
    order = [i for i in starts if i >= CONTEXT_LINES]
    shuffler.shuffle(order)
    for start in order:
        context = "".join(lines[start - CONTEXT_LINES : start])
        right = _block(lines, start)
        elsewhere = [i for i in starts if not start - CONTEXT_LINES - CHOICE_LINES < i < start + CHOICE_LINES]
        distractors = list(dict.fromkeys(block for i in elsewhere if (block := _block(lines, i)) != right))
        distractors = [block for block in distractors if len(context) + max(len(right), len(block)) <= MOST_CHARACTERS]
        if len(distractors) < CHOICES - 1 or len(context) + len(right) > MOST_CHARACTERS or not context.strip():
            continue
        choices = [right, *shuffler.sample(distractors, CHOICES - 1)]
        shuffler.shuffle(choices)
        yield Item(context, choices, choices.index(right))


def _block(lines: Sequence[str], start: int) -> str:
    return "".join(lines[start : start + CHOICE_LINES])


def _is_full(block: str) -> bool:
    return len("".join(block.split())) >= LEAST_CHARACTERS


def write_tasks(folder: Path, texts: Sequence[str], items: Sequence[Item], characters: int) -> None:
    """Write both tasks, for ``lm_eval --include_path FOLDER --tasks held_out_lines,held_out_text``.

    Args:
        folder: the folder, made if it does not exist.
        texts: the held-out files.
        items: the questions.
        characters: of each file, the likelihood of as many characters at the beginning is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, LINES, [asdict(item) for item in items], _choice_task())
    _write(folder, TEXT, [{"text": text[:characters]} for text in texts], _text_task())


def _choice_task() -> dict[str, Any]:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": metrics,
    }


def _text_task() -> dict[str, Any]:
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    return {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text", "metric_list": metrics}


def _write(folder: Path, name: str, rows: Sequence[dict[str, Any]], task: dict[str, Any]) -> None:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}
    body = {"task": name, **source, "test_split": "test", **task, "metadata": {"version": 1.0}}
    (folder / f"{name}.yaml").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
