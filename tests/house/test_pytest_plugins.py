"""Only the plugins of pytest that pyproject.toml names are loaded: warnings are errors here."""

import os
import subprocess
import sys
from pathlib import Path

#: As pytest-benchmark does beside pytest-xdist.
PLUGIN = """
import warnings

def pytest_configure(config):
    warnings.warn("Benchmarks are automatically disabled")
"""


def test_a_plugin_that_an_image_brings_cannot_end_the_tests(
    repository: Path, tmp_path: Path
) -> None:
    metadata = tmp_path / "of_the_image-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-image\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nbenchmark = of_the_image\n")
    (tmp_path / "of_the_image.py").write_text(PLUGIN)
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    words = ["-m", "pytest", "-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path / "test_nothing.py")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
