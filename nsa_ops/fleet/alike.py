"""Pods that train together are alike: one profile, one configuration, the same kernels; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsa_core.config.compare import differing_values
from nsa_core.config.run import RunConfig
from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.quantities import count_of
from nsa_ops.runs.launch import LaunchRequest, ReadyPod

#: More pods are the business of an engine.
MAX_PODS = 16
NUM_PODS = "runtime.num_pods"


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
    sets = (*launch.choice.sets, num_pods_set(launch.choice.sets, num_pods))
    return replace(launch, choice=replace(launch.choice, sets=sets))


def num_pods_set(sets: Sequence[str], num_pods: int) -> str:
    """The number of pods as `--set` takes it; ConfigurationError if another one was given."""
    ours = f"{NUM_PODS}={num_pods}"
    other = [one for one in sets if one.partition("=")[0] == NUM_PODS]
    if other and other[-1] != ours:
        pods = count_of(num_pods, "pod")
        message = f"`--set {other[-1]}` contradicts the {pods} that the run is to use"
        raise ConfigurationError(message, hint="Leave it out: it follows from the pods")
    return ours


def require_alike(pods: Mapping[str, tuple[str, RunConfig]], hint: str) -> None:
    """One profile and one configuration on every pod.

    Args:
        pods: Profile and configuration of each, by its name.
        hint: What to do where the profiles differ.

    Raises:
        ConfigurationError: Names the first value that differs.
    """
    (first, (profile, config)), *others = pods.items()
    for name, (its_profile, its_config) in others:
        on_pods = f"on pod `{first}` and {{}} on pod `{name}`"
        if its_profile != profile:
            message = f"The profile is {profile} {on_pods.format(its_profile)}"
            raise ConfigurationError(message, hint=hint)
        value = next(iter(differing_values(config, its_config)), None)
        if value is not None:
            message = f"{value.key} comes to {value.before} {on_pods.format(value.now)}"
            raise ConfigurationError(message, hint=f"Set it for all: `--set {value.key}=VALUE`")


def require_same_kernels(first: ReadyPod, one: ReadyPod) -> None:
    """Raise RefusedError if the preflights of two pods proved different kernels."""
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
