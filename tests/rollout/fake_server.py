"""A fake vLLM or SGLang server with scripted answers: in a thread of a test, or run as a script.

    python fake_server.py [anything] --port PORT
    python fake_server.py [anything] --uds SOCKET
    python fake_server.py [anything] --port PORT --config FILE

As a script it follows the environment variable FAKE, and with --config it requires the key in FILE, as SGLang does.
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
Responder = Callable[[Json], tuple[int, Json]]
"""Function from the body of a completion request to the answer's status and body."""
LOGPROB = -0.5


def fine(body: Json, **changes: Any) -> tuple[int, Json]:
    """Answer with `max_tokens` copies of the prompt's first token + 1, or with log-probabilities of the prompt."""
    if "input_ids" in body:
        return sglang_answer(body)
    if "prompt_logprobs" in body:
        return raw(body)
    ids = [body["prompt"][0] % 50 + 1] * body["max_tokens"]
    logprob = 0.0 if body["top_k"] == 1 else LOGPROB
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [logprob] * len(ids)}, "finish_reason": "length"}
    return 200, {"model": changes.pop("model", "student"), "choices": [choice | changes]}


def raw(body: Json) -> tuple[int, Json]:
    """Answer with log-probabilities −1, −2, … of the prompt and the token after it, in the form of vLLM 0.32."""
    entries = [{str(token): {"logprob": -1.0 - i, "rank": 1}} for i, token in enumerate(body["prompt"])]
    (last,) = body["logprob_token_ids"]
    top = {"token_id:9": -0.1, f"token_id:{last}": -1.0 - len(entries)}
    choice = {"prompt_logprobs": [None, *entries[1:]], "logprobs": {"top_logprobs": [top]}}
    return 200, {"model": "student", "choices": [choice]}


def sglang_answer(body: Json) -> tuple[int, Json]:
    """Answer in the form of SGLang's documentation."""
    count = body["sampling_params"]["max_new_tokens"]
    sampled = [[LOGPROB, 7, None]] * count
    meta = {"finish_reason": {"type": "length", "length": count}, "output_token_logprobs": sampled}
    return 200, {"text": "…", "meta_info": meta, "success": True}


class Handler(BaseHTTPRequestHandler):
    respond: Responder
    refuses: str
    cards: list[Json]
    calls: list[tuple[str, Json]]

    def do_GET(self) -> None:
        self._reply(200, {"data": self.cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.calls.append((self.path, body))
        if self.path in ("/v1/completions", "/generate"):
            self._reply(*type(self).respond(body))
        else:
            self._reply(500 if self.path == self.refuses else 200, {"says": "the fake"})

    def _reply(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        with suppress(BrokenPipeError):  # the client has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Locked(Handler):
    """Requires the key in all requests except GET."""

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
        TCPServer.server_bind(self)  # HTTPServer's method looks up the host's name
        self.server_name, self.server_port = "", 0


def make_server(
    address: int | str,
    respond: Responder,
    refuses: str = "",
    cards: list[Json] = CARDS,
    handler: type[Handler] = Handler,
) -> ThreadingHTTPServer:
    attributes = {"respond": staticmethod(respond), "refuses": refuses, "cards": cards, "calls": []}
    handler_class = type("Said", (handler,), attributes)
    if isinstance(address, str):
        server: ThreadingHTTPServer = SocketServer(address, handler_class)  # type: ignore[arg-type]
    else:
        server = ThreadingHTTPServer(("127.0.0.1", address), handler_class)
    server.daemon_threads = True
    return server


@contextmanager
def fake_server(
    respond: Responder = fine, refuses: str = "", cards: list[Json] = CARDS, handler: type[Handler] = Handler
) -> Iterator[tuple[str, list[tuple[str, Json]]]]:
    """Yield the server's address, and the paths and bodies of its POST requests.

    refuses: path that is answered with an error. cards: models in its list.
    """
    server = make_server(0, respond, refuses, cards, handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.RequestHandlerClass.calls  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


def dies(body: Json) -> tuple[int, Json]:
    """Answer the probe, and exit at the next request."""
    if body["max_tokens"] == 1:
        return fine(body)
    print("out of memory, says the fake", flush=True)
    os._exit(3)


def ends(body: Json) -> tuple[int, Json]:
    """Answer with `max_tokens` tokens; the last one ends the turn."""
    ids = [7] * (body["max_tokens"] - 1) + body["stop_token_ids"][:1]
    return fine(body, token_ids=ids, finish_reason="stop")


def main() -> None:
    behaviour = os.environ.get("FAKE", "")
    print("environment:", json.dumps(dict(os.environ)), flush=True)
    if behaviour == "dies at once":
        sys.exit("no such model, says the fake")
    if behaviour == "is never ready":
        time.sleep(600)
    if behaviour == "has children":
        # An orphan in a session of its own that ignores SIGTERM.
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
    respond = {"dies": dies, "ends": ends}.get(behaviour, fine)
    make_server(value if name == "--uds" else int(value), respond, handler=handler).serve_forever()


if __name__ == "__main__":
    main()
