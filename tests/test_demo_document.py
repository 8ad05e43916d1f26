"""The demo's document: what is shipped may be shipped and answers its questions; bad files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdepot.demo import document
from kvdepot.demo.document import (
    SHIPPED_QUESTIONS,
    Document,
    check_length,
    read_document,
    shipped_document,
)
from kvdepot.errors import ConfigError

FOLDER = Path(document.__file__).parent / "documents"


def test_the_shipped_document_is_labelled_and_keeps_its_licence():
    text = shipped_document().text
    head = text[:2500]
    # what its permission notice asks for
    assert "MODIFIED VERSION" in head
    assert "https://refspecs.linuxfoundation.org/FHS_3.0/" in head
    assert head.count("Copyright ©") == 4
    assert "Permission is granted to copy and distribute modified versions" in head
    assert "permission notice identical to this one" in head
    readme = (FOLDER / "README.md").read_text()
    assert "modified version" in readme
    assert "Original:" in readme


@pytest.mark.parametrize(
    ("question", "passage"),
    [
        (
            "What is /opt reserved for?",
            "/opt is reserved for the installation of add-on application software packages.",
        ),
        (
            "Where must device lock files be placed?",
            "device lock files must be placed in /var/lock",
        ),
        (
            "What is the naming convention for PID files?",
            "The naming convention for PID files is <program-name>.pid.",
        ),
    ],
)
def test_the_answers_stand_in_the_document(question, passage):
    assert question in SHIPPED_QUESTIONS
    assert passage in shipped_document().text
    assert question in (FOLDER / "README.md").read_text()


def test_the_shipped_document_is_the_same_for_everybody():
    assert shipped_document().sha256 == shipped_document().sha256
    assert "\r" not in shipped_document().text
    assert 16_000 < len(shipped_document().text) < 20_000


def test_a_text_file_is_read(tmp_path):
    path = tmp_path / "tender.txt"
    path.write_bytes("\ufeff  Größe: 5 m\n".encode())
    found = read_document(path)
    assert (found.name, found.text, found.source) == ("tender.txt", "Größe: 5 m", str(path))


def make_folder(path):
    path.mkdir()


BAD = {
    "is a folder": make_folder,
    "cannot be read: No such file": lambda path: None,
    "is empty": lambda path: path.write_text(" \n\t\n"),
    "binary file": lambda path: path.write_bytes(b"%PDF-1.7\0\x01"),
    "byte 3 is 0xe9": lambda path: path.write_bytes(b"caf\xe9"),
    "may have 16 MiB": lambda path: path.write_bytes(b"a" * ((16 << 20) + 1)),
    "Too many levels": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_text_is_refused(tmp_path, message):
    path = tmp_path / "document"
    BAD[message](path)
    with pytest.raises(ConfigError, match=message) as refused:
        read_document(path)
    assert str(path) in str(refused.value)


def test_too_long_a_document_is_refused_with_both_numbers():
    paper = Document("paper.txt", "x", "somewhere")
    check_length(paper, tokens=8160, answer_tokens=32, context=8192)
    with pytest.raises(ConfigError, match=r"8161 tokens.* 32; .* 8192 tokens") as refused:
        check_length(paper, tokens=8161, answer_tokens=32, context=8192)
    assert "paper.txt" in str(refused.value)
    assert "--model" in refused.value.hint
