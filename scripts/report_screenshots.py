"""Screenshots of a run's report for the documentation, in headless Chromium.

    python scripts/report_screenshots.py runs/20260101-120000

writes docs/images/report.png (the top of the report) and report-phone.png (390 pixels wide).
Needs `make docs`, which installs playwright, and a Chromium: the system's, or playwright's own.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from dprlhf.runs.report import write_report

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
SIZES = {"report.png": (1000, 1300), "report-phone.png": (390, 1300)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    runs = parser.parse_args().runs
    system = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        html = write_report(runs, Path(folder) / "report.html")
        browser = browsers.chromium.launch(executable_path=system, args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(html.as_uri())
            page.screenshot(path=IMAGES / name)
        browser.close()


if __name__ == "__main__":
    main()
