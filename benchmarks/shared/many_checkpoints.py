"""A root with many tiny checkpoints: one is saved, and written again under other names."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import ckpt
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root.catalog import INDEX, Overview
from ckpt.storage import open_storage

FIRST = "step-00000000"


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def build(root: str, count: int) -> None:
    """Each checkpoint has a manifest of its own; the index is that which a run leaves."""
    with ckpt.StateManager(root, model=model()) as manager:
        manager.save_state(FIRST, wait=True)
    storage = open_storage(root)
    files = {entry.key.removeprefix(f"{FIRST}/"): storage.read(entry.key) for entry in storage.list(FIRST)}
    first = Manifest.from_bytes(files.pop(FILE_NAME), FILE_NAME)

    def write(number: int) -> None:
        name = f"step-{number:08d}"
        manifest = dataclasses.replace(first, name=name, sequence=first.sequence + number, id=f"{number:032x}")
        for file, content in {**files, FILE_NAME: manifest.to_bytes()}.items():
            storage.write(f"{name}/{file}", [content])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(1, count)))
    if storage.is_local:  # which has no index
        return
    found = Overview.of(storage)
    found.index.update(storage, {summary.name for summary in found.committed})
    assert any(entry.key == INDEX for entry in storage.list())
