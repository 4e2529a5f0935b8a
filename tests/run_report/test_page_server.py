"""`rosetta-t5 report --follow` serves the current state of a run to this machine only."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import socket
import struct
import threading
import urllib.error
import urllib.request

import pytest
import run_files

from rosetta_t5.run_report.report_command import ReportServer


@pytest.fixture
def followed(runs, tmp_path):
  """Yields a server of a run, and the run's folder."""
  folder = shutil.copytree(runs[0], tmp_path / "run")
  with ReportServer([str(folder)], port=0, refresh_seconds=0.2) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, folder
    server.shutdown()
    thread.join()


def get(server, path="", **headers):
  request = urllib.request.Request(server.address + path, headers=headers)
  with urllib.request.urlopen(request) as answer:
    return answer.read().decode()


def loss_count(server):
  data = json.loads(gzip.decompress(base64.b64decode(get(server, "data"))))
  return data["runs"][0]["series"]["train"]["loss"]["count"]


def test_new_events_are_served(followed):
  server, folder = followed
  assert "<title>Run report: run</title>" in get(server)
  before = loss_count(server)
  later = run_files.training_metrics([1010, 1020])
  run_files.add_event_file(folder / "train", later, started=run_files.STARTED + 1000)
  assert loss_count(server) == before + 2


def test_other_sites_and_paths_are_refused(followed):
  server, _ = followed
  for path, headers, status in (("", {"Host": "evil.example"}, 403), ("../etc/passwd", {}, 404)):
    with pytest.raises(urllib.error.HTTPError) as refused:
      get(server, path, **headers)
    assert refused.value.code == status
    refused.value.close()


def test_a_run_that_disappears_is_an_error_of_the_request(followed):
  server, folder = followed
  server.folders = [str(folder.rename(folder.with_name("прогон\n2")))]
  folder = folder.with_name("прогон\n2")
  shutil.rmtree(folder)
  with pytest.raises(urllib.error.HTTPError) as failed:
    get(server, "data")
  assert failed.value.code == 500
  text = failed.value.read().decode()
  assert text.startswith("Internal Server Error: ")
  assert "прогон" in text
  failed.value.close()


def test_a_browser_that_closes_the_connection_causes_no_traceback(followed, capfd):
  server, _ = followed
  connection = socket.create_connection(server.server_address)
  connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  connection.close()  # with a reset, as linger says
  get(server)  # The first request has been accepted before this one.
  for thread in threading.enumerate():
    if "process_request_thread" in thread.name:
      thread.join()
  assert "Traceback" not in capfd.readouterr().err
