"""Ray Train: a run's checkpoints in its folder in Ray's storage path, each reported to Ray once it is committed.

    def train(config):                                   # the training function of a TorchTrainer
        with ckpt.StateManager(root(), model=model, ...) as manager, reporting(manager) as report:
            for batch in manager.batches(loader):
                ...
                manager.step(metrics={"loss": loss})
                report()

Ray takes a reported checkpoint for its own: it deletes it (`num_to_keep`), and refuses to start a run again that lacks
one. So Ray gets a small folder for each of ckpt's checkpoints, with the URL in its metadata. Ray keeps the folders, and
ckpt the checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import ConfigError
from ckpt.load.load_state import Restored
from ckpt.manager import StateManager
from ckpt.ranks.consensus import MAIN
from ckpt.ranks.schedule_and_signals import CommonStep
from ckpt.save.saver import SaveReport

URL = "ckpt"  # in the metadata of Ray's checkpoint
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}  # by the names that pyarrow's filesystems have


def root() -> str:
    """Return the root for this run's checkpoints: `STORAGE_PATH/NAME/ckpt`, with the values of Ray's `RunConfig`.

    Raises:
        ConfigError: ckpt can't tell the URL of this kind of storage.
    """
    from ray import train

    storage = train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind not in _SCHEMES:
        raise ConfigError(
            f"ckpt can't tell the URL of Ray's storage path from a filesystem of type {kind!r}, only from "
            f"these types: {', '.join(_SCHEMES)}. Pass a URL of your own to StateManager(...), one for each run."
        )
    return f"{_SCHEMES[kind]}{storage.experiment_fs_path}/ckpt"


@contextmanager
def reporting(manager: StateManager) -> Iterator[Callable[[], None]]:
    """Report checkpoints to Ray: a context that yields a function. Call the function on every worker, after every step.

    Ray's `report` waits for all workers. So the workers agree on one of the next steps when a checkpoint was committed,
    and report it there, with its metrics and its step. If others were committed meanwhile, they report the newest. No
    worker waits for a save, or for Ray to store the report. At its end, the context closes the manager, and reports the
    last checkpoint. If an exception ends the context, it reports nothing, because other workers may be gone.

    Args:
        manager: The manager of this worker. The context must be the inner one, as in
            `with StateManager(...) as manager, reporting(manager) as report`.
    """
    session = manager.session
    agreed = CommonStep(session.ranks, "ray")
    newest: list[SaveReport | Restored] = []  # on the main rank: what Ray does not know yet

    def committed(saved: SaveReport) -> None:
        if not saved.mirrored:
            newest[:] = [saved]
            agreed.asked = True

    def report() -> None:
        if agreed.due(session.loop.progress.step):
            _report(newest)

    manager.on_save(committed)
    yield report
    manager.close()
    if session.ranks.rank == MAIN and not session.saver.has_saved and manager.restored is not None:
        newest.append(manager.restored)  # nothing was left to do: the attempt before may have been killed at its end
    _report(newest)


def _report(newest: list[SaveReport | Restored]) -> None:
    from ray import train

    metrics: dict[str, float] = {}
    checkpoint = None
    if newest:
        saved = newest.pop()
        metrics = {**saved.metrics, "step": saved.step}
        checkpoint = train.Checkpoint.from_directory(tempfile.mkdtemp(prefix="ckpt-ray-"))  # Ray removes it
        checkpoint.set_metadata({URL: saved.url})
    train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC)
