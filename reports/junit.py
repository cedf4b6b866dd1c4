"""JUnit XML of a gate: one test suite a part, one test case a check, golden file, fault, kernel or figure.

GitHub Actions, GitLab, Jenkins and most others read this form and show which case failed with its message.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from reports.gate_parts import Case, Part

# XML 1.0 has no escape for control characters
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(parts: Iterable[Part]) -> ET.Element:
    """The document's root element."""
    parts = list(parts)
    cases = [case for part in parts for case in part.cases]
    root = ET.Element("testsuites", {"name": "dsv41 gate"} | _counts(cases, sum(p.seconds for p in parts)))
    for part in parts:
        suite = ET.SubElement(root, "testsuite", {"name": part.name} | _counts(part.cases, part.seconds))
        for case in part.cases:
            element = ET.SubElement(
                suite,
                "testcase",
                classname=f"dsv41.{part.name}",
                name=_clean(case.name),
                time=f"{case.seconds:.3f}",
            )
            if case.status != "passed":
                tag = {"failed": "failure", "error": "error"}.get(case.status, "skipped")
                child = ET.SubElement(
                    element, tag, message=_clean(case.message.splitlines()[0] if case.message else "")
                )
                child.text = _clean(case.message)
    return root


def _counts(cases: list[Case], seconds: float) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": str(sum(c.status == "failed" for c in cases)),
        "errors": str(sum(c.status == "error" for c in cases)),
        "skipped": str(sum(c.status in ("skipped", "declined") for c in cases)),
        "time": f"{seconds:.3f}",
    }


def _clean(text: str) -> str:
    return FORBIDDEN.sub("\ufffd", text)


def write_junit(parts: Iterable[Part], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = ET.ElementTree(junit(parts))
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)
    return path
