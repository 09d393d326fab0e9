"""Run a real ComfyUI as a child process on loopback and talk to its HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable
from pathlib import Path

MODEL_FOLDERS = ("diffusion_models", "checkpoints", "text_encoders", "vae", "loras", "controlnet")
PACK_NAME = "Halfsafe-Pack"
START_SECONDS = 240
LOG_TAIL_LINES = 60


class ServerError(Exception):
    """The server did not start, refused a prompt, or failed while running one."""


def make_base_directory(base: Path, pack: Path, pack_name: str = PACK_NAME, copied: bool = False) -> Path:
    """Lay out a ComfyUI base directory that holds this pack alone, linked in where links are allowed, or ``copied``."""
    for name in MODEL_FOLDERS:
        (base / "models" / name).mkdir(parents=True, exist_ok=True)
    for name in ("custom_nodes", "input", "output", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    (copy_pack if copied else link_pack)(pack, base / "custom_nodes" / pack_name)
    return base


def link_pack(pack: Path, target: Path) -> None:
    """Make `target` a symbolic link to `pack`, or a copy where the system allows no links."""
    try:
        target.symlink_to(pack, target_is_directory=True)
    except OSError:
        copy_pack(pack, target)


def copy_pack(pack: Path, target: Path) -> None:
    """Copy what ComfyUI needs of `pack` to `target`."""
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "output", "tests")
    shutil.copytree(pack, target, ignore=ignored)


class Server:
    """One ComfyUI process. Use as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        comfyui: Path,
        base: Path,
        extra_args: Iterable[str] = (),
        python: Path | str = sys.executable,
        cpu: bool = True,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.comfyui, self.base, self.python, self.cpu = Path(comfyui), Path(base), str(python), cpu
        self.extra_args = tuple(extra_args)
        self.environ = environ
        self.log_path = self.base / "server.log"
        self.process: subprocess.Popen | None = None
        self.url = ""
        self._client = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self, port: int) -> list[str]:
        """The command line that starts this server."""
        command = [self.python, str(self.comfyui / "main.py"), "--listen", "127.0.0.1", "--port", str(port)]
        command += ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        command += ["--disable-api-nodes", "--disable-auto-launch"]
        return command + (["--cpu"] if self.cpu else []) + list(self.extra_args)

    def start(self) -> Server:
        """Start the process and wait until it answers.

        Raises:
            ServerError: it ended or did not answer in time; the message holds the end of its log.
        """
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environ |= {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **(self.environ or {})}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(port), cwd=self.comfyui, stdout=log, stderr=subprocess.STDOUT, env=environ
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the process this object started, and only that one."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=15)

    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str) -> bytes:
        """Read one path of the server."""
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object = None) -> dict:
        """Send JSON and return the JSON answer, `{}` when it is empty.

        Raises:
            ServerError: the server answered with an error; the message holds its answer.
        """
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            answer = self._send(request)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            raise ServerError(f"{path} answered {error.code}: {_readable(text)}") from error
        return json.loads(answer) if answer.strip() else {}

    def object_info(self, node: str | None = None) -> dict:
        """Node definitions, of every node or of one."""
        return json.loads(self.get("/object_info" + (f"/{node}" if node else "")))

    def queue(self, graph: dict) -> str:
        """Queue an API-format prompt and return its id."""
        return self.post("/prompt", {"prompt": graph, "client_id": uuid.uuid4().hex})["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 600) -> dict:
        """Wait for a prompt and return its history entry, whether it succeeded or not."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            entry = json.loads(self.get(f"/history/{prompt_id}")).get(prompt_id)
            if entry:
                return entry
            if self.process and self.process.poll() is not None:
                raise ServerError(f"ComfyUI ended with {self.process.returncode}.\n{self.log_tail()}")
            time.sleep(0.1)
        raise ServerError(f"The prompt did not finish in {timeout:.0f} s.\n{self.log_tail()}")

    def prompt(self, graph: dict, timeout: float = 600) -> dict:
        """Run an API-format prompt and return its outputs by node id.

        Raises:
            ServerError: the prompt was refused, failed or was interrupted.
        """
        entry = self.wait(self.queue(graph), timeout)
        if entry["status"]["status_str"] != "success":
            raise ServerError(error_text(entry))
        return entry["outputs"]

    def interrupt(self) -> None:
        """Stop the running prompt."""
        self.post("/interrupt")

    def free(self) -> None:
        """Unload the models and empty the node cache."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def view(self, file: dict) -> bytes:
        """The bytes of a file named in a prompt's outputs."""
        query = {key: file[key] for key in ("filename", "subfolder", "type")}
        return self.get("/view?" + urllib.parse.urlencode(query))

    def _send(self, request: urllib.request.Request) -> bytes:
        with self._client.open(request, timeout=60) as answer:
            return answer.read()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"ComfyUI ended with {self.process.returncode}.\n{self.log_tail()}")
            with contextlib.suppress(OSError):
                self.get("/system_stats")
                return
            time.sleep(0.2)
        raise ServerError(f"ComfyUI did not answer in {START_SECONDS} s.\n{self.log_tail()}")


def error_text(entry: dict) -> str:
    """What a failed history entry says: the node, the exception and its traceback."""
    for name, detail in entry["status"].get("messages", []):
        if name == "execution_error":
            trace = "".join(detail.get("traceback", []))
            return f"{detail['node_type']}: {detail['exception_message'].strip()}\n{trace}"
        if name == "execution_interrupted":
            return "interrupted"
    return json.dumps(entry["status"])


def _readable(text: str) -> str:
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    lines = [answer.get("error", {}).get("message", "")]
    for node in answer.get("node_errors", {}).values():
        lines += [f"{node['class_type']}: {e['message']} ({e['details']})" for e in node["errors"]]
    return "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
