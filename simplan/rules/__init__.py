"""The rulebook: what must hold between model, cluster, training, plan and software.

Every rule is an object (``Rule``) with a name, the fields of a plan that it reads, and what it says to a job that
violates it. Scenarios ask all of them at once (``check_job``), searches as early as their fields are known
(``simplan.rules.filter``), and the executor those that concern it.
"""

from __future__ import annotations

from simplan.rules.book import BY_NAME, RULES, SEARCH_RULES
from simplan.rules.check import check_job, violations
from simplan.rules.rule import Rule

__all__ = ["BY_NAME", "RULES", "SEARCH_RULES", "Rule", "check_job", "violations"]
