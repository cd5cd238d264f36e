"""What is installed: all of the checkout's source under one name, `lockstep`.

In a checkout `models`, `parts` and `pipeline` lie at the top, where an index has no place for such
names. A wheel has them in the folder `lockstep`, their imports rewritten, beside the files that
`pipeline.stage.keys` reads; the library itself, `lockstep`, imports none of them. The readme of an
index has no files beside it, so its links are those of the repository. Everything else that there
is to say stands in pyproject.toml.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MOVED = ("models", "parts", "pipeline")
READ = ("constraints-gpu.txt", "constraints.txt", "dvc.yaml")
IMPORT_FROM = re.compile(rf"^(\s*from )({'|'.join(MOVED)})\b", re.MULTILINE)
IMPORT = re.compile(rf"^(\s*)(import (?:{'|'.join(MOVED)})(?: as \w+)?)$", re.MULTILINE)


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
        for file in (*tree.rglob("*.py"), *tree.rglob("*.pyi")):
            text = IMPORT_FROM.sub(r"\1lockstep.\2", file.read_text(encoding="utf-8"))
            file.write_text(IMPORT.sub(r"\1from lockstep \2", text), encoding="utf-8")
        for name in READ:
            shutil.copy(name, tree / "lockstep")
        stages = tree / "lockstep" / "dvc.yaml"
        stages.write_text(stages.read_text(encoding="utf-8").replace("- lockstep/", "- "), "utf-8")

    def get_source_files(self) -> list[str]:
        """Return what a source distribution has to hold."""
        return [*super().get_source_files(), *READ]


def for_an_index(readme: str, repository: str | None) -> str:
    """Return a readme whose links lead somewhere from anywhere.

    Args:
      readme: Markdown, whose links to files are relative.
      repository: Where these files are; without one, a link's text is left, and no picture.
    """

    def link(found: re.Match) -> str:
        picture, text, file = found.groups()
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/HEAD/{file})"
        return "" if picture else text

    return re.sub(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)", link, readme)


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    setup(
        cmdclass={"build_py": UnderOneName},
        long_description=for_an_index(Path("README.md").read_text(encoding="utf-8"), repository),
        long_description_content_type="text/markdown",
    )
