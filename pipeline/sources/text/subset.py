"""The subsets of a dataset on the hub: patterns of files, in the front matter of its README.md.

    configs:
    - config_name: sample-10BT
      data_files:
      - split: train
        path: sample/10BT/*

`data_files` may also be a pattern or a list of patterns, which are then of the split train.
"""

from typing import Annotated

import yaml
from pydantic import Field

from lockstep.errors import LockstepError, brief
from lockstep.tables.explain import validate
from lockstep.tables.table import AsTuple, Table
from pipeline.stage.given_files import check_yaml

README = "README.md"
MOST_BYTES = 2**20  # of a README.md
FENCE = "---\n"
Pattern = Annotated[str, Field(min_length=1, max_length=500)]
Patterns = Annotated[tuple[Pattern, ...], Field(max_length=10_000), AsTuple]


class SplitFiles(Table, extra="ignore"):
    """The files of one split."""

    split: Pattern = "train"
    path: Pattern | Patterns


class HubSubset(Table, extra="ignore"):
    """A subset, which the hub calls a config."""

    config_name: Pattern
    data_files: (
        Pattern | Annotated[tuple[SplitFiles | Pattern, ...], Field(max_length=1000), AsTuple]
    ) = ()


class FrontMatter(Table, extra="ignore"):
    """The keys of a README.md's front matter that are used."""

    configs: Annotated[tuple[HubSubset, ...], Field(max_length=10_000), AsTuple] = ()


def patterns(readme: bytes, subset: str, split: str, where: str) -> tuple[str, ...]:
    """Return the patterns of a subset's files in one split.

    Args:
      readme: of the dataset.
      subset: its name.
      split: name of the split.
      where: what errors call it.

    Raises:
      LockstepError: it has no such subset or split, or its front matter is none.
    """
    found = _subsets(readme, where)
    if subset not in found:
        known = brief(", ".join(found), 200) or "none"
        raise LockstepError(f"{where}: found the subsets {known}, expected {subset!r} among them")
    given = found[subset].data_files
    by_split: dict[str, list[str]] = {}
    for files in (given,) if isinstance(given, str) else given:
        part = SplitFiles(path=files) if isinstance(files, str) else files
        paths = (part.path,) if isinstance(part.path, str) else part.path
        by_split.setdefault(part.split, []).extend(paths)
    if not by_split.get(split):
        known = brief(", ".join(by_split), 200) or "none"
        raise LockstepError(
            f"{where}: found the splits {known} in subset {subset!r}, expected {split!r} among them"
        )
    return tuple(by_split[split])


def names(readme: bytes, where: str) -> tuple[str, ...]:
    """Return the names of the subsets.

    Raises:
      LockstepError: its front matter is none.
    """
    return tuple(_subsets(readme, where))


def _subsets(readme: bytes, where: str) -> dict[str, HubSubset]:
    return {config.config_name: config for config in _front_matter(readme, where).configs}


def _front_matter(readme: bytes, where: str) -> FrontMatter:
    text = readme.decode(errors="replace").replace("\r\n", "\n")
    beginning, _, rest = text.partition(FENCE)
    front, fence, _ = rest.partition(f"\n{FENCE}")
    try:
        if beginning or not fence:
            return FrontMatter()
        check_yaml(front, where)
        found = yaml.safe_load(front)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = brief(str(error).splitlines()[0], 200)
        raise LockstepError(f"{where}: {line}, expected YAML in front of it") from error
    return validate(FrontMatter, found if isinstance(found, dict) else {}, where)
