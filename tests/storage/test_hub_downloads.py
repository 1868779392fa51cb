"""A model of 200 MB from the Hub: by Xet, as its client downloads by default, and without; cached before, and not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

import ckpt
from tests.helpers.hub_server import HubServer, serving

ROWS, COLUMNS = 50_000, 1_000
REPO = "me/large"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """Random bits, which nothing compresses."""
    drawn = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def hub(weight: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A repository whose weights came by Xet, beside a small file that did not."""
    from huggingface_hub import HfApi

    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch, serving(folder, patch, xet=True) as server:
        api = HfApi()
        api.create_repo(REPO)
        for name, data in (("model.safetensors", save({"weight": weight})), ("config.json", b'{"is": "small"}')):
            api.upload_file(path_or_fileobj=data, path_in_repo=name, repo_id=REPO)
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("cached", [False, True], ids=["not cached", "cached by another library"])
@pytest.mark.parametrize("xet", [True, False], ids=["xet", "no xet"])
def test_a_large_model_is_downloaded_verified_and_taken_from_the_cache(
    hub: HubServer,
    cache: Path,
    weight: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    xet: bool,
    cached: bool,
) -> None:
    from huggingface_hub import constants, snapshot_download

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    if cached:
        snapshot_download(REPO)  # as `from_pretrained` does
    before = len(hub.requests)
    with torch.device("meta"):
        model = nn.Embedding(ROWS, COLUMNS)
    ckpt.load_model(f"hub://{REPO}", model := model.to_empty(device="cpu"))
    assert torch.equal(model.weight.view(torch.int32), weight.view(torch.int32))
    asked = any("xet-read-token" in sent.path for sent in hub.requests[before:])  # hf_xet keeps one for a while
    assert not asked or (xet and not cached)
    large = [sent for sent in hub.requests[before:] if sent.method == "GET" and "resolve" in sent.path]
    assert len(large) == (0 if cached else 1 if xet else 2)
    if cached and xet:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        ckpt.load_model(f"hub://{REPO}", model, storage_options={"deadline": 0.2})
        assert "from the cache" in capfd.readouterr().err


def test_a_bit_that_flipped_in_the_cache_is_found_wherever_the_file_lies(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    weights = Path(snapshot_download(REPO), "model.safetensors").resolve()
    with weights.open("r+b") as file:
        file.seek(100 << 20)
        byte = file.read(1)
        file.seek(100 << 20)
        file.write(bytes([byte[0] ^ 1]))
    with torch.device("meta"):
        model = nn.Embedding(ROWS, COLUMNS)
    with pytest.raises(ckpt.DamagedError, match=f"{weights.name}.* Remove these files, and ckpt fetches them again"):
        ckpt.load_model(f"hub://{REPO}", model.to_empty(device="cpu"))
    weights.unlink()
    ckpt.load_model(f"hub://{REPO}", model.to_empty(device="cpu"))
