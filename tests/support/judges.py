"""An OpenAI-compatible server in a thread, as good and as bad as a test wants it; and coroutines as rewards."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes | None = None
    """None: a chat completion that says ``text``."""
    text: str = "SCORE: 5"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Before it answers."""
    hangs_up: bool = False
    """Whether the connection is closed instead of an answer."""


def completion(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


class Server:
    """``reply(number, message)`` decides, by how many requests there were before and what was asked."""

    def __init__(self, reply):
        self.reply = reply if callable(reply) else lambda number, message: reply
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def messages(self):
        return [asked["messages"][0]["content"] for asked in self.asked]

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving(reply):
    server = Server(reply)
    try:
        yield server
    finally:
        server.close()


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with server.lock:
                number = len(server.asked)
                server.asked.append(asked)
                server.headers.append({name.lower(): value for name, value in self.headers.items()} | {"": self.path})
            try:
                self.answer(server.reply(number, asked["messages"][0]["content"]))
            except OSError:  # the client has gone
                self.close_connection = True

        def answer(self, reply):
            reply = reply if isinstance(reply, Reply) else Reply(text=str(reply))
            time.sleep(reply.seconds)
            if reply.hangs_up:
                self.close_connection = True
                return
            body = completion(reply.text) if reply.body is None else reply.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


async def length(completion, prompt):
    """As a user would write a judge of a single completion."""
    await asyncio.sleep(0.01 * (len(completion) % 3))
    return len(completion) / 10 + len(prompt) / 1000


async def lengths(completions, prompts, **columns):
    """TRL's signature."""
    await asyncio.sleep(0)
    return [len(text) / 10 + len(prompt) / 1000 for text, prompt in zip(completions, prompts, strict=True)]
