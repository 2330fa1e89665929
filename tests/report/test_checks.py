"""Check results as text, JSON, JUnit XML and GitHub annotations."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from simplan.report.checks import (
    CheckedCase,
    CheckedFile,
    CheckStatus,
    checks_json,
    checks_text,
    github_annotations,
    github_text,
    junit_xml,
    markdown_summary,
)
from tests.support.problems import says


@pytest.fixture
def files() -> list[CheckedFile]:
    return [
        CheckedFile("a.yaml", (CheckedCase("fits", CheckStatus.PASSED, "fits is true, expected true"),)),
        CheckedFile(
            "b, c.yaml",
            (
                CheckedCase("mfu", CheckStatus.FAILED, "mfu is 0.5 <\x00>,\nexpected 100 %", "a | paper", 7),
                CheckedCase("step_time_s", CheckStatus.SKIPPED, "no | calibration"),
            ),
        ),
        CheckedFile("d.yaml", (CheckedCase("scenario", CheckStatus.ERROR, "plan.pp = 5: must divide", line=3),)),
    ]


def test_text_names_what_did_not_pass(files: list[CheckedFile]) -> None:
    text = checks_text(files)
    assert text.splitlines()[0].split() == ["ok", "a.yaml", "1", "passed"]
    assert "line 7: mfu is 0.5" in text
    assert "(a | paper)" in text
    assert text.splitlines()[-1] == "3 scenarios: 1 passed, 1 failed, 1 skipped, 1 errors"


def test_json_has_every_case(files: list[CheckedFile]) -> None:
    document = json.loads(json.dumps(checks_json(files)))
    assert document["totals"] == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert [len(file["cases"]) for file in document["files"]] == [1, 2, 1]
    assert document["files"][1]["cases"][0]["line"] == 7


def test_junit_counts_and_is_well_formed(files: list[CheckedFile]) -> None:
    root = ElementTree.fromstring(junit_xml(files).encode())
    assert root.tag == "testsuites"
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    for suite in root:
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures") == str(len(suite.findall("testcase/failure")))
        assert suite.get("errors") == str(len(suite.findall("testcase/error")))
        assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))
        assert len({case.get("name") for case in cases}) == len(cases)
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("mfu is 0.5 <?>,")


def test_annotations_are_one_line_each_with_escapes(files: list[CheckedFile]) -> None:
    failed, skipped, error = github_annotations(files)
    # documented escapes: %25 %0A in the message, %2C and %3A too in properties
    assert says(failed, "::error file=b%2C c.yaml,line=7,", "%3A mfu::", "0.5 <\x00>,%0A", "100 %25 (a | paper)")
    assert "\n" not in failed
    assert skipped.startswith("::notice file=b%2C c.yaml,line=1,")
    assert says(error, "line=3,", "%3A scenario::", "plan.pp = 5: must divide")


def test_github_obeys_no_line_of_the_text() -> None:
    """A name of a file may have a line that GitHub would take for a command."""
    case = CheckedCase("scenario", CheckStatus.PASSED, "is valid")
    stop, *lines, go = github_text([CheckedFile("a\n::add-path::evil", (case,))]).splitlines()
    assert "::add-path::evil  predicted, no expectations" in lines
    assert re.fullmatch("::stop-commands::[0-9a-f]{32}", stop)
    assert go == f"::{stop.rpartition('::')[2]}::"


def test_markdown_has_a_row_per_case(files: list[CheckedFile]) -> None:
    lines = markdown_summary(files).strip().splitlines()
    assert len(lines) == 2 + 4
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)
