"""A server on loopback with the routes of Hugging Face's hub from which a model's files are downloaded."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve(name: str, folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
  """Serves a folder as the only model of a hub, OWNER/NAME.

  Yields:
    The hub's address, and the paths of the files whose contents were requested.
  """
  requested: list[str] = []
  api, files = f"/api/models/{name}", f"/{name}/resolve/{COMMIT}/"

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
      path = self.path.partition("?")[0]
      file = folder / path.removeprefix(files)
      if path == f"{api}/revision/main":
        self._send(json.dumps({"id": name, "sha": COMMIT}).encode())
      elif path == f"{api}/tree/{COMMIT}":
        self._send(json.dumps([*map(_entry, sorted(folder.iterdir()))]).encode())
      elif path.startswith(files) and file.is_file():
        if self.command == "GET":
          requested.append(file.name)
        self._send(file.read_bytes(), ETag=f'"{_digest(file)}"')
      else:
        missing = "Entry" if path.startswith(files) else "Repo"
        self._send(b"{}", 404, **{"X-Error-Code": f"{missing}NotFound"})

    do_HEAD = do_GET

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
      self.send_response(status)
      shared = {"Content-Length": len(content), "X-Repo-Commit": COMMIT}
      for key, value in {**shared, **headers}.items():
        self.send_header(key, str(value))
      self.end_headers()
      if self.command == "GET":
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
      """Prints nothing."""

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()
    thread.join()


def _digest(file: pathlib.Path) -> str:
  return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


def _entry(file: pathlib.Path) -> dict[str, object]:
  return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}
