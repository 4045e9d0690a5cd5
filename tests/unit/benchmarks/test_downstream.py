"""Questions from held-out files: what they hold, that they can be drawn again, and how results are compared."""

from benchmarks.quality.downstream_tasks import CHOICE_LINES, CHOICES, CONTEXT_LINES, LEAST_CHARACTERS, make_items


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
