"""The report's section on measured truth."""

from __future__ import annotations

from pathlib import Path

from test_proxy import save, table_with_truth

from snip_megatron.records.run_directory import RunDirectory
from snip_megatron.reporting.report import write_report
from snip_megatron.reporting.truth_view import latest_truth


def test_the_latest_measured_table_is_shown(tmp_path: Path) -> None:
    run = save(tmp_path / "run", table_with_truth(0.1, again=0.1, step=5), table_with_truth(0.1, step=11))
    (run / "stats" / "step_12.npz").write_bytes(b"torn")
    with RunDirectory(run, {}, overwrite=True, resume_step=20):
        pass
    unreadable: list[str] = []
    view = latest_truth(run, unreadable)
    assert view is not None
    assert (view.step, view.fmt) == (11, "fp4")
    assert view.estimators[0] == "noise"  # no ceiling was measured at step 11
    assert [(quantity, options) for quantity, options, _ in view.rows][:2] == [("loss", 16), ("drift: all", 48)]
    assert len(unreadable) == 1
    page = write_report(run).read_text()
    assert "Estimators against measured truth" in page
    assert '<td class="text">drift: all</td><td>48</td>' in page


def test_without_truth_there_is_no_section(tmp_path: Path) -> None:
    assert latest_truth(tmp_path, []) is None
    with RunDirectory(tmp_path / "run", {}, overwrite=False, resume_step=None):
        pass
    assert "Estimators against measured truth" not in write_report(tmp_path / "run").read_text()
