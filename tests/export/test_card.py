"""The model card: what is ours in it, and what is the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import ckpt
from ckpt.export.card import BEGIN, END, Training, known_fields, render
from ckpt.formats.native.manifest import Manifest
from tests.helpers.hub_server import HubServer

REPO = "me/model"
BY_HAND = """---
license: mit  # chosen by a lawyer
tags: [mine]
---
# My model

Text of my own, with a | and <b>tags</b>.

## Limitations

None that I know of.
"""


pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def fields_of(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def manifest(step: int, **metrics: float) -> Manifest:
    return Manifest(
        name=f"step-{step:08d}",
        id=f"{step:032x}",
        sequence=step,
        created="2026-01-01T00:00:00+00:00",
        run="run",
        files=(),
        world_size=2,
        parent=f"{step - 1:032x}",
        progress={"epoch": 1, "batch": 0, "step": step, "samples": 64 * step},
        metrics=metrics,
        versions={"ckpt": "0.1.0", "torch": "2.13.0"},
        hardware="NVIDIA H200",
    )


@pytest.mark.slow
def test_a_card_by_hand_keeps_its_text_through_three_pushes(hub: HubServer, tmp_path: Path) -> None:
    hub.store.create(REPO, private=False)
    by_hand = {"key": "file", "value": {"path": "README.md", "content": BY_HAND.encode()}}
    hub.store.commit(REPO, "main", {"summary": "by hand"}, [by_hand])
    model = nn.Linear(4, 4)
    cards = []
    with ckpt.StateManager(tmp_path / "run", model=model, save_every=1) as manager:
        manager.resume()
        for step in (1, 2, 3):
            nn.init.constant_(model.weight, float(step))
            manager.step(metrics={"loss": 1 / step, "accuracy": step / 4})
            manager.wait()
            manager.push_to_hub(REPO)
            cards.append(hub.files(REPO)["README.md"].decode())
    for step, card in enumerate(cards, start=1):
        assert _without_ours(card) == BY_HAND
        assert card.count(BEGIN) == card.count(END) == 1
        assert f"| steps | {step} |" in card
    assert fields_of(cards[2]) == {"license": "mit", "tags": ["mine"], "metrics": ["accuracy"]}


def _without_ours(card: str) -> str:
    """The card as it was by hand: our section and the fields that were added are taken out."""
    text, _, rest = card.partition(f"\n{BEGIN}")
    assert rest.partition(END)[2] == "\n"
    return text.replace("metrics:\n- accuracy\n", "")


def test_a_new_card_says_what_is_known() -> None:
    about = {
        "config": {"architectures": ["GPT2LMHeadModel"]},
        "base": "openai-community/gpt2",
    }
    training = Training.of(manifest(3, loss=1 / 3, accuracy=0.5))
    card = render(None, "model", known_fields(about, training), {"license": "apache-2.0"}, training)
    assert fields_of(card) == {
        "library_name": "transformers",
        "base_model": "openai-community/gpt2",
        "pipeline_tag": "text-generation",
        "metrics": ["accuracy"],
        "tags": ["torch-ckpt"],
        "license": "apache-2.0",
    }
    for line in (
        "# model",
        "| steps | 3 |",
        "| samples | 192 |",
        "| loss | 0.3333 |",
        "| hardware | 2 ranks, NVIDIA H200 |",
        "| versions | ckpt 0.1.0, torch 2.13.0 |",
        "| run | run |",
        "| checkpoint | step-00000003 (00000000) |",
    ):
        assert line in card.splitlines()


def test_fields_that_are_given_win_and_fields_that_are_known_do_not() -> None:
    known = {"library_name": "transformers", "tags": ["torch-ckpt"]}
    kept = render(BY_HAND, "model", known, {}, None)
    assert "license: mit  # chosen by a lawyer" in kept
    assert fields_of(kept) == {"license": "mit", "tags": ["mine"], "library_name": "transformers"}
    assert fields_of(render(kept, "model", known, {"license": "apache-2.0"}, None))["license"] == "apache-2.0"
    assert render(kept, "model", known, {}, None) == kept


def test_a_section_without_its_end_takes_no_text_with_it() -> None:
    card = render(BY_HAND, "model", {}, {}, None).replace(END, "") + "written later\n"
    for _ in range(3):
        card = render(card, "model", {}, {}, None)
    assert "written later" in card
    assert "None that I know of." in card
    assert card.count(END) == 1


def test_names_cannot_break_out_of_the_table() -> None:
    training = Training(metrics={"a|b\n<script>": 1.0}, hardware="x")
    card = render(None, "model", {}, {}, training)
    assert r"| `a\x7cb\n<script>` | 1 |" in card  # code, in which nothing is a tag


def test_front_matter_without_fields_is_not_touched() -> None:
    with pytest.raises(ckpt.ConfigError, match=r"has no fields: '- a'\. Correct the file, or push with card=False"):
        render("---\n- a\n---\n# x\n", "model", {}, {"license": "mit"}, None)


def test_a_base_model_on_this_disk_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    for base, shown in (("models/gpt2", None), ("models", None), ("..", None), ("openai-community/gpt2",) * 2):
        assert known_fields({"config": {}, "base": base}, None).get("base_model") == shown


@pytest.mark.slow
def test_front_matter_that_is_no_yaml_is_not_touched(hub: HubServer, tmp_path: Path) -> None:
    hub.store.create(REPO, private=False)
    broken = {"key": "file", "value": {"path": "README.md", "content": b"---\na: [\n---\n# x\n"}}
    hub.store.commit(REPO, "main", {"summary": "by hand"}, [broken])
    with ckpt.StateManager(tmp_path / "run", model=nn.Linear(2, 2)) as manager:
        with pytest.raises(ckpt.ConfigError, match=r"front matter of README\.md is not YAML.*or push with card=False"):
            manager.push_to_hub(REPO)
        assert len(hub.commits(REPO)) == 1
        manager.push_to_hub(REPO, card=False)
    assert hub.files(REPO)["README.md"] == b"---\na: [\n---\n# x\n"
    assert "model.safetensors" in hub.files(REPO)
