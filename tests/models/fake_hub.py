"""A local server that accepts uploads of models as the Hugging Face Hub does."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_a_test"


@dataclass
class FakeHub:
    """The files that it has received. `refuses`: it answers every request with 403."""

    address: str
    refuses: bool = False
    is_private: dict[str, bool] = field(default_factory=dict)
    """Keyed by repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Keyed by path; includes the files of large file storage."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files, keyed by hash."""
    tokens: set[str | None] = field(default_factory=set)

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            request = json.loads(body)
            self.is_private[f"{request['organization']}/{request['name']}"] = request["visibility"] == "private"
            return {"url": f"{self.address}/{request['organization']}/{request['name']}"}
        if path.endswith("/preupload/main"):
            files = [entry["path"] for entry in json.loads(body)["files"]]
            kinds = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {"path": file, "uploadMode": kinds[file.endswith(".safetensors")], "shouldIgnore": False}
                    for file in files
                ]
            }
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = {file["oid"]: {"upload": {"href": f"{self.address}/store/{file['oid']}"}} for file in objects}
            return {"transfer": "basic", "objects": [{**file, "actions": upload[file["oid"]]} for file in objects]}
        if stored := re.fullmatch(r"/store/(\w+)", path):
            self.stored[stored[1]] = body
            return {}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                self._commit(line["key"], line["value"])
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            return {"commitUrl": f"{self.address}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40}
        return {"errors": [], "warnings": []}  # the validation of a card's front matter

    def _commit(self, kind: str, value: dict[str, str]) -> None:
        if kind == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            self.files[value["path"]] = self.stored[value["oid"]]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.path.startswith("/api/repos"):
                hub.tokens.add(self.headers["Authorization"])
            self.send_response(403 if hub.refuses else 200)
            content = json.dumps(hub.answer(self.path, body)).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield hub
        finally:
            server.shutdown()
