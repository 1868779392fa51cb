"""The model card: front matter and a section that are generated, inside whatever the user has written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError
from ckpt.formats.native.manifest import Manifest
from ckpt.shown import markdown, shown

CARD = "README.md"
BEGIN = "<!-- ckpt writes this section anew with every push: what you change in it is lost -->"
END = "<!-- end of the section of ckpt -->"
_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# where a user has removed a marker of the section, the text after it is not taken for generated
_SECTION = re.compile(f"{re.escape(BEGIN)}(?:(?!{re.escape(BEGIN)}).)*?{re.escape(END)}", re.DOTALL)
_REPO_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "CAUSAL_LM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "SEQ_CLS": "text-classification",
    "ForTokenClassification": "token-classification",
    "TOKEN_CLS": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "QUESTION_ANS": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a model card says of the training: progress, metrics, environment and lineage."""

    progress: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    world_size: int = 1
    lineage: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Training:
        return cls(
            progress=manifest.progress,
            metrics=manifest.metrics,
            versions=manifest.versions,
            hardware=manifest.hardware,
            world_size=manifest.world_size,
            lineage={"run": manifest.run, "checkpoint": f"{manifest.name} ({manifest.id[:8]})"},
        )


def known_fields(about: Mapping[str, Any], training: Training | None) -> dict[str, Any]:
    """The front matter that follows from the model and its training."""
    adapters = [adapter["config"] for adapter in about.get("adapters", {}).values()]
    config = about.get("config", {})
    base = next((str(adapter.get("base_model_name_or_path") or "") for adapter in adapters), about.get("base", ""))
    words = [*config.get("architectures", ()), *(str(adapter.get("task_type")) for adapter in adapters)]
    measured = [shown(name) for name in training.metrics if name != "loss"] if training else []
    fields = {
        "library_name": "peft" if adapters else "transformers" if config else None,
        "base_model": base if _is_on_the_hub(base) else None,
        "pipeline_tag": next((tag for word in words for end, tag in _TASKS.items() if word.endswith(end)), None),
        "metrics": measured,
        "tags": ["torch-ckpt"],
    }
    return {key: value for key, value in fields.items() if value}


def _is_on_the_hub(base: str) -> bool:
    """Whether a base model's name is that of a repository: an existing path of the same form is a local folder."""
    return bool(_REPO_ID.fullmatch(base)) and not os.path.exists(base)


def render(
    existing: str | None,
    title: str,
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    training: Training | None,
) -> str:
    """The text of a card. An existing one is kept, except for the generated section and the fields that are `given`."""
    front, text = _split(existing or f"\n# {title}\n")
    section = f"{BEGIN}\n{_section(training)}\n{END}"
    if _SECTION.search(text):
        text = _SECTION.sub(lambda _: section, text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    return f"---\n{_merged(front, known, given)}---\n{text}"


def _split(card: str) -> tuple[str, str]:
    match = _FRONT.match(card)
    return (match.group(1), card[match.end() :]) if match else ("", card)


def _merged(front: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Front matter with missing fields appended; rewritten only where a `given` field has another value."""
    import yaml

    try:
        fields = yaml.safe_load(front) or {}
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or error
        raise ConfigError(
            f"the front matter of {CARD} is not YAML: {why}. Correct the file, or push with card=False."
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"the front matter of {CARD} has no fields: {front.strip()[:80]!r}. Correct the file, or push with "
            "card=False."
        )
    if any(key in fields and fields[key] != value for key, value in given.items()):
        return str(yaml.safe_dump({**known, **fields, **given}, sort_keys=False, allow_unicode=True))
    added = {key: value for key, value in {**known, **given}.items() if key not in fields}
    return front + (str(yaml.safe_dump(added, sort_keys=False, allow_unicode=True)) if added else "")


def _section(training: Training | None) -> str:
    if training is None:
        return "Published with [ckpt](https://pypi.org/project/torch-ckpt/)."
    rows = "\n".join(f"| {markdown(name)} | {markdown(value)} |" for name, value in _rows(training))
    return f"## Training\n\n| | |\n|---|---|\n{rows}"


def _rows(training: Training) -> list[tuple[str, str]]:
    progress = training.progress
    counted = [(word, f"{progress[key]:,}") for key, word in _COUNTERS.items() if progress.get(key)]
    measured = [(name, f"{value:.4g}") for name, value in training.metrics.items()]
    ranks = f"{training.world_size} ranks, {training.hardware}" if training.world_size > 1 else training.hardware
    versions = ", ".join(f"{name} {version}" for name, version in training.versions.items())
    rest = [("hardware", ranks), ("versions", versions), *training.lineage.items()]
    return [*counted, *measured, *((name, value) for name, value in rest if value)]


_COUNTERS = {"step": "steps", "epoch": "epochs", "samples": "samples"}
