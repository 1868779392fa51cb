"""Pull requests on the Hub, for repositories that one may read and not write to."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt.errors import ConfigError
from ckpt.storage.hub.errors import translated_errors

if TYPE_CHECKING:
    from ckpt.storage.hub.repo import HubRepo

_SHORTEST_TITLE = 3  # characters, of the Hub's


def open_pull_request(repo: HubRepo, title: str) -> HubRepo:
    """Open a pull request to the main branch, and return the repository at its branch: what it proposes is committed
    there.

    If the answer to a request was lost, the mark in its description tells whether it was opened: there is one, not two.
    """
    if len(title.strip()) < _SHORTEST_TITLE:
        raise ConfigError(f"the title of a pull request has {_SHORTEST_TITLE} characters or more, not {title!r}.")
    mark, tries = f"ckpt {secrets.token_hex(8)}", 0

    def opened() -> int:
        nonlocal tries
        tries += 1
        known = _marked(repo, title, mark) if tries > 1 else None
        return known or int(repo.api.create_pull_request(repo.id, title=title, description=f"Opened by {mark}.").num)

    with translated_errors("open a pull request in", repo.url):
        number = repo.hub.with_retries(opened)
    return replace(repo, revision=f"refs/pr/{number}")


def page_of(request: HubRepo) -> str:
    """The address of a pull request's web page."""
    return f"{request.page}/discussions/{request.revision.rpartition('/')[2]}"


def _marked(repo: HubRepo, title: str, mark: str) -> int | None:
    for found in repo.api.get_repo_discussions(repo.id, discussion_type="pull_request"):
        if found.title == title.strip():
            events = repo.api.get_discussion_details(repo.id, found.num).events
            if any(mark in str(getattr(event, "content", "")) for event in events):
                return int(found.num)
    return None
