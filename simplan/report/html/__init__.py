"""Reports as one HTML page that opens anywhere: no script, no request, light and dark."""

from simplan.report.html.page import KINDS, html_report

__all__ = ["KINDS", "html_report"]
