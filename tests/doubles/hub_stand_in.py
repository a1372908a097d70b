"""A stand-in for the hub's API: data set repositories in memory, over HTTP.

It answers what `Dataset.push_to_hub` and `hf_hub_download` ask: repository info, creation, upload
modes (large files for Parquet, by their digest), commits, listings and files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class HubStandIn:
    """``files``: of each repository, name to bytes; ``commits``: their titles, in order."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.uploads: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.get(self)

            do_HEAD = do_GET

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.uploads[self.path.rsplit("/", 1)[-1]] = body
                _send(self, b"", 200, {"ETag": '"whole"'})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.post(self, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def sha(self) -> str:
        return hashlib.sha1("".join(self.commits).encode()).hexdigest()

    def get(self, request: Any) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            if repo not in self.files:
                _json(request, {"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            elif rest[:1] == ["tree"]:
                self._list(request, repo, "/".join(rest[2:]))
            else:
                siblings = [{"rfilename": name} for name in self.files[repo]]
                _json(request, {"id": repo, "sha": self.sha, "siblings": siblings})
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            content = self.files["/".join(parts[1:3])].get("/".join(parts[5:]))
            if content is None:
                _json(request, {"error": "no entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            else:
                etag = hashlib.sha1(content).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.sha}
                asked = request.headers.get("Range")
                if asked is None:
                    _send(request, content, 200, headers)
                else:
                    first, last = map(int, asked.removeprefix("bytes=").split("-"))
                    _send(request, content[first : last + 1], 206, headers)
        else:
            _json(request, {"error": request.path}, 404)

    def post(self, request: Any, body: bytes) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.files.setdefault(repo, {})
            _json(request, {"url": f"{self.endpoint}/datasets/{repo}"})
            return
        if parts == ["api", "validate-yaml"]:
            _json(request, {"errors": [], "warnings": []})
            return
        if parts[-2:] == ["objects", "batch"]:
            asked = json.loads(body)["objects"]
            for each in asked:
                href = f"{self.endpoint}/uploads/{each['oid']}"
                each["actions"] = {"upload": {"href": href}}
            _json(request, {"transfer": "basic", "objects": asked})
            return
        repo, what = "/".join(parts[2:4]), parts[4]
        if what == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": _mode(name), "shouldIgnore": False} for name in names
            ]
            _json(request, {"files": modes})
        elif what == "paths-info":
            names = json.loads(body)["paths"]
            there = [_entry(n, self.files[repo][n]) for n in names if n in self.files[repo]]
            _json(request, there)
        elif what == "commit":
            self._commit(repo, body)
            url = f"{self.endpoint}/datasets/{repo}/commit/{self.sha}"
            _json(request, {"commitUrl": url, "commitOid": self.sha})
        else:
            _json(request, {"error": request.path}, 404)

    def _commit(self, repo: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.uploads[value["oid"]]
            elif entry["key"] == "deletedFile":
                del self.files[repo][value["path"]]

    def _list(self, request: Any, repo: str, folder: str) -> None:
        inside = f"{folder}/" if folder else ""
        below = {n: c for n, c in self.files[repo].items() if n.startswith(inside)}
        if folder and not below:
            _json(request, {"error": "no entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        is_recursive = "recursive=True" in request.path
        entries: dict[str, Any] = {}
        for name, content in below.items():
            steps = name.removeprefix(inside).split("/")
            for depth in range(1, len(steps) if is_recursive else min(2, len(steps))):
                path = inside + "/".join(steps[:depth])
                entries[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            if is_recursive or len(steps) == 1:
                entries[name] = _entry(name, content)
        _json(request, list(entries.values()))


def _mode(name: str) -> str:
    return "lfs" if name.endswith(".parquet") else "regular"


def _entry(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


def _json(request: Any, value: Any, code: int = 200, headers: Any = None) -> None:
    body = json.dumps(value).encode()
    _send(request, body, code, {"Content-Type": "application/json", **(headers or {})})


def _send(request: Any, body: bytes, code: int, headers: dict[str, str]) -> None:
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
