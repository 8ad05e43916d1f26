"""Pages: well-formed, escaped, self-contained, and readable without colours."""

from __future__ import annotations

import html.parser
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.report.bars import KINDS, Bar, bars, legend
from kvdepot.report.page import (
    STYLE,
    Html,
    definitions,
    join,
    page,
    paragraph,
    table,
    tag,
    text,
)

EVIL = "</title><script>alert('x')</script> \"quoted\" & <b>"
VOID = {"meta", "br"}


class Tree(html.parser.HTMLParser):
    """Checks that tags are balanced; collects the text and the attributes."""

    def __init__(self, document):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words = ""
        self.attributes: list[tuple[str, str]] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += data


def loads_nothing(document):
    tree = Tree(document)
    assert not tree.seen & {"script", "link", "img", "iframe", "object", "video", "audio"}
    assert "@import" not in document
    assert "url(" not in document
    assert not {"src", "href", "srcset", "onload"} & {name for name, _ in tree.attributes}
    return tree


def test_a_page_is_whole_and_loads_nothing():
    tree = loads_nothing(
        page("A title", paragraph("words"), table(["a", "b"], [[1, 2]], numbers=1))
    )
    assert tree.seen >= {"html", "head", "title", "style", "body", "h1", "table"}
    assert ("lang", "en") in tree.attributes
    assert any(value.startswith("width=device-width") for _, value in tree.attributes)


@pytest.mark.parametrize(
    "markup",
    [
        paragraph(EVIL),
        paragraph(EVIL, class_=EVIL),
        table([EVIL], [[EVIL]]),
        definitions([(EVIL, EVIL)]),
        bars([Bar(EVIL, EVIL, (1.0,))]),
        legend([EVIL]),
        tag("p", text(EVIL), title=EVIL),
    ],
)
def test_text_stays_text_everywhere(markup):
    tree = loads_nothing(page(EVIL, markup))
    assert "script" not in tree.seen
    assert tree.words.count(EVIL) >= 2


@given(st.text())
def test_any_text_comes_back(value):
    # control characters and lone surrogates are not characters of a page
    value = re.sub(r"[\x00-\x1f\x7f-\x9f]", "", value)
    assert Tree(f"<p>{text(value)}</p>").words == value
    assert dict(Tree(f'<p title="{text(value)}"></p>').attributes)["title"] == value


def test_light_dark_phone_and_paper_are_provided_for():
    for rule in ("prefers-color-scheme: dark", "max-width: 30rem", "@media print", "color-adjust"):
        assert rule in STYLE


def widths(markup):
    return [float(width) for width in re.findall(r"width:([0-9.]+)%", markup)]


def test_the_longest_bar_takes_the_whole_width_and_the_others_their_share():
    markup = bars([Bar("a", "8 s", (8.0,)), Bar("b", "2 s", (2.0,)), Bar("c", "0", (0.0,))])
    assert widths(markup) == [100.0, 25.0]
    assert markup.count('class="track"') == 3


def test_parts_are_stacked_and_told_apart_by_class():
    markup = bars([Bar("a", "x", (1.0, 0.0, 3.0)), Bar("b", "y", (4.0, 2.0, 2.0))])
    assert widths(markup) == [12.5, 37.5, 50.0, 25.0, 25.0]
    assert re.findall(r'class="part (\w)"', markup) == ["a", "c", "a", "b", "c"]


def test_kinds_differ_by_pattern_and_not_by_colour_alone():
    patterned = [kind for kind in KINDS if re.search(rf"\.part\.{kind}.*gradient", STYLE)]
    assert len(patterned) == len(KINDS) - 1
    angles = re.findall(r"repeating-linear-gradient\((\d+deg)", STYLE)
    assert len(set(angles)) == len(patterned)


def test_every_bar_has_its_name_and_value_as_text():
    tree = Tree(bars([Bar("recompute", "8.5 s", (8.5,)), Bar("follow_up", "150 ms", (0.15,))]))
    assert "recompute" in tree.words
    assert "150 ms" in tree.words
    assert ("aria-label", "follow_up: 150 ms") in tree.attributes


def test_charts_without_a_length_are_empty_and_not_an_error():
    assert widths(bars([Bar("a", "0 B", (0.0,))])) == []
    assert 'class="bars"' in bars([])


def test_number_columns_are_aligned_to_the_right():
    markup = table(["name", "one", "two"], [["x", 1, 2]], numbers=2)
    assert markup.count('<td class="number">') == 2
    assert markup.count('<th class="number">') == 2
    assert "<td>x</td>" in markup


def test_joined_parts_keep_their_order():
    assert join([Html("<i>a</i>"), Html("<i>b</i>")]) == "<i>a</i>\n<i>b</i>"
