"""The page and its twin: self-contained, complete, and deaf to hostile content."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.errors import NotFoundError, StateConflictError
from nsa_ops.report.write import write_report
from tests.ops.report.builder import RunBuilder, two_attempts

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = '</pre><script src="http://evil.example/x.js"></script><img src=x onerror=alert(1)>`|```'


class _Page(HTMLParser):
    """Collects tags and checks that every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _write(run: RunDir, out: Path) -> tuple[_Page, str]:
    written = write_report(run.root, out=out, now_unix_s=1_795_800_000.0)
    return _Page(written.page.read_text()), written.markdown.read_text()


def test_the_page_shows_every_part_of_the_run(tmp_path: Path) -> None:
    page, twin = _write(two_attempts(tmp_path / "runs"), tmp_path)
    for part in ("Throughput", "Gate shares", "Gate entropy", "wall time went", "attempt 2",
                 "verified: every hash of 3 files agrees", "4f1c9a7e0d2b",
                 "2 processors, Linux 6.1.0",
                 "temperature 0.8", "def read(self, path)",
                 "nsa-ops launch --profile cpu", "flag --set", "fingerprint byte-257"):  # fmt: skip
        assert part in page.text, part
    assert sum(1 for tag, values in page.tags if values.get("class") == "plot") == 8
    assert "8.396 bits per byte" in twin
    assert "| schedule.steps | 400 | flag --set |" in twin.replace("\\", "")


def test_the_page_makes_no_request(tmp_path: Path) -> None:
    written = write_report(
        two_attempts(tmp_path / "runs").root, out=tmp_path, now_unix_s=1_795_800_000.0
    )
    text = written.page.read_text()
    page = _Page(text)
    names = {name for _, values in page.tags for name in values}
    assert names.isdisjoint({"src", "href", "srcset", "data", "action", "poster", "xlink:href"})
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "img"})
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_hostile_content_stays_text_everywhere(tmp_path: Path) -> None:
    builder = RunBuilder(RunDir(tmp_path / "runs" / "x<b>&'\""), steps=40)
    (tmp_path / "runs").mkdir(exist_ok=True)
    builder.launch(
        code_commit=HOSTILE, profile=HOSTILE, command=["nsa-ops", HOSTILE],
        overrides={HOSTILE: HOSTILE}, pod_facts={HOSTILE: HOSTILE}, origins={"seed": HOSTILE},
    )  # fmt: skip
    builder.train(0, 40).validate(40).save(40).event(HOSTILE, HOSTILE, HOSTILE)
    builder.end(1, HOSTILE, 40)
    samples = [{"prompt": HOSTILE, "text": HOSTILE}]
    builder.run.samples.write_text(json.dumps(samples))
    builder.run.goodput.write_text(json.dumps({"buckets": {"step": 5, HOSTILE: 5}}))
    page, twin = _write(builder.run, tmp_path)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for _, values in page.tags for name in values)
    assert page.text.count(HOSTILE) >= 8
    outside_code = re.sub(r"^(`{3,})\n.*?\n\1$", "", twin, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside_code.replace("\\<", "")


def test_control_characters_of_a_run_are_escapes_in_the_page_and_its_twin(tmp_path: Path) -> None:
    steering = "a\x1b]0;title\x07\x9b2J\u202eb\rc\x00"
    builder = RunBuilder(RunDir(tmp_path / "run"), steps=40).launch(
        code_commit=steering, profile=steering, command=["nsa-ops", steering],
        overrides={steering: steering}, pod_facts={steering: steering}, origins={"seed": steering},
    )  # fmt: skip
    builder.train(0, 40).validate(40).save(40).event(steering, steering, steering)
    builder.end(1, steering, 40)
    samples = [{"prompt": steering, "text": steering}]
    builder.run.samples.write_text(json.dumps(samples))
    written = write_report(builder.run.root, out=tmp_path, now_unix_s=1_795_800_000.0)
    for path in (written.page, written.markdown):
        text = path.read_bytes().decode()
        assert {sign for sign in text if not sign.isprintable()} <= {"\n", "\t"}
        assert text.count("x1b]0;title") >= 8 or text.count("x1b\\]0;title") >= 5


def test_a_directory_with_almost_nothing_still_gives_a_page(tmp_path: Path) -> None:
    builder = RunBuilder(RunDir(tmp_path / "bare"), steps=40).row(10).row(20)
    page, twin = _write(builder.run, tmp_path)
    assert "Not recorded" in page.text
    assert "manifest.json does not exist" in page.text
    assert "Missing pieces" in twin


def test_a_loss_of_nan_is_drawn_as_a_cross(tmp_path: Path) -> None:
    builder = RunBuilder(RunDir(tmp_path / "nan"), steps=40).launch().train(0, 20)
    builder.row(22, loss=float("nan")).row(24)
    page, _ = _write(builder.run, tmp_path)
    assert "training loss is not finite at step 22" in page.text


def test_an_older_report_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    run = two_attempts(tmp_path / "runs")
    for name in ("²", "9" * 200):  # of a hostile pod, kept by a pull
        (run.root / "attempts" / name).mkdir()
    for _ in range(2):
        _write(run, tmp_path / "out.html")
    (tmp_path / "notes.html").write_text("my own notes")
    with pytest.raises(StateConflictError, match="is not a report"):
        _write(run, tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "my own notes"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not a run directory"):
        write_report(tmp_path, out=tmp_path, now_unix_s=0.0)


def test_a_missing_output_folder_is_named(tmp_path: Path) -> None:
    run = two_attempts(tmp_path / "runs")
    with pytest.raises(NotFoundError, match="does not exist"):
        write_report(run.root, out=tmp_path / "no" / "r.html", now_unix_s=0.0)
