"""A Trainer with `push_to_hub=True` and `CkptCallback`: the real client, and a server that stands in for the Hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForSequenceClassification

import ckpt
from tests.helpers.hub_server import Fault, HubServer
from tests.helpers.training import exact
from tests.integrations.test_trainer_generators import masking
from tests.integrations.test_transformers import kept, trainer

REPO = "me/model"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]


@pytest.fixture(autouse=True)
def _new_client(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps a client, which knows the server of an earlier test."""
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)


def pushing(folder: Path, **arguments: Any) -> Any:
    given = {"push_to_hub": True, "hub_model_id": REPO, "max_steps": 6, **arguments}
    run = trainer(folder, kept(folder / "root", saving=ckpt.SaveOptions(background=False)), **given)
    run.processing_class = masking().tokenizer
    return run


def titles(hub: HubServer) -> list[str]:
    """The commits, oldest first."""
    head = hub.store.resolve(REPO, "main")
    return [commit["title"] for commit in hub.store.history(head)][::-1]


def published(hub: HubServer) -> dict[str, bytes]:
    files = hub.store.files(hub.store.resolve(REPO, "main"))
    return {path: hub.store.content(blob) for path, blob in files.items()}


def test_every_save_is_pushed_in_one_commit_that_from_pretrained_reads(tmp_path: Path, hub: HubServer) -> None:
    run = pushing(tmp_path, hub_always_push=True, hub_private_repo=True)
    run.train()
    assert titles(hub)[1:] == ["Training in progress, step 3", "Training in progress, step 6"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= published(hub).keys()
    assert not [path for path in published(hub) if path.endswith((".bin", ".pt"))]
    assert hub.store.repo(REPO)["private"]
    assert exact(BertForSequenceClassification.from_pretrained(REPO).state_dict()) == exact(run.model.state_dict())


def test_a_save_is_left_out_while_the_one_before_is_pushed_and_the_last_is_made_up_for(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.export.push import Pusher

    monkeypatch.setattr(Pusher, "is_busy", True)  # however fast the server is
    pushing(tmp_path).train()
    assert titles(hub)[1:] == ["End of training"]


def test_a_hub_that_fails_does_not_end_the_training(
    tmp_path: Path, hub: HubServer, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    run = pushing(tmp_path, hub_always_push=True)
    hub.faults.append(Fault(r"/commit/", status=503, times=3))  # the first push, tried again twice
    with caplog.at_level(logging.WARNING, "ckpt"):
        run.train()
    assert "could not push the model to the Hub; training continues" in caplog.text
    assert titles(hub)[1:] == ["Training in progress, step 6"]
    hub.faults.append(Fault(r"/commit/", status=403, times=99))
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 8, "load_best_model_at_end": True}
    again = pushing(tmp_path, max_steps=8, save_steps=8, **best)
    again.train(resume_from_checkpoint=True)  # the push under way fails before the best model is loaded
    assert again.state.global_step == 8
    assert caplog.text.count("could not push the model to the Hub") == 3  # the last save is tried again at the end
    assert titles(hub)[1:] == ["Training in progress, step 6"]


def test_at_the_end_the_trainer_pushes_itself(tmp_path: Path, hub: HubServer) -> None:
    run = pushing(tmp_path, hub_strategy="end")
    run.train()
    assert len(titles(hub)) == 1
    run.push_to_hub()
    assert titles(hub)[1:] == ["End of training"]
    assert exact(BertForSequenceClassification.from_pretrained(REPO).state_dict()) == exact(run.model.state_dict())


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_strategy_that_pushes_checkpoints_is_refused_with_the_way_to_have_them(
    tmp_path: Path, hub: HubServer, strategy: str
) -> None:
    with pytest.raises(ckpt.ConfigError, match=rf"hub_strategy='{strategy}' .*CkptCallback\('hub://user/name'\)"):
        pushing(tmp_path, hub_strategy=strategy)


def test_the_way_to_have_checkpoints_on_the_hub_is_one(tmp_path: Path, hub: HubServer) -> None:
    trainer(tmp_path, kept("hub://me/trainer"), max_steps=3).train()
    again = trainer(tmp_path, kept("hub://me/trainer"), max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert [found.step for found in ckpt.list_checkpoints("hub://me/trainer")] == [6, 3]


def test_a_client_that_is_too_old_for_the_hub_is_refused_before_training(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.__version__", "0.36.2")
    with pytest.raises(ckpt.ConfigError, match=r"needs huggingface_hub 1\.0 or newer, but 0\.36\.2 is installed"):
        pushing(tmp_path)
    with pytest.raises(ckpt.ConfigError, match=r"needs huggingface_hub 1\.0 or newer"):
        ckpt.list_checkpoints("hub://me/runs")
    pushing(tmp_path, hub_strategy="end")  # by transformers alone
