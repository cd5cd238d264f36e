"""Tasks of lm_eval over data that is written here, and what comes of them with our model."""

import json

from parts.tasks import harness
from pipeline import runfile
from tests.parts.tasks import exported

LONG = "def f(x): return x\n" * 8  # more tokens than the model takes
QUESTIONS = [
    {"q": "def f(x): return", "c": [" x", " y", " def"], "a": 0},
    {"q": "Which letter?", "c": ["A", "B", "C", "D"], "a": 3},  # of one token each
    {"q": LONG, "c": [" x", " return x and more"], "a": 1},
    {"q": "", "c": ["def", "x", "caf\u00e9"], "a": 2},
    {"q": "ends in space ", "c": ["x", "xy"], "a": 0},
    {"q": "<|endoftext|>begins", "c": [" re", " de"], "a": 1},
]
TEXTS = [{"t": "def f"}, {"t": LONG}, {"t": LONG[: -len("return x\n")]}, {"t": "\u00e9"}]
TASKS = {
    "choices": """output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: "{{c}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{t}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """output_type: generate_until
doc_to_text: "{{t}}"
doc_to_target: "{{t}}"
generation_kwargs: {until: ["r"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(place):
    """YAML files of tasks over local data: name -> path."""
    for name, lines in (("choices", QUESTIONS), ("texts", TEXTS)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        data = place / ("choices.jsonl" if name == "choices" else "texts.jsonl")
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        files = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (place / f"{name}.yaml").write_text(head + files + text)
    return {name: str(place / f"{name}.yaml") for name in TASKS}


def run(folder, names, tmp_path, batch_size=4, pin="", **settings):
    model = exported.model(folder, batch_size=batch_size)
    table = runfile.Evaluate(trust_task_code=True, **settings)  # the tasks are YAML files
    results = harness.run_tasks(names, model, table, tmp_path / "store", pin=pin, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    return {result.name: result for result in results}, lines
