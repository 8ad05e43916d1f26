"""Pool URLs: every accepted text means exactly one folder; everything else says what to write instead.

    file:///data/kv     the folder /data/kv; %20 and the like are decoded
    fs:///data/kv       the same
    /data/kv            the same; a bare path is taken letter by letter, nothing is decoded
    data/kv, ./data/kv  below the working folder
    ~/kv                below the home folder

A URL with a host is refused and not guessed at: in ``fs://tmp/kv`` the first folder sits where a host
name belongs, and a parser that drops it stores into ``/kv``. Trailing and repeated slashes and ``.``
are dropped. ``..`` is allowed only at the start of a relative path: behind a name it means one folder
when read as text and another when the name is a link.

Nothing here touches the file system, so links are not followed: two roots that meet through a link
are recognised later, by the pool's id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

from kvdepot.errors import PoolUrlError

__all__ = ["PoolUrl", "distinct_roots", "normalise"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_FOLDER_SCHEMES = ("file", "fs")
_OBJECT_SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "http", "https")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ACCEPTED = "write file:///absolute/path, fs:///absolute/path or a plain path"

#: NAME_MAX of the file systems in use
_NAME_BYTES_MAX = 255
#: PATH_MAX (4,096 with its end mark) less the longest name that a pool makes below its root
_PATH_BYTES_MAX = 3840


@dataclass(frozen=True, slots=True)
class PoolUrl:
    """One pool root. Two spellings of the same folder are equal."""

    #: absolute, without trailing or repeated slashes, ``.`` or ``..``
    path: str
    #: what the user wrote
    written: str = field(compare=False)

    @classmethod
    def parse(
        cls, text: str, *, working_folder: str | None = None, home: str | None = None
    ) -> PoolUrl:
        """Read one URL or path.

        Args:
            text: what the user wrote.
            working_folder: where relative paths begin; None: the process's working folder.
            home: what ``~`` stands for; None: the HOME variable.

        Raises:
            PoolUrlError: the text does not name exactly one folder; the hint says what to write.
        """
        _check_text(text)
        match = _SCHEME.fullmatch(text)
        if match:
            path = _path_of_url(text, match[1].lower(), match[2])
        else:
            path = _path_of_bare(text, working_folder, home)
        return cls(_checked(text, path), text)

    @property
    def url(self) -> str:
        """The one canonical spelling, ``file://`` and the percent-encoded path."""
        return "file://" + quote(self.path)

    def describe(self) -> str:
        """What the text was taken to mean; printed at start."""
        return f"pool {self.written} is the folder {self.path}"


def normalise(text: str) -> str:
    """The canonical URL; equal for two spellings of the same root.

    Raises:
        PoolUrlError: as `PoolUrl.parse`.
    """
    return PoolUrl.parse(text).url


def distinct_roots(texts: Iterable[str]) -> tuple[PoolUrl, ...]:
    """Read the roots of one pool, in order.

    Raises:
        PoolUrlError: one is wrong, two are the same folder, or one lies inside another.
    """
    roots: list[PoolUrl] = []
    for text in texts:
        root = PoolUrl.parse(text)
        for other in roots:
            if root == other:
                raise PoolUrlError(
                    f"the same root is given twice: {other.written} and {root.written}"
                    f" are both the folder {root.path}",
                    hint="give each root once",
                )
            outer, inner = sorted((root, other), key=lambda each: len(each.path))
            if inner.path.startswith(outer.path + "/"):
                raise PoolUrlError(
                    f"root {inner.path} lies inside root {outer.path}",
                    hint="give folders that do not contain each other",
                )
        roots.append(root)
    return tuple(roots)


def _check_text(text: str) -> None:
    """What no spelling may contain, before it is taken apart."""
    if not isinstance(text, str):
        raise PoolUrlError(f"a pool URL is a text, not {text!r}", hint=_ACCEPTED)
    if not text.strip():
        raise PoolUrlError(f"the pool URL is empty: {text!r}", hint=_ACCEPTED)
    if text != text.strip():
        raise PoolUrlError(
            f"the pool URL {text!r} begins or ends with white space", hint="remove it"
        )
    if "," in text:
        raise PoolUrlError(
            f"the pool URL {text!r} holds a comma",
            hint="give one URL per root; a comma in a folder's name is written file:///a%2Cb",
        )
    if "\\" in text:
        raise PoolUrlError(
            f"the pool URL {text!r} holds a backslash",
            hint="separate folders by /; a backslash in a name is written file:///a%5Cb",
        )


def _path_of_url(text: str, scheme: str, rest: str) -> str:
    if scheme in _OBJECT_SCHEMES:
        raise PoolUrlError(f"{text!r}: pools on {scheme}:// are not supported yet", hint=_ACCEPTED)
    if len(scheme) == 1:
        raise PoolUrlError(f"{text!r} begins with a Windows drive letter", hint=_ACCEPTED)
    if scheme not in _FOLDER_SCHEMES:
        hint = _ACCEPTED if rest.startswith("//") else f"for a relative path write ./{text}"
        raise PoolUrlError(f"{text!r}: unknown URL scheme {scheme!r}", hint=hint)
    for mark, what in (("?", "query"), ("#", "fragment")):
        if mark in rest:
            code = f"%{ord(mark):02X}"
            raise PoolUrlError(
                f"{text!r} has a {what}, which a folder cannot have",
                hint=f"remove it; a {mark} in a folder's name is written {code}",
            )
    if not rest.startswith("//"):
        wish = rest.lstrip("/") or "absolute/path"
        raise PoolUrlError(
            f"{text!r} lacks the // after {scheme}:", hint=f"write {scheme}:///{wish}"
        )
    host, slash, path = rest[2:].partition("/")
    if host:
        _refuse_host(text, scheme, host, slash + path)
    if path.startswith("/"):
        raise PoolUrlError(
            f"{text!r} has more than three slashes after {scheme}:",
            hint=f"write {scheme}:///{path.lstrip('/')}",
        )
    if re.match(r"[A-Za-z]:(/|$)", path):
        raise PoolUrlError(f"{text!r} begins with a Windows drive letter", hint=_ACCEPTED)
    return slash + _decoded(text, path)


def _refuse_host(text: str, scheme: str, host: str, path: str) -> None:
    """A URL of a folder has no host; say which of the two likely meanings to write how."""
    if host == "~":
        raise PoolUrlError(f"{text!r}: ~ has no meaning inside a URL", hint=f"write ~{path}")
    named = re.fullmatch(r"[^:@\[\]]+", host) and host not in ("localhost", ".", "..")
    if not named:
        hint = f"write {scheme}://{path}" if path.strip("/") else _ACCEPTED
    elif path.strip("/"):
        hint = (
            f"for the folder /{host}{path} write {scheme}:///{host}{path};"
            f" for {path} write {scheme}://{path}"
        )
    else:
        hint = f"write {scheme}:///{host}"
    raise PoolUrlError(f"{text!r} names a host, {host!r}, where a folder's URL has none", hint=hint)


def _decoded(text: str, path: str) -> str:
    """Resolve %XX; an encoded slash is refused, because it could mean two things."""
    bad = _BAD_ESCAPE.search(path)
    if bad:
        raise PoolUrlError(
            f"{text!r}: {path[bad.start() : bad.start() + 3]!r} is not a percent code",
            hint="a percent sign in a folder's name is written %25",
        )
    if "%2f" in path.lower():
        raise PoolUrlError(
            f"{text!r} holds an encoded slash", hint="write / between folders, and never %2F"
        )
    try:
        return unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise PoolUrlError(
            f"{text!r}: its percent codes are not UTF-8", hint="encode the name as UTF-8"
        ) from None


def _path_of_bare(text: str, working_folder: str | None, home: str | None) -> str:
    if text.startswith("//"):
        raise PoolUrlError(
            f"{text!r} begins with more than one slash",
            hint=f"write /{text.lstrip('/')}, or mount the share and name the mount point",
        )
    if text.startswith("~"):
        name, _, rest = text.partition("/")
        if name != "~":
            raise PoolUrlError(
                f"{text!r}: the home folder of another user is not looked up",
                hint="write the absolute path, or ./~name for a folder that begins with ~",
            )
        base = home if home is not None else os.environ.get("HOME", "")
        if not base.startswith("/"):
            raise PoolUrlError(
                f"{text!r}: the home folder is not known (HOME is {base!r})",
                hint="write the absolute path",
            )
        return f"{base}/{rest}"
    if text.startswith("/"):
        return text
    folder = working_folder if working_folder is not None else os.getcwd()
    parts = [part for part in text.split("/") if part not in ("", ".")]
    while parts and parts[0] == "..":
        # the working folder's own name holds no links, so this has one meaning
        parts.pop(0)
        folder = os.path.dirname(folder)
    return "/".join([folder, *parts])


def _checked(text: str, path: str) -> str:
    """The path in its one form, or the reason why no pool can be there."""
    if any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in path):
        raise PoolUrlError(f"{text!r} holds a control character", hint="remove it")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise PoolUrlError(
            f"{text!r} is the root folder of the system",
            hint="name a folder of its own for the pool; is a variable in the URL empty?",
        )
    if ".." in parts:
        raise PoolUrlError(
            f"{text!r} holds '..' behind a name, which a link can turn into another folder",
            hint="write the path without it",
        )
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise PoolUrlError(f"{text!r} is not valid UTF-8", hint="rename the folder") from None
    if max(sizes) > _NAME_BYTES_MAX:
        raise PoolUrlError(
            f"{text!r} holds a name of {max(sizes)} bytes; file systems take {_NAME_BYTES_MAX}",
            hint="choose a shorter name",
        )
    if sum(sizes) + len(sizes) > _PATH_BYTES_MAX:
        raise PoolUrlError(
            f"the path of {sum(sizes) + len(sizes)} bytes is too long;"
            f" a pool's root may have {_PATH_BYTES_MAX}",
            hint="choose a shorter path",
        )
    return "/" + "/".join(parts)
