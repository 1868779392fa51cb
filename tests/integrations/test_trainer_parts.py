"""The parts of `CkptCallback`, each with its cases: what is kept of a Trainer, retention, pushes, and generators."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import HubStrategy, SaveStrategy

import ckpt
from ckpt.errors import ConfigError, DamagedError, StorageError
from ckpt.integrations import trainer_resume, trainer_state, transformers
from ckpt.integrations.trainer_push import TrainerPush
from ckpt.integrations.trainer_state import SubclassState, TotalLimit, TrainerPart, logged_metrics, total_limit
from ckpt.integrations.transformers import CkptCallback, managed_objects, refuse_foreign_options, refuse_unsupported
from ckpt.ranks.consensus import SingleProcess
from tests.integrations.test_trainer_overrides import Net, build

pytestmark = pytest.mark.slow  # transformers takes seconds to import


@dataclass(frozen=True)
class Saved:
    """As much of a manifest as retention asks for."""

    name: str
    sequence: int
    metrics: dict[str, float]


def saves(*losses: float | None) -> list[Any]:
    """Checkpoints named a, b, ... in the order in which they were saved; the newest first."""
    made = [
        Saved(name, number, {} if loss is None else {"eval_loss": loss})
        for number, (name, loss) in enumerate(zip("abcdefgh", losses, strict=False), 1)
    ]
    return made[::-1]


class TestTotalLimit:
    def test_the_newest_are_kept_and_the_best_is_one_of_them(self) -> None:
        plain = TotalLimit(last=2)
        assert plain.removable(saves(1.0, 2.0, 3.0, 4.0)) == ["b", "a"]
        assert plain.removable(saves(1.0, 2.0)) == []
        assert plain.removable([]) == []
        best = TotalLimit(last=2, best=1, metric="eval_loss", mode="min")
        assert best.removable(saves(1.0, 2.0, 3.0, 4.0)) == ["c", "b"]
        assert best.removable(saves(4.0, 3.0, 2.0, 1.0)) == ["b", "a"]
        assert best.removable(saves(2.0, 1.0, 1.0, 3.0)) == ["c", "a"]  # the first that was as good
        assert best.removable(saves(1.0, float("nan"), None, 4.0)) == ["c", "b"]
        only = TotalLimit(last=1, best=1, metric="eval_loss", mode="max")
        assert only.removable(saves(5.0, 2.0, 3.0)) == ["b"]  # the newest, and the best

    def test_damaged_ones_are_removed_once_a_newer_intact_one_is_there(self) -> None:
        assert TotalLimit(last=2).removable(saves(1.0, 2.0, 3.0, 4.0), {"c"}) == ["c", "a"]
        assert TotalLimit(last=2).removable(saves(1.0, 2.0, 3.0, 4.0), {"d"}) == ["a"]
        assert TotalLimit(last=2).removable(saves(1.0, 2.0), {"a", "b"}) == []

    def test_the_arguments_of_a_trainer_say_which(self) -> None:
        def limit(total: int | None, metric: str | None = None, greater: bool | None = None) -> Any:
            args: Any = SimpleNamespace(save_total_limit=total, metric_for_best_model=metric, greater_is_better=greater)
            return total_limit(args)

        assert limit(None, "loss") is None
        assert limit(3) == TotalLimit(last=3)
        assert limit(0) == TotalLimit(last=1)
        assert limit(2, "loss") == TotalLimit(last=2, best=1, metric="best_metric", mode="min")
        assert limit(2, "eval_f1", True) == TotalLimit(last=2, best=1, metric="best_metric", mode="max")
        TotalLimit(last=2, best=1, metric="eval_loss").check({}, "here")  # a save without it is no error
        assert TotalLimit(last=2, best=1, metric="eval_loss").cannot_rank(saves(None)) == ""


def test_metrics_are_the_numbers_that_were_logged_at_the_step() -> None:
    history = [
        {"step": 1, "loss": 9.0}, {"step": 2, "loss": 1.0, "epoch": 0.5, "note": "x"}, {"step": 2, "eval_loss": 3}
    ]  # fmt: skip
    assert logged_metrics(TrainerState(global_step=2, log_history=history)) == {"loss": 1.0, "eval_loss": 3}
    assert logged_metrics(TrainerState(global_step=3, log_history=history)) == {}
    best = TrainerState(global_step=3, log_history=history, best_global_step=3, best_metric=0.5)
    assert logged_metrics(best) == {"best_metric": 0.5}


class TestSubclassState:
    def trainer(self, ranks: int = 2, **attributes: Any) -> Any:
        args = SimpleNamespace(world_size=ranks, device=torch.device("cpu"))
        return SimpleNamespace(args=args, **attributes)

    def test_containers_are_saved_plain_and_come_back_as_the_trainer_has_them(self) -> None:
        metrics: Any = {"train": defaultdict(list, loss=[1.0, (2, 3)])}
        window = deque([torch.ones(2), 5], maxlen=3)
        state = SubclassState(self.trainer(_step=3, _metrics=metrics, _entropy_window_stats=window, other=1))
        saved = state.state_dict()
        assert (saved["world_size"], saved["values"].keys()) == (2, {"_step", "_metrics", "_entropy_window_stats"})
        values = saved["values"]
        assert values["_metrics"] == {"train": {"loss": [1.0, [2, 3]]}}
        assert [type(values["_metrics"]["train"]), type(values["_entropy_window_stats"])] == [dict, list]
        mine = self.trainer(
            _step=0, _metrics={"train": defaultdict(list, old=[1])}, _entropy_window_stats=deque([9], 3)
        )
        SubclassState(mine).load_state_dict(saved)
        assert mine._step == 3
        assert isinstance(mine._metrics["train"], defaultdict)
        assert mine._metrics == {"train": {"loss": [1.0, [2, 3]], "old": [1]}}
        assert (mine._entropy_window_stats.maxlen, len(mine._entropy_window_stats)) == (3, 2)
        assert torch.equal(mine._entropy_window_stats[0], torch.ones(2))
        assert trainer_state._restored({}, {"new": {"a": 1}}, torch.device("cpu")) == {"new": {"a": 1}}

    @pytest.mark.parametrize(("ranks", "taken"), [(2, True), (3, False)])
    def test_what_belongs_to_the_ranks_is_made_again_where_there_are_more(self, ranks: int, taken: bool) -> None:
        saved = SubclassState(self.trainer(_step=3, _buffered_inputs=[{"x": torch.ones(1)}])).state_dict()
        mine = self.trainer(ranks, _step=0, _buffered_inputs=None)
        SubclassState(mine).load_state_dict(saved)
        assert (mine._step, mine._buffered_inputs is not None) == (3, taken)

    def test_only_what_a_subclass_has_and_a_model_that_changes_too_are_saved_beside(self) -> None:
        class SyncRefModelCallback:
            ref_model: Any = None

        callback = SyncRefModelCallback()
        plain = self.trainer(callback_handler=SimpleNamespace(callbacks=[object(), callback]))
        assert trainer_state.beside(plain) == {}
        callback.ref_model = nn.Linear(1, 1)
        plain._step = 1
        assert trainer_state.beside(plain).keys() == {trainer_state.SUBCLASS_PART, "ref_model"}


class TestTrainerPart:
    def part(self, ranks: int = 2, rank: int = 1, batch: int = 8, **args: Any) -> tuple[TrainerPart, Any]:
        known = {"world_size": ranks, "process_index": rank, "train_batch_size": 2, "gradient_accumulation_steps": 3}
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(**{**known, **args}),
            get_total_train_batch_size=lambda args: batch,
            _globalstep_last_logged=9,
            _total_loss_scalar=100.0,
        )
        return TrainerPart(trainer), trainer

    @pytest.mark.parametrize(("ranks", "more"), [(2, 3.0), (3, 2.0)])
    def test_the_loss_that_was_not_logged_is_added_once_to_the_first(self, ranks: int, more: float) -> None:
        part, trainer = self.part(ranks)
        assert part.first_loss(torch.tensor(5.0)) == 5.0  # nothing was loaded
        part.load_state_dict({"unlogged": [1.0, 3.0], "since": 4})
        assert part.first_loss(torch.tensor(5.0)) == 5.0 + more
        assert (trainer._globalstep_last_logged, trainer._total_loss_scalar) == (4, 98.0)
        assert part.first_loss(torch.tensor(5.0)) == 5.0

    def test_data_that_does_not_continue_exactly_is_named_on_the_main_rank(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def told(*, has_position: bool = True, rank: int = 0, **saved: Any) -> str:
            part, _ = self.part(rank=rank, group_by_length=True)
            part.load_state_dict({"unlogged": [], "since": 0, **saved})
            restored: Any = SimpleNamespace(approximated={})
            caplog.clear()
            part.report_data(restored, has_position=has_position)
            assert len(caplog.messages) == (1 if restored.approximated and rank == 0 else 0)
            return str(restored.approximated.get("data", ""))

        assert told(batch=8, grouped=6) == ""
        assert told(grouped=6) == ""  # an old checkpoint
        assert told(batch=4, grouped=6, has_position=False).startswith("a step had 4 samples and has 8 now")
        assert told(batch=8, grouped=6, has_position=False) == trainer_state.NO_POSITION
        assert told(batch=8, grouped=5, rank=1).startswith("lengths were grouped for 5 samples and are for 6 now")
        assert self.part()[0].has_same_steps

    def test_lengths_are_grouped_for_the_samples_of_a_rank(self) -> None:
        found = [
            trainer_state._samples_in_a_group(self.part(**options)[1])
            for options in ({}, {"group_by_length": True}, {"train_sampling_strategy": "group_by_length"})
        ]
        assert found == [None, 6, 6]


class Manager:
    """Records what is pushed. `busy`: a push is under way; `wrong`: what the Hub says to each."""

    def __init__(self, *wrong: str) -> None:
        self.pushed: list[tuple[str, str]] = []
        self.waited = 0
        self._wrong = list(wrong)
        self.pusher = SimpleNamespace(is_busy=False, wait=self._wait)
        self.session = SimpleNamespace(ranks=SingleProcess(), pusher=self.pusher)

    def _wait(self) -> None:
        self.waited += 1
        self.pusher.is_busy = False

    def push_to_hub(self, repo: str, *, commit_message: str, wait: bool, **options: Any) -> None:
        assert not wait
        assert options == {"private": True, "revision": None, "token": "t", "processor": "p"}
        if self._wrong and (wrong := self._wrong.pop(0)):
            raise StorageError(wrong)
        self.pushed.append((repo, commit_message))
        self.pusher.is_busy = True


class TestPush:
    def push(self, **args: Any) -> TrainerPush:
        known = {
            "push_to_hub": True, "hub_strategy": HubStrategy.EVERY_SAVE, "save_strategy": SaveStrategy.STEPS,
            "hub_always_push": False, "hub_private_repo": True, "hub_token": "t",
        }  # fmt: skip
        state = SimpleNamespace(global_step=7, epoch=2.5)
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(**{**known, **args}), state=state, hub_model_id="me/it", processing_class="p"
        )
        return TrainerPush(trainer)

    def test_a_save_is_pushed_unless_the_one_before_is_under_way_and_the_last_is_made_up_for(self) -> None:
        manager: Any = Manager()
        push = self.push()
        push.after_save(manager)
        push.after_save(manager)  # left out
        assert manager.pushed == [("me/it", "Training in progress, step 7")]
        push.finish(manager, in_haste=True)
        assert len(manager.pushed) == 1
        waited = manager.waited
        push.finish(manager, in_haste=False)
        assert manager.pushed[1:] == [("me/it", "End of training")]
        assert not manager.pusher.is_busy
        assert manager.waited > waited
        push.finish(manager, in_haste=False)  # nothing is left to be made up for
        assert len(manager.pushed) == 2

    def test_always_and_by_epoch_and_never(self) -> None:
        manager: Any = Manager()
        always = self.push(hub_always_push=True, save_strategy=SaveStrategy.EPOCH)
        always.after_save(manager)
        always.after_save(manager)
        assert manager.pushed == [("me/it", "Training in progress, epoch 2")] * 2
        always.settle(manager)
        assert not manager.pusher.is_busy
        for off in ({"push_to_hub": False}, {"hub_strategy": HubStrategy.END}):
            quiet: Any = Manager()
            push = self.push(**off)
            push.after_save(quiet)
            push.finish(quiet, in_haste=False)
            push.settle(quiet)
            assert (quiet.pushed, quiet.waited) == ([], 0)
        self.push(push_to_hub=False, hub_strategy=HubStrategy.CHECKPOINT)
        for strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            with pytest.raises(ConfigError, match=f"hub_strategy='{strategy.value}' pushes the Trainer's own"):
                self.push(hub_strategy=strategy)

    def test_a_hub_that_fails_is_told_and_asked_again_at_the_end(self, caplog: pytest.LogCaptureFixture) -> None:
        manager: Any = Manager("it is down")
        push = self.push()
        push.after_save(manager)
        assert caplog.messages == ["ckpt could not push the model to the Hub; training continues: it is down"]
        assert manager.pushed == []
        push.finish(manager, in_haste=False)
        assert manager.pushed == [("me/it", "End of training")]

        def fails() -> None:
            raise StorageError("it broke off")

        manager.pusher.wait = fails
        push.settle(manager)
        assert "it broke off" in caplog.messages[-1]


class TestCallback:
    @pytest.fixture
    def callback(self, tmp_path: Path) -> CkptCallback:
        return CkptCallback(tmp_path / "root")

    def test_generators_are_put_back_once_unless_the_data_did(self, callback: CkptCallback) -> None:
        rewound: list[int] = []
        manager: Any = SimpleNamespace(rewind_rng=lambda: rewound.append(1))
        args: Any = SimpleNamespace(ignore_data_skip=False)
        cases: list[tuple[bool, Any, Any, int]] = [
            (True, manager, None, 1),
            (True, manager, SimpleNamespace(is_exact=False), 1),
            (True, manager, SimpleNamespace(is_exact=True), 0),
            (True, None, None, 0),
            (False, manager, None, 0),
        ]
        for due, opened, data, times in cases:
            callback._rng_is_due, callback._manager, callback._data = due, opened, data
            rewound.clear()
            callback.on_step_begin(args, SimpleNamespace(), None)
            callback.on_step_begin(args, SimpleNamespace(), None)
            assert len(rewound) == times
        for epoch, ignored, times in ((None, False, 1), (2.0, False, 1), (2.5, False, 0), (2.5, True, 1)):
            callback._rng_is_due, callback._manager, callback._data = True, manager, None
            rewound.clear()
            callback.on_epoch_begin(SimpleNamespace(ignore_data_skip=ignored), SimpleNamespace(epoch=epoch), None)
            assert len(rewound) == times

    def test_at_the_end_all_is_released_and_the_manager_told_of_the_error(
        self, callback: CkptCallback, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[Any] = []
        monkeypatch.setattr(callback, "_source", SimpleNamespace(release=lambda: done.append("source")))
        monkeypatch.setattr(callback, "_release_data", lambda: done.append("data"))
        error, opened = ValueError("x"), SimpleNamespace(__exit__=lambda *given: done.append(given))
        for manager, told in ((opened, [(ValueError, error, None)]), (None, [])):
            callback._manager = manager  # type: ignore[assignment]
            callback._close(ValueError, error, None)
            assert done == ["source", "data", *told]
            assert callback._manager is None
            done.clear()

    def test_an_engines_own_files_are_loaded_only_where_the_root_has_nothing(
        self, callback: CkptCallback, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[Any] = []
        monkeypatch.setattr(
            transformers, "deepspeed_load_checkpoint", lambda *given, **named: loaded.append((*given, named))
        )
        callback._load_engine("engine", "folder", load_module_strict=True)
        assert loaded == [("engine", "folder", {"load_module_strict": True})]
        callback._source.name = "step-00000001"
        callback._load_engine("engine", "folder")
        assert len(loaded) == 1

    def test_the_best_is_named_by_its_place_in_the_root(self, callback: CkptCallback, tmp_path: Path) -> None:
        state = TrainerState(best_global_step=5)
        callback._name_the_best(state)
        assert state.best_model_checkpoint is None
        callback._saved = {"step-00000005"}
        callback._name_the_best(state)
        assert state.best_model_checkpoint == f"{tmp_path}/root/step-00000005"

    def test_only_the_loader_that_is_followed_skips_by_itself(self, callback: CkptCallback) -> None:
        loader: Any = torch.utils.data.DataLoader(torch.arange(6), batch_size=1)  # type: ignore[arg-type]
        assert [batch.item() for batch in callback._skip_first_batches(loader, 4)] == [4, 5]
        asked: list[int] = []

        def skip(_: Any, batches: int) -> bool:
            asked.append(batches)
            return len(asked) == 1

        callback._data = cast(Any, SimpleNamespace(skip=skip))
        assert callback._skip_first_batches(loader, 4) is loader
        assert callback._skip_first_batches(loader, 4) is not loader
        assert asked == [4, 4]

    def test_options_and_trainers_that_it_cannot_serve_are_refused(self) -> None:
        refuse_foreign_options({"keep": None, "memory": 1})
        with pytest.raises(ConfigError, match=r"CkptCallback has no option model, save_every\. Its options are "):
            refuse_foreign_options({"save_every": 1, "model": 2})
        with pytest.raises(ConfigError, match=r"no option 'memry' \(did you mean 'memory'\?\)"):
            refuse_foreign_options({"memry": 1})
        for engine, only_model, missing in ((True, True, []), (False, False, ["absent"])):
            trainer: Any = SimpleNamespace(
                is_deepspeed_enabled=engine, args=SimpleNamespace(save_only_model=only_model), train=1
            )
            with pytest.raises(ConfigError, match="absent" if missing else "save_only_model=True has no effect"):
                refuse_unsupported(trainer, ["train", *missing])
        for engine, only_model in ((True, False), (False, True)):
            trainer.is_deepspeed_enabled, trainer.args.save_only_model = engine, only_model
            refuse_unsupported(trainer, ["train"])

    def test_what_is_managed_is_what_training_continues_from(self) -> None:
        inner = object()
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(save_only_model=False), is_deepspeed_enabled=False, model="model",
            model_wrapped="engine", optimizer=SimpleNamespace(optimizer=inner), lr_scheduler="scheduler",
            accelerator=SimpleNamespace(scaler="scaler"),
        )  # fmt: skip
        every = {"model": "model", "optimizer": inner, "scheduler": "scheduler", "scaler": "scaler"}
        assert managed_objects(trainer) == every
        trainer.optimizer = inner
        assert managed_objects(trainer) == every
        trainer.args.save_only_model = True
        assert managed_objects(trainer) == {"model": "model"}
        trainer.args.save_only_model, trainer.is_deepspeed_enabled = False, True
        assert managed_objects(trainer) == {"model": "engine", "scheduler": "scheduler"}
        trainer.lr_scheduler = type("DeepSpeedSchedulerWrapper", (), {})()
        assert managed_objects(trainer) == {"model": "engine"}

    def test_a_search_is_refused_and_a_callback_without_a_trainer_too(self, callback: CkptCallback) -> None:
        with pytest.raises(ConfigError, match="a hyperparameter search has many"):
            callback._train(trial=1)
        for call in (callback.on_init_end, callback.on_train_begin):
            with pytest.raises(ConfigError, match="a callback can't see which Trainer it belongs to"):
                call(None, None, None)


class Large(Net):
    """Has no memory for more than two samples."""

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        if len(x) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(x)


def test_a_trainer_that_begins_again_with_smaller_batches_leaves_the_manager_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ckpt.StateManager] = []
    closed: list[ckpt.StateManager] = []

    class Noted(ckpt.StateManager):
        def __init__(self, *given: Any, **named: Any) -> None:
            assert opened == closed
            super().__init__(*given, **named)
            opened.append(self)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(transformers, "StateManager", Noted)
    args = TrainingArguments(
        str(tmp_path / "output"), max_steps=2, per_device_train_batch_size=8, save_steps=2, report_to=[],
        disable_tqdm=True, use_cpu=True, auto_find_batch_size=True,
    )  # fmt: skip
    data = [{"x": torch.tensor([1.0, float(number)])} for number in range(8)]
    CkptCallback(tmp_path / "root").attach(Trainer(Large(), args, train_dataset=data)).train()
    assert len(opened) > 1
    assert ckpt.verify(tmp_path / "root") == {"step-00000002": []}


class TestResumeSource:
    def test_files_of_an_override_are_names_with_bytes(self, tmp_path: Path) -> None:
        trainer_resume._write_files(tmp_path / "a", {"x/y": b"1", "z": b""}, "it")
        assert (tmp_path / "a" / "x" / "y").read_bytes() == b"1"
        assert (tmp_path / "a" / "z").read_bytes() == b""
        wrong: list[Any] = [{"../x": b"1"}, {"/x": b"1"}, {"x": "1"}, {"x": b"1", "..": b""}, [b"1"], None]
        for files in wrong:
            with pytest.raises(DamagedError, match="it is damaged: its list of the Trainer's files"):
                trainer_resume._write_files(tmp_path / "b", files, "it")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_it_is_a_name_or_a_path_in_the_root_and_nothing_elsewhere(self, tmp_path: Path) -> None:
        trainer = build(Trainer, tmp_path)
        trainer.train()
        root = tmp_path / "root"
        for resume in ("step-00000002", str(root / "step-00000002"), f"{root}/step-00000002/"):
            again = build(Trainer, tmp_path)
            again.train(resume_from_checkpoint=resume)
            assert again.state.global_step == 4
        refused: list[tuple[str | None, str]] = [
            (None, r"has checkpoints \(step-00000004 is the newest\), but this run starts from scratch"),
            (
                str(tmp_path / "elsewhere" / "step-00000002"),
                "is neither a checkpoint in .*root nor a folder that a Trainer wrote",
            ),
        ]
        for wrong, message in refused:
            with pytest.raises(ConfigError, match=message):
                build(Trainer, tmp_path).train(resume_from_checkpoint=wrong)
