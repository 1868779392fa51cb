"""Publish folders as one commit on the Hub, or none if nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.errors import CkptError, ConfigError, TransientError
from ckpt.export import card as model_card
from ckpt.export.card import CARD, CURVE, Training, draw
from ckpt.export.folders import outdated_weights
from ckpt.storage.hub.repo import MAIN_BRANCH, HubFile, HubRepo, open_pull_request, page_of
from ckpt.util.console import say

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
                f"create_pr=True opens a pull request to {MAIN_BRANCH!r}: leave revision= out. To push to one that is "
                "open, give revision='refs/pr/1' alone."
            )
        if not isinstance(card, bool | Mapping):
            raise ConfigError(
                f"card={card!r} must be True, False, or a dict for its front matter, such as {{'license': 'mit'}}. "
                "Text of your own in an existing card is kept."
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
                f"{self.repo.page} is there already, and is public: nothing was pushed. Make it private in its "
                "settings, or leave private= out."
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
        """The card and its plot. The repository's card, or else the one in the folder, is updated."""
        if self.card is False:
            return {}
        found = local.read_bytes() if local else None
        if CARD in there:
            found = self.repo.read(CARD, head)
        existing = None if found is None else found.decode(errors="surrogateescape")  # keeps what is not UTF-8
        picture = draw(publication.training.curves) if publication.training else None
        known = model_card.known_fields(publication.about, publication.training)
        given = self.card if isinstance(self.card, Mapping) else {}
        name = self.repo.id.rpartition("/")[2]
        text = model_card.render(existing, name, known, given, publication.training, curve=picture is not None)
        card = {CARD: text.encode(errors="surrogateescape")}
        return {**card, CURVE: picture.encode()} if picture else card


@dataclass
class _Hashes:
    """Hashes of contents (a path, or bytes), each computed once."""

    known: dict[tuple[str | bytes, bool], str] = field(default_factory=dict)

    def of(self, content: str | bytes, *, like: str) -> str:
        """A hash of the kind that the other one is: sha256 for large files, git's for others."""
        key = (content, len(like) == _SHA256_DIGITS)
        if key not in self.known:
            self.known[key] = _hashed(*key)
        return self.known[key]


def _hashed(content: str | bytes, large: bool) -> str:
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    with BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        return sha_fileobj(file).hex() if large else git_hash(file.read())
