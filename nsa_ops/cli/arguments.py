"""Arguments and options that several commands share, each worded once."""

from typing import Annotated

import typer

from nsa_ops.cli.complete import complete_pod, complete_profile, complete_recipe, complete_run

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id; may be left out where only one fits",
        autocompletion=complete_run,
    ),
]
PodArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="POD",
        help="Pod name; may be left out where only one fits",
        autocompletion=complete_pod,
    ),
]
PodOption = Annotated[
    str | None,
    typer.Option(
        "--pod",
        metavar="POD",
        help="Pod; may be left out where one fits",
        autocompletion=complete_pod,
    ),
]
OnPodOption = Annotated[
    str | None,
    typer.Option(
        "--pod",
        metavar="POD",
        help="Pod to look on, such as one that the run left; else its own",
        autocompletion=complete_pod,
    ),
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="NAME=REASON",
        help="Pass a guardrail; the reason is recorded, no secrets",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Hardware profile, e.g., `a100`",
        autocompletion=complete_profile,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Recipe, or path of a YAML file",
        autocompletion=complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one value; may be repeated"),
]
