"""The image of a container, as far as it can be read: no engine runs here."""

import re
import tomllib

from packaging.specifiers import SpecifierSet

from pipeline.stage.keys import PROJECT

DOCKERFILE = (PROJECT / "Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()
MAKEFILE = (PROJECT / "Makefile").read_text()


def test_the_image_runs_the_two_commands_of_the_readme_with_what_they_set_up():
    commands = [line.removeprefix("CMD ") for line in LINES if line.startswith("CMD ")]
    assert commands == ['["make", "test"]', '["make", "repro"]']  # the last is what runs unasked
    readme = (PROJECT / "README.md").read_text()
    assert re.search(r"^make repro\b", readme, re.M) and re.search(r"^make test\b", readme, re.M)
    made = {line.removeprefix("RUN make ") for line in LINES if line.startswith("RUN make ")}
    targets = dict(re.findall(r"^([\w-]+): (\$\(VENV\)/installed\S*)$", MAKEFILE, re.M))
    for command, target in (("repro", "environment"), ("test", "environment-test")):
        assert target in made
        needed = re.search(rf"^{command}: (\$\(VENV\)/installed\S*)$", MAKEFILE, re.M)[1]
        assert targets[target] == needed
    assert "ENV GPU" not in DOCKERFILE and "GPU=${CUDA:+1}" in DOCKERFILE


def test_the_image_has_a_python_that_the_project_takes_with_and_without_a_gpu():
    (python,) = set(re.findall(r"^FROM python:(3\.\d+)-", DOCKERFILE, re.M))
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert python in SpecifierSet(project["requires-python"])
    least = re.search(r"^LEAST := \$\(if \$\(GPU\),(3\.\d+),", MAKEFILE, re.M)[1]
    assert python in SpecifierSet(f">={least}")


def test_the_image_is_not_sent_what_git_ignores():
    def lines(name):
        text = (PROJECT / name).read_text()
        return {line.replace("**/", "").replace("!/", "!").strip("/") for line in text.splitlines()}

    assert lines(".gitignore") <= lines(".dockerignore")
    assert ".git" not in lines(".dockerignore")  # DVC asks it
