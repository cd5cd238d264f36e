"""The folder pipeline/net, copied alone, downloads: it needs nothing of Lockstep."""

import json
import shutil
import subprocess
import sys

from pipeline.stage.keys import PROJECT
from tests.servers.files import Files

CODE = """
import json, sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, sys.argv[1])
for path in sorted(Path(sys.argv[1], "net").rglob("[a-z]*.py")):
    import_module(".".join(path.relative_to(sys.argv[1]).with_suffix("").parts))
from net import errors, limits, remote, web
from net.transfers import store


class Bar:
    done = 0

    def advance(self, count):
        self.done += count


def fetch(url):
    origin = web.head(remote.resolve_web(url), network)
    transfer = store.Transfer("a file", origin, origin.size)
    return store.fetch([transfer], Path(sys.argv[1], "store"), network, bar)[0]


network, bar = limits.NetSettings(attempts=2, stall_seconds=5.0), Bar()
stored = [fetch(sys.argv[2]), fetch(sys.argv[2])]
try:
    fetch(sys.argv[2] + "/none")
except errors.NetError as error:
    said = str(error)
found = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({
    "paths": [str(one.path) for one in stored],
    "sha256": stored[0].sha256,
    "done": bar.done,
    "said": said,
    "ours": sorted(found & {"lockstep", "pipeline", "parts", "models"}),
}))
"""


def test_a_copy_of_the_folder_alone_downloads_from_a_server(tmp_path):
    shutil.copytree(PROJECT / "pipeline" / "net", tmp_path / "net")
    content = bytes(range(256)) * 4000
    files = Files({"a.bin": content})
    with files.serving():
        command = [sys.executable, "-I", "-c", CODE, str(tmp_path), files.url("a.bin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        sent = sum(files.sent.values())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ours"] == []
    assert found["paths"][0] == found["paths"][1] and sent == len(content)
    (path,) = (tmp_path / "store").rglob(f"*.{found['sha256']}")
    assert path.read_bytes() == content and found["done"] == 2 * len(content)
    assert "404" in found["said"] and files.url("a.bin") in found["said"]
