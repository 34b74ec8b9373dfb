"""tools/debian_text.py: the prose of a page, and the same documents in the same order each time."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import zstandard

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "debian_text.py"
PAGE = """<html><head><script>var hidden = 1;</script></head><body><nav>Next page</nav>
<div class="sidebar">Table of contents</div>
<div role="main"><h1>Title<a>¶</a></h1><p>First &amp; last.</p><div>Inner</div></div>
<div>Footer</div></body></html>"""


def test_a_page_gives_its_main_part_without_scripts_and_navigation() -> None:
    text = runpy.run_path(str(SCRIPT))["page_text"](PAGE)
    assert [line for line in text.split("\n") if line] == ["Title", "First & last.", "Inner"]


def write(folder, out):
    words = [sys.executable, str(SCRIPT), "--folder", str(folder), "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True)
    return out.read_bytes()


def test_documents_are_unique_long_enough_and_in_an_order_that_repeats(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    (folder / "tests").mkdir(parents=True)
    texts = {"a.txt": "a" * 300, "b.py": "b" * 300, "copy.txt": "a" * 300, "short.txt": "c" * 20}
    for name, text in {**texts, "tests/left_out.py": "d" * 300, "image.png": "e" * 300}.items():
        (folder / name).write_text(text)
    first = write(folder, tmp_path / "1.jsonl.zst")
    lines = zstandard.ZstdDecompressor().stream_reader(first).read().decode().splitlines()
    assert sorted(json.loads(line)["text"][0] for line in lines) == ["a", "b"]
    assert write(folder, tmp_path / "2.jsonl.zst") == first
