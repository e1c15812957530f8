"""A hub on this machine in place of huggingface.co, for the real client that the package downloads and uploads with.

It answers as the hub does: which commit a revision is, which files a commit has, and what is in them. Large files lie
on another host, to which the client is sent, and which must not see the token. A test says which transfers break off,
and looks at what was asked.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pytest

TOKEN = "hf_of_a_reader"
LARGE = 2000  # bytes; larger files lie elsewhere
_API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/(?P<asked>revision|tree)/(?P<revision>[^/?]+)")
_UPLOAD = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<asked>preupload|commit)/main")
_FILE = re.compile(r"/(?P<repository>.+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Request(NamedTuple):
    """What the client asked for."""

    method: str
    file: str | None  # whose content it is about
    is_large: bool  # asked of the host of large files
    has_token: bool
    start: int  # the byte from which on the content is wanted


class SmallHub:
    """Repositories by their paths, `team/tiny` for a model and `datasets/team/sums` for a data set."""

    def __init__(self, home: Path):
        self.cache = home / "hub"  # of the client
        self.commits: dict[tuple[str, str], Mapping[str, bytes]] = {}  # (repository, commit) -> files
        self.revisions: dict[tuple[str, str], str] = {}  # (repository, branch or tag) -> commit
        self.gated: set[str] = set()  # repositories whose files need the token
        self.requests: list[Request] = []
        self.breaks: dict[str, list[int]] = {}  # for a file, after how many bytes its next transfers break off
        self.is_resetting = False  # such a transfer ends with a reset of the connection in place of its end
        self.is_down = False
        self.visibility: dict[str, str] = {}  # of repositories that uploads have made
        self.may_write, self.refuses_uploads = True, False  # what the token is said to be for; what the hub does
        self.posted: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.large_host = f"localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def add(self, repository: str, commit: str, files: Path | Mapping[str, bytes], *revisions: str) -> None:
        """Add a commit with the files of a folder, or with those named, and point these revisions to it."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        self.commits[repository, commit] = files
        self.revisions |= {(repository, revision): commit for revision in (*revisions, commit)}

    def fetched(self) -> list[str]:
        """The files whose contents were asked for since the last call, in the order of their names."""
        files = sorted(request.file for request in self.requests if request.method == "GET" and request.file)
        self.requests.clear()
        return files

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server looks for)
        if self.path == "/api/whoami-v2":
            return self.tell_who()
        hub, token, is_large = self.server.hub, self.headers["Authorization"], False
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
        api, found = _API.match(self.path), _FILE.match(self.path)
        if not (api or found):  # what some clients ask for on their own, such as /api/agent-harnesses
            return self.refuse(404, "", f"no {self.path} here")
        asked = {name: unquote(value) for name, value in (api or found).groupdict().items()}
        is_large = self.headers["Host"] == hub.large_host
        hub.requests.append(Request(self.command, asked.get("file"), is_large, token is not None, start))
        repository = asked.get("repository") or ("datasets/" * (asked["kind"] == "datasets")) + asked["name"]
        commit = hub.revisions.get((repository, asked["revision"]))
        if hub.is_down:
            self.refuse(503, "", "The hub is down")
        elif is_large:
            self.send_content(asked["file"], hub.commits[repository, commit][asked["file"]], start, {})
        elif token not in (None, f"Bearer {TOKEN}"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif not any(known == repository for known, _ in hub.commits):
            self.refuse(401 if token is None else 404, "RepoNotFound", "Repository not found")
        elif commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {asked['revision']}")
        elif api:
            files = hub.commits[repository, commit]
            siblings = [{"rfilename": name} for name in files]
            self.send_json(200, {}, [_entry(*file) for file in files.items()] if asked["asked"] == "tree" else
                           {"id": asked["name"], "sha": commit, "siblings": siblings})
        elif repository in hub.gated and token is None:
            self.refuse(401, "GatedRepo", f"Access to {repository} is restricted. Please log in.")
        else:
            self.send_file(repository, commit, asked["file"], start)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        """What an upload asks: a repository, whether the card is right, how files are sent, and a commit of them."""
        hub, body = self.server.hub, self.rfile.read(int(self.headers["Content-Length"]))
        hub.posted.append(self.path)
        found = _UPLOAD.fullmatch(self.path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or hub.refuses_uploads:
            self.refuse(403, "", "Forbidden")
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in hub.visibility
            hub.visibility.setdefault(name, asked.get("visibility", "public"))
            self.send_json(200 if is_new else 409, {}, {"url": f"{hub.endpoint}/{name}", "id": name})
        elif self.path == "/api/validate-yaml":
            self.send_json(200, {}, {"errors": [], "warnings": []})
        elif found["asked"] == "preupload":
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]
            self.send_json(200, {}, {"files": files})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            hub.add(found["name"], "a" * 40, {one["value"]["path"]: base64.b64decode(one["value"]["content"])
                                              for one in lines if one["key"] == "file"}, "main")
            self.send_json(200, {}, {"commitUrl": f"{hub.endpoint}/{found['name']}/commit/a", "commitOid": "a" * 40})

    def tell_who(self) -> None:
        hub = self.server.hub
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        token = {"accessToken": {"role": "write" if hub.may_write else "read"}}
        self.send_json(503 if hub.is_down else 200, {}, {"name": "me", "orgs": [{"name": "team"}], "auth": token})

    def log_message(self, *_) -> None:
        pass

    def send_file(self, repository: str, commit: str, file: str, start: int) -> None:
        content = self.server.hub.commits[repository, commit].get(file)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest[:40]}"'}
        if len(content) <= LARGE:
            return self.send_content(file, content, start, headers)
        location = f"http://{self.server.hub.large_host}/{repository}/resolve/{commit}/{quote(file)}"
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"', "Location": location}
        return self.send(302, headers, b"")

    def send_content(self, file: str, content: bytes, start: int, headers: Mapping[str, str]) -> None:
        hub, left = self.server.hub, content[start:]
        if start:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        breaks = hub.breaks.get(file) if self.command == "GET" else None
        self.send(206 if start else 200, headers, left, breaks.pop(0) if breaks else None)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send_json(status, {"X-Error-Code": code, "X-Error-Message": message}, {"error": message})

    def send_json(self, status: int, headers: Mapping[str, str], value: Any) -> None:
        self.send(status, {**headers, "Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status: int, headers: Mapping[str, str], body: bytes, breaks_at: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:breaks_at])
        if breaks_at is not None:
            self.close_connection = True
            if self.server.hub.is_resetting:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                socket.close(self.connection.detach())


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """A file in the list of a commit's files."""
    digest = hashlib.sha256(content).hexdigest()
    large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}} if len(content) > LARGE else {}
    return {"type": "file", "path": name, "size": len(content), "oid": digest[:40]} | large


@contextlib.contextmanager
def small_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[SmallHub]:
    """A hub that the client asks, in this process and in those it starts. `home` takes the downloads."""
    from huggingface_hub import constants

    hub = SmallHub(home)
    # The client reads its variables once, when it is imported.
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    for name, value in {
        "ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(hub.cache), "HF_TOKEN_PATH": str(home / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("tango_jax.runtime.hub._told", set())
    try:
        yield hub
    finally:
        hub.close()
