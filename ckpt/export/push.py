"""Push a model to the Hub: one commit, made by the main rank alone, and none if nothing has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import CkptError, ConfigError, TransientError
from ckpt.export import card as model_card
from ckpt.export.card import CARD, Training
from ckpt.export.folders import belongs_beside, outdated_weights, scratch_folder
from ckpt.export.options import SHARD_SIZE, ExportOptions
from ckpt.export.save_model import (
    ADAPTER_CONFIG,
    CONFIG,
    ModelExport,
    Processor,
    about_model,
    check_processors,
    model_files,
    save_live,
    write_processors,
)
from ckpt.export.source import open_source
from ckpt.formats.foreign.hf_safetensors import tied
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.registry import HF, PEFT
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.root.folder import Place
from ckpt.root.signing import KeySource, Trust, open_trust
from ckpt.state.model import ModelPart
from ckpt.storage.hub.repo import (
    MAIN_BRANCH,
    HubFile,
    HubRepo,
    hashed_like,
    open_pull_request,
    page_of,
    pieces_of,
)
from ckpt.util.console import say
from ckpt.util.threads import Worker

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


Card = bool | Mapping[str, Any]
_SHA256_DIGITS = 64  # the Hub identifies large files by sha256, others by git's hash, which has 40 digits


@dataclass(frozen=True)
class Publication:
    """The files to publish, and what the model card says of them. In `folders` a later one overrides an earlier one."""

    folders: Sequence[Path]
    about: Mapping[str, Any] = field(default_factory=dict)
    training: Training | None = None

    def paths(self) -> dict[str, Path]:
        """The files by their path in the repository, without hidden ones."""
        found = ((folder, path) for folder in self.folders for path in sorted(folder.rglob("*")) if path.is_file())
        named = {path.relative_to(folder).as_posix(): path for folder, path in found}
        return {name: path for name, path in named.items() if not any(word.startswith(".") for word in name.split("/"))}


@dataclass(frozen=True)
class HubTarget:
    """The repository to publish to, and how: its visibility, the commit's message, the model card."""

    repo: HubRepo
    private: bool | None = None
    message: str | None = None
    card: Card = True
    create_pr: bool = False

    @classmethod
    def of(
        cls,
        repo_id: str,
        revision: str | None,
        token: str | None,
        private: bool | None,
        message: str | None,
        card: Card,
        create_pr: bool = False,
    ) -> HubTarget:
        if not isinstance(create_pr, bool):
            raise ConfigError(f"create_pr={create_pr!r} must be True or False.")
        if create_pr and revision not in (None, MAIN_BRANCH):
            raise ConfigError(
                f"create_pr=True opens a pull request to {MAIN_BRANCH!r}, so leave out revision=. To push to an open "
                "pull request, give only revision='refs/pr/1'."
            )
        if not isinstance(card, bool | Mapping):
            raise ConfigError(
                f"card={card!r} must be True, False, or a dict for the front matter of the model card, such as "
                "{'license': 'mit'}. ckpt keeps your own text in an existing card."
            )
        return cls(HubRepo(repo_id, revision or MAIN_BRANCH, token), private, message, card, create_pr)

    def publish(self, publication: Publication) -> str:
        """Commit what differs from the repository's head, and return the URL of the commit.

        On an error a repository that this call created is removed again. After a transient one it is kept, with what
        was uploaded, and the error says so.
        """
        created = self.repo.create(private=self.private)
        try:
            return self._publish(publication)
        except CkptError as error:
            if created:
                error.args = (f"{error} {self._after_failure(error)}",)
            raise

    def _after_failure(self, error: CkptError) -> str:
        """What an error says of a repository that was created for this push."""
        if not isinstance(error, TransientError) and self.repo.remove_if_untouched():
            return f"{self.repo.page}, which was made for this push, has been removed again."
        return f"{self.repo.page} was made for this push, and is still empty: push again, or remove it."

    def _publish(self, publication: Publication) -> str:
        hashes = _Hashes()
        if self.private and not self.repo.is_private():
            raise ConfigError(
                f"nothing was pushed, because {self.repo.page} already exists and is public. Make the repository "
                "private in its settings, or leave out private=."
            )
        message = self.message or "Upload model with ckpt"
        if self.create_pr and self._operations(publication, hashes, self.repo.head()):
            return self._propose(publication, hashes, message)
        commit, count = self.repo.commit_on_head(lambda head: self._operations(publication, hashes, head), message)
        if count:
            say(f"pushed to {self.repo.page}: {count} files in commit {commit[:8]}")
        else:
            say(f"{self.repo.page} has all of it already: nothing to push")
        return f"{self.repo.page}/commit/{commit}"

    def _propose(self, publication: Publication, hashes: _Hashes, message: str) -> str:
        """Commit to a pull request of its own, and return its URL."""
        request = open_pull_request(self.repo, message)
        say(f"opened the pull request {page_of(request)}")  # before the commit, which may be interrupted
        target = replace(self, repo=request, create_pr=False)
        try:
            _, count = request.commit_on_head(lambda head: target._operations(publication, hashes, head), message)
        except CkptError as error:
            rest = f"push again with revision={request.revision!r} and without create_pr, or close it"
            error.args = (f"{error} The pull request {page_of(request)} is open, and empty: {rest}.",)
            raise
        say(f"pushed {count} files to {page_of(request)}")
        return page_of(request)

    def _operations(
        self, publication: Publication, hashes: _Hashes, head: str
    ) -> list[CommitOperationAdd | CommitOperationDelete]:
        """The changes that turn the files at a commit into those to publish."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there = self.repo.files(head)
        paths = publication.paths()
        new: dict[str, str | bytes] = {path: str(file) for path, file in paths.items()}
        new |= self._texts(publication, paths.get(CARD), head, there)
        additions = [
            CommitOperationAdd(path, content)
            for path, content in new.items()
            if path not in there or hashes.of(content, like=there[path].oid) != there[path].oid
        ]
        return [*additions, *(CommitOperationDelete(path) for path in sorted(outdated_weights(there, new)))]

    def _texts(
        self, publication: Publication, local: Path | None, head: str, there: Mapping[str, HubFile]
    ) -> dict[str, bytes]:
        """The card. The repository's, or else the one in the folder, is updated."""
        if self.card is False:
            return {}
        found = local.read_bytes() if local else None
        if CARD in there:
            found = self.repo.read(CARD, head)
        existing = None if found is None else found.decode(errors="surrogateescape")  # keeps what is not UTF-8
        known = model_card.known_fields(publication.about, publication.training)
        given = self.card if isinstance(self.card, Mapping) else {}
        name = self.repo.id.rpartition("/")[2]
        text = model_card.render(existing, name, known, given, publication.training)
        return {CARD: text.encode(errors="surrogateescape")}


@dataclass
class _Hashes:
    """Hashes of contents (a path, or bytes), each computed once."""

    known: dict[tuple[str | bytes, int], str] = field(default_factory=dict)

    def of(self, content: str | bytes, *, like: str) -> str:
        """A hash of the kind that the other one is."""
        key = (content, len(like))
        if key not in self.known:
            is_file = isinstance(content, str)
            size = os.path.getsize(content) if is_file else len(content)
            self.known[key] = hashed_like(like, pieces_of(content) if isinstance(content, str) else [content], size)
        return self.known[key]


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
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> str:
    """Publish a model on the Hub in one commit: from a checkpoint, sharded or not, or from a folder of safetensors
    files.

    The commit contains the weights, `config.json`, the tokenizer, the files in `beside`, and the model card. ckpt
    uploads only files that the Hub doesn't have, so if a push is interrupted, the next push continues it. If nothing
    has changed, ckpt makes no commit. With several processes, only the main process talks to the Hub, and the others
    wait.

    Args:
        source: Anything that `merge` reads, at a path or URL.
        repo_id: `user/name`; created if it does not exist.
        private: Make a new repository private.
        revision: A branch; created if it does not exist.
        commit_message: The commit's message.
        create_pr: Open a pull request instead, and leave the main branch unchanged.
        token: A token for the Hub; None: `HF_TOKEN` or a login.
        max_shard_size: The largest size of a file, in bytes or as `"5GB"`; a larger model becomes several files.
        dtype: The dtype to cast floating point tensors to.
        card: False for no model card, or a dict for its front matter: `{"license": "apache-2.0"}`.
        tokenizer: A tokenizer to add to the commit.
        processor: A processor to add to the commit.
        beside: A folder with more files for the commit, such as a tokenizer or a config; ckpt leaves out its weights.
        part: The model to push, if there are several.
        format: The format to push, if a folder has saves in several formats: `"deepspeed"`, `"hf"`.
        storage_options: For a `source` that is a URL, as for the manager.
        timeout: Seconds to wait for other ranks.
        verify_key: As in `Signing`: ckpt warns if none of these keys has signed the source.
        require_signed: As `required` of `Signing`.

    Returns:
        The URL of the commit, or of the pull request.

    Raises:
        UntrustedError: You require a signature, but no trusted key has signed the source.
        DeniedError: The token is missing, or has no permission to write there.
        StorageError: The Hub refused the commit; nothing has changed there.
    """
    target = HubTarget.of(repo_id, revision, token, private, commit_message, card, create_pr)
    processors = check_processors(tokenizer=tokenizer, processor=processor)
    trust = open_trust(verify_key, required=require_signed)
    request = _PushRequest(ExportOptions.parse(dtype, max_shard_size), processors, beside, trust)
    ranks = find_ranks(f"push to {target.repo.url}", timeout)

    def push(_: object) -> str:
        with _prepare(os.fspath(source), part, format, request, storage_options) as publication:
            if not {CONFIG, ADAPTER_CONFIG} & {path.rpartition("/")[2] for path in publication.paths()}:
                _log.warning(
                    "the push contains no %s, which from_pretrained needs. Pass a folder that contains one as beside=.",
                    CONFIG,
                )
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
    trust: Trust

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
                raise ConfigError(
                    f"ckpt pushes the files of {source} unchanged. Leave out dtype= and max_shard_size=, which apply "
                    "only to checkpoints."
                )
            request.trust.refuse_unsigned(source)
            request.write_companions(folder)
            yield Publication((Path(source), folder))
            return
        with open_source(source, part, storage_options, request.trust, format) as opened:
            for name, content in opened.beside.items():
                (folder / name).write_bytes(content())
            request.write_companions(folder)
            beside = {path.name: path.read_bytes for path in folder.iterdir()}
            about = opened.about or about_model(beside, opened.tensors)
            files = model_files(about, opened.tensors, tied(opened.tensors), request.options)
            ModelExport(files).write(folder)
            yield Publication((folder,), about, Training.of(opened.manifest) if opened.manifest else None)


def _copy_beside(beside: Path, folder: Path) -> None:
    if not beside.is_dir():
        raise ConfigError(
            f"beside={str(beside)!r} is not a folder. Give a folder that contains a tokenizer or a config."
        )
    for path in beside.iterdir():
        if path.is_file() and belongs_beside(path.name):
            (folder / path.name).write_bytes(path.read_bytes())


@dataclass
class Pusher:
    """Publishes live models, one at a time; with `wait=False` on a background thread of the main rank."""

    ranks: Ranks
    _background: Worker = field(default_factory=lambda: Worker("ckpt-push"))

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
        """Block until no push is under way. If a background push failed, raises its error; later calls don't
        raise it again."""
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
