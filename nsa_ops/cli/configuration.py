"""Commands about configuration: `config`, `profile` and `estimate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_ops.cli.arguments import (
    ProfileOption,
    RecipeOption,
    SetOption,
    choice_of,
    complete_profile,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_table, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.quantities import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.config.profile import HardwareProfile
    from nsa_ops.configure import Checked, Value
    from nsa_ops.estimate import Estimate
    from nsa_ops.laptop.trust import TrustedFile

commands = typer.Typer()
config_group = typer.Typer(
    name="config", help="The configuration of a run, and where each value comes from."
)
profile_group = typer.Typer(
    name="profile", help="What each kind of GPU can do, and what we allow on it."
)


@command(config_group, "check")
def config_check(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
) -> None:
    """Resolve a configuration and say whether it can be used."""
    from nsa_ops.configure import check_config

    choice = choice_of(recipe, profile, sets)
    session.show(check_config(session.settings, choice), draw_checked)


@command(config_group, "show")
def config_show(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show what set each value")] = False,
    operator: Annotated[
        bool, typer.Option("--operator", help="Show the operator's settings instead")
    ] = False,
) -> None:
    """Show every value of a configuration, or of the operator's own settings."""
    from nsa_ops.configure import list_settings, list_values

    choice = choice_of(recipe, profile, sets)
    settings = session.settings
    values = list_settings(settings) if operator else list_values(settings, choice)
    session.show(values, draw_values_with_origin if origin else draw_values)


@command(config_group, "trust", changes=True)
def config_trust(
    session: Session,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Default: the nearest `nsa-ops.toml`")
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Stop trusting the file")] = False,
) -> None:
    """Trust the current content of a project's `nsa-ops.toml`, or stop trusting it."""
    from nsa_ops.laptop.trust import execute_trust_file, plan_trust_file

    planned = plan_trust_file(session.settings, file, is_forgotten=forget)
    session.agree(planned.plan, is_reversible=False)
    session.show(execute_trust_file(session.settings, planned), draw_trusted)


@command(config_group, "trusted")
def config_trusted(session: Session) -> None:
    """List the trusted project files, and whether each has changed since."""
    from nsa_ops.laptop.trust import list_trusted

    session.show(list_trusted(session.settings), draw_trusted)


@command(profile_group, "ls")
def profile_ls(session: Session) -> None:
    """List the hardware profiles."""
    from nsa_ops.configure import all_hardware

    session.show(all_hardware(), draw_profiles)


@command(profile_group, "show")
def profile_show(
    session: Session,
    name: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE", help="Name of the profile", autocompletion=complete_profile
        ),
    ],
) -> None:
    """Show one hardware profile."""
    from nsa_ops.configure import load_hardware

    session.show(load_hardware(name), draw_profile)


@command(profile_group, "explain")
def profile_explain(
    session: Session,
    name: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE", help="Name of the profile", autocompletion=complete_profile
        ),
    ],
    recipe: RecipeOption = None,
    sets: SetOption = None,
) -> None:
    """Show the values that a profile sets, and why."""
    from nsa_ops.configure import explain_profile

    choice = choice_of(recipe, name, sets)
    session.show(explain_profile(session.settings, choice), draw_reasons)


@command(commands, "estimate")
def estimate(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
) -> None:
    """Estimate what a run needs before launching it; exit code 3 if no card of the profile fits."""
    from nsa_ops.estimate import estimate_choice, refusal_of

    found = estimate_choice(session.settings, choice_of(recipe, profile, sets))
    session.show(found, draw_estimate, failure=refusal_of(found))


def draw_checked(console: "Console", checked: "Checked") -> None:
    """A configuration that can be used."""
    line(console, f"recipe {checked.recipe} with profile {checked.profile} can be used")
    facts(console, [("sha256", checked.sha256), ("values set", checked.num_overridden)])
    for note in checked.notes:
        line(console, f"note: {note}")


def draw_values(console: "Console", values: "list[Value]") -> None:
    """Values by key."""
    rows = [(value.key, value.value) for value in values]
    draw_table(console, ["KEY", "VALUE"], rows, never_folded=0)


def draw_values_with_origin(console: "Console", values: "list[Value]") -> None:
    """Values by key with who set them, and why where that is known."""
    rows = [(value.key, value.value, value.origin, value.reason) for value in values]
    draw_table(console, ["KEY", "VALUE", "ORIGIN", "WHY"], rows, never_folded=0)


def draw_reasons(console: "Console", values: "list[Value]") -> None:
    """Values that a profile decides, with the reason."""
    rows = [(value.key, value.value, value.reason or "-") for value in values]
    draw_table(console, ["KEY", "VALUE", "WHY"], rows, never_folded=0)


def draw_trusted(console: "Console", files: "list[TrustedFile]") -> None:
    """Project files that are trusted."""
    if not files:
        line(console, "no project file is trusted")
        return
    rows = [(one.path, one.sha256[:12], one.state) for one in files]
    draw_table(console, ["FILE", "SHA256", "STATE"], rows)


def draw_profiles(console: "Console", profiles: "list[HardwareProfile]") -> None:
    """Hardware profiles in a table."""
    rows = [
        (profile.name, _capability(profile), profile.precisions, profile.description)
        for profile in profiles
    ]
    draw_table(console, ["PROFILE", "CAPABILITY", "PRECISIONS", "DESCRIPTION"], rows)


def _capability(profile: "HardwareProfile") -> str:
    capability = profile.compute_capability
    return "-" if capability is None else f"{capability:.1f}"


def draw_profile(console: "Console", profile: "HardwareProfile") -> None:
    """One hardware profile, field by field."""
    pairs: list[tuple[str, Any]] = []
    for name, value in profile.model_dump(exclude={"config", "reasons", "batch_tiers"}).items():
        pairs += (
            [(f"{name}.{key}", item) for key, item in value.items()]
            if isinstance(value, dict)
            else [(name, value)]
        )
    pairs += [(f"config {key}", value) for key, value in profile.config.items()]
    for tier in profile.batch_tiers:
        batches = ", ".join(f"{count} x {length}" for length, count in tier.micro_batch.items())
        pairs.append((f"batch from {tier.min_memory_gib:g} GiB", batches))
    facts(console, pairs)


def _shared(num_ranks: int) -> str:
    return f", shared by {num_ranks} ranks" if num_ranks > 1 else ""


def _fit_words(estimate: "Estimate") -> str | None:
    """Whether it fits the cards of the profile; None where nobody knows their memory."""
    if not estimate.fits:
        return None
    smallest = estimate.fits[0]
    if smallest.is_fitting:
        return f"yes: {smallest.sentence}"
    larger = next((one for one in estimate.fits if one.is_fitting), None)
    more = f"; it fits one of {larger.memory_mib:,.0f} MiB" if larger is not None else ""
    return f"no: {smallest.sentence}{more}"


def draw_estimate(console: "Console", estimate: "Estimate") -> None:
    """What a run needs."""
    memory = estimate.memory
    pairs: list[tuple[str, Any]] = [
        ("parameters", f"{estimate.parameters.total:,}"),
        ("tokens a step", f"{estimate.tokens_per_step:,}{_shared(estimate.num_ranks)}"),
        ("tokens in all", f"{estimate.total_tokens:,}"),
        ("FLOPs a token", f"{estimate.flops.train:,.0f} in training"),
        ("memory", f"about {memory.total:,.0f} MiB on a card at the peak of a step"),
        ("  weights", f"{memory.weights:,.0f} MiB"),
        ("  gradients", f"{memory.gradients:,.0f} MiB"),
        ("  optimizer", f"{memory.optimizer:,.0f} MiB"),
        ("  activations", f"{memory.activations:,.0f} MiB"),
        ("  logits", f"{memory.logits:,.0f} MiB"),
        *([("  gathered", f"{memory.gathered:,.0f} MiB")] if memory.gathered else []),
        ("fits", _fit_words(estimate)),
        ("a checkpoint", format_bytes(estimate.checkpoint_bytes)),
        ("disk", f"{format_bytes(estimate.disk_bytes)} for all kept ones, plus the data shards"),
        ("data", estimate.staging.sentence()),
    ]
    if estimate.num_ranks > 1:
        pairs.append(("sharding", f"{estimate.sharding[0]}: {estimate.sharding[1]}"))
    if estimate.best_tokens_per_s is not None and estimate.shortest_hours is not None:
        cards = "one card" if estimate.num_ranks == 1 else f"{estimate.num_ranks} cards"
        best = f"at most {estimate.best_tokens_per_s:,.0f} tokens/s on {cards}"
        pairs.append(
            ("speed", f"{best}, so {format_duration(3600 * estimate.shortest_hours)} or more")
        )
    facts(console, pairs)
