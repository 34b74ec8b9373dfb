"""Pods that train together are alike: one profile, one configuration, the same kernels; pure."""

from collections.abc import Sequence
from dataclasses import replace

from nsa_core.config.recipe import leaves
from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.quantities import count_of
from nsa_ops.runs.launch import LaunchRequest, ReadyPod

#: More pods are the business of an engine.
MAX_PODS = 16


def check_pods(pods: Sequence[str]) -> tuple[str, ...]:
    """The names of the pods of a run; each once."""
    names = tuple(name.strip() for name in pods)
    twice = next((name for name in names if names.count(name) > 1), None)
    if "" in names or twice:
        what = f"names pod `{twice}` twice" if twice else "has an empty name"
        message = f"`--pods {','.join(pods)}` {what}"
        raise ConfigurationError(message, hint="Name each pod once: `--pods a,b`")
    if len(names) > MAX_PODS:
        message = f"`--pods` names {len(names)} pods, and at most {MAX_PODS} train as one run"
        raise ConfigurationError(message, hint="Let an engine run more: see docs/scale.md")
    return names


def with_num_pods(launch: LaunchRequest, num_pods: int) -> LaunchRequest:
    """The same request with the number of pods in its configuration."""
    ours = f"runtime.num_pods={num_pods}"
    other = [one for one in launch.choice.sets if one.partition("=")[0] == "runtime.num_pods"]
    if other and other[-1] != ours:
        message = (
            f"`--set {other[-1]}` contradicts `--pods`, which names {count_of(num_pods, 'pod')}"
        )
        raise ConfigurationError(message, hint="Leave it out: `--pods` sets it")
    sets = (*launch.choice.sets, ours)
    return replace(launch, choice=replace(launch.choice, sets=sets))


def require_alike(ready: Sequence[ReadyPod]) -> None:
    """One profile, one configuration and the same kernels on every pod.

    Raises:
        ConfigurationError: If profile or configuration differ; names the first value that does.
        RefusedError: If the preflights proved different kernels.
    """
    first = ready[0]
    for one in ready[1:]:
        pods = f"pod `{first.link.record.name}` and {{}} on pod `{one.link.record.name}`"
        if one.resolved.profile != first.resolved.profile:
            message = f"The profile is {first.resolved.profile} on " + pods.format(
                one.resolved.profile
            )
            raise ConfigurationError(message, hint="Name one that all match: `--profile NAME`")
        ours, theirs = leaves(first.resolved.config), leaves(one.resolved.config)
        differing = next((key for key in ours if ours[key] != theirs[key]), None)
        if differing is not None:
            message = f"{differing} comes to {ours[differing]} on " + pods.format(theirs[differing])
            raise ConfigurationError(message, hint=f"Set it for all: `--set {differing}=VALUE`")
        _require_same_kernels(first, one)


def _require_same_kernels(first: ReadyPod, one: ReadyPod) -> None:
    ours = {branch: choice.name for branch, choice in first.proof.kernels.items()}
    theirs = {branch: choice.name for branch, choice in one.proof.kernels.items()}
    if ours == theirs:
        return
    branch = next(key for key in sorted(ours | theirs) if ours.get(key) != theirs.get(key))
    pod, other = first.link.record.name, one.link.record.name
    message = (
        f"The preflights proved {ours.get(branch, 'nothing')} for the {branch} branch on pod "
        f"`{pod}` and {theirs.get(branch, 'nothing')} on pod `{other}`"
    )
    raise RefusedError(message, hint=f"Repeat `nsa-ops preflight {pod}` and that of `{other}`")
