"""The page as a person meets it, in a real browser: needs playwright, and a Chromium of its own or the system's."""

import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from mlrl.report.__main__ import main
from tests.report.runs import node, two_turns, write_run
from tests.report.test_page import HOSTILE, curve_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# the number of colours of a canvas
INKED = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = own if os.path.exists(own) else shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            pytest.skip("no Chromium: playwright install chromium, or the system's package")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Opens a file; fails at the end for anything the page complained of or tried to fetch."""
    pages, complaints = [], []

    def open_file(path, **options):
        page = browser.new_page(**options)
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        pages.append(page)
        page.goto(path.as_uri())
        return page

    yield open_file
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "a", list(curve_rows()), num_turns=2)
    folder.write_completions([node(5, [], [0.0, 1.0], [["old", "b"], ["c", "d"]])], "train", 1)
    folder.write_completions(two_turns(7, first=HOSTILE), "train", 4)
    main([str(folder.path)])
    return folder.path / "report.html"


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_curves_are_drawn_and_fit(open_page, run, width, scheme):
    page = open_page(run, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").wait_for()
        assert figure.locator("canvas").evaluate(INKED) > 3  # background, grid, line and their edges
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    reward = page.get_by_role("group", name="Reward")
    assert reward.locator(".legend").inner_text().split() == ["env_step", "40", "1"]
    reward.focus()
    page.keyboard.press("ArrowLeft")
    assert reward.locator(".legend").inner_text().split() == ["env_step", "30", "0.75"]
    page.select_option("#x-axis", "0")
    assert reward.locator(".legend").inner_text().split() == ["step", "4", "1"]


def test_a_tree_opens_by_click_and_its_texts_are_shown(open_page, run):
    page = open_page(run)
    rows = page.locator("[role=treeitem]")
    assert page.locator("#tree-step").input_value() == "1"  # the last training step
    # the best branch, [1, 0], lies open: joints 0 and 1 of the first turn, and two below joint 1
    assert [row.get_attribute("data-path") for row in rows.all()] == ["0", "1", "1,0", "1,1"]
    assert page.locator("[data-path='1,0'] .best").count() == page.locator("[data-path='0'] > .row .worst").count() == 1
    page.locator("[data-path='0'] > .row").click()
    assert page.locator("[data-path='0,1'] .worst").is_visible()
    detail = page.locator("#detail")
    assert detail.locator(".response pre").first.text_content() == HOSTILE
    assert "prompt 7 []" in detail.inner_text() and "advantage +0.5" in detail.inner_text()
    page.locator("[data-path='0,1'] > .row").click()
    assert "(empty)" in detail.inner_text() and "prompt 7 [0]" in detail.inner_text()
    assert page.locator("[data-path='0,1'] > .row .badge").all_inner_texts() == ["agent 1 empty"]
    assert page.locator("[data-path='0,0'] > .row .badge").count() == 0
    detail.get_by_role("button", name="turn 1 · 0").click()
    assert page.locator("[aria-selected=true]").get_attribute("data-path") == "0"
    page.select_option("#tree-step", "0")
    assert "item 5" in page.locator("#tree-item").inner_text() and rows.count() == 2


def test_a_tree_opens_by_keyboard(open_page, run):
    page = open_page(run)
    page.locator("[role=treeitem][tabindex='0']").focus()
    selected = page.locator("[aria-selected=true]")
    for key, path in (
        ("ArrowUp", "0"), ("ArrowRight", "0"), ("ArrowRight", "0,0"), ("End", "1,1"), ("ArrowLeft", "1"), ("Home", "0"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert selected.get_attribute("data-path") == path, key
        assert page.evaluate("document.activeElement.dataset.path") == path
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.path") == "0"


def test_a_long_run_opens_at_once(open_page, tmp_path):
    """5,000 logged steps and 200 trees: under 15 MB, and under 3 s of the browser's main thread."""
    rows = ({**row, "step": 4 * i + row["step"]} for i in range(1250) for row in curve_rows())
    folder = write_run(tmp_path / "a", list(rows))
    for step in range(1, 201):
        text = [f"{step} {k} " + "word " * 200 for k in range(4)]
        nodes = [node(step, path, [0.1, 0.2, 0.3, step], [text, text]) for path in ([], [0], [1], [2], [3])]
        for own in nodes:
            own["advantages"] = [[0.1] * 4] * 2
        folder.write_completions(nodes, "train", 25 * step)
    main([str(folder.path)])
    path = folder.path / "report.html"
    assert path.stat().st_size < 15_000_000
    page = open_page(path)
    page.locator("figure canvas").first.wait_for()
    assert page.locator("#tree-step option").count() == 200
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # of the processor, not of a busy machine's clock
    page.reload()
    page.locator("#tree li").first.wait_for()
    spent = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    assert spent["TaskDuration"] < 3


KINDS = {
    "magrpo": (["--num_turns", "2", "--num_generations", "2", "--max_steps", "3"], "Agents", "turn 2"),
    "maac": (["--num_generations", "2", "--max_steps", "3"], "Critics", "Explained variance"),
    "madpo": (["--num_iterations", "2", "--max_steps", "2"], "Preferences", "round"),
}


@pytest.mark.parametrize("script", KINDS)
def test_a_real_run(open_page, tiny_llama, tmp_path, monkeypatch, script):
    """What a script wrote, from its own files: every chart drawn, every tree's first row opened."""
    more, section, says = KINDS[script]
    flags = ["--agent_model", tiny_llama, "--max_new_tokens", "6", "--output_dir", str(tmp_path), "--run_name", "run"]
    monkeypatch.setattr(sys, "argv", [script, *flags, "--completions_steps", "1", *more])
    runpy.run_path(str(ROOT / f"train/{script}.py"), run_name="__main__")
    main([str(tmp_path / "run")])
    page = open_page(tmp_path / "run/report.html", viewport={"width": 1280, "height": 800})
    assert section in page.locator("h2").all_inner_texts() and says in page.locator("main").inner_text()
    figures = page.locator("figure").all()
    assert len(figures) >= 12
    for figure in figures:
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").wait_for()
        assert figure.locator("canvas").evaluate(INKED) > 3, figure.inner_text()
    steps = page.locator("#tree-step option").count()
    assert steps >= 1
    page.locator("[role=treeitem] > .row").first.click()
    assert page.locator("#detail .response pre").count() == 2  # one an agent
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
