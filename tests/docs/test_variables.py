"""docs/variables.md is the table of the code, line by line."""

from nsa_core.config.environment import VARIABLES
from nsa_ops.settings import CONFIG_VARIABLE, PREFIX, OperatorSettings
from tests.docs.markdown import REPOSITORY


def test_the_page_lists_every_variable_of_a_run_in_the_words_of_the_code() -> None:
    expected = [f"| `{name}` | {variable.meaning} |" for name, variable in VARIABLES.items()]
    lines = (REPOSITORY / "docs/variables.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(("| `NSA_", "| `DDP_"))] == [
        *expected,
        *(line for line in lines if line.startswith(f"| `{PREFIX}")),
    ]


def test_the_page_lists_every_setting_of_the_operator() -> None:
    lines = (REPOSITORY / "docs/variables.md").read_text().splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith(f"| `{PREFIX}")]
    settings = [PREFIX + name.upper() for name in OperatorSettings.model_fields]
    assert listed == [CONFIG_VARIABLE, *settings]
