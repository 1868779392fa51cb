"""A model goes to the Hub: one commit, made by the main process alone, and none if nothing has changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt import model_card
from ckpt.agreement import Outcome, agree
from ckpt.catalog import locate, scan
from ckpt.console import say
from ckpt.curve import draw
from ckpt.errors import ConfigError
from ckpt.exporting import SHARD_SIZE, Exported, Wanted, model_files, save_live
from ckpt.folders import outdated
from ckpt.formats.headers import SUFFIX
from ckpt.formats.manifest import FILE_NAME, Manifest
from ckpt.formats.tied import tied
from ckpt.merge_sources import open_source
from ckpt.model_card import CARD, CURVE, Training
from ckpt.models import ModelPart
from ckpt.ranks import MAIN, Ranks, find_ranks
from ckpt.storage.hub_repo import MAIN_BRANCH, HubFile, HubRepo

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

Card = bool | Mapping[str, Any]
_LARGE = 64  # digits of sha256, by which large files are known; git's hash has 40


def push_to_hub(
    source: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    max_shard_size: int | str | None = SHARD_SIZE,
    dtype: str | torch.dtype | None = None,
    card: Card = True,
    part: str = "model",
    beside: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
) -> str:
    """Publish the model of a checkpoint, sharded or not, or a folder of safetensors, and return the commit's URL.

    One commit has everything: weights, `config.json`, what lies in the folder `beside` (a tokenizer), and the model
    card; `card` is False for none, or a dict for its front matter: `{"license": "apache-2.0"}`. What the Hub has is not
    sent again, so that an interrupted push goes on where it was; if nothing has changed there is no commit. With
    several processes the main one alone talks to the Hub, and the others wait.
    """
    target = Target(HubRepo(repo_id, revision or MAIN_BRANCH, token), private, commit_message, card)
    wanted = Wanted.of(dtype, max_shard_size)
    ranks = find_ranks(f"push to {target.repo.url}", timeout)

    def push(_: Any) -> str:
        with _folder_of(os.fspath(source), part, wanted, beside) as ready:
            return target.publish(ready)

    with ranks.working():
        url: str = agree(ranks, f"push_to_hub({repo_id!r})", Outcome(), push)
    return url


@dataclass(frozen=True)
class Ready:
    """A folder with everything that shall be published, and what the card can say of it."""

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    training: Training | None = None

    def paths(self) -> dict[str, Path]:
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        named = {path.relative_to(self.folder).as_posix(): path for path in found}
        return {name: path for name, path in named.items() if not any(word.startswith(".") for word in name.split("/"))}


@contextmanager
def _folder_of(source: str, part: str, wanted: Wanted, beside: str | os.PathLike[str] | None) -> Iterator[Ready]:
    """What is at a path or URL as a folder to publish: itself, if it is one already."""
    if _is_published_form(Path(source)):
        if wanted.dtype is not None or beside is not None:
            raise ConfigError(f"{source} is pushed as it is: dtype= and beside= are for checkpoints.")
        yield Ready(Path(source))
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-push-") as temporary, open_source(source, part) as opened:
        folder = Path(temporary)
        _copy_beside(beside, folder)
        files = model_files(opened.about, opened.tensors, tied(opened.tensors), wanted)
        Exported(files).write(folder)
        yield Ready(folder, opened.about, _told(source, opened.manifest))


def _is_published_form(folder: Path) -> bool:
    return folder.is_dir() and not (folder / FILE_NAME).exists() and any(folder.glob(f"*{SUFFIX}"))


def _copy_beside(beside: str | os.PathLike[str] | None, folder: Path) -> None:
    if beside is None:
        return
    files = [path for path in Path(beside).iterdir() if path.is_file() and path.suffix != SUFFIX]
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())


def _told(source: str, manifest: Manifest | None) -> Training | None:
    if manifest is None:
        return None
    storage, _ = locate(source)
    return Training.of(manifest, [one.manifest for one in scan(storage) if one.manifest])


@dataclass(frozen=True)
class Target:
    """Where to publish, and in what words."""

    repo: HubRepo
    private: bool | None = None
    message: str | None = None
    card: Card = True

    def publish(self, ready: Ready) -> str:
        """Make one commit of what differs from what is there, and return its URL."""
        hashes = _Hashes()
        self.repo.create(private=self.private)
        message = self.message or "Upload model with ckpt"
        commit, count = self.repo.commit_on_head(lambda head: self._operations(ready, hashes, head), message)
        if count:
            say(f"pushed to {self.repo.page}: {count} files in commit {commit[:8]}")
        else:
            say(f"{self.repo.page} has all of it already: nothing to push")
        return f"{self.repo.page}/commit/{commit}"

    def _operations(self, ready: Ready, hashes: _Hashes, head: str) -> list[CommitOperationAdd | CommitOperationDelete]:
        """What differs between what shall be there and what is there at a commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there = self.repo.files(head)
        new: dict[str, str | bytes] = {path: str(file) for path, file in ready.paths().items()}
        new |= self._texts(ready, head, there)
        additions = [
            CommitOperationAdd(path, content)
            for path, content in new.items()
            if path not in there or hashes.of(content, like=there[path].oid) != there[path].oid
        ]
        return [*additions, *(CommitOperationDelete(path) for path in sorted(outdated(there, new)))]

    def _texts(self, ready: Ready, head: str, there: Mapping[str, HubFile]) -> dict[str, bytes]:
        """The card and its picture, with the card that is there, or lies in the folder, as a beginning."""
        if self.card is False:
            return {}
        local = ready.folder / CARD
        found = local.read_bytes() if local.exists() else None
        if CARD in there:
            found = self.repo.read(CARD, head)
        existing = None if found is None else found.decode(errors="surrogateescape")  # what is no UTF-8 stays, too
        picture = draw(ready.training.curves) if ready.training else None
        known = model_card.known_fields(ready.about, ready.training)
        given = self.card if isinstance(self.card, Mapping) else {}
        name = self.repo.id.rpartition("/")[2]
        text = model_card.written(existing, name, known, given, ready.training, curve=picture is not None)
        card = {CARD: text.encode(errors="surrogateescape")}
        return {**card, CURVE: picture.encode()} if picture else card


@dataclass
class _Hashes:
    """Hashes of contents (of a file at a path, or of bytes), each worked out once."""

    known: dict[tuple[str | bytes, bool], str] = field(default_factory=dict)

    def of(self, content: str | bytes, *, like: str) -> str:
        """In the way in which another hash was made: sha256 for large files, git's for others."""
        key = (content, len(like) == _LARGE)
        if key not in self.known:
            self.known[key] = _hashed(*key)
        return self.known[key]


def _hashed(content: str | bytes, large: bool) -> str:
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    with BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        return sha_fileobj(file).hex() if large else git_hash(file.read())


def push_live(
    part: ModelPart, ranks: Ranks, target: Target, wanted: Wanted, beside: tuple[Any, ...], training: Training | None
) -> Callable[[], str]:
    """Make the files of a live model, on all ranks together. What is returned publishes them, on the main rank."""
    with ExitStack() as stack:
        temporary: AbstractContextManager[str]
        temporary = tempfile.TemporaryDirectory(prefix="ckpt-push-") if ranks.rank == MAIN else nullcontext("")
        folder = Path(stack.enter_context(temporary), "model")
        exported = save_live(f"push_to_hub({target.repo.id!r})", folder, part, ranks, wanted, beside)
        until_published = stack.pop_all()

    def publish() -> str:
        with until_published:
            return target.publish(Ready(folder, exported.about, training))

    return publish
