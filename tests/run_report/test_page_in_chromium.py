"""The page works in a real browser: it draws, answers the mouse, and fits wide and narrow screens."""

from __future__ import annotations

import contextlib
import shutil
import threading

import pytest
import run_files

from rosetta_t5.run_report.report_command import ReportServer, build_page
from rosetta_t5.run_report.run_folder import read_runs

PLOT = ".js-plotly-plot .main-svg"
LOSS = "#training .chart:has(h3:text-is('Loss')) .plot"


@pytest.fixture(scope="module")
def browser():
  """Returns Debian's Chromium."""
  sync_api = pytest.importorskip("playwright.sync_api")
  program = shutil.which("chromium") or shutil.which("google-chrome")
  if program is None:
    pytest.skip("no Chromium on this machine (apt-get install chromium)")
  with sync_api.sync_playwright() as playwright:
    # Chromium's sandbox needs privileges that root in a container does not have.
    yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@contextlib.contextmanager
def _opening_pages(browser):
  """Yields a function that opens a page in a window; an error on its console fails the test."""
  problems, opened = [], []

  def open_page(url, width=1280, height=900):
    page = browser.new_page(viewport={"width": width, "height": height})
    opened.append(page)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
      "console",
      lambda message: message.type in ("error", "warning") and problems.append(message.text),
    )
    page.on(
      "request",
      lambda request: (
        request.url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))
        or problems.append(request.url)
      ),
    )
    page.goto(url)
    page.locator(".plot").first.scroll_into_view_if_needed()  # A chart is drawn when it is near.
    page.wait_for_selector(PLOT)
    return page

  yield open_page
  for page in opened:
    page.context.close()
  assert not problems


@pytest.fixture
def open_page(browser):
  with _opening_pages(browser) as open_page:
    yield open_page


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
  path = tmp_path_factory.mktemp("report") / "report.html"
  path.write_text(build_page(read_runs([str(run) for run in runs])))
  return path.as_uri()


@pytest.fixture(scope="module")
def page(browser, report):
  """The report in one window, whose charts several tests change one after another."""
  with _opening_pages(browser) as open_page:
    yield open_page(report)


def drawn_lines(page):
  page.locator(LOSS).scroll_into_view_if_needed()
  return page.locator(f"{LOSS} .scatterlayer .trace").count()


def test_a_run_can_be_switched_off_and_on(page):
  assert drawn_lines(page) == 4  # training and held-out data of two runs
  assert page.locator("#runs tbody tr").count() == 2
  chip = page.locator(".chip", has_text="second")
  chip.click()
  assert drawn_lines(page) == 2
  assert page.locator("#runs tbody tr").count() == 1
  assert chip.get_attribute("aria-pressed") == "false"
  chip.click()
  assert drawn_lines(page) == 4


def test_the_mouse_shows_values_and_the_controls_change_axes_and_smoothing(page):
  assert drawn_lines(page) == 4
  page.locator(f"{LOSS} .nsewdrag").hover()
  label = page.locator(f"{LOSS} .hoverlayer").text_content()
  assert "Step 500" in label
  assert "first · training" in label
  assert "second · training" in label
  title = page.locator(f"{LOSS} .xtitle")
  for value, text in (("seconds", "Time since the start (minutes)"), ("tokens", "Tokens, with p")):
    page.select_option("#axis", value)
    assert title.text_content().startswith(text)
  page.locator("#smoothing").fill("0.9")
  assert drawn_lines(page) == 8  # as measured and smoothed
  highest = page.locator(LOSS).evaluate("plot => plot.layout.yaxis.range[1]")
  page.locator("#clip").check()
  assert page.locator(LOSS).evaluate("plot => plot.layout.yaxis.range[1]") < highest
  page.locator("#log").check()
  assert page.locator(LOSS).evaluate("plot => plot.layout.yaxis.type") == "log"


def test_the_table_of_runs_is_sorted_and_filtered(page):
  names = page.locator("#runs tbody td:first-child")
  assert names.all_text_contents() == ["first", "second"]
  page.get_by_role("button", name="Sequences/s").press("Enter")
  assert names.all_text_contents() == ["second", "first"]
  page.get_by_role("button", name="Est. walltime").click()  # 4d05h and 4d16h
  page.get_by_role("button", name="Est. walltime").click()
  assert names.all_text_contents() == ["second", "first"]
  page.get_by_label("Filter the runs").fill("5,600")
  assert names.all_text_contents() == ["first"]
  page.get_by_label("Filter the runs").fill("")


def test_a_constant_is_drawn_near_its_value(page):
  plot = page.locator("#training .chart:has(h3:text-is('Peak memory')) .plot")
  plot.scroll_into_view_if_needed()
  plot.locator(".main-svg").first.wait_for()
  page.locator("#log").uncheck()
  assert plot.evaluate("plot => plot.layout.yaxis.range") == pytest.approx([49.2, 73.8])


def test_tables_show_predictions_differences_and_placement(page):
  assert page.locator("#predictions td.same").first.text_content() == "Denver Broncos"
  page.locator("#predictions select").nth(1).select_option("200")
  assert page.locator("#predictions td.same").count() == 0
  assert page.locator("#configuration tbody tr").all_text_contents() == ["BATCH_SIZE20484096"]
  page.get_by_label("only differences").uncheck()
  page.get_by_label("Filter the settings").fill("dtype")
  rows = page.locator("#configuration tbody tr").all_text_contents()
  assert rows == ["network.T5Config.dtype'bfloat16''bfloat16'"]
  page.locator("#model-and-devices summary").first.click()
  assert page.get_by_text("(None, 'model')").first.is_visible()
  timeline = page.locator("#timeline").text_content()
  assert "preempted or stopped by a signal" in timeline
  assert "ended without a record" in timeline


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_the_page_fits_the_screen(width, open_page, report):
  page = open_page(report, width=width, height=844)
  page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
  for plot in page.locator(".plot").all():
    plot.scroll_into_view_if_needed()
  page.wait_for_function("document.querySelectorAll('.plot:not(.js-plotly-plot)').length === 0")
  assert page.evaluate("document.documentElement.scrollWidth") == width
  sizes = page.evaluate(
    "[...document.querySelectorAll('.plot text, td, th, label')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
  )
  assert min(sizes) >= 11


@pytest.mark.slow
def test_hostile_names_and_texts_are_only_shown(open_page, tmp_path):
  hostile = "</script><img src=x onerror='document.title=`stolen`'>"
  folder = run_files.write_run(tmp_path / "<b>run")
  run_files.add_event_file(
    folder / "inference_eval" / hostile.replace("/", ""), [(1, {hostile: 1.0, "__proto__": 2.0})]
  )
  run_files.add_predictions(folder, 1000, hostile)
  (folder / "config.gin").write_text(f"NAME = {hostile!r}\n__proto__ = 1\nconstructor = 2\n")
  path = tmp_path / "report.html"
  path.write_text(build_page(read_runs([str(folder)])))
  page = open_page(path.as_uri())
  assert page.title() == "Run report: <b>run"
  for plot in page.locator(".plot").all():
    plot.scroll_into_view_if_needed()
  assert page.locator("img").count() == 0
  assert page.get_by_text(hostile, exact=True).first.is_visible()
  assert page.locator("#configuration tbody tr").count() == 3
  assert page.locator(".chip").text_content() == "<b>run"


@pytest.mark.slow
def test_a_followed_run_grows_in_place(open_page, runs, tmp_path):
  folder = shutil.copytree(runs[0], tmp_path / "run")
  with ReportServer([str(folder)], port=0, refresh_seconds=0.1) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    page = open_page(server.address)
    page.locator("#smoothing").fill("0.5")
    later = run_files.training_metrics([1010, 1020])
    run_files.add_event_file(folder / "train", later, started=run_files.STARTED + 1000)
    page.locator(LOSS).scroll_into_view_if_needed()
    page.wait_for_function(
      f"Math.max(...document.querySelector('{LOSS.partition(' ')[0]} .plot').data[0].x) === 1020"
    )
    assert page.locator("#smoothing").input_value() == "0.5"
    page.close()
    server.shutdown()
    thread.join()
