"""The model card: front matter and a section that are generated, inside whatever the user has written."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError
from ckpt.formats.native.manifest import Manifest
from ckpt.root.catalog import Summary
from ckpt.shown import markdown, shown
from ckpt.util.svg_plot import HEIGHT, PLAIN, WIDTH, Points, document, line_panel


def draw(curves: Mapping[str, Points]) -> str | None:
    """One panel for each metric that has two finite points or more; none if there is no such metric."""
    metrics = [(name, points) for name, points in curves.items() if _finite(points) > 1]
    if not metrics:
        return None
    panels = [line for index, metric in enumerate(metrics) for line in line_panel(*metric, PLAIN, top=index * HEIGHT)]
    return document(panels, WIDTH, HEIGHT * len(metrics), title="metrics by step")


def _finite(points: Points) -> int:
    return sum(math.isfinite(value) for _, value in points)


CARD, CURVE = "README.md", "training-curve.svg"
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
    """What a model card says of the training: progress, metrics, environment, lineage, and metrics by step."""

    progress: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    world_size: int = 1
    lineage: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Points] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, root: Sequence[Manifest | Summary]) -> Training:
        """Of a checkpoint, with the metrics of the earlier checkpoints of its run in `root`, also of removed ones."""
        known = {"run": manifest.run, "checkpoint": f"{manifest.name} ({manifest.id[:8]})"}
        parents = [other.name for other in root if other.id == manifest.parent]
        return cls(
            progress=manifest.progress,
            metrics=manifest.metrics,
            versions=manifest.versions,
            hardware=manifest.hardware,
            world_size=manifest.world_size,
            lineage={**known, **({"trained on from": parents[0]} if parents else {})},
            curves=curves(other for other in root if other.run == manifest.run and other.sequence <= manifest.sequence),
        )


def curves(manifests: Iterable[Manifest | Summary]) -> dict[str, list[tuple[int, float]]]:
    """The values of each metric by step. Of checkpoints of the same step, the last one counts."""
    found: dict[str, dict[int, float]] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.sequence):
        for name, value in manifest.metrics.items():
            found.setdefault(name, {})[manifest.step] = value
    return {name: sorted(points.items()) for name, points in found.items()}


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
    *,
    curve: bool = False,
) -> str:
    """The text of a card. An existing one is kept, except for the generated section and the fields that are `given`."""
    front, text = _split(existing or f"\n# {title}\n")
    section = f"{BEGIN}\n{_section(training, curve=curve)}\n{END}"
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
            f"the front matter of {CARD} is not YAML: {why}. Correct it, or push with card=False."
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"the front matter of {CARD} has no fields: {front.strip()[:80]!r}. Correct it, or push with card=False."
        )
    if any(key in fields and fields[key] != value for key, value in given.items()):
        return str(yaml.safe_dump({**known, **fields, **given}, sort_keys=False, allow_unicode=True))
    added = {key: value for key, value in {**known, **given}.items() if key not in fields}
    return front + (str(yaml.safe_dump(added, sort_keys=False, allow_unicode=True)) if added else "")


def _section(training: Training | None, *, curve: bool) -> str:
    if training is None:
        return "Published with [ckpt](https://pypi.org/project/torch-ckpt/)."
    rows = "\n".join(f"| {markdown(name)} | {markdown(value)} |" for name, value in _rows(training))
    picture = f"\n\n![metrics by step]({CURVE})" if curve else ""
    return f"## Training\n\n| | |\n|---|---|\n{rows}{picture}"


def _rows(training: Training) -> list[tuple[str, str]]:
    progress = training.progress
    counted = [(word, f"{progress[key]:,}") for key, word in _COUNTERS.items() if progress.get(key)]
    measured = [(name, f"{value:.4g}") for name, value in training.metrics.items()]
    ranks = f"{training.world_size} ranks, {training.hardware}" if training.world_size > 1 else training.hardware
    versions = ", ".join(f"{name} {version}" for name, version in training.versions.items())
    rest = [("hardware", ranks), ("versions", versions), *training.lineage.items()]
    return [*counted, *measured, *((name, value) for name, value in rest if value)]


_COUNTERS = {"step": "steps", "epoch": "epochs", "samples": "samples"}
