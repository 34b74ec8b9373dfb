"""The report page in a real browser: silent, self-contained, drawn, readable in both schemes."""

import json
from collections.abc import Iterator

import pytest

from nsa_ops.report.write import write_report
from tests.integration.browser import EXECUTABLE, Browser
from tests.ops.report.builder import two_attempts

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine"),
]

#: Pairs of visible texts in one chart whose boxes overlap by more than a pixel or two.
OVERLAPS = """
[...document.querySelectorAll('svg.plot')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')]
    .filter(t => getComputedStyle(t).visibility === 'visible');
  const boxes = texts.map(t => t.getBoundingClientRect());
  return texts.flatMap((t, i) => texts.slice(i + 1).filter((_, j) => {
    const a = boxes[i], b = boxes[i + 1 + j];
    return a.left < b.right - 2 && b.left < a.right - 2
      && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  }).map(u => t.textContent + ' / ' + u.textContent));
})
"""

#: Texts of charts that stick out of their picture on the left or right.
CUT_OFF = """
[...document.querySelectorAll('svg.plot')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(t => {
    const box = t.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
  }).map(t => t.textContent);
})
"""

#: Contrast ratio (WCAG 2) of the page's small text against the card behind it.
CONTRAST = """
(() => {
  const light = css => css.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const card = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
  const small = 'svg .tick, svg .note, .legend li, .tiles dt, td, summary';
  const all = [...document.querySelectorAll(small)]
    .map(e => light(e.closest('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color));
  return Math.min(...all.map(t => (Math.max(t, card) + 0.05) / (Math.min(t, card) + 0.05)));
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    root = tmp_path_factory.mktemp("report")
    written = write_report(two_attempts(root / "runs").root, out=root, now_unix_s=1_795_800_000.0)
    opened = Browser(root / "profile")
    opened.resize(1200, 900)
    opened.open(written.page)
    yield opened
    opened.close()


def test_the_browser_has_nothing_to_complain_about(browser: Browser) -> None:
    browser.evaluate("0")
    complaints = [
        event
        for event in browser.events
        if event.get("method")
        in {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
    ]
    assert complaints == []


def test_the_page_requests_itself_and_nothing_else(browser: Browser) -> None:
    urls = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert len(urls) == 1
    assert urls[0].startswith("file://")


def test_every_chart_has_drawn_lines_of_visible_length_and_colour(browser: Browser) -> None:
    drawn = browser.evaluate(
        "[...document.querySelectorAll('figure svg.plot')].map(svg => "
        "[...svg.querySelectorAll('.line')].map(p => [p.getTotalLength(), "
        "getComputedStyle(p).stroke, p.getBoundingClientRect().width]))"
    )
    assert len(drawn) == 8
    for lines in drawn:
        assert lines
        for length, colour, width in lines:
            assert length > 300
            assert width > 300
            assert colour.startswith("rgb")


def test_the_bar_of_wall_time_fills_its_width(browser: Browser) -> None:
    widths = browser.evaluate(
        "[...document.querySelectorAll('.goodput rect')].map(r => r.getBoundingClientRect().width)"
    )
    whole = browser.evaluate("document.querySelector('.goodput').getBoundingClientRect().width")
    assert len(widths) == 8
    assert sum(widths) == pytest.approx(whole, rel=0.03)


def test_no_label_overlaps_another_or_is_cut_off(browser: Browser) -> None:
    assert browser.evaluate(OVERLAPS) == []
    assert browser.evaluate(CUT_OFF) == []


def test_a_pointer_over_a_chart_shows_one_reading(browser: Browser) -> None:
    browser.evaluate("document.querySelector('figure svg').scrollIntoView()")
    box = json.loads(
        browser.evaluate(
            "JSON.stringify(document.querySelector('figure svg').getBoundingClientRect())"
        )
    )
    browser.move_to(box["left"] + box["width"] / 2, box["top"] + box["height"] / 2)
    shown = browser.evaluate(
        "[...document.querySelectorAll('.shown')].filter(t => "
        "getComputedStyle(t).visibility === 'visible').map(t => t.textContent)"
    )
    browser.move_to(1, 1)
    assert len(shown) == 1
    assert shown[0].startswith("step ")
    assert "loss" in shown[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_is_readable_in_both_schemes(browser: Browser, scheme: str) -> None:
    browser.prefer(scheme)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(17, 19, 23)") == (scheme == "dark")
    assert browser.evaluate(CONTRAST) >= 4.5


def test_a_narrow_window_never_scrolls_sideways(browser: Browser) -> None:
    browser.resize(380, 800)
    wide = browser.evaluate("document.documentElement.scrollWidth")
    browser.resize(1200, 900)
    assert wide <= 380
