"""A hub that speaks as much as huggingface_hub asks of one: models by revision, and commits."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import web

REPO = "ours/tiny"


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def tag_of(name: str, content: bytes) -> str:
    """The hub's hash of a file: SHA-256 of a large one, git's SHA-1 of another."""
    return hashlib.sha256(content).hexdigest() if is_large(name) else git_hash(content)


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


@dataclass
class Hub:
    """One model on a hub.

    Attributes:
      commits: its files by commit, oldest first; without any there is no repository.
      refs: branches and tags -> commit.
      messages: of the commits that were pushed.
      private: what was asked for when the repository was made.
      seen: what was asked: method, path and Authorization.
      damaged: the file that is sent with one bit flipped.
      refuse: answers requests whose path matches: (pattern, status); with the request's own
        Authorization in its words.
      address: of the server.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: bool | None = None
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    damaged: str | None = None
    refuse: tuple[str, int] | None = None
    large: dict[str, bytes] = field(default_factory=dict)
    address: str = ""

    def commit(self, files: dict[str, bytes]) -> str:
        """Puts a commit on the main branch."""
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        self.refs["main"] = name
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

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        handler = type("Bound", (_Handler,), {"hub": self})
        with web.serving(handler) as self.address:
            yield self


@contextmanager
def found(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
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
    hub: Hub

    def do_GET(self) -> None:
        hub, path = self.hub, self.place
        if self.refused():
            return
        if not hub.commits or not path.startswith((f"/api/models/{REPO}", f"/{REPO}/")):
            self.answer(404, {}, X_Error_Code="RepoNotFound")
        elif found := re.fullmatch(f"/api/models/{REPO}(?:/revision/(.+))?", path):
            commit = hub.resolve(found[1] or "main")
            if commit is None:
                self.answer(404, {}, X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in hub.commits[commit]]
            self.answer(200, {"id": REPO, "sha": commit, "siblings": siblings})
        elif found := re.fullmatch(f"/api/models/{REPO}/tree/(.+)", path):
            files = hub.commits[hub.resolve(found[1])].items()
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": tag_of(name, content)}
                for name, content in files
            ]
            self.answer(200, tree)
        elif found := re.fullmatch(f"/{REPO}/resolve/([0-9a-f]+)/(.+)", path):
            content = hub.commits[found[1]][found[2]]
            tag = tag_of(found[2], content)
            if found[2] == hub.damaged:
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.answer(200, content, ETag=f'"{tag}"', X_Repo_Commit=found[1])
        else:
            self.answer(404, {}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        hub, path, body = self.hub, self.place, self.body()
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
        elif path == f"/api/models/{REPO}/preupload/main":
            there = hub.files
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": tag_of(file["path"], there[file["path"]])
                    if file["path"] in there
                    else None,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = []
            for entry in json.loads(body)["objects"]:
                where = {"href": f"{hub.address}/large/{entry['oid']}?X-Amz-Signature=hf_sentinel"}
                objects.append(entry | {"actions": {"upload": where}})
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif path == f"/api/models/{REPO}/commit/main":
            self.take([json.loads(line) for line in body.splitlines()])
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
        self.hub.large[oid] = body
        self.answer(200)

    def take(self, lines: list[dict]) -> None:
        hub, files = self.hub, dict(self.hub.files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    if value.get("parentCommit") not in (None, hub.refs["main"]):
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
        commit = hub.commit(files)
        url = f"{hub.address}/{REPO}/commit/{commit}"
        self.answer(200, {"commitOid": commit, "commitUrl": url, "success": True})

    def refused(self) -> bool:
        said = self.headers.get("Authorization")
        self.hub.seen.append((self.command, self.place, said))
        if self.hub.refuse is None or not re.search(self.hub.refuse[0], self.place):
            return False
        words = f"we do not like {said}, that is {(said or 'x').split()[-1]}"
        self.answer(self.hub.refuse[1], {"error": words}, X_Error_Message=words)
        return True
