"""Prints, at the end of a run, which check noticed which planted fault."""

import pytest

NOTICED = pytest.StashKey[list[tuple[str, list[str]]]]()


@pytest.fixture
def planted_faults(request):
    """Where a test says which checks noticed the fault it planted: (fault, checks)."""
    return request.config.stash.setdefault(NOTICED, [])


def pytest_terminal_summary(terminalreporter):
    noticed = terminalreporter.config.stash.get(NOTICED, [])
    if noticed:
        terminalreporter.section(f"{len(noticed)} planted faults and the checks that noticed them")
        for fault, checks in noticed:
            terminalreporter.line(f"{fault:48} {', '.join(checks) or 'NONE'}")
