"""Prompts: one real document, cut to a number of tokens, and questions of one length about it.

What stays the same comes first and the question last, so that everything before it can be reused. The
text never changes between repetitions; the salt does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.io.results import read_whole

__all__ = [
    "NEEDLE_QUESTION",
    "Material",
    "Prompts",
    "TokenIds",
    "document_of",
    "read_material",
    "shipped_material",
    "units_of",
]

#: tokens of a prompt by the server; None where it does not say
TokenIds = Callable[[str], Awaitable[Sequence[int] | None]]

#: the question whose answer was planted
NEEDLE_QUESTION = 0
_QUESTIONS = (
    "What is the code word of this document, which is stated in a note to the reader?",
    "Which directories does the document name, and what does it say they are for?",
    "What must a program not do, according to the rules that the document states?",
    "Which parts of the document would change first if the rules were rewritten?",
    "What does the document say about who may write to which of these places?",
    "Which of the rules in the document are optional, and which ones are required?",
    "What would an administrator have to do to follow the rules of the document?",
    "Which terms does the document define, and in which words does it define them?",
)
_MANNER = (
    "Answer with what stands in the document alone, in whole sentences and in plain words; do not "
    "begin with the question, and leave out what is not asked for."
)
#: used where the server does not tell tokens
_TOKEN_CHARACTERS = 4.0
_PASSES = 8
_CLOSE = 0.002
_FILE_BYTES_MAX = 64 << 20


class Material(NamedTuple):
    """A text to ask about."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """Of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def needle(self) -> str:
        """The planted code word; another text has another one."""
        return f"ZEBRA-{int(self.digest[:6], 16) % 9000 + 1000}"


class Prompts(NamedTuple):
    """The prompts of one length."""

    document: str
    needle: str

    def text(self, question: int) -> str:
        """A whole prompt."""
        return f"{self.document}\n\n{self.question(question)}"

    @staticmethod
    def question(index: int) -> str:
        """A question; all have about the same length."""
        return f"Question {index:04d}: {_QUESTIONS[index % len(_QUESTIONS)]} {_MANNER}\nAnswer:"


def shipped_material() -> Material:
    """The text that comes with the package."""
    file = resources.files("kvdepot").joinpath("demo", "documents", "fhs-excerpt.txt")
    with file.open("rb") as opened:
        text = opened.read().decode().strip()
    return Material("Filesystem Hierarchy Standard (excerpt)", text)


def read_material(path: str) -> Material:
    """A text of the user's.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, is empty, or is too large.
    """
    content = read_whole(path)
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"the document {path} is larger than any context")
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the document {path} is not a UTF-8 text") from error
    if not text or "\0" in text:
        raise ConfigError(f"the document {path} is empty or not a text")
    return Material(path.rpartition("/")[2], text)


async def document_of(material: Material, tokens: int, token_ids: TokenIds) -> Prompts:
    """The material cut so that a whole prompt has about this many tokens, with the needle in it.

    A text that is too short is begun again under a new heading.

    Raises:
        ConfigError: so few tokens that no document is left.
    """
    per_token = _TOKEN_CHARACTERS
    cut = round(tokens * per_token)
    prompts = _cut(material, cut)
    for _ in range(_PASSES):
        ids = await token_ids(prompts.text(1))
        if ids is None:
            break
        missing = tokens - len(ids)
        if abs(missing) <= max(1, _CLOSE * tokens):
            break
        per_token = len(prompts.text(1)) / len(ids)
        cut += round(missing * per_token)
        if cut < 1:
            raise ConfigError(
                f"{tokens} tokens are too few: the question alone has {len(ids) + cut}",
                hint="ask for 256 tokens or more",
            )
        prompts = _cut(material, cut)
    return prompts


def units_of(ids: Sequence[int] | None, text: str) -> list[int]:
    """Tokens of a prompt; where the server does not tell them, runs of four characters instead."""
    if ids is not None:
        return list(ids)
    width = round(_TOKEN_CHARACTERS)
    runs = [text[start : start + width] for start in range(0, len(text), width)]
    return [int.from_bytes(hashlib.sha256(run.encode()).digest()[:7]) for run in runs]


def _cut(material: Material, characters: int) -> Prompts:
    note = f"\n[Note to the reader: the code word of this document is {material.needle}.]\n"
    wanted = max(characters, len(note) + 1) - len(note)
    text, part = material.text, 1
    while len(text) < wanted:
        part += 1
        text += f"\n\nPart {part}\n\n{material.text}"
    text = text[:wanted]
    # in the first half, so that it is in what is reused, and at a line's end
    at = text.rfind("\n", 0, max(1, wanted * 2 // 5)) + 1
    return Prompts(text[:at] + note + text[at:], material.needle)
