"""A folder becomes one commit on the Hub, or none if nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.errors import CkptError, ConfigError, TransientError
from ckpt.export import card as model_card
from ckpt.export.card import CARD, CURVE, Training
from ckpt.export.folders import outdated
from ckpt.export.metric_plot import draw
from ckpt.storage.hub.repo import MAIN_BRANCH, HubFile, HubRepo
from ckpt.util.console import say

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

Card = bool | Mapping[str, Any]
_LARGE = 64  # digits of sha256, by which large files are known; git's hash has 40


@dataclass(frozen=True)
class Ready:
    """Folders with everything that shall be published, later ones before earlier, and what the card can say of it."""

    folders: Sequence[Path]
    about: Mapping[str, Any] = field(default_factory=dict)
    training: Training | None = None

    def paths(self) -> dict[str, Path]:
        found = ((folder, path) for folder in self.folders for path in sorted(folder.rglob("*")) if path.is_file())
        named = {path.relative_to(folder).as_posix(): path for folder, path in found}
        return {name: path for name, path in named.items() if not any(word.startswith(".") for word in name.split("/"))}


@dataclass(frozen=True)
class Target:
    """Where to publish, and in what words."""

    repo: HubRepo
    private: bool | None = None
    message: str | None = None
    card: Card = True

    @classmethod
    def of(
        cls,
        repo_id: str,
        revision: str | None,
        token: str | None,
        private: bool | None,
        message: str | None,
        card: Card,
    ) -> Target:
        if not isinstance(card, bool | Mapping):
            raise ConfigError(
                f"card={card!r} must be True, False, or a dict for its front matter, such as {{'license': 'mit'}}. "
                "Text of your own stays in the card once it is there."
            )
        return cls(HubRepo(repo_id, revision or MAIN_BRANCH, token), private, message, card)

    def publish(self, ready: Ready) -> str:
        """Make one commit of what differs from what is there, and return its URL.

        If that fails, a repository that was made for it is removed again. Where another try may help it stays, with
        what was uploaded, and the error says so.
        """
        made = self.repo.create(private=self.private)
        try:
            return self._publish(ready)
        except CkptError as error:
            if made:
                error.args = (f"{error} {self._after_failure(error)}",)
            raise

    def _after_failure(self, error: CkptError) -> str:
        """What has become of a repository that was made for this push."""
        if not isinstance(error, TransientError) and self.repo.remove_if_untouched():
            return f"{self.repo.page}, which was made for this push, has been removed again."
        return f"{self.repo.page} was made for this push, and is still empty: push again, or remove it."

    def _publish(self, ready: Ready) -> str:
        hashes = _Hashes()
        if self.private and not self.repo.is_private():
            raise ConfigError(
                f"{self.repo.page} is there already, and is public: nothing was pushed. Make it private in its "
                "settings, or leave private= out."
            )
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
        paths = ready.paths()
        new: dict[str, str | bytes] = {path: str(file) for path, file in paths.items()}
        new |= self._texts(ready, paths.get(CARD), head, there)
        additions = [
            CommitOperationAdd(path, content)
            for path, content in new.items()
            if path not in there or hashes.of(content, like=there[path].oid) != there[path].oid
        ]
        return [*additions, *(CommitOperationDelete(path) for path in sorted(outdated(there, new)))]

    def _texts(self, ready: Ready, local: Path | None, head: str, there: Mapping[str, HubFile]) -> dict[str, bytes]:
        """The card and its picture, with the card that is there, or lies in the folder, as a beginning."""
        if self.card is False:
            return {}
        found = local.read_bytes() if local else None
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
