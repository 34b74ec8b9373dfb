"""Prints, at the end of a run, which check noticed which planted fault."""

from itertools import chain

import pytest


@pytest.fixture
def planted_fault(record_property):
    """Where a test says which checks noticed the fault it planted: (fault, checks)."""
    return lambda fault, checks: record_property("planted fault", (fault, checks))


def pytest_terminal_summary(terminalreporter):
    noticed = [
        value
        for report in chain.from_iterable(terminalreporter.stats.values())
        for name, value in getattr(report, "user_properties", ())
        if name == "planted fault" and report.when == "call"
    ]
    if noticed:
        terminalreporter.section(f"{len(noticed)} planted faults and the checks that noticed them")
        for fault, checks in noticed:
            terminalreporter.line(f"{fault:48} {', '.join(checks) or 'NONE'}")
