"""What a run prints and writes at its end, on rank 0."""

from pathlib import Path

from snip_megatron.runtime.run_data import load_run


def finish(run: Path) -> None:
    """Print whether the run was worth it, and write ``report.html`` into its directory and print its path.

    Failures are printed only.
    """
    # The record is already on disk. A missing package or a full disk must not change the exit code of the job.
    try:
        from snip_megatron.reporting.summary import lines, summarise

        for line in lines(summarise(load_run(run))):
            print(f"snip: {line}", flush=True)
    except Exception as error:
        print(f"snip: no summary: {error}", flush=True)
    try:
        from snip_megatron.reporting.report import write_report  # which needs plotly

        print(f"snip: report: {write_report(run)}", flush=True)
    except Exception as error:
        print(f"snip: no report: {error}; later: snip report {run}", flush=True)
