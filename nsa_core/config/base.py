"""What all of the configuration shares: frozen records, errors of one line, strict YAML."""

import difflib
import errno
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)

#: What to do about a file or disk that refused, by the number of the error.
_ADVICE = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "Free space: the quota of this user is used up",
    errno.EROFS: "Mount the file system for writing: it is read-only",
    errno.EACCES: "Give this user the right to write there",
    errno.EPERM: "Give this user the right to write there",
    errno.EIO: "Look at `dmesg`: the disk fails",
}


#: Characters of a refused value that an error repeats.
_SHOWN = 80
#: A recipe has two thousand.
_MOST_CHARACTERS = 1_000_000


class ConfigError(ValueError):
    """A recipe, profile, flag or variable that cannot be used; the message names it and the fix."""


class VariableError(ConfigError):
    """An NSA_* variable that is not known, or whose value cannot be read."""


#: How pydantic begins a message that one of our validators wrote.
_OWN_WORDS = "Value error, "


def one_line(error: OSError | ValueError) -> str:
    """What is wrong: the path and why, the first bad field and why, or the first line; pure."""
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        return f"{path}: {error.strerror}" if path else str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix(_OWN_WORDS)
        return f"{where}: {text}" if where else text
    return str(error).strip().partition("\n")[0]


def disk_advice(error: OSError) -> str:
    """What to do about a file or a disk that refused, as the beginning of a hint; pure."""
    return _ADVICE.get(error.errno or 0, "Look at that path, its rights and its disk")


class FrozenModel(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


#: Largest count in a configuration: every whole number up to it is exact as a float, too.
MAX_COUNT = 2**53
#: Largest seed: runs were started with any that torch takes, and their records have to load. Half
#: of that range is left for what ranks add to it.
MAX_SEED = 2**63 - 1


class ConfigSection(FrozenModel):
    """A configuration or a part of one; each number is finite, because JSON knows no other."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        """`steps: yes` would be one step, also within a list or a mapping of numbers."""
        kind = cls.model_fields[info.field_name].annotation if info.field_name else None
        kinds = set(_kinds_in(kind))
        if _holds_truth(value) and kinds & {int, float} and bool not in kinds:
            is_one = isinstance(value, bool)
            message = "it must be a number" if is_one else "yes and no in it must be numbers"
            raise ValueError(message)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_countless(cls, value: object, info: ValidationInfo) -> object:
        limit = MAX_SEED if info.field_name == "seed" else MAX_COUNT
        if isinstance(value, int) and abs(value) > limit:
            message = f"it must be at most {limit:,}"
            raise ValueError(message)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_unwritable_text(cls, value: object) -> object:
        """No path of a system has a NUL, and no file in UTF-8 half of a surrogate pair."""
        text = str(value) if isinstance(value, str | Path) else ""
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            message = "it holds a NUL, or half of a surrogate pair"
            raise ValueError(message)
        return value


def _kinds_in(kind: object) -> Iterator[object]:
    """A type of a field and those within it: `dict` and `int` of `dict[int, int]`."""
    yield kind
    for part in get_args(kind):
        yield from _kinds_in(part)


def _holds_truth(value: object) -> bool:
    """Whether a value is `yes` or `no`, or a list or mapping with one of them."""
    if isinstance(value, Mapping):
        return any(map(_holds_truth, (*value.keys(), *value.values())))
    return any(map(_holds_truth, value)) if isinstance(value, list) else isinstance(value, bool)


class TolerantModel(BaseModel):
    """A frozen record from a file that a newer version may have written: unknown keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


#: Numbers that everybody reads alike, by kind. YAML 1.1 knows more: `010` is 8, and `1:30` is 90.
_DECIMAL = {"int": re.compile(r"[-+]?(0|[1-9][0-9]*)"), "float": re.compile(r"[^_:]+")}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key that is in one mapping twice, and a number in strange form."""

    def construct_decimal(self, node: yaml.ScalarNode) -> float:
        """A number of either kind; ConstructorError if it is not in plain decimal digits."""
        kind = node.tag.rpartition(":")[2]
        read = self.construct_yaml_int(node) if kind == "int" else self.construct_yaml_float(node)
        if not _DECIMAL[kind].fullmatch(node.value):
            problem = (
                f"{_brief(node.value)} is {_brief(read)} in YAML: write a number in decimal digits "
                "alone, and text in quotes"
            )
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return read

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Hashable = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                problem = f"key {key!r} is there twice (line {line}); keep one"
                raise yaml.constructor.ConstructorError(problem=problem)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind in _DECIMAL:
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _StrictLoader.construct_decimal)


def is_read_whole(text: str) -> bool:
    """Whether YAML that was parsed takes every character of one value, and no line for a space.

    ` #` begins a comment, and a line break in a value without quotes becomes a space.
    """
    node = yaml.compose(text, Loader=_StrictLoader)
    if node is None:
        return not text.strip()
    end = node.end_mark.index
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return not text[end:].strip() and not (is_plain and len(text[:end].strip().splitlines()) > 1)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML strictly.

    Raises:
        ConfigError: For a syntax error, a duplicate key, or a value or key that YAML's own types
            cannot hold; the message begins with `where`.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        message = f"{where}: {error.problem}{line}"
        raise ConfigError(message) from error
    except yaml.YAMLError as error:
        message = f"{where}: not YAML: {str(error).splitlines()[0]}"
        raise ConfigError(message) from error
    except RecursionError as error:
        message = f"{where}: its values are nested too deep"
        raise ConfigError(message) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # What PyYAML's constructors let out: `2026-13-45`, `!!int x`, a list as a key.
        message = f"{where}: a value or a key cannot be read: {one_line(ValueError(*error.args))}"
        raise ConfigError(message) from error


def names_in(folder: Path) -> list[str]:
    """Names of the YAML files in a folder, without ending, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_mapping(name: str, folder: Path, kind: str) -> tuple[dict[str, Any], Path]:
    """Read `folder/name.yaml`, or the file itself if `name` ends in .yaml.

    Raises:
        ConfigError: If it does not exist (the nearest name is given), is too long or is not a
            mapping.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError as error:
        known = names_in(folder)
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        message = f"there is no {kind} {name!r}: {advice}"
        raise ConfigError(message) from error
    except (OSError, UnicodeDecodeError) as error:
        message = f"{kind} {path} cannot be read: {error}"
        raise ConfigError(message) from error
    if len(text) > _MOST_CHARACTERS:
        message = f"{kind} {path} has more than {_MOST_CHARACTERS:,} characters"
        raise ConfigError(message)
    values = parse_yaml(text, f"{kind} {path.name}")
    if not isinstance(values, dict):
        message = f"{kind} {path.name} must be a mapping of keys to values"
        raise ConfigError(message)
    return values, path


def first_error(error: ValidationError) -> str:
    """The first problem of a validation error, as `key: what is wrong (value)`."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    text = problem["msg"].removeprefix(_OWN_WORDS)
    value = problem["input"]
    shown = f" (got {_brief(value)})" if isinstance(value, str | int | float | bool) else ""
    return f"{where}: {text}{shown}" if where else text


def _brief(value: str | float) -> str:
    # Python refuses to write an integer of more than 4,300 digits, but in hexadecimal.
    is_long = isinstance(value, int) and abs(value) > 10**_SHOWN
    shown = f"{value:#x}" if is_long else repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(shown):,} characters)"
