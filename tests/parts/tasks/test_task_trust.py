"""A task of a stranger's is read as data: none of these runs code."""

import os
import sys
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from parts.tasks import definitions, task_trust
from tests.parts.tasks import exported
from tests.pipeline.sources.options import refusal

DOCUMENT = {"q": "a {0.__class__}", "c": [" x", "y "], "n": 2, "_id": 7, "t": {"k": "v", "_k": 1}}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    exported.go_offline(monkeypatch)


# ---- Templates ----


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ lipsum.__globals__['os'].system('touch ran') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ q.__class__ }}",
        "{{ (q|attr('__class__')) ~ '' }}",
        "{{ [q]|map(attribute='__class__')|join }}",
        "{{ '{0.__class__.__mro__}'.format(q) }}",
        "{{ (q|attr('format'))(q) }}",
        "{{ q.format(q) }}",
        "{{ '{x.__class__}'.format_map({'x': q}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__ }}",
        "{% for x in c %}{{ loop.__class__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ c.append(1) }}",
        "{{ undefined_name }}",
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for a in range(10**6) %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1 // 0 }}",
        "{{",
    ],
)
def test_a_template_that_asks_for_more_than_values_is_one_line(template, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert refusal(task_trust.render, template, DOCUMENT).startswith("template ")
    assert not list(tmp_path.iterdir())


def test_a_template_calls_no_method_of_an_object_that_could_write_files(tmp_path):
    from PIL import Image

    document = {"image": Image.new("1", (1, 1)), "path": str(tmp_path / "x.png")}
    refusal(task_trust.render, "{{ image.save(path) }}", document)
    assert not list(tmp_path.iterdir())


def test_templates_that_ask_for_values_write_what_lm_eval_writes():
    from lm_eval.utils import apply_template

    for template in (
        "{{q.split()[-1]}}{{ _id }}{{ t.k }}{{ t._k }}{{ t['k'].upper() }}\n",
        "{{ c|map('trim')|join(', ') }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
        "{% for x in c %}{{ loop.index }}{{ 'ab' * n }}{{ 2 ** n }}{% endfor %}\n",
        "{{ q|regex_replace('[a ]', '-') }}{{ '%s' % n }}{{ '{:03}'.format(n) }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(c.index('y ')) }}{{ dict(a=1).items()|list }}",
    ):
        assert task_trust.render(template, DOCUMENT) == apply_template(template, DOCUMENT)


# ---- YAML ----


def test_a_yaml_file_is_bounded_before_it_is_parsed(tmp_path):
    path = tmp_path / "task.yaml"
    laughs = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    for text, said in (
        ("[" * 100_000, "more than 100 deep"),
        ("- " * 50_000, "more than 100 deep"),
        ("{a: " * 50_000, "more than 100 deep"),
        (f"a0: &a0 [x, y]\n{laughs}", "more than 100000 values"),
        ("a: &a [*a]", "more than 100000 values"),
        ("# " + "x" * 2**18, "bytes, expected at most 262144"),
        ("a: !function os.system", "!function, which runs code, expected none; [evaluate] trust_"),
        ("a: !!python/name:os.system", "found the tag tag:yaml.org,2002:python/name:os.system"),
        ("a: !!python/object/apply:os.system [id]", "found the tag"),
        ("a: [", "expected YAML"),
    ):
        path.write_text(text)
        assert said in refusal(task_trust.check_yaml, path, functions=False)
    path.write_text("a: !function os.system\nb: !!null 'null'\nc: &c [1]\nd: [*c, *c, ! x]")
    task_trust.check_yaml(path, functions=True)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(task_trust.check_yaml, path, functions=True)


# ---- Whole tasks ----

PLAIN = """task: theirs
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: "{{c}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A task of somebody's, and Python files that would leave a file `ran`."""
    place = tmp_path_factory.mktemp("theirs")
    (place / "data.jsonl").write_text('{"q": "Which?", "c": ["a", "b"], "a": 0}\n' * 3)
    (place / "theirs.yaml").write_text(PLAIN.replace("DATA", str(place / "data.jsonl")))
    evil = f"open({str(place / 'ran')!r}, 'w')\ndef f(*_, **__):\n    return 'a'\n"
    (place / "evil").mkdir()
    for name in ("evil.py", "evil/evil.py"):
        (place / name).write_text(evil)
    return place


def load(path: Path, store: Path, **how: bool):
    with definitions.data_in(store, **how):
        return definitions.load([str(path)], store, **how)


OWN = Path("lm_eval/tasks/humaneval/humaneval.yaml")
HOSTILE = {
    "function": ("doc_to_text: !function evil.f", "found !function, which runs code"),
    "documents": ("process_docs: !function evil.f", "found !function, which runs code"),
    "metric": ("metric_list: [{metric: !function evil.f}]", "found !function, which runs code"),
    "aggregation": (
        "metric_list: [{metric: acc, aggregation: !function evil.f}]",
        "found !function, which runs code",
    ),
    "filter": (
        "filter_list: [{name: x, filter: [{function: custom, filter_fn: !function evil.f}]}]",
        "found !function, which runs code",
    ),
    "class": ("class: !function evil.f", "found !function, which runs code"),
    "include": ("include: below.yaml", "below.yaml: found !function, which runs code"),
    "include of lm_eval's": (f"include: {OWN}\nunsafe_code: false", "humaneval.yaml: found !func"),
    "metric of the hub": ("metric_list: [{metric: evil/evil}]", "is fetched as code"),
    "metric as code": ("metric_list: [{metric: acc, hf_evaluate: true}]", "is fetched as code"),
    "template": (
        "doc_to_text: \"{{ cycler.__init__.__globals__.os.system('touch RAN') }}\"",
        "template {{ cycler.__init__.__globals__",
    ),
    "description": (
        "description: \"{{ lipsum.__globals__.os.system('touch RAN') }}\"",
        None,  # rendered as requests are made
    ),
    "choices": ('doc_to_choice: "{{ self.__init__.__globals__ }}"', "template {{ self.__init__"),
    "prompt": ("use_prompt: promptsource:x", "found use_prompt"),
    "pickle": ("dataset_path: pandas", "dataset_path is pandas, expected a data set of the hub"),
    "catalog": ("dataset_path: iceberg", "dataset_path is iceberg, expected a data set of"),
    "script": ("dataset_path: evil/evil.py", "expected its data"),
    "address": ("dataset_path: https://x.org/y", "dataset_path is https://x.org/y, expected"),
    "option": ("dataset_kwargs: {num_proc: 100000}", "dataset_kwargs has num_proc, expected some"),
    "scheme": ("dataset_kwargs: {data_files: 'reference://x'}", "names reference://x, expected a"),
    "chain": ("dataset_kwargs: {data_files: 'tar://*::x.tar'}", "names tar://*::x.tar, expected a"),
    "repeats": ("repeats: 1000000000", "repeats = 1000000000, expected at most 10000"),
    "deep": ("doc_to_choice: " + "[" * 100_000, "more than 100 deep"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_task_of_a_stranger_runs_no_code(place, tmp_path, monkeypatch, kind):
    import lm_eval

    monkeypatch.chdir(place)
    text, said = HOSTILE[kind]
    text = text.replace("RAN", str(place / "ran"))
    text = text.replace("lm_eval", str(Path(lm_eval.__file__).parent), 1)
    (place / "below.yaml").write_text("doc_to_text: !function evil.f\n")
    written = {line.partition(":")[0] for line in text.splitlines()}
    plain = [
        line
        for line in (place / "theirs.yaml").read_text().splitlines()
        if line.partition(":")[0] not in written
    ]
    (place / "hostile.yaml").write_text("\n".join([*plain, text]) + "\n")
    if said is None:
        [loaded] = load(place / "hostile.yaml", tmp_path)
        with definitions.data_in(tmp_path), pytest.raises(LockstepError, match="^template "):
            loaded.tasks["theirs"].build_all_requests()
    else:
        line = refusal(load, place / "hostile.yaml", tmp_path)
        assert line.startswith(f"[evaluate] tasks: {place}/hostile.yaml: ") and said in line
        assert len(line) < 600
    assert not (place / "ran").exists()


def test_a_group_takes_no_code_from_its_folder_and_deep_files_in_it_are_left_out(place, tmp_path):
    group = place / "group.yaml"
    for name, text in (("deep", "task: deep\na: " + "[" * 100_000), ("code", "x: !function a.b")):
        (place / f"{name}.yaml").write_text(text)
    code = (place / "theirs.yaml").read_text().replace("task: theirs", "task: member")
    (place / "member.yaml").write_text(code + "process_docs: !function evil.f\n")
    for members, said in (
        ("[theirs]", None),
        ("[member]", "member.yaml: found !function, which runs code"),
        ("[theirs, deep]", "deep is no task of a readable YAML file in "),
        ("[]", "a group without tasks, expected some"),
    ):
        group.write_text(f"group: mine\ntask: {members}\n")
        if said:
            assert said in refusal(load, group, tmp_path)
        else:
            [loaded] = load(group, tmp_path)
            assert list(loaded.tasks) == ["theirs"]
    assert not (place / "ran").exists()


def test_code_runs_where_the_run_file_trusts_it(place, tmp_path):
    trusted = place / "trusted.yaml"
    text = (place / "theirs.yaml").read_text().replace('"{{q}}"', "!function kind.f")
    (place / "kind.py").write_text("def f(document):\n    return document['q'].upper()\n")
    trusted.write_text(text)
    [loaded] = load(trusted, tmp_path, trusted=True)
    assert loaded.tasks["theirs"].doc_to_text({"q": "Which?"}) == "WHICH?"


def test_the_library_of_metrics_as_code_is_out_of_reach_while_tasks_run(tmp_path):
    before = sys.modules.get("evaluate")
    with definitions.data_in(tmp_path), pytest.raises(ModuleNotFoundError) as caught:
        import evaluate  # noqa: F401
    assert task_trust.reason(caught.value).startswith("a metric is fetched as code; [evaluate] tr")
    assert sys.modules.get("evaluate") is before
