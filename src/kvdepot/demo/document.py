"""The document that the demo asks about: the one that is shipped, or a file of the user's."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.units import MIB, format_bytes

__all__ = ["SHIPPED_QUESTIONS", "Document", "check_length", "read_document", "shipped_document"]

#: their answers stand in the shipped document, and the small model finds them
SHIPPED_QUESTIONS = (
    "What is /opt reserved for?",
    "Where must device lock files be placed?",
    "What is the naming convention for PID files?",
)

_SOURCE = (
    "an excerpt of the Filesystem Hierarchy Standard 3.0 (The Linux Foundation and others), "
    "from https://refspecs.linuxfoundation.org/FHS_3.0/; its licence stands at its head"
)
#: no context takes more; a larger file is another kind of file
_FILE_BYTES_MAX = 16 * MIB


class Document(NamedTuple):
    """A text, and where it is from."""

    name: str
    text: str
    source: str

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def shipped_document() -> Document:
    """The document that comes with the package."""
    file = resources.files("kvdepot.demo").joinpath("documents", "fhs-excerpt.txt")
    text = file.read_text(encoding="utf-8").strip()
    return Document("Filesystem Hierarchy Standard (excerpt)", text, _SOURCE)


def read_document(path: Path) -> Document:
    """A text file of the user's.

    Raises:
        ConfigError: it is missing, unreadable, empty, too large, or not a text.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, not a document")
        size = path.stat().st_size
        if size > _FILE_BYTES_MAX:
            raise ConfigError(
                f"{path} has {format_bytes(size)}; a document may have {format_bytes(_FILE_BYTES_MAX)}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the document {path} cannot be read: {error.strerror}") from error
    if b"\0" in content:
        raise ConfigError(f"{path} is a binary file", hint="give a text file; convert PDFs to text")
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a UTF-8 text: byte {error.start} is {content[error.start]:#04x}",
            hint="convert it, for example: iconv -f LATIN1 -t UTF-8",
        ) from error
    if not text:
        raise ConfigError(f"the document {path} is empty")
    return Document(path.name, text, str(path))


def check_length(document: Document, *, tokens: int, answer_tokens: int, context: int) -> None:
    """Refuse a document that the model's context does not take.

    Raises:
        ConfigError: with both numbers.
    """
    if tokens + answer_tokens > context:
        raise ConfigError(
            f"{document.name} has {tokens} tokens, and the answer may have {answer_tokens}; the model's "
            f"context is {context} tokens",
            hint="give a shorter document, or a model with a longer context: --model",
        )
