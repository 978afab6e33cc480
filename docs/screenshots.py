"""Write pictures of a report for the documentation: python docs/screenshots.py report.html docs/images

Requires playwright, pillow and an installed Chromium. Pictures have 128 colours and a width of 1280 pixels.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZE = {"width": 1280, "height": 860}
COLOURS = 128
SHOTS = {  # name -> section, what is done first
    "report-answer": ("answer", ""),
    "report-whatif": ("whatif", "document.querySelector('#whatif-presets button')?.click()"),
    "report-slices": ("slices", ""),
    "report-rows": ("rows", ""),
    "report-trust": ("trust", ""),
    "report-dark": ("answer", "dark"),
}


def shoot(page: Page, section: str, path: Path) -> None:
    """The screen with a section at its top."""
    page.evaluate(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
    page.wait_for_timeout(400)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
    image.save(path, optimize=True)


def main(report: Path, folder: Path) -> None:
    """Write every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for name, (section, before) in SHOTS.items():
            scheme = "dark" if before == "dark" else "light"
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(report.resolve().as_uri())
            if before and before != "dark":
                page.evaluate(before)
            shoot(page, section, folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
