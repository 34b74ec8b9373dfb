"""docs/watchdog.md lists the rules of the code, with the worst level of each."""

import re

from nsa_ops.pod.rules import RULES
from tests.docs.markdown import REPOSITORY


def test_the_page_has_every_rule_with_its_level_in_the_order_of_the_code():
    page = (REPOSITORY / "docs/watchdog.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted((rule.id, rule.level) for rule in RULES)
