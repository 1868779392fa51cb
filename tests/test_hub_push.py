"""Models are published on the Hub: the real client, against a server that stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.hub_server import HubServer, serving

REPO = "me/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


def gpt(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(8)[None]).logits
    return found


def downloaded(repo: str = REPO, revision: str = "main") -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(repo, revision=revision)


def pulled_logits() -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(downloaded()).eval())


def test_one_process_publishes_a_model_that_from_pretrained_reads(hub: HubServer, tmp_path: Path) -> None:
    model = gpt()
    with ckpt.StateManager(tmp_path / "run", model=model) as manager:
        url = manager.push_to_hub(REPO, private=True)
    assert url == f"{hub.url}/{REPO}/commit/{hub.head(REPO)}"
    assert hub.commits(REPO) == ["Upload model with ckpt"]
    assert set(hub.files(REPO)) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert hub.store.repo(REPO)["private"]
    assert torch.equal(pulled_logits(), logits(model))


def test_what_has_not_changed_makes_no_commit_and_sends_no_weights(hub: HubServer, tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path / "run", model=gpt()) as manager:
        first = manager.push_to_hub(REPO)
        again = manager.push_to_hub(REPO)
    assert first == again
    assert len(hub.commits(REPO)) == len(hub.accepted) == 1
