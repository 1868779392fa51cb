"""A root on the Hub (the stand-in server of the tests): a killed run, cut answers, manifests that come back altered."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign.children import Voice
from tests.campaign.training import Training
from tests.campaign.trials import Trial, options
from tests.campaign.verdicts import FRESH, LOST, WRONG, Found
from tests.helpers.hostile_bucket import Reply
from tests.helpers.hub_server import Fault, HubServer

ROOT = "hub://me/run"
_HARM = ("nothing", "answers cut", "manifests altered", "copies altered", "manifests and copies altered")
_ALTERED = {"manifests": ("manifest.json",), "copies": ("manifest.copy.json",)}


def hub(trial: Trial) -> None:
    harm = _HARM[trial.index % len(_HARM)]
    trial.scenario = f"a root on the Hub, killed, then {harm}"
    server = trial.start(_serve, str(trial.folder / "hub"))
    place = (str(server.hear("url ")), str(trial.folder))
    child = trial.start(_saving, *place)
    child.hear("durable 1")
    time.sleep(trial.random.random() * 0.5)
    durable = child.kill().durable()
    server.say(harm)
    server.hear("done")
    ended = trial.run("a resume from the Hub", _resume, *place)
    if ended.failure is not None:
        ended.failure.check("a resume from the Hub")
        if harm != _HARM[-1]:
            raise Found(LOST, f"step {durable} was durable, and nothing loads: {ended.failure}")
    elif harm == _HARM[-1] or not ended.value["step"]:
        raise Found(FRESH, f"step {durable} was durable, and a resume gave step {ended.value['step']}")
    elif ended.value["wrong"]:
        raise Found(WRONG, "; ".join(ended.value["wrong"]))
    elif ended.value["step"] < durable:
        raise Found(LOST, f"step {durable} was durable, resumed was step {ended.value['step']}")


def _serve(voice: Voice, folder: str) -> None:
    server = HubServer(Path(folder))
    voice.tell(f"url {server.url}")
    while harm := voice.heed():
        if harm == "answers cut":
            server.faults += [Fault(pattern, cut="after") for pattern in ("GET .*/tree/", "GET .*/resolve/")]
        names = tuple(f"/{name}" for what, found in _ALTERED.items() if what in harm for name in found)
        if names:
            server.bend = functools.partial(_bend, names)
        voice.tell("done")
    server.close()


def _bend(names: tuple[str, ...], method: str, path: str, reply: Reply) -> Reply:
    return _altered(reply) if path.endswith(names) else reply


def _altered(reply: Reply) -> Reply:
    body = bytearray(reply.body)
    if body:
        body[len(body) // 2] ^= 1
    return replace(reply, body=bytes(body))


def _connect(url: str, folder: str) -> None:
    """Make this process a client of that server, though its parent may have imported Hugging Face's client."""
    from huggingface_hub import constants

    os.environ.update(HF_ENDPOINT=url, HF_HUB_CACHE=f"{folder}/cache", HF_TOKEN="none")
    constants.ENDPOINT, constants.HF_HUB_CACHE = url, f"{folder}/cache"
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants.HF_HUB_DISABLE_XET = True


def _manager(training: Training) -> Any:
    return training.manager(ROOT, storage_options={"deadline": 20}, **options("keep", wait=True))


def _saving(voice: Voice, url: str, folder: str) -> None:
    _connect(url, folder)
    training = Training()
    with _manager(training) as manager:
        manager.resume()
        for _ in range(100):
            step = training.advance()
            manager.step()
            manager.save_state(wait=True)
            voice.tell(f"durable {step}")


def _resume(voice: Voice, url: str, folder: str) -> dict[str, Any]:
    _connect(url, folder)
    training = Training()
    with _manager(training) as manager:
        restored = manager.resume()
        wrong = training.disagreements(restored, generators=not restored.approximated) if restored else []
        return {"step": restored.step if restored else 0, "wrong": wrong}
