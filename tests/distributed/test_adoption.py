"""Agreement over three real ranks: the map and its figures, a corrupted broadcast, a replay's schedule, the loss."""

import json
from typing import Any

import pytest
from adoption_ranks import NAMES, SCENARIOS, a_map, a_plan
from warm_ranks import WarmRanks

from snip_megatron.runtime.exchange import EXIT_MAP_MISMATCH

RANKS = 3


@pytest.fixture(scope="module")
def outcomes(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: scenario -> what it returned there. One launch for all: ranks go on after each scenario."""
    folder = tmp_path_factory.mktemp("adoption")
    warm.succeed(RANKS, [*SCENARIOS], module="adoption_ranks", tmp=folder, env={"OUT": str(folder)})
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_map_and_its_plan_arrive_whole_and_a_corrupted_broadcast_is_repeated_on_all_ranks(
    outcomes: list[dict[str, Any]],
) -> None:
    expected = {"map": json.loads(a_map().to_json()), "digest": a_map().digest(NAMES), "plan": a_plan().as_dict()}
    for rank in outcomes:
        assert rank["plan"] == expected | {"broadcasts": 1}
        assert rank["corrupted_twice"] == expected | {"broadcasts": 3}


def test_lasting_corruption_stops_every_rank(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        assert rank["corrupted_always"] == {
            "error": "ranks disagree about the precision map after 3 broadcasts",
            "exit_code": EXIT_MAP_MISMATCH,
            "broadcasts": 3,
        }


def test_ranks_with_other_linears_do_not_agree(outcomes: list[dict[str, Any]]) -> None:
    """Not even about an empty answer: there, the codes of a later map would stand for other linears."""
    assert all("ranks disagree" in rank["other_model"]["error"] for rank in outcomes)


def test_a_schedule_no_candidates_and_a_late_answer_reach_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert all(rank["others"] == {"values": [[3, 50, 2**40], [], None]} for rank in outcomes)


def test_the_loss_of_one_rank_is_known_to_all_a_step_later(outcomes: list[dict[str, Any]]) -> None:
    expected = [None, [0, 2.5, 1.0], [1, 2.25, None], [2, None, 3.0], [3, 2.0, 4.0], None]
    assert all(rank["report"]["figures"] == expected for rank in outcomes)
