"""Arguments and options that several commands share, each worded once."""

from typing import Annotated

import typer

RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Run id; may be left out where only one fits")
]
PodArgument = Annotated[
    str | None, typer.Argument(metavar="POD", help="Pod name; may be left out where only one fits")
]
PodOption = Annotated[
    str | None, typer.Option("--pod", metavar="POD", help="Pod; may be left out where one fits")
]
OnPodOption = Annotated[
    str | None,
    typer.Option(
        "--pod", metavar="POD", help="Pod to look on, such as one that the run left; else its own"
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
    str | None, typer.Option("--profile", metavar="NAME", help="Hardware profile, e.g., `a100`")
]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME", help="Recipe, or path of a YAML file")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one value; may be repeated"),
]
