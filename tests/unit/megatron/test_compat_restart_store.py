"""When ranks were started again on a shared store."""

from __future__ import annotations

import pytest

from snip_megatron.megatron.compat import restart_store

AGENT, COUNT, OWN = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        ({}, False),
        ({AGENT: "True", COUNT: "0"}, False),
        ({AGENT: "True", COUNT: "2"}, True),
        ({AGENT: "True", COUNT: "2", OWN: "0"}, True),
        ({AGENT: "True", COUNT: "2", OWN: "1"}, False),
        ({AGENT: "False", COUNT: "2"}, False),
    ],
)
def test_only_after_a_restart_on_a_shared_store(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], needed: bool
) -> None:
    for name in (AGENT, COUNT, OWN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert restart_store.is_needed() == needed
