"""Models are published on the Hub: the real client, against a server that stands in for it."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.cli.main import main
from ckpt.storage import HubStorage
from ckpt.storage.retry import Retries
from tests.helpers.hub_server import HubServer, connect, serving
from tests.helpers.hub_store import MissingError
from tests.helpers.places import intact
from tests.helpers.processes import DEADLINE, run_alone, run_ranks, start_alone

REPO = "me/model"
KILLS = int(os.environ.get("CKPT_KILLS", "5"))

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning", "ignore:torch.distributed is")


def gpt(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def lora(base: Any, seed: int = 9, targets: tuple[str, ...] = ("c_attn", "c_fc")) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(8)[None]).logits
    return found


def downloaded(repo: str = REPO, revision: str = "main") -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(repo, revision=revision)


def read_back(folder: str | os.PathLike[str]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder).eval())


def small(seed: int) -> nn.Module:
    """A model with four tensors, for which Transformers need not be imported."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


def skip_pauses(patch: pytest.MonkeyPatch) -> list[float]:
    """Requests that failed are made again at once. Returns the seconds that would have been waited for each."""
    next_pause, skipped = Retries.next_pause, list[float]()

    def skip(retries: Retries, **given: Any) -> float | None:
        pause = next_pause(retries, **given)
        skipped.extend([pause] if pause is not None else [])
        return None if pause is None else 0.0

    patch.setattr(Retries, "next_pause", skip)
    return skipped


def commits_sent(hub: HubServer) -> int:
    return len(hub.sent(r"POST /api/models/.*/commit/"))


@pytest.mark.slow
class TestOneProcess:
    def test_a_live_model_is_one_commit_that_from_pretrained_reads(self, hub: HubServer, tmp_path: Path) -> None:
        model = gpt()
        with ckpt.StateManager(tmp_path / "run", model=torch.compile(model)) as manager:
            url = manager.push_to_hub(REPO, private=True)
        assert url == f"{hub.url}/{REPO}/commit/{hub.head(REPO)}"
        assert hub.commits(REPO) == ["Upload model with ckpt"]
        assert set(hub.files(REPO)) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
        assert hub.store.repo(REPO)["private"]
        assert torch.equal(read_back(downloaded()), logits(model))

    def test_what_has_not_changed_makes_no_commit_and_is_not_sent(self, hub: HubServer, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "run", model=gpt()) as manager:
            first = manager.push_to_hub(REPO)
            assert manager.push_to_hub(REPO) == first
        assert len(hub.commits(REPO)) == len(hub.accepted) == commits_sent(hub) == 1

    def test_a_new_state_replaces_the_shards_of_the_old_one(self, hub: HubServer, tmp_path: Path) -> None:
        model = gpt()
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.push_to_hub(REPO, max_shard_size="60kB")
            assert "model.safetensors.index.json" in hub.files(REPO)
            assert torch.equal(read_back(downloaded()), logits(model))
            hub.store.commit(REPO, "main", {"summary": "mine"}, [_file("notes.txt", b"by hand")])
            manager.push_to_hub(REPO, commit_message="whole")
        weights = [path for path in hub.files(REPO) if path.startswith("model")]
        assert weights == ["model.safetensors"]
        assert hub.files(REPO)["notes.txt"] == b"by hand"
        assert hub.commits(REPO) == ["whole", "mine", "Upload model with ckpt"]
        assert torch.equal(read_back(downloaded()), logits(model))

    def test_weights_are_cast_and_the_config_says_so(self, hub: HubServer, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = gpt()
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.push_to_hub(REPO, dtype="bfloat16", revision="half")
        assert json.loads(hub.files(REPO, "half")["config.json"])["dtype"] == "bfloat16"
        assert hub.files(REPO) == {}
        loaded = AutoModelForCausalLM.from_pretrained(downloaded(revision="half")).eval()
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(logits(loaded), logits(model.to(torch.bfloat16)))

    def test_a_tokenizer_goes_along(self, hub: HubServer, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        vocabulary = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="[UNK]")
        with ckpt.StateManager(tmp_path / "run", model=gpt()) as manager:
            manager.push_to_hub(REPO, tokenizer=tokenizer)
            manager.save_state("x", wait=True)
            manager.save_model(tmp_path / "out")
        ckpt.push_to_hub(tmp_path / "run" / "x", "me/from-checkpoint", tokenizer=tokenizer)
        ckpt.push_to_hub(tmp_path / "out", "me/from-folder", tokenizer=tokenizer)
        for repo in (REPO, "me/from-checkpoint", "me/from-folder"):
            assert AutoTokenizer.from_pretrained(downloaded(repo))("hello")["input_ids"] == [1]

    def test_of_the_folder_beside_everything_but_weights_goes_along(
        self, hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.save_state("x", wait=True)
        beside = tmp_path / "beside"
        (beside / "below").mkdir(parents=True)
        for name in ("model.safetensors.index.json", "pytorch_model.bin", "training_args.bin", ".hidden", "vocab.txt"):
            (beside / name).write_text("{}")
        (beside / "config.json").write_text('{"architectures": ["SomeForCausalLM"], "dtype": "float32"}')
        ckpt.push_to_hub(tmp_path / "run" / "x", REPO, beside=beside, dtype="bfloat16")
        assert set(hub.files(REPO)) == {"README.md", "config.json", "model.safetensors", "vocab.txt"}
        assert json.loads(hub.files(REPO)["config.json"])["dtype"] == "bfloat16"
        assert b"pipeline_tag: text-generation" in hub.files(REPO)["README.md"]
        assert "the push contains no config.json" not in capfd.readouterr().err
        ckpt.push_to_hub(tmp_path / "run" / "x", "me/bare")
        assert "the push contains no config.json, which from_pretrained needs" in capfd.readouterr().err
        with pytest.raises(ckpt.ConfigError, match=r"beside='.*nowhere' is not a folder"):
            ckpt.push_to_hub(tmp_path / "run" / "x", REPO, beside=tmp_path / "nowhere")

    def test_a_folder_at_a_url_takes_its_configuration_along(self, hub: HubServer, tmp_path: Path) -> None:
        model = gpt()
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.push_to_hub(REPO, max_shard_size="60kB")
        ckpt.push_to_hub(f"hub://{REPO}", "me/copy", dtype="float64")
        assert set(hub.files("me/copy")) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
        assert torch.allclose(read_back(downloaded("me/copy")).float(), logits(model), atol=1e-6)

    def test_a_branch_is_made_but_no_pull_request(self, hub: HubServer, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO, revision="new/branch")
            with pytest.raises(ckpt.AbsentError, match="the repository has no such revision"):
                manager.push_to_hub(REPO, revision="refs/pr/1")
        assert hub.store.repo(REPO)["branches"].keys() == {"main", "new/branch"}

    def test_a_pull_request_is_opened_and_the_main_branch_stays_as_it_was(self, hub: HubServer, tmp_path: Path) -> None:
        hub.store.create(REPO, private=False)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.save_state("a", wait=True)
            hub.fail(r"POST .*/discussions", cut="after")  # the answer is lost: there is one all the same
            assert manager.push_to_hub(REPO, create_pr=True) == f"{hub.url}/{REPO}/discussions/1"
        assert hub.commits(REPO) == []
        assert hub.commits(REPO, "refs/pr/1") == ["Upload model with ckpt"]
        assert "model.safetensors" in hub.files(REPO, "refs/pr/1")
        done = CliRunner().invoke(main, ["push", str(tmp_path / "run" / "a"), REPO, "--create-pr", "-m", "Second"])
        assert done.output.splitlines()[-1] == f"{hub.url}/{REPO}/discussions/2"
        assert [found["title"] for found in hub.pull_requests] == ["Upload model with ckpt", "Second"]
        assert hub.commits(REPO, "refs/pr/2") == ["Second"]

    def test_no_pull_request_is_opened_for_nothing(self, hub: HubServer, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
            manager.push_to_hub(REPO, create_pr=True)
            with pytest.raises(ckpt.ConfigError, match="leave out revision="):
                manager.push_to_hub(REPO, create_pr=True, revision="other")
        assert hub.pull_requests == []

    def test_a_pull_request_whose_commit_fails_is_named_to_go_on_with(self, hub: HubServer, tmp_path: Path) -> None:
        hub.store.create(REPO, private=False)
        hub.fail(r"POST .*/commit/", 403)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            with pytest.raises(ckpt.StorageError, match=r"push again with revision='refs/pr/1' and without create_pr"):
                manager.push_to_hub(REPO, create_pr=True)
            manager.push_to_hub(REPO, revision="refs/pr/1")
        assert len(hub.commits(REPO, "refs/pr/1")) == 1

    def test_what_shall_be_private_does_not_go_to_a_public_repository(self, hub: HubServer, tmp_path: Path) -> None:
        hub.store.create(REPO, private=False)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            with pytest.raises(ckpt.ConfigError, match="is public"):
                manager.push_to_hub(REPO, private=True)
            assert hub.files(REPO) == {}
            for _ in range(2):
                manager.push_to_hub("me/other", private=True)
            with pytest.raises(ckpt.ConfigError, match=r"card='# Mine' must be True, False, or a dict"):
                manager.push_to_hub("me/other", card="# Mine")  # type: ignore[arg-type]

    def test_a_push_in_the_background_is_done_after_wait(self, hub: HubServer, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            assert manager.push_to_hub(REPO, wait=False) is None
            manager.wait()
            assert commits_sent(hub) == 1
            for by_push in (False, True):
                hub.fail("POST /api/repos/create", 403)
                manager.push_to_hub("me/other", wait=False)
                with pytest.raises(ckpt.DeniedError, match="the token may not do that"):
                    manager.push_to_hub("me/more") if by_push else manager.wait()
            manager.push_to_hub("me/more")

    def test_a_push_behind_the_training_has_the_state_of_its_moment_while_a_save_is_written(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.save_state("x")
            manager.push_to_hub(REPO, wait=False)
            with torch.no_grad():
                for parameter in manager.unwrap().parameters():
                    parameter.zero_()
            manager.wait()
        for where in (f"hub://{REPO}", tmp_path / "run"):
            model = small(1)
            assert ckpt.load_model(where, model) == {}
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), small(0).parameters(), strict=True))

    def test_large_files_travel_in_parts_where_the_hub_says_so(self, hub: HubServer, tmp_path: Path) -> None:
        hub.part_size = 4000
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert len(hub.sent(r"PUT /lfs/\w+/\d+")) == 3
        assert len(hub.accepted) == 1


@pytest.mark.slow
class TestXet:
    """The same with Xet on: `hf_xet` itself, which stores into a folder in place of Xet's servers."""

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
        with serving(tmp_path, monkeypatch, xet=True) as server:
            yield server

    def test_a_model_goes_there_and_comes_back(self, hub: HubServer, tmp_path: Path) -> None:
        model = gpt()
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.push_to_hub(REPO, max_shard_size="60kB")
            assert torch.equal(read_back(downloaded()), logits(model))
            manager.push_to_hub(REPO, max_shard_size="60kB")
        assert len(hub.commits(REPO)) == 1
        assert len(hub.sent("xet-write-token")) == 1
        assert hub.sent("xet-read-token")
        assert not hub.sent("PUT /lfs/")

    def test_a_large_file_of_a_storage_goes_there_and_comes_back(self, hub: HubServer) -> None:
        storage, data = HubStorage("me/runs"), random.Random(3).randbytes(2 << 20)
        storage.write("large.bin", [data])
        assert storage.read("large.bin") == data
        assert not hub.sent("PUT /lfs/")

    def test_a_file_that_was_cut_off_in_the_middle_goes_on_where_it_was(self, hub: HubServer, tmp_path: Path) -> None:
        home = tmp_path / "home"
        home.mkdir()
        hub.fail("/commit/", 503, times=1000)  # or it might be done before it is killed
        job = start_alone(str(tmp_path), _write_by_xet, str(home), hub.url)
        accepted = hub.store.folder / "cas" / "xet" / "shard-session" / "xorb_metadata"
        while job.is_alive() and not any(accepted.glob("*.mdb")) and not hub.sent("/commit/"):
            time.sleep(0.002)
        job.kill()
        job.join(DEADLINE)
        assert job.exitcode == -signal.SIGKILL
        hub.faults.clear()
        (home / "sent").unlink(missing_ok=True)
        assert run_alone(_write_by_xet, str(home), hub.url) == 0
        sent = int((home / "sent").read_text())
        assert sent <= LARGE - (20 << 20)  # one of its two parts was there already: of 64 MiB, or the rest
        assert len(hub.files("me/runs")["large.bin"]) == LARGE

    def test_a_run_is_saved_and_resumed(self, hub: HubServer) -> None:
        root = "hub://me/runs"
        with ckpt.StateManager(root, model=small(1)) as manager:
            manager.save_state("a", wait=True)
            manager.save_state("b", wait=True)
        model = small(2)
        with ckpt.StateManager(root, model=model) as manager:
            assert manager.load_state().name == "b"
        assert all(
            torch.equal(loaded, saved) for loaded, saved in zip(model.parameters(), small(1).parameters(), strict=True)
        )
        assert len(hub.commits("me/runs")) == 2
        assert not hub.sent("PUT /lfs/")


LARGE = 90 << 20


def _write_by_xet(rank: int, home: str, url: str) -> None:
    # what was accepted is noted down after each part, not every few seconds
    noted = {"HF_XET_DATA_SESSION_XORB_METADATA_FLUSH_MAX_COUNT": "1"}
    connect(url, home, HF_HUB_DISABLE_XET="0", HF_HUB_DISABLE_PROGRESS_BARS="0", **noted)
    from huggingface_hub.utils._xet_progress_reporting import XetUploadProgressReporter

    def note(self: Any, report: Any, *others: Any) -> None:
        Path(home, "sent").write_text(str(report.total_transfer_bytes_completed))

    XetUploadProgressReporter.update_progress = note  # type: ignore[method-assign, assignment]
    HubStorage("me/runs").write("large.bin", [random.Random(3).randbytes(LARGE)])


class TestAdapters:
    @pytest.mark.slow
    def test_of_a_peft_model_the_adapter_is_published(self, hub: HubServer, tmp_path: Path) -> None:
        from peft import PeftModel

        model = lora(gpt())
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.save_state("x", wait=True)
            manager.push_to_hub(REPO)
            manager.save_model(tmp_path / "ours")
        ckpt.push_to_hub(tmp_path / "run" / "x", "me/from-checkpoint")
        model.save_pretrained(tmp_path / "theirs")
        for repo in (REPO, "me/from-checkpoint"):
            assert set(hub.files(repo)) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
            loaded = PeftModel.from_pretrained(gpt(), downloaded(repo)).eval()
            assert torch.equal(logits(loaded), logits(model))
        ckpt.push_to_hub(f"hub://{REPO}", "me/copy")
        assert hub.files("me/copy")["adapter_model.safetensors"] == hub.files(REPO)["adapter_model.safetensors"]
        fresh = lora(gpt(), seed=10)
        assert not torch.equal(logits(fresh), logits(model))
        assert ckpt.load_model(f"hub://{REPO}", fresh) == {}
        assert torch.equal(logits(fresh), logits(model))
        with pytest.raises(ckpt.MismatchError, match="has an adapter, but the model has none"):
            ckpt.load_model(f"hub://{REPO}", gpt())
        with pytest.raises(ckpt.MismatchError, match=r"lora_A\.default\.weight: missing there"):
            ckpt.load_model(f"hub://{REPO}", lora(gpt(), targets=("c_attn", "c_fc", "c_proj")))
        found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
        assert found.keys() == expected.keys()
        ours, theirs = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("ours", "theirs"))
        assert {**ours, "target_modules": sorted(theirs["target_modules"])} == {
            **theirs,
            "target_modules": ours["target_modules"],
        }

    def test_each_adapter_has_a_folder_but_for_the_default_one(self, tmp_path: Path) -> None:
        from peft import LoraConfig

        model = lora(gpt())
        model.add_adapter("other", LoraConfig(r=1, target_modules=["c_attn"]))
        with ckpt.StateManager(tmp_path / "run", model=model) as manager:
            manager.save_model(tmp_path / "ours", dtype="float16")
        model.save_pretrained(tmp_path / "theirs")
        for folder in (".", "other"):
            found, expected = (
                load_file(tmp_path / name / folder / "adapter_model.safetensors") for name in ("ours", "theirs")
            )
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name].half()) for name in found)


def test_a_configuration_that_cannot_be_taken_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt()
    model.config.strange = object()
    with ckpt.StateManager(tmp_path / "run", model=model) as manager:
        manager.save_state("x", wait=True)
        assert "can't publish checkpoints without their configuration" in caplog.text
        with pytest.raises(ckpt.CkptError, match="not JSON serializable"):
            manager.save_model(tmp_path / "out")
    assert intact(tmp_path / "run")


def _file(path: str, content: bytes) -> dict[str, Any]:
    return {"key": "file", "value": {"path": path, "content": content}}


def _push_from_every_rank(rank: int, root: str, url: str) -> None:
    connect(url, f"{root}/home")
    model = gpt(seed=3)
    with ckpt.StateManager(root, model=DistributedDataParallel(model)) as manager:
        assert manager.push_to_hub("me/ddp") is not None
    from torch.distributed.fsdp import fully_shard

    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    with ckpt.StateManager(f"{root}/sharded", model=model) as manager:
        manager.save_state("x", wait=True)
        manager.push_to_hub("me/fsdp2", max_shard_size="60kB")
        manager.save_model(f"{root}/out")
        manager.push_to_hub("me/late", wait=False)
        with pytest.raises(ckpt.DeniedError, match="the token may not do that"):  # of the push before, on every rank
            manager.push_to_hub("me/more")
    ckpt.push_to_hub(f"{root}/sharded/x", "me/from-all-ranks")
    dist.barrier()


@pytest.fixture
def pushed_by_two(hub: HubServer, tmp_path: Path) -> HubServer:
    hub.fail("/api/models/me/late/", 403)
    assert run_ranks(2, _push_from_every_rank, str(tmp_path / "run"), hub.url) == [0, 0]
    return hub


@pytest.mark.slow
def test_two_ranks_have_one_uploader_whatever_the_model_is_wrapped_in(pushed_by_two: HubServer, tmp_path: Path) -> None:
    hub, expected = pushed_by_two, logits(gpt(seed=3))
    for repo in ("me/ddp", "me/fsdp2", "me/from-all-ranks"):
        assert len(hub.commits(repo)) == 1
        assert torch.equal(read_back(downloaded(repo)), expected)
    assert commits_sent(hub) + 1 == len(hub.sent("POST /api/repos/create")) == 4  # one push was refused
    assert len(hub.accepted) == len(set(hub.accepted))
    assert torch.equal(read_back(tmp_path / "run" / "out"), expected)
    runner = CliRunner().invoke(main, ["push", str(tmp_path / "run" / "sharded" / "x"), REPO, "--license", "mit"])
    assert runner.exit_code == 0, runner.output
    assert f"{hub.url}/{REPO}/commit/{hub.head(REPO)}" in runner.output
    assert torch.equal(read_back(downloaded()), expected)
    assert b"license: mit" in hub.files(REPO)["README.md"]
    before = commits_sent(hub)
    again = ckpt.push_to_hub(tmp_path / "run" / "sharded" / "x", REPO, card={"license": "mit"})
    assert again in runner.output
    assert commits_sent(hub) == before
    ckpt.push_to_hub(tmp_path / "run" / "out", "me/from-folder")
    assert torch.equal(read_back(downloaded("me/from-folder")), expected)


def _push_small(rank: int, root: str, url: str, seed: int) -> None:
    connect(url, f"{root}/home")
    tempfile.tempdir = f"{root}/temporary"
    with ckpt.StateManager(f"{root}/run", model=small(seed)) as manager:
        manager.push_to_hub(REPO, max_shard_size=2000)


class _Killer:
    """Kills a process at its n-th request: before it is answered."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.job: BaseProcess | None = None

    def __call__(self, method: str, path: str) -> None:
        self.at -= 1
        if self.at == 0 and self.job is not None:
            os.kill(self.job.pid or 0, signal.SIGKILL)


@pytest.mark.slow
def test_a_push_that_is_killed_leaves_the_old_state_or_the_new_and_goes_on(hub: HubServer, tmp_path: Path) -> None:
    moments = random.Random(7)
    (tmp_path / "temporary").mkdir()
    old = _push_until_done(hub, tmp_path, seed=0)
    requests = len(hub.requests)
    for seed in range(1, KILLS + 1):
        hub.gate = killer = _Killer(at=moments.randint(1, requests))
        killer.job = start_alone(str(tmp_path), _push_small, str(tmp_path), hub.url, seed)
        killer.job.join(DEADLINE)
        assert killer.job.exitcode == -signal.SIGKILL
        between = hub.files(REPO)
        new = _push_until_done(hub, tmp_path, seed)
        assert new != old
        assert between in (old, new)
        old = new
    assert len(hub.accepted) == len(set(hub.accepted))
    assert len(hub.commits(REPO)) == KILLS + 1
    assert [path for path in (tmp_path / "temporary").iterdir() if path.name.startswith("ckpt-push-")] == []


def _push_until_done(hub: HubServer, tmp_path: Path, seed: int) -> dict[str, bytes]:
    hub.gate = lambda method, path: None
    job = start_alone(str(tmp_path), _push_small, str(tmp_path), hub.url, seed)
    job.join(DEADLINE)
    assert job.exitcode == 0
    return hub.files(REPO)


class TestFaults:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("status", "advice"),
        [
            (
                401,
                r"401 .*token is missing or invalid, or .*\. Log in with 'hf auth login', set HF_TOKEN, or give",
            ),
            (403, r"403 .*the token may not do that\. Give it write access to this repository at https://"),
            (404, r"404 .*Is the name right, and may the token see it\? Log in"),
            (413, r"413 .*too large\. Use a smaller max_shard_size"),
        ],
    )
    def test_what_cannot_be_helped_is_told_with_what_to_do(
        self, hub: HubServer, tmp_path: Path, status: int, advice: str
    ) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
            before = hub.files(REPO)
            with torch.no_grad():
                next(manager.unwrap().parameters()).zero_()
            hub.fail(r"POST /api/models/.*/commit/", status)
            with pytest.raises(ckpt.StorageError, match=advice) as raised:
                manager.push_to_hub(REPO)
            assert isinstance(raised.value, ckpt.DeniedError) == (status in (401, 403))
        assert hub.files(REPO) == before
        assert commits_sent(hub) == 2

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["model", "hub://me/model", "https://huggingface.co/me/model", "a/b/c", 3, None])
    def test_what_is_no_repository_is_refused_before_anything_is_done(
        self, hub: HubServer, tmp_path: Path, name: Any
    ) -> None:
        with (
            ckpt.StateManager(tmp_path / "run", model=small(0)) as manager,
            pytest.raises(ckpt.ConfigError, match=r"is not a repository id\. Write user/name"),
        ):
            manager.push_to_hub(name)
        assert not hub.requests

    @pytest.mark.slow
    def test_front_matter_that_the_hub_refuses_is_told_and_nothing_is_changed(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        with (
            ckpt.StateManager(tmp_path / "run", model=small(0)) as manager,
            pytest.raises(ckpt.ConfigError, match=r'(?s)"license" must be one of.* or push with card=False'),
        ):
            manager.push_to_hub(REPO, card={"license": "nonsense"})
        assert hub.sent("DELETE /api/repos/delete")

    @pytest.mark.slow
    def test_a_repository_made_for_a_push_that_fails_is_removed_again(self, hub: HubServer, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            hub.fail(r"POST /api/models/.*/commit/", 403)
            with pytest.raises(ckpt.DeniedError, match="which was made for this push, has been removed again"):
                manager.push_to_hub(REPO)
            with pytest.raises(MissingError):
                hub.files(REPO)
            manager.push_to_hub(REPO)
        assert "model.safetensors" in hub.files(REPO)

    @pytest.mark.slow
    @pytest.mark.usefixtures("impatient")
    def test_where_another_try_may_help_it_stays_with_what_was_uploaded_and_the_error_says_so(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            hub.fail(r"POST /api/models/.*/commit/", 503, times=9)
            with pytest.raises(ckpt.TransientError, match="was made for this push, and is still empty: push again"):
                manager.push_to_hub(REPO)
            sent = len(hub.sent("PUT /lfs/"))
            hub.faults.clear()
            manager.push_to_hub(REPO)
            assert len(hub.sent("PUT /lfs/")) == sent
        assert not hub.sent("DELETE ")

    @pytest.mark.slow
    def test_a_repository_that_was_there_or_that_others_have_committed_to_is_never_removed(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        theirs = {"key": "file", "value": {"path": "notes.txt", "content": b"theirs"}}
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            hub.store.create("me/empty", private=False)
            hub.fail(r"POST /api/models/me/empty/commit/", 403)
            with pytest.raises(ckpt.DeniedError):
                manager.push_to_hub("me/empty")
            answer = hub.fault

            def commit_first(method: str, path: str) -> Any:
                if "/commit/" in path:
                    hub.store.commit(REPO, "main", {"summary": "x"}, [theirs])
                return answer(method, path)

            hub.fault = commit_first  # type: ignore[method-assign]
            hub.fail(rf"POST /api/models/{REPO}/commit/", 403)
            with pytest.raises(ckpt.DeniedError):
                manager.push_to_hub(REPO)
        assert hub.files(REPO) == {"notes.txt": b"theirs"}
        assert hub.files("me/empty") == {}
        assert not hub.sent("DELETE ")

    @pytest.mark.slow
    @pytest.mark.parametrize("pattern", ["POST /api/repos/create", "GET /api/models/[^/]*/[^/]*/revision", "/commit/"])
    @pytest.mark.parametrize("status", [429, 500, 503])
    @pytest.mark.usefixtures("impatient")
    def test_what_passes_is_waited_for(self, hub: HubServer, tmp_path: Path, pattern: str, status: int) -> None:
        hub.fail(pattern, status, times=2)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert len(hub.commits(REPO)) == 1

    @pytest.mark.slow
    def test_the_hub_is_asked_again_when_it_says_so(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited = skip_pauses(monkeypatch)
        hub.fail("/commit/", 429, Retry_After="37")
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert waited == [37.0]

    @pytest.mark.slow
    def test_a_hub_that_has_answered_before_is_waited_for_much_longer_than_one_that_has_not(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited = skip_pauses(monkeypatch)
        hub.fail("/commit/", 503, times=12)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert len(hub.commits(REPO)) == 1
        assert len(waited) == 12
        assert sum(waited) > 60

    @pytest.mark.slow
    def test_offline_by_choice_is_not_waited_for(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited = skip_pauses(monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with (
            ckpt.StateManager(tmp_path / "run", model=small(0)) as manager,
            pytest.raises(ckpt.TransientError, match="HF_HUB_OFFLINE"),
        ):
            manager.push_to_hub(REPO)
        assert waited == []

    @pytest.mark.slow
    @pytest.mark.usefixtures("impatient")
    def test_what_does_not_pass_is_told(self, hub: HubServer, tmp_path: Path) -> None:
        hub.fail("/commit/", 500, times=9)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            with pytest.raises(ckpt.TransientError, match=r"500 .*also when asked again.*Hub keeps what was uploaded"):
                manager.push_to_hub(REPO)
            assert hub.files(REPO) == {}
            hub.faults.clear()
            manager.push_to_hub(REPO)
        assert len(hub.accepted) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.usefixtures("impatient")
    def test_a_cut_connection_makes_one_commit_all_the_same(self, hub: HubServer, tmp_path: Path, when: str) -> None:
        hub.fail("/commit/", cut=when)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            url = manager.push_to_hub(REPO)
        assert len(hub.commits(REPO)) == 1
        assert url == f"{hub.url}/{REPO}/commit/{hub.head(REPO)}"

    @pytest.mark.slow
    def test_an_upload_that_is_cut_is_made_again_by_the_client(self, hub: HubServer, tmp_path: Path) -> None:
        hub.fail("PUT /lfs/", cut="before")
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert len(hub.accepted) == len(hub.commits(REPO)) == 1

    @pytest.mark.slow
    def test_whoever_commits_in_between_is_kept(self, hub: HubServer, tmp_path: Path) -> None:
        hub.store.create(REPO, private=False)
        hub.gate = _once(r"/commit/", lambda: hub.store.commit(REPO, "main", {"summary": "b"}, [_file("b", b"b")]))
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
        assert hub.commits(REPO) == ["Upload model with ckpt", "b"]
        assert set(hub.files(REPO)) == {"README.md", "b", "model.safetensors"}
        assert commits_sent(hub) == 2

    @pytest.mark.slow
    @pytest.mark.parametrize("status", [409, 412])
    def test_a_conflict_is_tried_on_the_new_head_but_not_for_ever(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
    ) -> None:
        skip_pauses(monkeypatch)
        hub.fail("/commit/", status, times=3)
        with ckpt.StateManager(tmp_path / "run", model=small(0)) as manager:
            manager.push_to_hub(REPO)
            hub.fail("/commit/", status, times=99)
            with pytest.raises(ckpt.TransientError, match="other processes keep committing there"):
                manager.push_to_hub("me/other")
        assert len(hub.commits(REPO)) == 1
        assert hub.files("me/other") == {}

    @pytest.mark.usefixtures("impatient")
    def test_without_a_network_it_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving(tmp_path, monkeypatch):
            pass
        with (
            ckpt.StateManager(tmp_path / "run", model=small(0)) as manager,
            pytest.raises(ckpt.TransientError, match=r"the Hub cannot be reached .*Check the network"),
        ):
            manager.push_to_hub(REPO)


def _once(pattern: str, do: Callable[[], object]) -> Callable[[str, str], None]:
    left = [do]

    def gate(method: str, path: str) -> None:
        if pattern in path and left:
            left.pop()()

    return gate


TOKEN = "hf_DistinctiveSecretForThisTest"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["argument", "environment", "login"])
def test_a_token_is_used_and_told_to_nobody_else(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    given: str,
) -> None:
    hub.token = TOKEN
    caplog.set_level(logging.DEBUG, "ckpt")
    caplog.set_level(logging.DEBUG, "huggingface_hub")
    if given == "environment":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    if given == "login":
        Path(huggingface_hub.constants.HF_TOKEN_PATH).write_text(TOKEN)
    token = TOKEN if given == "argument" else None
    root = tmp_path / "run"
    with ckpt.StateManager(root, model=small(0)) as manager:
        manager.save_state("x", wait=True)
        manager.push_to_hub(REPO, token=token)
        hub.fail("/commit/", 403)
        with torch.no_grad():
            next(manager.unwrap().parameters()).zero_()
        with pytest.raises(ckpt.StorageError) as raised:
            manager.push_to_hub(REPO, token=token)
    asked = [request for request in hub.requests if REPO in request.path or request.path.startswith("/api/repos/")]
    assert len(asked) > 5
    assert [request for request in asked if request.authorization != f"Bearer {TOKEN}"] == []
    told = [repr(raised.value), repr(raised.value.__cause__), repr(manager), caplog.text, *capfd.readouterr()]
    told += [repr(HubStorage(REPO, token=token)), repr(HubStorage(REPO, token=token).repo)]
    told += [path.read_bytes().decode("latin-1") for path in root.rglob("*") if path.is_file()]
    told += [content.decode("latin-1") for content in hub.files(REPO).values()]
    assert not any(TOKEN in text for text in told)
    assert not any(TOKEN in path.read_text("latin-1") for path in hub.store.folder.rglob("*") if path.is_file())
