"""kvdepot.urls: one meaning each, or an error that says what to write.

The table is the one of LMCache#4493, where a documented spelling was refused, the refusal was only a
warning, and the engine then stored nothing; with the siblings that `urlsplit` would read wrongly.
"""

from __future__ import annotations

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError, KvdepotError, PoolUrlError
from kvdepot.urls import PoolUrl, distinct_roots, normalise


def parse(text):
    return PoolUrl.parse(text, working_folder="/srv/here", home="/home/ada")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        # the three spellings, each with one meaning
        ("file:///a", "/a"),
        ("fs:///a", "/a"),
        ("/a", "/a"),
        ("FILE:///a", "/a"),
        ("./a", "/srv/here/a"),
        ("a", "/srv/here/a"),
        ("a/b/", "/srv/here/a/b"),
        (".", "/srv/here"),
        ("..", "/srv"),
        ("../a", "/srv/a"),
        ("./../../a", "/a"),
        ("~/a", "/home/ada/a"),
        ("~", "/home/ada"),
        ("./~a", "/srv/here/~a"),
        # slashes and dots that add nothing
        ("file:///a/", "/a"),
        ("fs:///a//b///c", "/a/b/c"),
        ("/a/./b/.", "/a/b"),
        ("file:///tmp/./a", "/tmp/a"),
        # spaces and percent codes: decoded in URLs, letters in bare paths
        ("/a b", "/a b"),
        ("file:///a b", "/a b"),
        ("file:///a%20b", "/a b"),
        ("fs:///a%20b", "/a b"),
        ("/a%20b", "/a%20b"),
        ("file:///a%2Cb%5Cc%3Fd%23e%25f", "/a,b\\c?d#e%f"),
        ("file:///%C3%A9t%C3%A9", "/été"),
        ("/été", "/été"),
        # letters that mean something in URLs only
        ("/a?b#c", "/a?b#c"),
        ("/a:b", "/a:b"),
        ("./a:b", "/srv/here/a:b"),
        ("/a@b", "/a@b"),
        ("...", "/srv/here/..."),
        ("/a/..b", "/a/..b"),
        ("/" + "n" * 255, "/" + "n" * 255),
        ("/CON", "/CON"),
    ],
)
def test_accepted_spellings_have_one_meaning(text, path):
    root = parse(text)
    assert root.path == path
    assert root.written == text
    assert root.describe() == f"pool {text} is the folder {path}"


#: text, a word of the message, what the hint tells to write
REFUSED = [
    # a host where none belongs: the first folder would be eaten
    ("fs://tmp/a", "names a host", "fs:///tmp/a"),
    ("file://tmp/a/b", "names a host", "file:///tmp/a/b"),
    ("fs://host:0/a", "names a host", "fs:///a"),
    ("fs://host:abc/a", "names a host", "fs:///a"),
    ("fs://user@host/a", "names a host", "fs:///a"),
    ("fs://[::1]/a", "names a host", "fs:///a"),
    ("fs://[/a", "names a host", "fs:///a"),
    ("file://localhost/a", "names a host", "file:///a"),
    ("file://a", "names a host", "file:///a"),
    ("file://a/", "names a host", "file:///a"),
    ("file://./a", "names a host", "file:///a"),
    ("file://../a", "names a host", "file:///a"),
    ("file://~/a", "~ has no meaning", "~/a"),
    ("file:/a", "lacks the //", "file:///a"),
    ("file:a", "lacks the //", "file:///a"),
    ("fs:", "lacks the //", "fs:///absolute/path"),
    ("file:////a", "three slashes", "file:///a"),
    ("fs://///server/share", "three slashes", "fs:///server/share"),
    # no folder at all
    ("file://", "root folder", "empty"),
    ("file:///", "root folder", "empty"),
    ("fs:///.", "root folder", "empty"),
    ("/", "root folder", "empty"),
    ("/.", "root folder", "empty"),
    ("", "empty", "file:///"),
    ("   ", "empty", "file:///"),
    # several roots in one text
    ("/a,/b", "comma", "one URL per root"),
    ("fs:///a,fs:///b", "comma", "one URL per root"),
    ("/a,", "comma", "one URL per root"),
    # parts that a folder cannot have
    ("file:///a?x=1", "query", "%3F"),
    ("fs:///a#b", "fragment", "%23"),
    ("file:///a%", "percent code", "%25"),
    ("file:///a%zz", "percent code", "%25"),
    ("file:///a%2", "percent code", "%25"),
    ("file:///a%2Fb", "encoded slash", "never %2F"),
    ("file:///%2e%2e%2fetc", "encoded slash", "never %2F"),
    ("file:///a%FFb", "UTF-8", "UTF-8"),
    ("file:///a%00b", "control character", "remove"),
    ("file:///a%0Ab", "control character", "remove"),
    ("/a\nb", "control character", "remove"),
    ("/a\0b", "control character", "remove"),
    ("/a\x7fb", "control character", "remove"),
    ("/a\x9bb", "control character", "remove"),
    ("/a\n", "white space", "remove"),
    (" /a", "white space", "remove"),
    ("/a\udcffb", "UTF-8", "rename"),
    # paths that leave their folder
    ("/a/../b", "'..' behind a name", "without it"),
    ("/../a", "'..' behind a name", "without it"),
    ("a/../../b", "'..' behind a name", "without it"),
    ("~/../root", "'..' behind a name", "without it"),
    ("file:///a/../b", "'..' behind a name", "without it"),
    ("file:///..", "'..' behind a name", "without it"),
    ("file:///a/%2e%2e/b", "'..' behind a name", "without it"),
    # other systems' and other stores' spellings
    ("s3://bucket/a", "not supported yet", "file:///"),
    ("S3://bucket/a", "not supported yet", "file:///"),
    ("gs://bucket", "not supported yet", "file:///"),
    ("https://host/a", "not supported yet", "file:///"),
    ("nfs://host/a", "unknown URL scheme 'nfs'", "file:///"),
    ("localhost:8000/a", "unknown URL scheme 'localhost'", "./localhost:8000/a"),
    ("C:/a", "Windows drive", "file:///"),
    ("C:\\a", "backslash", "%5C"),
    ("file:///C:/a", "Windows drive", "file:///"),
    ("//server/share", "more than one slash", "/server/share"),
    ("///a", "more than one slash", "/a"),
    ("\\\\server\\share", "backslash", "%5C"),
    ("~ada/a", "another user", "absolute path"),
    # sizes
    ("/" + "n" * 256, "256 bytes", "shorter"),
    ("/" + "é" * 128, "256 bytes", "shorter"),
    ("/" + "/".join(["n" * 200] * 20), "too long", "shorter"),
]


@pytest.mark.parametrize(("text", "message", "hint"), REFUSED)
def test_refused_spellings_say_what_to_write(text, message, hint):
    with pytest.raises(PoolUrlError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_what_the_hints_suggest_is_accepted():
    for text in ("fs:///tmp/a", "file:///a", "~/a", "./localhost:8000/a", "file:///a%2Cb"):
        parse(text)


@pytest.mark.parametrize("thing", [None, 3, b"/a", ("/a",)])
def test_other_types_are_refused(thing):
    with pytest.raises(PoolUrlError, match="is a text"):
        PoolUrl.parse(thing)


def test_the_error_is_a_config_error_and_a_value_error():
    assert issubclass(PoolUrlError, ConfigError | KvdepotError)
    with pytest.raises(ValueError, match="names a host"):
        parse("fs://tmp/a")


def test_an_unknown_home_is_an_error_and_no_folder_named_tilde(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(PoolUrlError, match="home folder is not known"):
        PoolUrl.parse("~/a")
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(PoolUrlError, match="home folder is not known"):
        PoolUrl.parse("~/a")


def test_defaults_are_the_process_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/grace")
    assert PoolUrl.parse("pool").path == os.path.join(os.getcwd(), "pool")
    assert PoolUrl.parse("~/pool").path == "/home/grace/pool"


@pytest.mark.parametrize(
    "spelling", ["fs:///a b/c", "file:///a%20b/c/", "/a b//c", "FS:///a b/./c", "file:///a b/c"]
)
def test_spellings_of_one_root_are_one_root(spelling):
    assert normalise(spelling) == "file:///a%20b/c"
    assert PoolUrl.parse(spelling) == PoolUrl.parse("/a b/c")
    assert hash(PoolUrl.parse(spelling)) == hash(PoolUrl.parse("/a b/c"))


def test_roots_of_one_pool_must_be_apart():
    assert [root.path for root in distinct_roots(["/a", "fs:///ab", "/c"])] == ["/a", "/ab", "/c"]
    with pytest.raises(PoolUrlError, match="given twice"):
        distinct_roots(["/a", "file:///a/"])
    with pytest.raises(PoolUrlError, match="lies inside"):
        distinct_roots(["/a/b", "/a"])
    with pytest.raises(PoolUrlError, match="lies inside"):
        distinct_roots(["/a", "/x", "/a/b/c"])


_LETTERS = string.ascii_letters + string.digits + string.punctuation + " äß語"


@given(st.lists(st.text(_LETTERS, min_size=1, max_size=20), min_size=1, max_size=6))
def test_the_canonical_url_means_the_same_folder(names):
    # whatever a bare path means, its canonical URL means it too, and nothing else
    text = "/" + "/".join(names)
    try:
        root = PoolUrl.parse(text)
    except PoolUrlError:
        return
    assert PoolUrl.parse(root.url) == root
    assert normalise(root.url) == root.url
    assert PoolUrl.parse("/." + text) == root


@given(st.one_of(st.text(max_size=60), st.text("/.:~%fiels2F@?#", max_size=24)))
def test_any_text_gives_a_clean_absolute_path_or_a_hint(text):
    try:
        path = parse(text).path
    except PoolUrlError as error:
        path, hint = "/refused", error.hint
    else:
        hint = "none needed"
    assert hint
    assert path.startswith("/")
    assert not {"", ".", ".."} & set(path[1:].split("/"))
