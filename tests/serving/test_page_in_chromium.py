"""The page of a server, in a real browser with a real model."""

from __future__ import annotations

import shutil

import pytest
from test_serve import CASE, NEW_TOKENS, PROMPTS, Server, expected, write_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
  sync_api = pytest.importorskip("playwright.sync_api")
  if (program := shutil.which("chromium") or shutil.which("google-chrome")) is None:
    pytest.skip("no Chromium on this machine (apt-get install chromium)")
  with sync_api.sync_playwright() as playwright:
    # Chromium's sandbox needs privileges that root in a container does not have.
    yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("page") / "words"
  write_folder(CASE, folder)
  server = Server(folder, folder.parent)
  yield server
  server.process.kill()
  server.process.wait()


def check_attention(page):
  """Checks that each token of the answer has a row, and that its percentages add up to 100."""
  rows = page.locator("figure tr").all()
  columns = rows[0].locator("th").count()
  assert len(rows) - 1 >= len(expected()[0].split())
  for row in rows[1:]:
    percentages = [float(x.get_attribute("title")[:-1]) for x in row.locator("td").all()]
    assert len(percentages) == columns
    assert sum(percentages) == pytest.approx(100, abs=0.05 * columns + 0.01)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_shows_answers_and_lists_and_needs_no_mouse(
  browser, server, tmp_path, width, scheme
):
  problems = []
  page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
  page.on("pageerror", lambda error: problems.append(str(error)))
  page.goto(server.url)
  page.get_by_text("Bearer TOKEN").wait_for()
  page.get_by_label("Access token").fill("secret")
  page.keyboard.press("Tab")
  page.get_by_text("ready: inputs up to").wait_for()
  page.get_by_label("Max tokens").fill(str(NEW_TOKENS))
  page.get_by_label("Text Ctrl+Enter").fill(PROMPTS[0])
  page.keyboard.press("Control+Enter")
  page.get_by_text("tokens, ").wait_for()
  assert page.locator("article .text").inner_text().strip() == expected()[0]
  page.get_by_role("button", name="Attention").press("Enter")
  page.get_by_text("How much each token").wait_for()
  check_attention(page)
  page.screenshot(path=tmp_path / "attention.png", full_page=True)
  assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
  of_last_layer = page.locator("table").inner_text()
  page.get_by_label("Layer").select_option(label="1")
  page.wait_for_function("t => document.querySelector('table').innerText !== t", arg=of_last_layer)
  check_attention(page)
  page.get_by_label("Best texts").fill("3")
  page.keyboard.press("Enter")
  page.get_by_text("each text with its score").wait_for()
  scores = [float(text) for text in page.locator("article li small").all_inner_texts()]
  assert len(scores) == 3
  assert scores == sorted(scores, reverse=True)
  page.get_by_label("Best texts").fill("0")
  page.get_by_label("Text Ctrl+Enter").fill("word " * 500)
  page.keyboard.press("Control+Enter")
  page.get_by_text("must have 1 to 8 tokens").wait_for()
  page.screenshot(path=tmp_path / "page.png", full_page=True)
  assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
  assert not problems
  page.close()
