"""What a stranger may hand over: thirteen cases, seven of a folder and six of a server."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gate import bombs
from tests.servers import misbehaviour as m
from tests.servers.web import Answer, Served

# Of a folder.
PIPE, DEVICE, SPARSE = "a pipe", "an endless device", "a 100 GB file"
LINK, SURROGATE, DEEP = "a link outside", "a name not in Unicode", "2,000 nested folders"
# Of a server.
SILENT, DRIPPING, ENDLESS = "sends nothing", "a byte now and then", "an endless body"
PAGES, TOKEN, BREAK = "endless pages", "repeats a secret", "breaks off in the middle"
# Of both: a few bytes that stand for many.
BOMB = "a bomb"
FOLDER = (PIPE, DEVICE, SPARSE, LINK, SURROGATE, DEEP, BOMB)
CONTENT = (SILENT, DRIPPING, ENDLESS, PAGES, TOKEN, BREAK)
SERVER = (SURROGATE, DEEP, *CONTENT)
CASES = (*FOLDER, *CONTENT)

RIGHT = ""  # what is read is right
HUGE = 100 * 10**9
NAMES = {SURROGATE: "\ud800.ds", DEEP: "d/" * 2000 + "x.ds"}  # that a server lists


@dataclass(frozen=True)
class No:
    """Why a case cannot arise."""

    why: str


# Of a table: RIGHT, words of the refusal, of each of the case's forms where they differ, ...
Cell = str | tuple[str, ...] | No
Cells = dict[str, Cell]


# ---- Folders ----


@contextmanager
def deep_folder() -> Iterator[Path]:
    """2,000 folders in one another, deeper than any path may be long."""
    # in memory, where there is such a place: on a disk, taking them away lasts seconds
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    (top := place / "deep").mkdir()
    with chdir(top):
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
        Path("x.parquet").write_bytes(b"theirs")
    yield top
    with chdir(top):  # rmtree goes no deeper than 1,000
        for _ in range(2000):
            os.chdir("d")
        os.remove("x.parquet")
        for _ in range(2000):
            os.chdir("..")
            os.rmdir("d")
    shutil.rmtree(place)


@contextmanager
def spoiled(case: str, folder: Path, name: str, deep: Path) -> Iterator[None]:
    """A folder with something in the place of one of its files, or beside it."""
    target, below = folder / name, folder / "deep"
    if case == DEEP:
        deep.rename(below)
    elif case == SURROGATE:
        shutil.copyfile(target, os.fsencode(target.parent) + b"/\xff" + os.fsencode(target.suffix))
    elif case == SPARSE:
        os.truncate(target, HUGE)
    elif case == BOMB:
        target.write_bytes(bombs.of(target))
    else:
        outside = folder.parent / f"outside{target.suffix}"
        target.rename(outside)
        if case == PIPE:
            os.mkfifo(target)
        else:
            target.symlink_to("/dev/zero" if case == DEVICE else outside)
    try:
        yield
    finally:
        if case == DEEP:
            below.rename(deep)


# ---- Servers ----


def spoils(case: str, served: Served, kind: str, place: str) -> list[m.Spoil]:
    """What a server of a kind does, each on its own."""
    if case == PAGES:
        return PAGES_OF[kind]
    if case == TOKEN:
        return [_refusing(served), _packed(served)][: 1 if place == "listing" else 2]
    return [{SILENT: m.silent, DRIPPING: m.trickling, ENDLESS: m.endless, BREAK: m.dropped}[case]]


def said(served: Served) -> str:
    """What the last request said of who asks, in other letters."""
    return (served.seen[-1][2] or "").swapcase()


def signatures(served: Served) -> list[str]:
    """What signed each request of S3."""
    return [said[-64:] for _, _, said in served.seen if said and "Signature=" in said]


def _refusing(served: Served) -> m.Spoil:
    def spoil(answer: Answer) -> Answer:
        text = said(served)
        body = f"<Error><Code>AccessDenied</Code><Message>{text}</Message></Error>".encode()
        headers = {"Content-Length": str(len(body)), "X-Error-Message": text}
        return replace(answer, status=403, reason=text, headers=headers, body=body, name=None)

    return spoil


def _packed(served: Served) -> m.Spoil:
    def spoil(answer: Answer) -> Answer:
        return replace(answer, headers=answer.headers | {"Content-Encoding": said(served)})

    return spoil


def _google_page(token: Callable[[], str]) -> m.Spoil:
    return lambda answer: _page(answer, json.dumps({"nextPageToken": token()}))


def _s3_page(token: Callable[[], str]) -> m.Spoil:
    def spoil(answer: Answer) -> Answer:
        more = f"<NextContinuationToken>{token()}</NextContinuationToken>"
        text = f"<ListBucketResult><IsTruncated>true</IsTruncated>{more}</ListBucketResult>"
        return _page(answer, text)

    return spoil


def _page(answer: Answer, text: str) -> Answer:
    headers = answer.headers | {"Content-Length": str(len(text))}
    return replace(answer, status=200, headers=headers, body=text.encode())


def _another() -> str:
    return str(next(m.COUNT) + 10)


# Another page without end, and the same page again.
PAGES_OF = {
    "hub": [m.page_after_page, m.itself_again],
    "bucket": [_google_page(_another), _google_page(lambda: "1")],
    "s3": [_s3_page(_another), _s3_page(lambda: "1")],
}
