"""What is installed: all of the checkout's source under one name, `lockstep`.

In a checkout `models` and `pipeline` lie at the top, where an index has no place for such names. A
wheel has them in the folder `lockstep`, their imports rewritten, beside the files that
`pipeline.stage.keys` reads. Everything else that there is to say stands in pyproject.toml.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MOVED = ("models", "pipeline")
READ = ("constraints-gpu.txt", "constraints.txt", "dvc.yaml")
IMPORT_FROM = re.compile(rf"^(\s*from )({'|'.join(MOVED)})\b", re.MULTILINE)
IMPORT = re.compile(rf"^(\s*)(import (?:{'|'.join(MOVED)}))$", re.MULTILINE)


class UnderOneName(build_py):
    """Builds the tree of a wheel; an editable install stays with that of the checkout."""

    def run(self) -> None:
        """Copy what is listed, as ever, and move and rewrite the copies."""
        super().run()
        if self.editable_mode:
            return
        tree = Path(self.build_lib)
        for name in MOVED:
            shutil.rmtree(tree / "lockstep" / name, ignore_errors=True)  # of an earlier build
            (tree / name).rename(tree / "lockstep" / name)
        for file in tree.rglob("*.py"):
            text = IMPORT_FROM.sub(r"\1lockstep.\2", file.read_text(encoding="utf-8"))
            file.write_text(IMPORT.sub(r"\1from lockstep \2", text), encoding="utf-8")
        for name in READ:
            shutil.copy(name, tree / "lockstep")

    def get_source_files(self) -> list[str]:
        """Return what a source distribution has to hold."""
        return [*super().get_source_files(), *READ]


setup(cmdclass={"build_py": UnderOneName})
