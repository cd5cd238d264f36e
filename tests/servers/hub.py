"""A hub that speaks as much as huggingface_hub asks of one: a model, datasets, and commits."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import pytest

from tests.servers import web

REPO = "ours/tiny"
LARGE = (".safetensors", ".ds", ".parquet")
SIGNATURE = "hf_sentinel"  # what an address is signed with, which nobody is to see
PAGE = 3  # entries of a listing; the real one has a thousand


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def tag_of(name: str, content: bytes) -> str:
    """The hub's hash of a file: SHA-256 of a large one, git's SHA-1 of another."""
    return _sha256(content) if is_large(name) else git_hash(content)


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


def pointer(content: bytes) -> bytes:
    """What git keeps of a large file."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{_sha256(content)}")
    return "".join(f"{line}\n" for line in (*lines, f"size {len(content)}")).encode()


@lru_cache(maxsize=64)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repo:
    """A repository on a hub.

    Attributes:
      commits: its files by commit, oldest first; without any there is no repository.
      refs: branches and tags -> commit.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Puts a commit on a branch."""
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        self.refs[branch] = name
        return name

    def add(self, folder: Path) -> str:
        """Puts a folder's files on the main branch, in place of all others."""
        return self.commit({path.name: path.read_bytes() for path in folder.iterdir()})

    def resolve(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


@dataclass
class Hub(Repo, web.Served):
    """A hub with one model, whose repository this is, and datasets.

    Large files are sent from another server, at an address that is signed: there, nobody's token
    is needed or wanted.

    Attributes:
      datasets: repositories, by name.
      messages: of the commits that were pushed.
      private: what was asked for when the repository was made.
      token: who reads must say it; None: anybody may.
      elsewhere: as `seen`, of the other server.
    """

    datasets: dict[str, Repo] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: bool | None = None
    token: str | None = None
    elsewhere: list[tuple[str, str, str | None]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    other_address: str = ""

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        with (
            web.serving(_Handler, self) as self.address,
            web.serving(_Large, self) as self.other_address,
        ):
            yield self


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """A hub without a repository, which the client takes for the hub, here and in processes.

    Args:
      monkeypatch: takes it back.
      home: the client's own folder.
    """
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    # large files go by another protocol, to another server, where that is not switched off
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with Hub().serving() as hub:
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


class _Handler(web.Handler):
    served: Hub

    def do_GET(self) -> None:
        hub, path = self.served, self.place
        if self.refused():
            return
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.say(401, "Invalid credentials")
            return
        kind, name, repo, rest = self.find_repo(path)
        if repo is None or not repo.commits:
            self.answer(404, {}, X_Error_Code="RepoNotFound")
            return
        found = re.fullmatch("(/revision|/tree|/resolve|)(?:/([^/]+)(?:/(.+))?)?", rest, re.DOTALL)
        commit = repo.resolve((found and found[2]) or "main")
        if found is None:
            self.answer(404, {}, X_Error_Code="EntryNotFound")
        elif commit is None:
            self.answer(404, {}, X_Error_Code="RevisionNotFound")
        elif kind == "api" and found[1] in ("", "/revision"):
            siblings = [{"rfilename": file} for file in repo.commits[commit]]
            self.answer(200, {"id": name, "sha": commit, "siblings": siblings})
        elif kind == "api" and found[1] == "/tree":
            self.send_tree(repo.commits[commit])
        elif kind == "files" and found[1] == "/resolve" and found[3] in repo.commits[commit]:
            self.send_or_redirect(repo.commits[commit][found[3]], commit, found[3])
        else:
            self.answer(404, {}, X_Error_Code="EntryNotFound")

    def find_repo(self, path: str) -> tuple[str, str, Repo | None, str]:
        """What is asked for, "api" or "files", of which repository, and what follows its name."""
        for kind, prefix, repos in (
            ("api", "/api/models/", {REPO: self.served}),
            ("api", "/api/datasets/", self.served.datasets),
            ("files", "/datasets/", self.served.datasets),
            ("files", "/", {REPO: self.served}),
        ):
            for name, repo in repos.items():
                rest = path.removeprefix(prefix + name)
                if rest != path and rest[:1] in ("", "/"):
                    return kind, name, repo, rest
        return "", "", None, ""

    def send_tree(self, files: dict[str, bytes]) -> None:
        """A page of all files and folders."""
        folders = {name[:end] for name in files for end, c in enumerate(name) if c == "/"}
        entries = [_entry(name, content) for name, content in sorted(files.items())]
        entries += [
            {"type": "directory", "path": name, "size": 0, "oid": git_hash(name.encode())}
            for name in sorted(folders)
        ]
        start = int(self.query.get("cursor", 0))
        end = start + PAGE
        more = {}
        if end < len(entries):
            query = urlencode(self.query | {"cursor": str(end)})
            more = {
                "Link": f'<{self.served.address}{urlsplit(self.path).path}?{query}>; rel="next"'
            }
        self.answer(200, entries[start:end], **more)

    def send_or_redirect(self, content: bytes, commit: str, name: str) -> None:
        tag = tag_of(name, content)
        said = {"X_Repo_Commit": commit}
        if not is_large(name):
            self.send_file(name, content, ETag=f'"{tag}"', **said)
            return
        self.served.large[tag] = content
        said |= {"X_Linked_Etag": f'"{tag}"', "X_Linked_Size": str(len(content))}
        query = f"X-Amz-Signature={SIGNATURE}&name={quote(name, safe='')}"
        self.answer(302, Location=f"{self.served.other_address}/large/{tag}?{query}", **said)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        hub, path, body = self.served, self.place, self.body()
        if self.refused():
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            url = f"{hub.address}/{asked['organization']}/{asked['name']}"
            if hub.commits:
                self.answer(409, {"error": "You already created this model repo", "url": url})
                return
            hub.private = asked.get("visibility") == "private"
            hub.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self.answer(200, {"url": url})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif branch := re.fullmatch(f"/api/models/{REPO}/branch/(.+)", path):
            hub.refs.setdefault(branch[1], hub.refs["main"])
            self.answer(200, {})
        elif branch := re.fullmatch(f"/api/models/{REPO}/preupload/(.+)", path):
            files, there = [], hub.commits[hub.refs[branch[1]]]
            for name in (file["path"] for file in json.loads(body)["files"]):
                mode = "lfs" if is_large(name) else "regular"
                oid = tag_of(name, there[name]) if name in there else None
                entry = {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}
                files.append(entry)
            self.answer(200, {"files": files})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = []
            for entry in json.loads(body)["objects"]:
                where = {"href": f"{hub.address}/large/{entry['oid']}?X-Amz-Signature={SIGNATURE}"}
                objects.append(entry | {"actions": {"upload": where}})
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif branch := re.fullmatch(f"/api/models/{REPO}/commit/(.+)", path):
            self.take([json.loads(line) for line in body.splitlines()], branch[1])
        else:
            self.answer(404, {})

    def do_PUT(self) -> None:
        body = self.body()
        if self.refused():
            return
        oid = self.place.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            self.answer(400, {"error": "another hash"})
            return
        self.served.large[oid] = body
        self.answer(200)

    def take(self, lines: list[dict], branch: str) -> None:
        hub = self.served
        files = dict(hub.commits[hub.refs[branch]])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    if value.get("parentCommit") not in (None, hub.refs[branch]):
                        self.answer(412, {"error": "A commit has happened since"})
                        return
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        hub.messages.append(message)
        commit = hub.commit(files, branch)
        url = f"{hub.address}/{REPO}/commit/{commit}"
        self.answer(200, {"commitOid": commit, "commitUrl": url, "success": True})

    def say(self, status: int, words: str) -> None:
        self.answer(status, {"error": words}, X_Error_Message=words)


class _Large(_Handler):
    """The server from which large files come."""

    def do_GET(self) -> None:
        hub = self.served
        hub.elsewhere.append((self.command, self.path, self.headers.get("Authorization")))
        content = hub.large.get(self.place.removeprefix("/large/"))
        if content is None or self.query.get("X-Amz-Signature") != SIGNATURE:
            self.answer(403, b"no such file, or not for you\n")
            return
        name = self.query["name"]
        tag = hashlib.md5(name.encode()).hexdigest()  # its own, which says nothing of the bytes
        self.send_file(name, content, ETag=f'"{tag}"')

    do_HEAD = do_GET


def _entry(name: str, content: bytes) -> dict:
    """A file, as a listing has it."""
    entry = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    if is_large(name):
        kept = pointer(content)
        lfs = {"oid": _sha256(content), "size": len(content), "pointerSize": len(kept)}
        entry |= {"oid": git_hash(kept), "lfs": lfs}
    return entry
