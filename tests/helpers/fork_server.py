"""What the fork server does first, once for all its children.

Nothing is collected while it imports, nor what it has imported in its children: a collection would go through a million
objects there, and in a child copy each of their pages, for half a second. The descriptions of S3 are read: the first
client of a process takes a tenth of a second, the next ones a hundredth.
"""

from __future__ import annotations

import asyncio
import gc
import os

from ckpt.storage.clouds.s3 import _fast_session

_SERVER = os.getpid()


def _begin() -> None:
    if os.getppid() == _SERVER:
        gc.freeze()
        gc.enable()


async def _make_client() -> None:
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}  # or it would look for some
    async with _fast_session({}).create_client("s3", region_name="us-east-1", **keys):
        pass


gc.disable()
os.register_at_fork(after_in_child=_begin)
asyncio.run(_make_client())
