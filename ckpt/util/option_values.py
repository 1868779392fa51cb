"""Option objects that check themselves: the type of a field says what it must be. Sizes and times as people write them.

@dataclass(frozen=True, kw_only=True)
class Waiting(Options):
    patience: Seconds = 5.0
    backlog: Annotated[int, Must(is_count, "a number of checkpoints, 1 or more")] = 2
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from ckpt.errors import ConfigError
from ckpt.util.filesystem import expand_home

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LARGEST = 2**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def parse_size(size: int | str) -> int | None:
    """Bytes for `5GB`, `512MiB` or a number, 1 or more; None if it is no size, or larger than any disk."""
    if isinstance(size, bool):
        return None
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        given = float(found[1]) * _UNITS[found[2].upper()]
        size = int(given) if given < _LARGEST else 0
    return size if isinstance(size, int) and 0 < size < _LARGEST else None


_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_TEN_YEARS = 10 * 365 * 86400.0  # seconds
_PART = r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)\s*"


def parse_duration(text: object) -> float | None:
    """Seconds for `90s`, `10min`, `2h` or `1h30min`, more than 0; None if it is no time, or longer than ten years."""
    if not isinstance(text, str) or not re.fullmatch(f"(?:{_PART})+", said := text.strip().lower()):
        return None
    parts = re.findall(_PART, said)
    if any(unit not in _SECONDS for _, unit in parts):
        return None
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= _TEN_YEARS else None


_LONGEST = 10 * 365 * 24 * 3600.0  # seconds: what threads and stores can wait
_SHOWN = 100  # characters of a value


class UnknownOptionError(ConfigError, TypeError):
    """An option that does not exist: a TypeError too, as for any unknown keyword."""


def refuse_unknown(
    what: str, names: Iterable[str], known: Collection[str], inside: Mapping[str, str] | None = None
) -> None:
    """Raise one error that names every option that does not exist, with the nearest one that does.

    `inside`: options of the objects that other options take, each with how it is written.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownOptionError(
            f"{what} has no option {', '.join(_with_nearest(name, known, inside or {}) for name in unknown)}. "
            f"It has: {', '.join(sorted(known))}."
        )


def _with_nearest(name: str, known: Collection[str], inside: Mapping[str, str]) -> str:
    nearest = name if name in inside else next(iter(difflib.get_close_matches(name, {*known, *inside})), None)
    if nearest is None:
        return repr(name)
    return f"{name!r} (write {inside[nearest]})" if nearest in inside else f"{name!r} (did you mean {nearest!r}?)"


@dataclass(frozen=True)
class Must:
    """Written into the type of an option: `Annotated[float, Must(is_seconds, "a number of seconds")]`."""

    hold: Callable[[Any], bool]
    be: str
    secret: bool = False  # a wrong value is not shown, whatever it is
    kind: type[Options] | None = None  # the option object that it is, for which a plain value may stand


class Options:
    """Base of option objects: keyword-only dataclasses that refuse nonsense when they are built, all of it at once."""

    example: ClassVar[str] = ""  # of its fields in a YAML file; empty where a plain value may stand for the object
    called: ClassVar[str] = ""  # by whom users give these, if it is not the object itself

    def __new__(cls, *_: Any, **named: Any) -> Any:
        refuse_unknown(cls.__name__, named, names_of(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        vars(self).update({name: kind.of(vars(self)[name]) for name, kind in objects_in(type(self)).items()})
        wrong = _problems(type(self), vars(self))
        refuse(self.called or type(self).__name__, [*wrong.values(), *self.contradictions(wrong)])

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        """What fields that are right one by one, and so not among the `wrong` ones, may not be together."""
        return []

    @classmethod
    def of(cls, value: Any) -> Any:
        """The object that a plain value stands for; the value itself if it stands for none."""
        return value


def names_of(kind: type) -> list[str]:
    """The options that an option object has."""
    return [field.name for field in fields(kind)]


def objects_in(kind: type) -> dict[str, type[Options]]:
    """Those of these options that are option objects themselves."""
    return {name: must.kind for name, must in _musts(kind).items() if must.kind is not None}


def _problems(kind: type, options: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with values of options that this class has, by their names."""
    return {
        name: f"{name}={kind_of(options[name]) if must.secret else said(options[name])} must be {must.be}"
        for name, must in _musts(kind).items()
        if not must.hold(options[name])
    }


@cache
def _musts(kind: type) -> dict[str, Must]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: must for name in names_of(kind) if (must := _must(hints[name])) is not None}


def _must(hint: Any) -> Must | None:
    """What a type says; `Seconds | None` may be None too."""
    if get_origin(hint) is Annotated:
        return next(must for must in get_args(hint) if isinstance(must, Must))
    required = next((must for part in get_args(hint) if (must := _must(part)) is not None), None)
    return required and replace(required, hold=optional(required.hold))


def refuse(what: str, wrong: Collection[str]) -> None:
    """Raise one error that names every option that makes no sense."""
    if wrong:
        raise ConfigError(f"{what}: {'; '.join(wrong)}.")


def said(value: Any) -> str:
    """A value as its user wrote it, shortened; its type where that says no more, or cannot be said."""
    try:
        text = repr(value)
    except Exception:
        return kind_of(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def path_text(value: Any, what: str) -> str:
    """A path or URL as text, with `~` replaced by the home folder. Anything else is refused, under the name `what`."""
    if not is_path(value):
        raise ConfigError(f"{what} must be a path or a URL, not {said(value)}.")
    return expand_home(os.fspath(value))


def settings(value: Any) -> dict[str, Any]:
    """The options of a storage, as keywords; none is an empty dict."""
    if value is not None and not is_settings(value):
        raise ConfigError(f"storage_options must be a dict of options for the storage, not {kind_of(value)}.")
    return dict(value or {})


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def is_seconds(value: Any) -> bool:
    return is_number(value) and value <= _LONGEST


def is_size(value: Any) -> bool:
    """A size in bytes, or as people write it; 0 too."""
    return is_count(value, 0) or (isinstance(value, str) and (value.strip() == "0" or parse_size(value) is not None))


def is_period(value: Any) -> bool:
    return parse_duration(value) is not None or (isinstance(value, str) and value == AUTO)


def is_rate(value: Any) -> bool:
    """Bytes per second, more than none."""
    return is_number(value) or (isinstance(value, str) and parse_size(value) is not None)


def is_settings(value: Any) -> bool:
    """Options by name."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def is_path(value: Any) -> bool:
    """A path or URL that a system can take: some text, without NUL."""
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    try:
        return isinstance(text, str) and bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_kind(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def one_of(*words: str) -> Must:
    return Must(is_one_of(*words), f"one of {', '.join(words)}")


Flag = Annotated[bool, Must(is_kind(bool), "True or False")]
Maybe = Annotated[bool | None, Must(optional(is_kind(bool)), "True, False or None")]
Steps = Annotated[int, Must(is_count, "a number of steps, 1 or more")]
Seconds = Annotated[float, Must(is_seconds, "a number of seconds, up to ten years")]
AnySeconds = Annotated[float, Must(lambda value: value == 0 or is_seconds(value), "a number of seconds")]
AUTO = "auto"
Period = Annotated[str, Must(is_period, "a time such as '10min', '90s' or '2h', or 'auto'")]
Size = Annotated[int | str, Must(is_size, "a size such as '8GB', or a number of bytes")]
Settings = Annotated[Mapping[str, Any], Must(is_settings, "a dict of options for the storage", secret=True)]
