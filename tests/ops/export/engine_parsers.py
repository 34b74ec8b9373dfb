"""Read exported files as the engines do. Runs in the environment that has them, apart from ours.

usage: python engine_parsers.py skypilot|dstack|kubernetes, with {name: text} as JSON on stdin;
prints {name: error}, an empty error for a file that the engine takes.
"""

import json
import sys

import yaml


def check_skypilot(text):
    import sky
    from sky.utils import registry

    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    for resources in task.resources:
        # The client leaves the name to the server, which loads the same registry.
        registry.JOBS_RECOVERY_STRATEGY_REGISTRY.from_str(resources.job_recovery["strategy"])


def check_dstack(text):
    from dstack._internal.core.models.configurations import parse_run_configuration
    from dstack._internal.core.services import validate_dstack_resource_name
    from dstack._internal.utils.interpolator import VariablesInterpolator

    task = parse_run_configuration(yaml.safe_load(text))
    validate_dstack_resource_name(task.name)
    # What `dstack apply` does with each command: a reference that nobody meant is an error.
    for command in task.commands:
        if VariablesInterpolator({"run": {"args": ""}}).interpolate_or_error(command) != command:
            message = "the command holds a reference"
            raise ValueError(message)


def check_kubernetes(text):
    import kubernetes_validate

    for document in yaml.safe_load_all(text):
        kubernetes_validate.validate(document, "1.31", strict=True)


def verdict(check, text):
    try:
        check(text)
    except Exception as error:  # noqa: BLE001 -- whatever an engine raises is its verdict
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    check = globals()[f"check_{sys.argv[1]}"]
    given = json.load(sys.stdin)
    verdicts = {name: verdict(check, text) for name, text in given.items()}
    sys.stdout.write("\n" + json.dumps(verdicts))
