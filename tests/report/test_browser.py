"""The page in a real browser: sliders agree with `grasp predict`; hostile text; small screens, keyboard, print.

Requires playwright and an installed Chromium (Debian: `apt install chromium`); nothing is downloaded.
"""

import csv
import io
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
import yaml

from grasp.report.build_report import ReportFile
from tests.cli.grasp_command import succeed
from tests.report.world import HOSTILE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
DESKTOP, PHONE, TINY = ({"width": width, "height": 900} for width in (1280, 390, 360))
PATIENCE = 120_000  # milliseconds: on a busy machine a browser takes its time
POLL = 100
READABLE = 4.5  # WCAG AA: contrast of text

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def opened(browser, url: str, *, faults: bool = False, home: str = "file:", **options) -> Iterator:
    """A page that complains about nothing and asks nobody but its home, unless `faults` are looked for."""
    context = browser.new_context(**{"viewport": DESKTOP} | options)
    context.set_default_timeout(PATIENCE)
    view, messages, requests = context.new_page(), [], []
    view.on("pageerror", lambda error: messages.append(str(error)))
    view.on("console", lambda message: messages.append(message.text))
    view.on("request", lambda request: requests.append(request.url))
    view.goto(url, wait_until="domcontentloaded")
    try:
        yield view
        if not faults:
            assert messages == []
        assert [node for node in requests if not node.startswith((home, "blob:", "data:text/html"))] == []
    finally:
        context.close()


def until(view, expression: str) -> None:
    """Playwright's own wait_for_function needs eval, which the policy of the page forbids."""
    for _ in range(PATIENCE // POLL):
        if view.evaluate(expression):
            return
        view.wait_for_timeout(POLL)
    raise AssertionError(f"never came true: {expression}")


@pytest.fixture(scope="module")
def url(page) -> str:
    return page.as_uri()


@pytest.fixture
def view(browser, url):
    with opened(browser, url) as view:
        yield view


def shown(view) -> dict[str, dict[str, float]]:
    """Numbers of the page, unrounded: by target its change against the whole corpus."""
    rows = view.locator("#whatif-results tr[data-target]").all()
    return {
        row.get_attribute("data-target"): {
            "change": float(row.get_attribute("data-change")),
        }
        for row in rows
    }


def predicted(view, tmp_path) -> dict[str, dict[str, float]]:
    """What the command line that the page shows says."""
    program, *arguments = shlex.split(view.locator("#whatif-command").text_content())
    assert program == "grasp"
    succeed(*arguments, "--out", tmp_path / "p.parquet")
    lines = pq.read_table(tmp_path / "p.parquet").to_pylist()
    return {line["target"]: {"change": line["change"]} for line in lines}


def assert_same(view, tmp_path) -> None:
    changes, expected = shown(view), predicted(view, tmp_path)
    assert changes.keys() == expected.keys()
    for target, numbers in expected.items():
        assert changes[target] == pytest.approx(numbers, abs=1e-6), target


def sliders(view):
    return view.locator("#whatif-sliders input[type=range]")


# what if


def test_nothing_changes_while_everything_is_kept(view):
    changes = {target: numbers["change"] for target, numbers in shown(view).items()}
    assert changes == pytest.approx({"sciq": 0, "boolq": 0}, abs=1e-6)
    assert {bar.evaluate("bar => bar.style.width") for bar in view.locator("#whatif-results i").all()} == {"0%"}
    assert view.locator("#whatif-results .helps, #whatif-results .hurts").count() == 0
    assert "the whole corpus is kept" in view.locator("#whatif-command").text_content()


def test_dropped_slices_say_what_predict_says(view, tmp_path):
    assert sliders(view).count() == len(HOSTILE)
    for place in (0, 3, 7):
        sliders(view).nth(place).fill("0")
    assert " --drop " in view.locator("#whatif-command").text_content()
    assert min(abs(numbers["change"]) for numbers in shown(view).values()) > 1e-3
    assert_same(view, tmp_path)


def test_sliders_moved_by_keyboard_and_mouse_say_what_predict_says(view, tmp_path):
    sliders(view).nth(1).focus()
    for _ in range(37):
        view.keyboard.press("ArrowLeft")
    assert sliders(view).nth(1).input_value() == "63"
    sliders(view).nth(5).scroll_into_view_if_needed()
    box = sliders(view).nth(5).bounding_box()
    view.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + box["height"] / 2)
    assert 280 < int(sliders(view).nth(5).input_value()) < 360
    sliders(view).nth(8).fill("0")
    assert view.locator("#whatif-command").text_content().count("--weight") == 3
    assert_same(view, tmp_path)
    # a slider over a target, from the corpus: it changes its target by the number shown, to first order
    view.locator("#whatif-all").click()
    target_sliders = view.locator("#whatif-targets input[type=range]")
    assert target_sliders.count() == 2
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        target_sliders.nth(1).press(key)
    number_shown = float(view.locator("#whatif-targets output").nth(1).text_content())
    assert shown(view)["boolq"]["change"] == pytest.approx(number_shown, rel=0.15)
    assert_same(view, tmp_path)
    target_sliders.nth(0).fill("-10")
    moved = [int(slider.input_value()) for slider in sliders(view).all()]
    assert (min(moved) >= 0, max(moved) <= 400, len(set(moved)) > 2) == (True, True, True)
    assert shown(view)["sciq"]["change"] < 0
    for slider in target_sliders.all():
        slider.fill("0")  # steps are added to the mixture at which all are 0, which returns
    assert {slider.input_value() for slider in sliders(view).all()} == {"100"}
    target_sliders.nth(0).fill("4")
    sliders(view).nth(1).fill("50")  # from now on, this is that mixture
    assert {slider.input_value() for slider in target_sliders.all()} == {"0"}


def test_few_slices_kept_of_another_label_say_what_predict_says(view, tmp_path):
    view.locator("#whatif-label").select_option(label="format")
    view.locator("#whatif-none").click()
    assert "no prediction" in view.locator("#whatif-size").text_content()
    sliders(view).nth(1).fill("100")
    assert_same(view, tmp_path)


def test_the_address_holds_the_state(browser, view):
    sliders(view).nth(0).fill("15")
    sliders(view).nth(4).fill("400")
    until(view, "[...new URLSearchParams(location.hash.slice(1))].length === 3")  # label, two sliders
    with opened(browser, view.url) as other:
        assert shown(other) == shown(view)
        assert sliders(other).nth(0).input_value() == "15"
        assert sliders(other).nth(4).input_value() == "400"


def test_buttons_copy_the_command_and_a_link(browser, url):
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as view:
        sliders(view).nth(1).fill("0")
        view.locator("#whatif-more summary").click()
        view.locator("[data-copy=whatif-command]").click()
        view.get_by_text("Copied", exact=True).wait_for()
        command = view.locator("#whatif-command").text_content()
        assert view.evaluate("navigator.clipboard.readText()") == command
        view.locator("#whatif-link").click()
        until(view, "navigator.clipboard.readText().then((text) => text.startsWith('file:'))")
        assert view.evaluate("navigator.clipboard.readText()").startswith(url + "#by=topic&")


def test_an_environment_gives_intervals_and_a_warning(view):
    sliders(view).nth(0).fill("0")
    assert "nats" in view.locator("#whatif-unit").text_content()
    parsed = [node.text_content() for node in view.locator("#whatif-results tr[data-target] .ci").all()]
    assert len(parsed) == 2
    assert all(node.startswith("[") for node in parsed)
    view.get_by_text("Drop harmful slices", exact=True).click()
    assert "nats" in view.locator("#whatif-unit").text_content()
    assert view.locator("#whatif-warning").is_visible()
    assert "beyond the runs" in view.locator("#whatif-warning").text_content()
    sliders(view).nth(1).fill("50")
    assert view.locator("#whatif-warning").is_hidden()
    assert "nats" not in view.locator("#whatif-unit").text_content()
    assert "the command below for a prediction in nats" in view.locator("#whatif-note").text_content()
    view.locator("#whatif-all").click()
    assert "nats" in view.locator("#whatif-unit").text_content()


@pytest.mark.parametrize("kind", ["csv", "datatrove", "olmix", "axolotl"])
def test_the_mix_of_the_sliders_is_a_file(view, kind):
    assert view.locator("#mix-export").is_hidden()  # the sliders are not moved
    sliders(view).nth(0).fill("350")
    sliders(view).nth(1).fill("0")
    view.locator("#mix-format").select_option(kind)
    file = view.locator("#mix-file").text_content()
    order = view.evaluate("JSON.parse(document.getElementById('data').textContent).labels[0].order")
    names = [node.text_content() for node in view.locator("#whatif-sliders label").all()]
    if kind == "csv":
        lines = {line["value"]: line for line in csv.DictReader(io.StringIO(file))}
        assert float(lines[names[0]]["times_as_often"]) == 3.5
        assert sum(float(line["proposed"]) for line in lines.values()) == pytest.approx(1, abs=1e-4)
        assert len(lines) == len(order)
        return
    parsed = yaml.safe_load(file)
    if kind == "datatrove":
        assert parsed["topic"][names[0]] == {"rate": 0.875, "copies": 4}
        assert parsed["topic"][names[1]]["rate"] == 0
    elif kind == "olmix":
        assert sum(node["weight"] for node in parsed["mix"].values()) == pytest.approx(1, abs=1e-4)
        assert names[1] not in parsed["mix"]
    else:
        splits = [node["split"] for node in parsed["datasets"] if node["path"] == f"data/{names[0]}.jsonl"]
        assert splits == ["train", "train", "train", "train[:50%]"]


# slices, rows


def test_slices_are_sorted_searched_and_filtered(view):
    panel = view.locator(".panel[data-label='0']")
    rows = panel.locator("tbody").first.locator("tr:visible")
    assert rows.count() == len(HOSTILE)
    panel.locator("th[data-t='1'] .sort").click()
    assert panel.locator("th[data-t='1']").get_attribute("aria-sort") == "descending"
    values = [float(node.get_attribute("data-v")) for node in panel.locator("tbody td[data-t='1']").all()]
    assert values == sorted(values, reverse=True)
    view.locator("#slices-find").fill("javascript")
    assert rows.count() == 1
    view.locator("#slices-find").fill("")
    view.locator("#slices-significant").check()
    assert rows.count() == panel.locator("tbody tr:has(td.helps), tbody tr:has(td.hurts)").count()


def test_a_question_shows_the_rows_that_help_it(view):
    view.locator("#rows-question").select_option(index=1)
    assert view.locator("#rows-prompt").text_content().startswith("Question 0:")
    effects = [node.text_content() for node in view.locator("#rows-list .meta b").all()]
    numbers = [float(node.replace("\N{MINUS SIGN}", "-")) for node in effects]
    assert numbers == sorted(numbers, reverse=True)
    view.locator("#rows-order").select_option("-1")
    assert view.locator("#rows-list .meta b").first.text_content() == effects[-1]


# untrusted text, no network


def test_nothing_of_the_corpus_runs(view):
    view.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    for more in view.locator("button:visible").all():
        if more.text_content().startswith("Show"):
            more.click()
    assert view.evaluate("window.hacked") is None
    assert view.locator("img, iframe, object, form").count() == 0
    assert view.evaluate("document.querySelectorAll('a').length") == view.locator("a[href^='#']").count()


def test_the_content_policy_blocks_scripts_and_requests(browser, url):
    """The same attacks as above, had the text been let through."""
    attack = """async () => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 8";
        document.body.append(script);
        const image = document.createElement("div");
        image.innerHTML = "<img src=x onerror='window.hacked = 9'>";
        document.body.append(image);
        const link = document.createElement("a");
        link.href = "javascript:window.hacked = 10";
        link.click();
        const asked = await fetch("https://example.org/").then(() => "answered", () => "refused");
        await new Promise((done) => setTimeout(done, 200));
        return [window.hacked ?? "not hacked", asked];
    }"""
    with opened(browser, url, faults=True) as view:
        assert view.evaluate(attack) == ["not hacked", "refused"]


# what it looks like


@pytest.mark.parametrize("size", [DESKTOP, PHONE, TINY], ids=["desktop", "phone", "tiny"])
def test_nothing_is_wider_than_the_screen(browser, url, size):
    with opened(browser, url, viewport=size) as view:
        view.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert view.evaluate("document.documentElement.scrollWidth") <= size["width"]
        for section in view.locator("main > section").all():
            box = section.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size["width"]


CONTRAST = """([front, back]) => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((x) => x / 255)
            .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const colour = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
    const [a, b] = [light(colour(front, "color")), light(colour(back, "backgroundColor"))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


def test_light_and_dark_are_different_and_readable(browser, url):
    grounds = set()
    for scheme in ("light", "dark"):
        with opened(browser, url, color_scheme=scheme) as view:
            grounds.add(view.evaluate("getComputedStyle(document.body).backgroundColor"))
            for front, back in (
                (".note", "section"),
                ("nav a", "nav"),
                ("summary", "section"),
                ("td.unsure", "section"),
            ):
                assert view.evaluate(CONTRAST, [front, back]) > READABLE, (scheme, front)
    assert len(grounds) == 2


def test_the_keyboard_reaches_sections_and_sliders(view):
    view.keyboard.press("Tab")
    assert view.evaluate("document.activeElement.textContent") == "Skip to the content"
    reached = set()
    for _ in range(40):
        view.keyboard.press("Tab")
        reached.add(view.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"A", "SUMMARY", "whatif-label", "whatif-all", "slice-0"} <= reached
    assert view.locator("input[type=range]:not([aria-label])").count() == 0


def test_it_prints_with_everything_open(browser, url):
    with opened(browser, url, color_scheme="dark") as view:
        view.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert view.locator("details:not([open])").count() == 0
        assert view.pdf(format="A4").startswith(b"%PDF-")
        view.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert view.locator("details.target[open]").count() == 1


def test_without_javascript_words_and_tables_are_there(browser, url):
    with opened(browser, url, java_script_enabled=False) as view:
        assert (
            "The sliders require JavaScript" in view.locator("noscript").first.text_content()
        )  # Chromium hides it here
        assert view.locator("#whatif-app").is_hidden()
        assert view.locator("#slices table").first.is_visible()
        assert view.locator("#slices table.slices tbody tr:visible").count() > len(HOSTILE)


# in a notebook


def test_a_notebook_shows_the_whole_page_in_a_frame(browser, page, tmp_path):
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{ReportFile(page)._repr_html_()}", encoding="utf-8")
    with opened(browser, cell.as_uri()) as view:
        frame = view.frame_locator("iframe")
        assert frame.locator("h1").first.text_content()
        slider = frame.locator("#whatif-sliders input[type=range]").first
        before = frame.locator("#whatif-results tr[data-target]").first.get_attribute("data-change")
        slider.focus()
        slider.press("ArrowLeft")
        view.wait_for_timeout(1_000)  # the address of the page is updated
        assert frame.locator("#whatif-results tr[data-target]").first.get_attribute("data-change") != before
