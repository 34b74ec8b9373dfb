"""docs/watchdog.md lists the rules of the code, with the worst level of each."""

import re

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.rules.rulebook import RULES
from tests.docs.markdown import REPOSITORY


def section(title: str) -> str:
    page = (REPOSITORY / "docs/watchdog.md").read_text()
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_page_has_every_rule_with_its_level_in_the_order_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", section("Rules"), re.MULTILINE)
    assert sorted(rows) == sorted((rule.id, rule.level) for rule in RULES)


def test_each_limit_has_a_derivation_with_its_value() -> None:
    lines = section("Where the limits come from").splitlines()
    rows = [line.split("|")[1:4] for line in lines if line.startswith("| `")]
    derived = {}
    for names, values, why in rows:
        assert len(why.split()) > 3
        fields = re.findall(r"`(\w+)`", names)
        derived |= dict(zip(fields, [one.strip() for one in values.split(",")], strict=True))
    assert derived.keys() == WatchdogLimits.model_fields.keys()
    assert derived.pop("expected_tokens_per_s") == "of the profile"
    defaults = WatchdogLimits().model_dump()
    for name, value in derived.items():
        assert float(value.removesuffix(" ms").removesuffix(" s")) == defaults[name], name
