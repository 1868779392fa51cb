"""`ckpt report -o report.html`: the page of a run with restarts, a fallback and a phase of LoRA."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root.catalog import HISTORY, History, PastAttempt
from ckpt.storage import open_storage
from ckpt.tools.report.facts import best_of, gather, guessed_mode
from ckpt.tools.report.page import _ATTEMPTS
from tests.cli.test_hostile_names import EVIL, rewrite
from tests.cli.test_main import flip_a_bit
from tests.helpers.eventful_run import DAMAGED, eventful_run

pytestmark = pytest.mark.slow  # its run takes seconds, and so do the libraries of its adapters

VOID = {"meta", "br"}
HOSTILE = "\"'><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>&lt;b&gt;"


class Page(HTMLParser):
    """Every tag with its attributes, and the text inside each element, by the order in which they end."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[tuple[str, list[str]]]] = []  # of cells: text, and the values of <data> in it
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(("", []))
        elif tag == "data":
            self.rows[-1][-1][1].append(dict(attrs)["value"] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without a beginning"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text.append(data)
        if {"td", "th"} & set(self._open):
            text, values = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, values)


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def page_of(root: Path, folder: Path, *options: str) -> str:
    result = report(root, "-o", folder / "report.html", *options)
    assert (result.exit_code, result.output) == (0, f"{folder}/report.html\n")
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eventful") / "run"
    eventful_run(root)
    return root


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return page_of(run, run.parent)


def refuse_what_acts(text: str) -> Page:
    """The page, if it is well-formed, has no script, and loads nothing."""
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "embed", "base", "a"})
    for _, attributes in page.tags:
        assert not {name for name in attributes if name in ("src", "href", "srcset", "xlink:href") or name[:2] == "on"}
        assert "evil" not in (attributes.get("style") or "")
    loaded = set(re.findall(r"url\([^)]*\)|@import", text))
    assert loaded == set()
    assert "default-src 'none'" in text
    return page


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    refuse_what_acts(page)
    assert "http://" not in page
    assert "https://" not in page


def test_its_numbers_are_those_of_ls(run: Path, page: str) -> None:
    listed = json.loads(CliRunner().invoke(main, ["ls", "--all", "--json", str(run)]).stdout)
    rows = Page(page).rows
    head = next(row for row in rows if [cell[0] for cell in row[:2]] == ["name", "state"])
    columns = [cell[0] for cell in head]
    found = []
    for row in rows[rows.index(head) + 1 :]:
        if len(row) == len(columns):
            cells = dict(zip(columns, row, strict=True))
            values = {key: cells[name][1][0] for key, name in (("step", "step"), ("bytes", "size"), ("ranks", "ranks"))}
            metrics = {name: float(cells[name][1][0]) for name in ("loss", "accuracy")}
            found.append((cells["name"][0], cells["state"][0], cells["saved (UTC)"][1][0], metrics, values))
    assert len(listed) == 12
    assert sorted(found, key=str) == sorted(
        (
            (
                one["name"], one["state"], one["created"], one["metrics"],
                {"step": str(one["step"]), "bytes": str(one["bytes"]), "ranks": str(one["world_size"])},
            )
            for one in listed
        ),
        key=str,
    )  # fmt: skip


def test_it_tells_of_restarts_and_what_they_passed_over(run: Path, page: str) -> None:
    text = " ".join("".join(Page(page).text).split())
    assert f"attempt 2 passed over:{DAMAGED} is damaged: model.safetensors was altered" in text
    rows = [[cell[0] for cell in row] for row in Page(page).rows]
    told = rows[rows.index([*_ATTEMPTS]) + 1 :][:4]
    assert [(row[2], row[3], row[5], row[6]) for row in told] == [
        ("scratch", "0 to 10", "finished", "2 steps"),
        ("step-00000008", "8 to 14", "finished", "none"),
        ("step-00000014", "14 to 16", "finished", "none"),
        ("step-00000016", "16 to 22", "finished", "none"),
    ]


def test_where_there_is_no_history_manifests_tell_of_restarts(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / HISTORY).unlink()
    facts = gather(tmp_path / "run")
    assert [(one.began_from, one.past.last, one.end) for one in facts.told][1:] == [
        ("step-00000008", 14, "not known"), ("step-00000014", 16, "not known"), ("step-00000016", 22, "not known"),
    ]  # fmt: skip
    assert facts.goodput is None
    assert facts.curves["loss"][0][0] == 8  # of checkpoints alone


def test_saves_that_retention_removed_still_say_how_long_training_waited(run: Path) -> None:
    removed = gather(run).removed
    assert [save.step for save in removed] == [2, 4, 6, 10]
    assert all(save.waited is not None and save.durable is not None for save in removed)


def test_what_is_frozen_is_shared_with_the_checkpoint_before(run: Path) -> None:
    saves = {save.step: save for save in gather(run).present}
    assert (saves[20].shared or 0) > 0.9 * saves[20].summary.size
    frozen = [Path(run, f"step-000000{step}", "model+frozen.safetensors") for step in (18, 20, 22)]
    assert len({file.stat().st_ino for file in frozen}) == 1
    assert saves[8].shared is None  # the one before it is gone


def test_nothing_but_manifests_and_sizes_is_read(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run").rglob("*.safetensors"):
        flip_a_bit(file)
    said = "".join(Page(page_of(tmp_path / "run", tmp_path)).text)
    assert "all 8 checkpoints are complete, by the sizes of files" in said
    assert "intact" not in said


def test_a_damaged_checkpoint_is_in_the_health_section(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    cut = tmp_path / "run" / "step-00000020" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "run" / "step-00000099").mkdir()
    (tmp_path / "run" / "step-00000099" / ".saving").write_text("{}")
    text = " ".join("".join(Page(page_of(tmp_path / "run", tmp_path)).text).split())
    assert "Damaged: step-00000020 can't be used (model.safetensors is " in text
    assert "; a restart begins at step-00000022." in text
    assert "step-00000020damagedmodel.safetensors is " in text
    assert "step-00000099uncommittedstep-00000099 was never committed" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    root = tmp_path / "<b>run</b>"
    model = nn.Sequential()
    model.add_module(HOSTILE.replace(".", ""), nn.Linear(2, 2))
    with ckpt.StateManager(root, model=model) as manager:
        manager.resume()
        for _ in range(2):
            manager.step()
            manager.save_state()
    for step in (1, 2):
        rewrite(root / f"step-{step:08d}" / "manifest.json", metrics={EVIL: float(step), HOSTILE: math.nan})
    said = {"name": HOSTILE, "id": "x", "step": 0, "found_in": HOSTILE, "passed_over": {HOSTILE: HOSTILE}}
    rewrite(root / "step-00000002" / "manifest.json", metrics={HOSTILE: 1.0}, resumed=said)
    (root / HISTORY).unlink()  # so that manifests tell of restarts; and an attempt that has saved nothing
    history = History(open_storage(root))
    began, said = "2026-01-01T00:00:00+00:00", {"ended": "failed", "reason": HOSTILE, "seconds": {"total": 1.0}}
    history.note(PastAttempt(HOSTILE, HOSTILE, began, **said, metrics={HOSTILE: [(1, 2.0)]}))  # type: ignore[arg-type]
    history.store(())
    text = page_of(root, tmp_path)
    page = refuse_what_acts(text)
    assert not any(char in text for char in "\x1b\x07\u202e")
    for sentence in (f"{HOSTILE}, found in the {HOSTILE}", f"failed: {HOSTILE}", "attempt 2 passed over:"):
        assert sentence in "".join(page.text)
    assert HOSTILE in "".join(page.text)
    assert "b" not in {tag for tag, _ in page.tags} or "<b>run" not in text


def test_the_suffix_or_the_option_says_which_format_it_is(run: Path, tmp_path: Path) -> None:
    for name, options, begins in (
        ("a.html", [], "<!DOCTYPE html>"),
        ("a.HTM", [], "<!DOCTYPE html>"),
        ("a.md", [], "# "),
        ("a.html", ["--format", "md"], "# "),
        ("a.txt", ["--format", "html"], "<!DOCTYPE html>"),
    ):
        assert report(run, "-o", tmp_path / name, *options).exit_code == 0
        assert (tmp_path / name).read_text().startswith(begins)
    assert report(run, "--format", "md").output.startswith("# ")


def test_markdown_tells_the_same(run: Path) -> None:
    text = report(run, "--format", "md").output
    assert "| step-00000008 | 8 to 14 |" in text
    assert "- attempt 2 passed over:\n" in text
    assert f"  - {DAMAGED} is damaged" in text


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"), ("eval/loss", "min"), ("val_perplexity", "min"), ("accuracy", "max"), ("eval_f1", "max"),
        ("lr", None), ("tokens", None), ("reward_loss", "min"), ("loss_accuracy", "max"),
    ],
)  # fmt: skip
def test_the_name_of_a_metric_says_which_value_is_best(name: str, mode: str | None) -> None:
    assert guessed_mode(name) == mode


def test_the_best_is_what_the_user_says() -> None:
    points = [(1, 3.0), (2, math.nan), (3, 5.0), (4, 5.0)]
    assert best_of("odd", points, {}) is None
    best = best_of("odd", points, {"odd": "max"})
    assert best is not None
    assert (best.step, best.value, best.how) == (3, 5.0, "highest")
    assert best_of("loss", [(1, math.nan)], {}) is None


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FRAME = """<!doctype html><body><iframe id="page" src="{page}" style="width:390px;height:900px"></iframe><script>
page.onload = () => {{
  const inside = page.contentDocument, root = inside.documentElement;
  document.title = JSON.stringify({{
    overflow: root.scrollWidth - root.clientWidth,
    background: getComputedStyle(inside.body).backgroundColor,
    bar: getComputedStyle(inside.querySelector("svg circle")).fill,
  }});
}}
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it_light_and_dark_on_a_phone_without_an_error(page: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "frame.html").write_text(FRAME.format(page="page.html"))
    seen = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={tmp_path / scheme}",
            f"--blink-settings=preferredColorScheme={number}", "--dump-dom",
        ]  # fmt: skip
        command = [str(BROWSER), *options, (tmp_path / "frame.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr
        title = re.search("<title>(.*?)</title>", done.stdout)
        assert title is not None, done.stdout
        seen[scheme] = json.loads(unescape(title.group(1)))
    assert [facts["overflow"] for facts in seen.values()] == [0, 0]
    assert seen["light"]["background"] == "rgb(245, 246, 248)"
    assert seen["dark"]["background"] == "rgb(17, 20, 26)"
    assert seen["light"]["bar"] != seen["dark"]["bar"]
