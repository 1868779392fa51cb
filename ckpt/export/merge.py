"""Merge a sharded checkpoint into one safetensors file, or a few, in bounded memory whatever the size of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import ConfigError, StorageError
from ckpt.export.options import ExportOptions
from ckpt.export.source import open_source
from ckpt.formats.foreign.hf_safetensors import INDEX_SUFFIX, plan_files, tied
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.tensors import FilePlan
from ckpt.root.folder import open_url
from ckpt.root.signing import KeySource, open_trust
from ckpt.storage import Storage
from ckpt.util.console import counted, progress_bar
from ckpt.util.option_values import path_text


def merge(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    part: str = "model",
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> list[str]:
    """Write a checkpoint's tensors to one safetensors file.

    `merge` writes tied weights only once, and takes about 0.2 GB of memory, however large the checkpoint is. The file
    appears only when it is complete.

    Args:
        source: A ckpt checkpoint, a root (`merge` takes its newest intact checkpoint, and warns about newer ones), or
            another tool's file or folder that `convert` reads, at a path or URL. From DeepSpeed, `merge` takes the
            master weights.
        destination: A file that ends with `.safetensors`, at a path or URL.
        dtype: The dtype to cast floating point tensors to.
        max_shard_size: The largest size of a file, in bytes or as `"5GB"`; a larger model becomes shards and
            `model.safetensors.index.json`.
        part: The part of the checkpoint to write, if not the model.
        format: The format to read, if a folder has saves in several formats: `"deepspeed"`, `"hf"`.
        storage_options: Credentials and the like, for URLs on both sides.
        verify_key: As in `Signing`: ckpt warns if none of these keys has signed the source.
        require_signed: As `required` of `Signing`.

    Returns:
        The URLs of the written files.

    Raises:
        MissingError: The source does not exist, or has no such part.
        DamagedError: The source's bytes have changed since they were saved.
        ConfigError: ckpt can't read this kind of source, or the destination would overwrite a checkpoint.
    """
    output = _Destination.parse(destination, storage_options)
    options = ExportOptions.parse(dtype, max_shard_size)
    trust = open_trust(verify_key, required=require_signed)
    with open_source(source, part, storage_options, trust, format) as opened:
        tensors = opened.tensors
        files = plan_files(
            output.name, tensors, tied(tensors), dtype=options.dtype, max_shard_size=options.max_shard_size
        )
        output.check_free(files)
        return output.write(files)


@dataclass(frozen=True)
class _Destination:
    """The folder that the output is written to, and the name of the file in it."""

    storage: Storage
    name: str

    @classmethod
    def parse(cls, destination: str | os.PathLike[str], options: Mapping[str, Any] | None) -> _Destination:
        text = path_text(destination, "the destination")
        folder, slash, name = text.rpartition("/")
        if not name or os.path.isdir(text):
            raise ConfigError(f"{text} is a folder. Name a file in that folder: {text.rstrip('/')}/model{SUFFIX}.")
        if not name.endswith(SUFFIX) or folder.endswith(":/"):
            raise ConfigError(f"ckpt can't write to {text}. Name a file in a folder, with the suffix {SUFFIX}.")
        return cls(open_url(folder or slash or ".", options), name)

    def check_free(self, files: list[FilePlan]) -> None:
        """Refuse a folder in which the output would overwrite a checkpoint, or be mixed up with an older output."""
        there = {entry.key for entry in self.storage.list()}
        if FILE_NAME in there:
            raise ConfigError(
                f"{self.storage.url} is a checkpoint, and ckpt does not overwrite it. Choose another destination."
            )
        if any(key.startswith(f"{self.name}/") for key in there):
            raise ConfigError(
                f"{self._url(self.name)} is a folder. Name a file in that folder: {self.name}/model{SUFFIX}."
            )
        in_the_way = [name for name in (self.name, self.name + INDEX_SUFFIX) if name in there and len(files) > 1]
        if in_the_way:
            listed = " and ".join(self._url(name) for name in in_the_way)
            raise ConfigError(
                f"other tools would read {listed} together with the new shards. Remove the old file, or choose "
                "another destination."
            )

    def write(self, files: list[FilePlan]) -> list[str]:
        """Write the files in order. If a write fails, the files before it are removed."""
        done: list[str] = []
        with progress_bar(f"merging into {self.name}", sum(file.size for file in files), in_bytes=True) as advance:
            try:
                for file in files:
                    self.storage.write(file.path, counted(file.pieces(), advance))
                    done.append(file.path)
            except BaseException:
                with suppress(StorageError):  # the first error is the one to raise
                    self.storage.delete(done)
                raise
        return [self._url(path) for path in done]

    def _url(self, name: str) -> str:
        return f"{self.storage.url.rstrip('/')}/{name}"
