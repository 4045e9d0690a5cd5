"""Records how many tests passed on which stack: ``python record.py REPORT RESULT [ARGS of pytest]``."""

import datetime
import importlib.metadata
import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def record(report: Path, arguments: list[str]) -> dict[str, object]:
    """Return the result of a run of pytest from its report in JUnit's format."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "megatron_core": version("megatron-core"),
        "torch": version("torch"),
        "transformer_engine": version("transformer-engine"),
        "python": platform.python_version(),
        "passed": tests - failures - errors - skipped,
        "failed": failures + errors,
        "skipped": skipped,
        **({"arguments": arguments} if arguments else {}),  # only a part of the suite has run
    }


if __name__ == "__main__":
    result = Path(sys.argv[2])
    result.write_text(json.dumps(record(Path(sys.argv[1]), sys.argv[3:]), indent=1) + "\n", encoding="utf-8")
    print(f"test.sh: {result}")
