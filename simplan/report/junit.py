"""Check results as JUnit XML: a suite per scenario file, a test case per expectation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

from simplan.report.checks import CheckedFile, CheckStatus, count

__all__ = ["junit_xml"]

_TAGS = {CheckStatus.FAILED: "failure", CheckStatus.ERROR: "error", CheckStatus.SKIPPED: "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(files: Iterable[CheckedFile]) -> str:
    """The XML text, as continuous integration services read it."""
    files = tuple(files)
    root = ElementTree.Element("testsuites", {"name": "simplan check"} | _counts(files))
    for file in files:
        suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(file.file)} | _counts((file,)))
        for number, case in enumerate(file.cases, start=1):
            attributes = {"classname": _clean(file.file), "name": f"{number} {_clean(case.name)}"}
            attributes |= {"file": _clean(file.file)} | ({} if case.line is None else {"line": str(case.line)})
            element = ElementTree.SubElement(suite, "testcase", attributes)
            if case.status in _TAGS:
                found = ElementTree.SubElement(element, _TAGS[case.status], message=_clean(case.message))
                found.text = _clean(case.why or case.message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(files: tuple[CheckedFile, ...]) -> dict[str, str]:
    return {
        "tests": str(sum(len(file.cases) for file in files)),
        "failures": str(count(files, CheckStatus.FAILED)),
        "errors": str(count(files, CheckStatus.ERROR)),
        "skipped": str(count(files, CheckStatus.SKIPPED)),
    }


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return _NOT_XML.sub("?", text)
