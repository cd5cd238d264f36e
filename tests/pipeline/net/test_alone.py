"""The folder pipeline/net, copied alone, downloads: it needs nothing of Lockstep."""

import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.stage.keys import PROJECT
from tests.servers.files import Files

CODE = """
import sys
from importlib import import_module
from pathlib import Path

folder, url = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(folder))
for path in sorted(folder.glob("net/**/[a-z]*.py")):
    import_module(".".join(path.relative_to(folder).with_suffix("").parts))
from net import errors, limits, remote, web
from net.transfers import store


class Bar:
    done = 0

    def advance(self, count):
        self.done += count


network, bar = limits.NetSettings(attempts=2, stall_seconds=5.0), Bar()
origin = web.head(remote.resolve_web(url), network)
transfer = store.Transfer("a file", origin, origin.size)
one, again = (store.fetch([transfer], folder / "store", network, bar)[0] for _ in range(2))
assert one == again and bar.done == 2 * origin.size
try:
    web.head(remote.resolve_web(f"{url}/none"), network)
except errors.NetError as error:
    assert "404" in str(error) and url in str(error)
assert not {"lockstep", "pipeline", "parts", "models"} & {*sys.modules}
print(one.path)
"""


def test_a_copy_of_the_folder_alone_downloads_from_a_server(tmp_path):
    shutil.copytree(PROJECT / "pipeline" / "net", tmp_path / "net")
    files = Files({"a.bin": bytes(range(256)) * 4000})
    with files.serving():
        command = [sys.executable, "-I", "-c", CODE, str(tmp_path), files.url("a.bin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == files.files["a.bin"]
    assert sum(files.sent.values()) == len(files.files["a.bin"])
