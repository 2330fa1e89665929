"""Rules between model, cluster, training, plan and software.

Every rule is an object (``Rule``) with a name, the plan fields that it reads, and the error for a job that violates it.
Scenarios check all rules together (``check_job``). Searches check a rule as soon as its fields are known
(``simplan.rules.filter``). The executor checks the rules that concern it.
"""

from __future__ import annotations

from simplan.rules.book import BY_NAME, MEMORY_RULES, RULES, SEARCH_RULES, check_job, violations
from simplan.rules.rule import Rule

__all__ = ["BY_NAME", "MEMORY_RULES", "RULES", "SEARCH_RULES", "Rule", "check_job", "violations"]
