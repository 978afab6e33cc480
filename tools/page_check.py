"""Is a page fit to be sent? python tools/page_check.py --axe node_modules/axe-core/axe.min.js report.html [URL ...]

Opens each page in a headless Chromium on a phone, a tablet and a desktop, light and dark, everything unfolded, and says
what axe-core (npm install axe-core) finds, whether anything is wider than the screen, after how many milliseconds the
page answers, and how long a slider takes. Exit code 1 if anything is serious, too wide, or slower than a second.
Needs playwright and a Chromium that is installed. `--shots DIR` keeps pictures.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS, HEIGHT = (360, 768, 1440), 900
SLOWEST = 1000  # milliseconds until the page can be used
GRAVE = ("serious", "critical")
INTERACTIVE = "Math.round(performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd)"
SLIDER = """() => {
    const slider = document.querySelector("#whatif-sliders input");
    if (!slider) return 0;
    const start = performance.now();
    for (let i = 0; i < 10; i++) { slider.value = 10 * i; slider.dispatchEvent(new Event("input", { bubbles: true })); }
    return Math.round(performance.now() - start) / 10;
}"""
UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.removeAttribute('name'); one.open = true; })"
VIOLATIONS_SCRIPT = "axe.run(document, { resultTypes: ['violations'] }).then((found) => found.violations)"


def looked_at(browser: Browser, address: str, width: int, scheme: str, axe: str, shots: Path | None) -> dict[str, Any]:
    """What is there to say of a page at one width and in one scheme of colours."""
    # bypass_csp: the page's own policy allows no script but its own, and axe is one
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme="dark" if scheme == "dark" else "light",
        bypass_csp=True,
    )
    page = context.new_page()
    page.goto(address, wait_until="load", timeout=120_000)
    result = {"interactive": page.evaluate(INTERACTIVE), "slider": page.evaluate(SLIDER)}
    if shots is not None:
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=shots / f"{address.rstrip('/').rpartition('/')[2][:40]}-{width}-{scheme}.png")
    page.evaluate(UNFOLD)
    result["over"] = page.evaluate("document.documentElement.scrollWidth") - width
    page.evaluate(axe)
    result["rules"] = page.evaluate(VIOLATIONS_SCRIPT)
    context.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", help="files or URLs")
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of the npm package axe-core")
    parser.add_argument("--shots", type=Path, help="directory for a picture of each")
    args = parser.parse_args()
    axe, fit = args.axe.read_text(encoding="utf-8"), True
    if args.shots is not None:
        args.shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for page in args.pages:
            address = page if "://" in page else Path(page).resolve().as_uri()
            for width, scheme in [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]:
                result = looked_at(browser, address, width, scheme, axe, args.shots)
                grave = [rule for rule in result["rules"] if rule["impact"] in GRAVE]
                fit &= not grave and result["over"] <= 0 and result["interactive"] <= SLOWEST
                rules = [f"{rule['id']} ({rule['impact']}) {rule['nodes'][0]['target']}" for rule in result["rules"]]
                print(
                    f"{page} {width} {scheme}: {result['interactive']} ms, a slider {result['slider']} ms, "
                    f"{max(0, result['over'])} px too wide, axe: {', '.join(rules) or 'nothing'}"
                )
        browser.close()
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main())
