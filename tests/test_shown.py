"""What is printed, logged, raised or written into a document: nothing in it acts, and nothing in it is secret."""

from __future__ import annotations

import base64
import logging
import pickle
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import ckpt.cli
import ckpt.shown
from ckpt.errors import AbsentError, CkptError, MismatchError, StorageError
from ckpt.options import ManagerOptions, Mirror, resolve_options
from ckpt.ranks.consensus import Result
from ckpt.shown import Lines, few, markdown, printable, remember_secrets, sentence, shown, without_secrets
from ckpt.storage import open_storage
from ckpt.storage.hub.repo import HubRepo, translate_error
from ckpt.util.console import format_table, say
from ckpt.util.svg_plot import text

TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7" * 2
ACTIVE = {
    "\x1b[2J": r"\x1b[2J",  # clears the screen
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b31m": r"\x9b31m",  # the same as ESC [ in one character
    "\u202egnp.exe": r"\u202egnp.exe",  # the rest is displayed backwards
    "a\u2028b": r"a\u2028b",
    "a\nb\rc\td\x00": r"a\nb\rc\td\x00",
    "\udcff": r"\udcff",  # a byte of a file name that is not UTF-8: printing it raises
    "\U000e0041": r"\U000e0041",
}


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt.shown, "_known", [])


@pytest.mark.parametrize(("active", "escaped"), ACTIVE.items())
def test_what_acts_on_a_terminal_is_shown_as_python_writes_it(active: str, escaped: str) -> None:
    assert printable(f"é {active} 日") == f"é {escaped} 日"
    assert printable(escaped) == escaped  # shown twice, it is the same


@pytest.mark.parametrize(("active", "escaped"), ACTIVE.items())
def test_no_way_of_showing_a_name_lets_it_act(
    active: str, escaped: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    say(f"loaded {active}")
    assert capsys.readouterr().err == f"loaded {escaped}\n"
    assert list(format_table(("name", "n"), [(active, "1")]))[1] == f"{escaped}  1"
    logging.getLogger("ckpt").warning("%s is passed over: %s, %d", active, ValueError(active), 3)
    quoted = escaped.replace(r"\n", " ").replace(r"\r", " ")  # an error of another library may have several lines
    assert caplog.messages == [f"{escaped} is passed over: {quoted}, 3"]
    assert f">{escaped}</text>" in text(0, 0, active)
    assert str(Result.from_json(Result(error=OSError(active)).to_json("save")).error) == f"OSError: {escaped}"


@pytest.mark.parametrize("kind", [CkptError, AbsentError, MismatchError])
def test_the_message_of_an_error_is_escaped_however_it_is_read(kind: type[CkptError]) -> None:
    error = kind("no \x1b[2Jfile\n")
    assert str(error) == r"no \x1b[2Jfile"
    assert repr(error) == rf"{kind.__name__}('no \\x1b[2Jfile')"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_with_many_offenders_has_ten_lines_and_keeps_all() -> None:
    problems = [f"model: w{number}\n\x1b: missing" for number in range(30)]
    error = MismatchError(Lines.listing("it does not fit:", problems, "Build it anew."), tuple(problems))
    head, *listed, more, tail = str(error).splitlines()
    assert (head, more, tail) == ("it does not fit:", "  and 23 more", "Build it anew.")
    assert listed == [rf"  model: w{number}\n\x1b: missing" for number in range(7)]
    assert len(error.problems) == 30
    assert len(Lines.listing("head", problems[:8], "tail").splitlines()) == 10
    assert len(Lines.listing("head", problems).splitlines()) == 10


def test_lines_of_an_error_are_the_same_on_another_rank() -> None:
    error = CkptError(Lines.listing("the ranks disagree:", ["a\x1b", "b"]))
    assert str(Result.from_json(Result(error=error).to_json("save")).error) == "the ranks disagree:\n  a\\x1b\n  b"


MARKUP = [
    "![x](http://evil.example/pixel.png)", "[click](javascript:alert(1))", "<script>alert(1)</script>", "<img src=x>",
    "https://evil.example", "www.evil.example", "a | b", "a\n\n# title", "`code` <b>", "``` | ```", "*bold*",
    "&lt;b&gt;", "<!-- end of the section of ckpt -->", "me@evil.example", "<https://evil.example>", r"a\|b<i>",
    "~~x~~", "__init__", "[ref]: http://evil.example", "$x$", "\x1b[2J", "a\\",
]  # fmt: skip


@pytest.mark.parametrize("name", MARKUP)
def test_a_name_in_markdown_is_text_and_nothing_else(name: str) -> None:
    page = f"# {markdown(name)}\n\n| a | b |\n|---|---|\n| {markdown(name)} | end |\n\n- {markdown(name)}\n"
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    kinds = {inner.type for token in tokens for inner in (token, *(token.children or ()))}
    assert not kinds & {"link_open", "image", "html_inline", "html_block", "em_open", "strong_open", "s_open"}
    cells = [after.content for token, after in pairwise(tokens) if token.type == "td_open"]
    assert (len(cells), cells[1]) == (2, "end")
    assert "<!--" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize("name", ["eval_loss", "step-00000500", "2026-11-16T12:57:10+00:00", "8 x NVIDIA H200", "▁▂█"])
def test_an_ordinary_name_in_markdown_is_as_it_is(name: str) -> None:
    assert markdown(name) == name


SECRETS = [
    "s3://key:pa55/wo@rd@bucket/run",
    "https://user:pa/55@host/x",
    "s3://AKIAABCDEFGHIJKLMNOP@bucket/run",
    f"hub://{TOKEN}@user/repo",
    "hub://hf_short@user/repo",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=pa55&X-Amz-Date=1&X-Amz-Signature=pa55pa55",
    "https://a.blob.core.windows.net/c/k?sv=1&sig=pa55pa55",
    "https://b.storage.googleapis.com/k?GoogleAccessId=x&Signature=pa55pa55&Expires=1",
    "https://host/x?token=pa55pa55",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_secret_in_a_url_is_neither_accepted_nor_shown(url: str) -> None:
    with pytest.raises(CkptError, match=r"\*\*\*") as caught:
        open_storage(url)
    for told in (str(caught.value), repr(caught.value), without_secrets(f"could not read {url!r}.")):
        assert not any(part in told for part in ("pa55", "pa/55", "wo@rd", "hf_", "AKIA")), told
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "hub://user/repo@main/path", "abfss://container@account.dfs.core.windows.net/run", "s3://bucket/a@b/c",
        "give token=..., or log in", "revision= and token= are for the Hub", "s3://bucket/max_token=128/x",
        "tokenizer=AutoTokenizer", "no token: log in", "formats/foreign/hf_safetensors.py", "a secret: none",
        "http://localhost:9000/bucket", "user@host: rank 3", "/home/me@work/runs",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "said",
    [
        f"Invalid token {TOKEN}", f"Authorization: Bearer {TOKEN[3:]}", "authorization: basic dXNlcjpwYXNzd29yZA==",
        f"{{'key': 'x', 'secret': '{TOKEN[3:]}'}}", f'{{"access_token": "{TOKEN[3:]}"}}',
        f"aws_session_token={TOKEN[3:]}",
        f"-----BEGIN PRIVATE KEY-----\n{TOKEN[3:]}\n-----END PRIVATE KEY-----",
        f"x-amz-security-token: {TOKEN[3:]}", f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{TOKEN[3:]}",
    ],
)  # fmt: skip
def test_a_server_that_echoes_a_token_does_not_reveal_it(said: str) -> None:
    for told in (str(StorageError(f"the server says {said}")), shown(said)):
        assert "***" in told
        assert TOKEN[3:] not in told
        assert "dXNlcjpw" not in told


def test_a_secret_that_was_given_is_recognised_wherever_it_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "from-the-environment")
    remember_secrets({"secret": "hunter2/x", "client_kwargs": {"sas_token": "nested-one"}, "endpoint_url": "http://h"})
    said = without_secrets("got hunter2/x, hunter2%2Fx, nested-one and from-the-environment at http://h")
    assert said == "got ***, ***, *** and *** at http://h"


def test_the_secrets_in_a_connection_string_and_in_a_signed_query_are_recognised_alone() -> None:
    account = "AccountName=name;AccountKey=of-an-account=;BlobEndpoint=http://h/name;"
    remember_secrets({"connection_string": account, "sas_token": "?sv=2024-01-01&sig=signed%2Fby&se=2030"})
    remember_secrets({"connection_string": "BlobEndpoint=http://h;SharedAccessSignature=sv=2024&sig=shared-one"})
    said = without_secrets("of-an-account=, signed%2Fby, shared-one of name at 2024-01-01")
    assert said == "***, ***, *** of name at 2024-01-01"


def test_the_token_of_a_login_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "of-a-login")
    assert HubRepo("user/repo").api is not None
    assert shown("the Hub answered 500 (bad token of-a-login)") == "the Hub answered 500 (bad token ***)"


def test_an_answer_of_the_hub_that_quotes_the_token_does_not_reveal_it() -> None:
    class AnswerError(Exception):
        server_message = "who is odd-token-value?\x1b[2J"
        response = type("Response", (), {"status_code": 500, "headers": {}})

    remember_secrets({"token": "odd-token-value"})
    error = translate_error(AnswerError("odd-token-value"), "could not read hub://user/repo")
    assert r"who is ***?\x1b[2J" in str(error)


def test_credentials_are_in_no_repr_and_in_no_error_about_options() -> None:
    options = {"secret": "hunter2hunter2"}
    assert "hunter2" not in repr(Mirror("s3://b/x", storage_options=options))
    assert "hunter2" not in repr(ManagerOptions(storage_options=options))
    with pytest.raises(CkptError) as caught:
        resolve_options({"storage_options": [("odd", "hunter2hunter2")]})
    assert "storage_options=" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("unit", ["x", "://a:", "token=", "?a", "secret'", "bearer ", "eyJaaaaaaaa.", "\x1b", "hf_"])
def test_a_name_of_a_megabyte_neither_floods_the_screen_nor_takes_long(unit: str) -> None:
    start = time.process_time()
    said = shown(unit * (1_000_000 // len(unit)))
    assert "more characters)" in said
    assert len(said) < 100_000
    assert time.process_time() - start < 5


def test_every_command_prints_through_the_one_function_that_escapes() -> None:
    """But for a report, which is Markdown, and what runs the user's own program."""
    prints = re.compile(r"click\.(s?echo|style)|\bprint\(")
    commands = Path(ckpt.cli.__path__[0]).glob("*.py")
    printing = {path.stem for path in commands if prints.search(path.read_text())}
    assert {name for name in printing if not name.startswith("demo")} == {"output", "report", "selftest"}


def test_of_many_names_the_first_are_shown_and_the_rest_is_counted() -> None:
    assert [few(names, 3) for names in ("", "abc", "abcd", "abcde")] == [
        "", "a, b, c", "a, b, c and 1 more", "a, b, c and 2 more"
    ]  # fmt: skip


def test_options_are_secret_by_their_names_and_all_that_is_sent_to_a_server() -> None:
    remember_secrets(
        {
            "Secret": "by-its-name",
            "key": "not-a-secret",
            "headers": {"X-Any": "of-a-header", "Authorization": "Bearer of-bearer"},
            "outer": {"COOKIES": {"deep": {"er": "of-a-cookie"}}, "plain": "not-secret-either"},
            "auth": ("user-name", "of-auth"),
            "proxy_auth": ["user-name", "of-proxy", "more"],
            "token": 123456789,
            "password": "short",
        }
    )
    for secret in ("by-its-name", "of-a-header", "of-bearer", "of-a-cookie", "of-auth", "of-proxy"):
        assert without_secrets(f"<{secret}>") == "<***>", secret
    basic = base64.b64encode(b"user-name:of-auth").decode()
    assert without_secrets(f"<{basic}>") == "<***>"
    said = "not-a-secret not-secret-either user-name 123456789 short more"
    assert without_secrets(said) == said
    ckpt.shown._known.clear()
    remember_secrets({"auth": ("alone-in-it",), "proxy_auth": "no-pair-at-all", "other": ("user-name", "not-a-secret")})
    assert ckpt.shown._known == []
    remember_secrets({"secret": "sixsix", "token": "sixsix-and-more"})
    assert without_secrets("sixsix-and-more sixsix") == "*** ***"  # the longest first


def test_a_text_is_cut_where_it_is_too_long_and_its_lines_are_counted() -> None:
    assert shown("x" * 10_000) == "x" * 10_000
    assert shown("x" * 10_001) == "x" * 10_000 + "... (1 more characters)"
    lines = Lines.of(["a", "b\nc"])
    assert lines == "a\nb\\nc"
    assert shown(lines) is lines
    assert sentence(lines) is lines
    assert sentence("\na \n b\r\n\r\nc\n") == "a b c"
    for number, expected in ((8, 8), (9, 9), (10, 9), (12, 9)):
        listed = str(Lines.listing("head", map(str, range(number)))).splitlines()
        assert len(listed) == expected + 1
        assert listed[-1] == (f"  {number - 1}" if number <= 9 else f"  and {number - 8} more")
    with_tail = str(Lines.listing("head", map(str, range(9)), "tail")).splitlines()
    assert (len(with_tail), with_tail[-2:]) == (10, ["  and 2 more", "tail"])


def test_the_user_of_a_url_is_a_secret_unless_it_is_a_container() -> None:
    cases = {
        "s3://user@bucket/x": "s3://***@bucket/x",
        "s3://user:password@bucket/x": "s3://***@bucket/x",
        "abfss://container@account/x": "abfss://container@account/x",
        "az://container@account/x": "az://container@account/x",
        "oci://bucket@namespace/x": "oci://bucket@namespace/x",
        f"az://{TOKEN}@account/x": "az://***@account/x",
    }
    assert {url: ckpt.shown.masked_url(url) for url in cases} == cases


def test_what_is_logged_is_shown_whatever_its_arguments_are(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("ckpt")
    remember_secrets({"secret": "hunter2hunter2"})
    log.warning("%s %d %.1f %s", "a\nhunter2hunter2", 3, 0.5, ValueError("b\nc"))
    log.warning("without arguments hunter2hunter2\x1b")
    log.warning("%(name)s by name", {"name": "x"})
    log.warning("%s", ["in a list", "hunter2hunter2"])
    assert caplog.messages == [
        r"a\n*** 3 0.5 b c",
        r"without arguments ***\x1b",
        "x by name",
        "['in a list', '***']",
    ]
