"""ExportedRun: what an engine is told of a run, in text that no shell or YAML misreads."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from nsa_ops.errors import ConfigurationError
from nsa_ops.printable import printable

#: Between the stop signal and the end: a save takes 25 s at most, and a queue of disks may be slow.
STOP_S = 300
#: dstack takes 41 characters, and Kubernetes 63 with the number of the node behind the name.
_MAX_NAME = 40
#: Of an image: what registries, tags and digests are made of, and nothing that YAML could read.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")
#: Characters of JSON text that a shell, a template or an engine could read as its own.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "$`'!&;|<>(){}#%*?~^\x7f"}


@dataclass(frozen=True)
class Card:
    """A kind of card by the names of the engines.

    Attributes:
        skypilot: Its names there, one for each memory size.
        dstack: Its name there, whatever its memory.
    """

    skypilot: tuple[str, ...]
    dstack: str


#: By hardware profile.
CARDS = {
    "a100": Card(("A100", "A100-80GB"), "A100"),
    "h100": Card(("H100",), "H100"),
    "4090": Card(("RTX4090",), "RTX4090"),
    "v100": Card(("V100", "V100-32GB"), "V100"),
    "t4": Card(("T4",), "T4"),
}


@dataclass(frozen=True)
class ExportedRun:
    """A run as an engine starts it.

    Attributes:
        name: Its name at the engine.
        manifest: Its manifest as JSON; see `safe_json`.
        code_id: Hash of the code.
        archive: File name of the packed code.
        environment: Folder name of the packages, where they have to be installed.
        torch_backend: CUDA build of torch, `auto` or `cpu`.
        torch_requirement: Which torch the profile takes.
        gpus_per_node: Cards of a node; 0 without any.
        card: Which cards; None without any.
        image: Container image; empty where none was named.
        disk_gib: What a node keeps: checkpoints and shards of the data.
        data_path: Local data that the nodes have to see; empty for none.
        about: Lines about the run, for people.
    """

    name: str
    run_id: str
    manifest: str
    code_id: str
    archive: str
    environment: str
    torch_backend: str
    torch_requirement: str
    num_nodes: int
    gpus_per_node: int
    card: Card | None
    image: str
    disk_gib: int
    data_path: str
    about: tuple[str, ...]

    def comments(self, *lines: str) -> str:
        """The head of a file: what it is, then these lines, each as a comment."""
        return "".join(f"# {printable(line)}".rstrip() + "\n" for line in (*self.about, *lines))


def engine_name(run_id: str) -> str:
    """A name that every engine takes; one that had to be changed ends in a hash of the run id."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    name = f"nsa-{plain}"
    if plain == run_id and len(name) <= _MAX_NAME:
        return name
    digest = sha256(run_id.encode()).hexdigest()[:6]
    return f"{name[: _MAX_NAME - 7].rstrip('-')}-{digest}"


def check_image(image: str) -> None:
    """Raise ConfigurationError if no registry could have it."""
    if image and not _IMAGE.fullmatch(image):
        message = f"`{printable(image)}` is no name of a container image"
        hint = "Name it as `docker pull` does: up to 255 letters, digits and . _ - : / @"
        raise ConfigurationError(message, hint=hint)


def card_of(profile: str) -> Card:
    """The cards of a profile; one that no engine is known to have is named after the profile."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "-", profile).strip("-").upper() or "GPU"
    return CARDS.get(profile, Card((plain,), plain))


def safe_json(document: Any) -> str:
    r"""JSON that may stand in a quoted here-document, a YAML block and a template.

    It is ASCII in lines that begin with a bracket, a quote or a space. In its strings, every sign
    that a shell or an engine expands is written as `\u0024`; the same document is read from it.
    """
    return "\n".join(_safe_lines(json.dumps(document, indent=1, ensure_ascii=True)))


def _safe_lines(text: str) -> Iterator[str]:
    """Each line with its strings escaped; brackets outside of strings stay."""
    for line in text.split("\n"):
        parts = re.split(r'("(?:[^"\\]|\\.)*")', line)
        yield "".join(part.translate(_ESCAPED) if part.startswith('"') else part for part in parts)


def indented(text: str, columns: int) -> str:
    """Every line of a text moved to the right; empty lines stay empty."""
    return "".join(
        f"{' ' * columns}{line}\n" if line else "\n" for line in text.rstrip("\n").split("\n")
    )
