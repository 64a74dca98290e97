"""A server that talks as vLLM does, and does what it is told: in a thread of a test, or run as a script.

    python fake_server.py [anything] --port PORT
    python fake_server.py [anything] --uds SOCKET
    python fake_server.py [anything] --port PORT --config FILE

As a script it does what the variable FAKE says, and with --config it asks for the key in the file as SGLang does.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

Json = dict[str, Any]
Says = Callable[[Json], tuple[int, Json]]
"""Status and body of the answer to a request for a completion."""
LOGPROB = -0.5


def fine(body: Json, **changes: Any) -> tuple[int, Json]:
    """As many tokens as were asked for, each the prompt's first and one; raw log-probabilities of a prompt's."""
    if "input_ids" in body:
        return sglang_says(body)
    if "prompt_logprobs" in body:
        return raw(body)
    ids = [body["prompt"][0] % 50 + 1] * body["max_tokens"]
    logprob = 0.0 if body["top_k"] == 1 else LOGPROB
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [logprob] * len(ids)}, "finish_reason": "length"}
    return 200, {"model": changes.pop("model", "student"), "choices": [choice | changes]}


def raw(body: Json) -> tuple[int, Json]:
    """−1, −2, … by position in the prompt, and of the token after it, as vLLM 0.32 has it."""
    known = [{str(each): {"logprob": -1.0 - i, "rank": 1}} for i, each in enumerate(body["prompt"])]
    (last,) = body["logprob_token_ids"]
    top = {"token_id:9": -0.1, f"token_id:{last}": -1.0 - len(known)}
    choice = {"prompt_logprobs": [None, *known[1:]], "logprobs": {"top_logprobs": [top]}}
    return 200, {"model": "student", "choices": [choice]}


def sglang_says(body: Json) -> tuple[int, Json]:
    """As SGLang's documentation has it."""
    count = body["sampling_params"]["max_new_tokens"]
    sampled = [[LOGPROB, 7, None]] * count
    about = {"finish_reason": {"type": "length", "length": count}, "output_token_logprobs": sampled}
    return 200, {"text": "…", "meta_info": about, "success": True}


class Handler(BaseHTTPRequestHandler):
    says: Says
    refuses: str
    cards: list[Json]
    calls: list[tuple[str, Json]]

    def do_GET(self) -> None:
        self._reply(200, {"data": self.cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.calls.append((self.path, body))
        if self.path in ("/v1/completions", "/generate"):
            self._reply(*type(self).says(body))
        else:
            self._reply(500 if self.path == self.refuses else 200, {"says": "the fake"})

    def _reply(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        with suppress(BrokenPipeError):  # who asked has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Locked(Handler):
    """Answers only requests with the key, but for those about its health."""

    key: str

    def do_POST(self) -> None:
        if self.headers.get("Authorization") == f"Bearer {self.key}":
            super().do_POST()
        else:
            self._reply(401, {"error": "Unauthorized"})


CARDS = [{"id": "student", "root": "/models/student"}]


class SocketServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for the name of a host
        self.server_name, self.server_port = "", 0


def make_server(
    address: int | str, says: Says, refuses: str = "", cards: list[Json] = CARDS, handler: type[Handler] = Handler
) -> ThreadingHTTPServer:
    own = {"says": staticmethod(says), "refuses": refuses, "cards": cards, "calls": []}
    said = type("Said", (handler,), own)
    if isinstance(address, str):
        server: ThreadingHTTPServer = SocketServer(address, said)  # type: ignore[arg-type]
    else:
        server = ThreadingHTTPServer(("127.0.0.1", address), said)
    server.daemon_threads = True
    return server


@contextmanager
def fake_server(
    says: Says = fine, refuses: str = "", cards: list[Json] = CARDS, handler: type[Handler] = Handler
) -> Iterator[tuple[str, list[tuple[str, Json]]]]:
    """Its address, and the paths and bodies of what was posted to it.

    refuses: a path that it has an error for. cards: models that it lists.
    """
    server = make_server(0, says, refuses, cards, handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.RequestHandlerClass.calls  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


def dies(body: Json) -> tuple[int, Json]:
    """But for a first request, the probe."""
    if body["max_tokens"] == 1:
        return fine(body)
    print("out of memory, says the fake", flush=True)
    os._exit(3)


def ends(body: Json) -> tuple[int, Json]:
    """As many tokens as were asked for, the last of which ends the turn."""
    ids = [7] * (body["max_tokens"] - 1) + body["stop_token_ids"][:1]
    return fine(body, token_ids=ids, finish_reason="stop")


def main() -> None:
    how = os.environ.get("FAKE", "")
    print("environment:", json.dumps(dict(os.environ)), flush=True)
    if how == "dies at once":
        sys.exit("no such model, says the fake")
    if how == "is never ready":
        time.sleep(600)
    if how == "has children":
        # One in its own session that does not end when asked, and whose parent is gone.
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        orphaned = (
            f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
        )
        subprocess.run([sys.executable, "-c", orphaned], check=True)
        Path(tempfile.gettempdir(), "socket").touch()
    handler = Handler
    if "--config" in sys.argv:
        Locked.key = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["api-key"]
        handler = Locked
    name = "--uds" if "--uds" in sys.argv else "--port"
    value = sys.argv[sys.argv.index(name) + 1]
    says = {"dies": dies, "ends": ends}.get(how, fine)
    make_server(value if name == "--uds" else int(value), says, handler=handler).serve_forever()


if __name__ == "__main__":
    main()
