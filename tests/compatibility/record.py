"""Records how many tests passed on which stack: ``python record.py RESULT REPORT... [-- ARGS of pytest]``.

Of a test in several reports the last one counts, so that the suite can run in parts, and a test again.
"""

import datetime
import importlib.metadata
import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def outcomes(report: Path) -> dict[str, str]:
    """Return what became of each test of a run of pytest, from its report in JUnit's format."""
    result: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if result.get(name) != "failed":  # a test whose teardown ends in an error is there twice
            result[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return result


def record(reports: list[Path], arguments: list[str]) -> dict[str, object]:
    """Return the result of a run of pytest, or of several with parts of the suite."""
    tests: dict[str, str] = {}
    for report in reports:
        tests |= outcomes(report)
    counts = Counter(tests.values())
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "megatron_core": version("megatron-core"),
        "torch": version("torch"),
        "transformer_engine": version("transformer-engine"),
        "python": platform.python_version(),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        **({"arguments": arguments} if arguments else {}),  # only a part of the suite has run
    }


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    result, *reports = map(Path, sys.argv[1:end])
    result.write_text(json.dumps(record(reports, sys.argv[end + 1 :]), indent=1) + "\n", encoding="utf-8")
    print(f"test.sh: {result}")
