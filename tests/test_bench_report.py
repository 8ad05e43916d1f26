"""The report: what it says, in both languages, that it is safe, whole, and can be looked at."""

from __future__ import annotations

import re
import shutil
import subprocess

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench import pageloads, pageparts
from kvdepot.bench.figures import times_of, tokens_of
from kvdepot.bench.guards import Finding
from kvdepot.bench.loadfigures import ClassFigures, LoadFigures
from kvdepot.bench.page import result_page
from kvdepot.bench.pageloads import loads_part
from kvdepot.bench.pageparts import unbroken
from kvdepot.bench.quantiles import quantile
from kvdepot.bench.run import samples_of_folder, summarise_folder
from kvdepot.bench.words import Words, count_text, rate_text, seconds_text, share_text
from kvdepot.cli import bench as bench_command
from kvdepot.cli.benchshow import BenchShow, print_summary
from kvdepot.cli.main import run as run_command
from kvdepot.report.charts import Axis, Line, chart, share_steps
from kvdepot.report.page import text
from kvdepot.testing.fakeserver import FakeServer
from tests.bench_rig import FakeLauncher, FakeProbe, behaviours, measured

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A measured result on the fake server."""
    folder = tmp_path_factory.mktemp("result")
    pool = folder / "pool"
    pool.mkdir()
    (pool / "blocks").write_bytes(b"x" * 10_000)
    with FakeServer() as server:
        launcher, probe = FakeLauncher(server, behaviours()), FakeProbe(server)
        summary = measured(folder / "out", server, launcher, probe, pool=str(pool))
    return folder / "out", summary


def page_of(result, lang="en", **changes):
    folder, summary = result
    summary = msgspec.structs.replace(summary, **changes)
    return result_page(summary, lang=lang, samples=samples_of_folder(folder, summary))


def test_the_verdict_and_the_guards_come_first(result):
    page = page_of(result)
    at = [
        page.index(word) for word in ("VALID WITH NOTES", "Guards", "Rounds", "Headlines", "Record")
    ]
    assert at == sorted(at)
    assert "max of 6" in page  # no p95 of six requests
    assert result[1].state.digest in page
    assert "round=R2 arm=kvdepot length=512" in page
    assert "Nearly every request has some" in page


def test_both_languages_have_every_word():
    english, chinese = Words("en"), Words("zh")
    for key in Words.keys():  # noqa: SIM118
        assert english(key)
        assert chinese(key)
        holes = re.findall(r"\{(\w+)\}", english(key))
        assert sorted(holes) == sorted(re.findall(r"\{(\w+)\}", chinese(key)))
    assert english("an arm of the user's") == "an arm of the user's"


def test_the_chinese_page_is_chinese(result):
    page = page_of(result, "zh")
    assert '<html lang="zh-Hans">' in page
    assert "有效性检查" in page
    assert "Headlines" not in page
    assert "every request" not in page


def test_nothing_is_loaded_and_nothing_runs(result):
    page = page_of(result)
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert "url(" not in page


def test_what_others_wrote_is_escaped(result):
    planted = Finding(
        guard="G11", level="invalid", where="R2", arm="<b>x", reason="<script>alert(1)</script>"
    )
    page = page_of(result, findings=[planted], verdict="INVALID")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    cell = pageparts.data_table(["a"], [["<i>"], [pageparts.Cell(text("<u>"))]])
    assert "<i>" not in cell
    assert "<u>" not in cell


def test_every_bar_and_line_has_its_number(result):
    page = page_of(result)
    assert page.count('class="bar"') == len([r for r in result[1].rounds if r.tokens.prompt])
    assert page.count("<polyline") >= 5
    assert "figcaption" in page


def test_charts_are_within_their_frame():
    seconds = Axis("time", seconds_text, is_log=True)
    share = Axis("share", share_text, low=0.0, high=1.0)
    svg = chart(
        [Line("a", share_steps([0.001, 1.0, 50.0])), Line("none", [])],
        seconds,
        share,
        describes="d",
    )
    points = re.search(r'points="([^"]*)"', svg)
    assert points
    places = [tuple(map(float, pair.split(","))) for pair in points[1].split()]
    assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in places)
    assert "none" not in svg
    assert chart([], seconds, share, describes="d") == ""
    flat = chart(
        [Line("one", [(1.0, 5.0)])], Axis("x", count_text), Axis("y", count_text), describes=""
    )
    assert "<circle" in flat
    assert "nan" not in flat


def test_numbers_are_written_for_people():
    assert [seconds_text(s) for s in (0.00002, 0.0123, 1.234, 99.9, 1234)] == [
        "20 us", "12.3 ms", "1.23 s", "99.9 s", "1234 s",
    ]  # fmt: skip
    assert rate_text(2.5e9) == "2.5 GB/s"
    assert rate_text(12) == "12 B/s"
    assert rate_text(None) == share_text(None) == "-"
    words = Words("en")
    assert pageparts.tail_text(quantile([1.0, 2.0], 0.95), words) == "max of 2: 2 s"
    assert "(" in pageparts.tail_text(quantile([float(i) for i in range(1, 101)], 0.95), words)
    assert list(pageloads.loads_part([], words)) == []
    assert list(pageloads.contention_part([], words)) == []


def test_a_summary_is_made_again_from_its_rows(result, capsys):
    folder, summary = result
    assert summarise_folder(folder) == summary
    assert run_command(["bench", "report", str(folder), "--lang", "zh"]) == 0
    assert "VALID WITH NOTES" in capsys.readouterr().out
    assert "有效" in (folder / "report.html").read_text(encoding="utf-8")
    print_summary(summary)
    assert "speed-up, R2" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert run_command(["bench", "report", str(tmp_path)]) == 2
    assert "no result" in capsys.readouterr().err
    assert run_command(["bench", "run", "--plan", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run_command(["bench", "run", "--engine", "vllm", "--out", str(tmp_path / "o")]) == 2
    assert "needs a model" in capsys.readouterr().err
    assert bench_command.Target().engine == "auto"
    with BenchShow() as show:
        show.tell("run 1, a, R1a: request 1", 1, 2)


# looked at in a browser


def browse(page, tmp_path, *arguments):
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'profile'}", *arguments, path.as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium to look at the page with")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_browser_shows_it_without_complaint(result, tmp_path, lang):
    shot = tmp_path / "shot.png"
    done = browse(
        page_of(result, lang), tmp_path, f"--screenshot={shot}", "--window-size=390,844",
        "--enable-logging=stderr",
    )  # fmt: skip
    assert shot.stat().st_size > 10_000
    assert "CONSOLE" not in done.stderr


#: writes into the title how wide the page is and how many characters have the box of a missing glyph
_MEASURE = """<script>
const box = t => { const s = document.createElement("canvas").getContext("2d");
  s.canvas.width = s.canvas.height = 40; s.font = "24px system-ui, sans-serif";
  s.fillText(t, 4, 30); return s.canvas.toDataURL(); };
const missing = box("\\uffff"), empty = box(" ");
const seen = new Set(document.body.innerText);
let lost = ""; for (const c of seen) if (c.trim() && [missing, empty].includes(box(c))) lost += c;
document.title = "wide=" + document.documentElement.scrollWidth + " lost=[" + lost + "]";
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium to look at the page with")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_it_fits_a_phone_and_no_character_is_missing(result, tmp_path, lang):
    fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, text=True).stdout
    if lang == "zh" and not fonts.strip():
        pytest.skip("no Chinese font here")
    page = page_of(result, lang).replace("</body>", _MEASURE + "</body>")
    done = browse(page, tmp_path, "--dump-dom", "--window-size=500,844")
    found = re.search(r"<title>wide=(\d+) lost=\[(.*?)\]", done.stdout)
    assert found, done.stderr[-500:]
    assert int(found[1]) <= 500
    assert found[2] == ""


def test_numbers_stay_with_their_units():
    gap = "\N{NO-BREAK SPACE}"
    for words, shown in [
        ("1.65 s", f"1.65{gap}s"),
        ("max of 12: 1.65 s", f"max of 12: 1.65{gap}s"),
        ("90 % of 5 GB/s and more", f"90{gap}% of 5{gap}GB/s and more"),
        ("12 seconds or 3 blocks", "12 seconds or 3 blocks"),
    ]:
        assert unbroken(words) == shown


def test_many_lines_are_told_apart():
    lines = [Line(f"line {i}", [(1.0, float(i)), (2.0, float(i))]) for i in range(1, 19)]
    drawn = chart(lines, Axis("x", str), Axis("y", str), describes="lines")
    looks = re.findall(r'<line[^>]*class="(line [a-f])" stroke-dasharray="([^"]*)"', drawn)
    assert len(looks) == len(set(looks)) == 18


def test_one_load_point_makes_no_curve():
    def load(throughput):
        figures = ClassFigures(
            ask_class="F", requests=1, ttft=times_of([1.0]), tokens=tokens_of([]), outcomes={},
            run_ttft_s=[1.0],
        )  # fmt: skip
        return LoadFigures(
            load=f"at {throughput}", noise="peak", arm="a", role="tier", verdict="VALID", runs=1,
            requests=1, failed=0, connections=1, throughput=throughput, mean_latency_s=1.0, goodput=None,
            classes=[figures], tokens=tokens_of([]), tpot=None, itl=None, little=1.0, by_rank_s=[],
        )  # fmt: skip

    words = Words("en")
    assert words("curves") not in "".join(loads_part([load(1.0)], words))
    assert words("curves") in "".join(loads_part([load(1.0), load(2.0)], words))
