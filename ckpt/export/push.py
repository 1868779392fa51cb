"""Push a model to the Hub: one commit, made by the main rank alone, and none if nothing has changed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigError
from ckpt.export.card import Training
from ckpt.export.checkpoint_tensors import TensorSource
from ckpt.export.folders import belongs_beside, scratch_folder
from ckpt.export.hub_commit import Card, HubTarget, Publication
from ckpt.export.options import SHARD_SIZE, ExportOptions
from ckpt.export.save_model import (
    ADAPTER_CONFIG,
    CONFIG,
    ModelExport,
    Processor,
    check_processors,
    model_files,
    save_live,
    write_processors,
)
from ckpt.export.source import open_source
from ckpt.formats.foreign.hf_safetensors import tied
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.registry import HF, PEFT
from ckpt.ranks.consensus import Result, decide_together, run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.root.catalog import locate, scan
from ckpt.root.folder import Place
from ckpt.root.history import History
from ckpt.state.model import ModelPart
from ckpt.util.threads import SerialWorker

_log = logging.getLogger("ckpt")


def push_to_hub(
    source: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    max_shard_size: int | str | None = SHARD_SIZE,
    dtype: str | torch.dtype | None = None,
    card: Card = True,
    tokenizer: Processor | None = None,
    processor: Processor | None = None,
    beside: str | os.PathLike[str] | None = None,
    part: str = "model",
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> str:
    """Publish the model of a checkpoint, sharded or not, or a folder of safetensors, in one commit.

    The commit has everything: weights, `config.json`, tokenizer, what lies `beside`, and the model card. What the Hub
    has is not sent again, so that an interrupted push continues where it was; if nothing has changed there is no
    commit. With several processes the main one alone talks to the Hub, and the others wait.

    Args:
        source: A path or URL.
        repo_id: `user/name`; created if it does not exist.
        private: Of a repository that is created.
        revision: A branch; created if it does not exist.
        commit_message: What the commit says.
        create_pr: Propose it by a pull request; the main branch is as before.
        token: None: `HF_TOKEN` or a login.
        max_shard_size: Bytes, or `"5GB"`, beyond which there are several files.
        dtype: What floating point tensors are cast to.
        card: False for no model card, or a dict for its front matter: `{"license": "apache-2.0"}`.
        tokenizer: Its files are in the commit.
        processor: So are those of this.
        beside: A folder whose files are in the commit: a tokenizer, a config; no weights.
        part: Which model, where there are several.
        format: Which one to push, where a folder holds saves in several formats: `"deepspeed"`, `"hf"`.
        storage_options: For a `source` that is a URL, as for the manager.
        timeout: Seconds to wait for other ranks.

    Returns:
        The URL of the commit, or of the pull request.

    Raises:
        DeniedError: The token is missing, or may not write there.
        StorageError: The Hub did not take it; nothing has changed there.
    """
    target = HubTarget.of(repo_id, revision, token, private, commit_message, card, create_pr)
    processors = check_processors(tokenizer=tokenizer, processor=processor)
    request = _PushRequest(ExportOptions.parse(dtype, max_shard_size), processors, beside)
    ranks = find_ranks(f"push to {target.repo.url}", timeout)

    def push(_: object) -> str:
        with _prepare(os.fspath(source), part, format, request, storage_options) as publication:
            if not {CONFIG, ADAPTER_CONFIG} & {path.rpartition("/")[2] for path in publication.paths()}:
                _log.warning("No %s is pushed, and from_pretrained needs one. Name its folder: beside=.", CONFIG)
            return target.publish(publication)

    with ranks.working():
        url: str = decide_together(ranks, f"push_to_hub({repo_id!r})", Result(), push)
    return url


@dataclass(frozen=True)
class _PushRequest:
    """How the weights are written, and the files that accompany them: of processors, and of the folder `beside`."""

    options: ExportOptions
    processors: Sequence[Processor]
    beside: str | os.PathLike[str] | None

    def write_companions(self, folder: Path) -> None:
        if self.beside is not None:
            _copy_beside(Path(self.beside), folder)
        write_processors(folder, self.processors)


@contextmanager
def _prepare(
    source: str, part: str, format: str | None, request: _PushRequest, storage_options: Mapping[str, Any] | None
) -> Iterator[Publication]:
    """The files to publish, in a scratch folder. A folder of safetensors is published as it is."""
    place = Place.at(source, storage_options, format)
    with scratch_folder() as folder:
        if place.format in (HF, PEFT) and os.path.isdir(source) and any(Path(source).glob(f"*{SUFFIX}")):
            if request.options != ExportOptions.parse(None, SHARD_SIZE):
                raise ConfigError(f"{source} is pushed as it is: dtype= and max_shard_size= are for checkpoints.")
            request.write_companions(folder)
            yield Publication((Path(source), folder))
            return
        with open_source(source, part, storage_options, format=format) as opened:
            for name, content in opened.beside.items():
                (folder / name).write_bytes(content())
            request.write_companions(folder)
            about = _describe(opened, folder)
            files = model_files(about, opened.tensors, tied(opened.tensors), request.options)
            ModelExport(files).write(folder)
            yield Publication((folder,), about, _training(source, opened.manifest, storage_options))


def _copy_beside(beside: Path, folder: Path) -> None:
    if not beside.is_dir():
        raise ConfigError(f"beside={str(beside)!r} is no folder: give that of a tokenizer, or of a config.")
    for path in beside.iterdir():
        if path.is_file() and belongs_beside(path.name):
            (folder / path.name).write_bytes(path.read_bytes())


def _describe(source: TensorSource, folder: Path) -> Mapping[str, Any]:
    """The description of a model that its checkpoint holds; or the configuration beside the weights."""
    if source.about:
        return source.about
    if (folder / CONFIG).exists():
        return {"config": _read_json(folder / CONFIG)}
    if (folder / ADAPTER_CONFIG).exists():
        names = {name: name for name in source.tensors}
        return {"adapters": {"default": {"config": _read_json(folder / ADAPTER_CONFIG), "tensors": names}}}
    return {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path.name} is not JSON: {error}.") from None


def _training(source: str, manifest: Manifest | None, options: Mapping[str, Any] | None) -> Training | None:
    if manifest is None:
        return None
    storage, _ = locate(source, options if "://" in source else None)
    present = [checkpoint.manifest for checkpoint in scan(storage) if checkpoint.manifest]
    return Training.of(manifest, [*present, *(save.summary for save in History.of(storage).without(present))])


@dataclass
class Pusher:
    """Publishes live models, one at a time; with `wait=False` on a background thread of the main rank."""

    ranks: Ranks
    _background: SerialWorker = field(default_factory=lambda: SerialWorker("ckpt-push"))

    def push(
        self,
        part: ModelPart,
        target: HubTarget,
        options: ExportOptions,
        processors: Sequence[Processor],
        training: Callable[[], Training],
        *,
        wait: bool,
    ) -> str | None:
        """Write the model's files, collectively, and publish them on the main rank."""
        call = f"push_to_hub({target.repo.id!r})"
        main = self.ranks.rank == MAIN
        with self.ranks.working():
            run_on_all_ranks(self.ranks, call, self.wait)  # an error of the last push is raised on all ranks
            facts = run_on_all_ranks(self.ranks, call, lambda: training() if main else None)
            publish = self._write_files(call, part, target, options, processors, facts)
            if wait:
                url: str = decide_together(self.ranks, call, Result(), lambda _: publish())
                return url
        if main:
            self._background.start(publish)
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way on this rank."""
        return self._background.busy

    def wait(self) -> None:
        """Block until no push is under way. An error of a background push is raised here, once."""
        self._background.wait()

    def _write_files(
        self,
        call: str,
        part: ModelPart,
        target: HubTarget,
        options: ExportOptions,
        processors: Sequence[Processor],
        training: Training | None,
    ) -> Callable[[], str]:
        """Write the files into a scratch folder of the main rank, and return the function that publishes them there."""
        with ExitStack() as stack:
            scratch: AbstractContextManager[Path] = scratch_folder() if self.ranks.rank == MAIN else nullcontext(Path())
            folder = stack.enter_context(scratch) / "model"
            exported = save_live(call, folder, part, self.ranks, options, processors)
            until_published = stack.pop_all()

        def publish() -> str:
            with until_published:
                return target.publish(Publication((folder,), exported.about, training))

        return publish
