"""lm_eval's own command and registry know our model by its name, and its tokens are checked."""

import re
import shutil
import sys

import pytest

from lockstep.errors import LockstepError
from lockstep.files import write_json
from tests.errors import refused
from tests.parts.tasks import exported
from tests.parts.tasks.harness.local_tasks import QUESTIONS


def test_tokens_that_the_model_does_not_have_begin_no_text_and_are_in_none(folder, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(folder, export)
    write_json(export / "tokenizer_config.json", {"bos_token": 5, "eos_token": {"content": [1]}})
    assert exported.model(export).beginning == exported.END
    tokenizer = exported.make_tokenizer()
    tokenizer.add_tokens([f"more{number}" for number in range(272)])
    tokenizer.save(str(export / "tokenizer.json"))
    write_json(export / "tokenizer_config.json", {"bos_token": "more271"})
    with pytest.raises(
        LockstepError, match="found 534 as the token that begins .* vocab_size .272"
    ):
        exported.model(export)
    (export / "tokenizer_config.json").unlink()
    from parts.tasks.lm_eval import LmEvalModel

    with pytest.raises(LockstepError, match="has token .* in a text, expected .* vocab_size .272"):
        LmEvalModel(exported.model(export)).tok_encode("more271")


def test_lm_eval_knows_the_model_lockstep(folder):
    from lm_eval.api.registry import get_model

    import parts.tasks.lm_eval  # noqa: F401 - registers it
    from parts.tasks.lm_eval import LmEvalModel

    given = {"batch_size": "4", "device": "cuda:0"}  # as lm_eval's command line has it
    model = get_model("lockstep").create_from_arg_obj({"pretrained": str(folder)}, given)
    asked = [(("", ""), [5, 6], [7, 8, 9]), (("", ""), [5], [6])]
    expected = LmEvalModel(exported.model(folder))._loglikelihood_tokens(asked)
    assert model._loglikelihood_tokens(asked) == [
        (pytest.approx(log, abs=1e-4), greedy) for log, greedy in expected
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"parallelize": True},
        {"batch_size": "none"},
        {"batch_size": 0},
        {"seed": "x"},
        {"max_batch_size": "1.5"},
    ],
    ids=str,
)
def test_an_argument_that_it_does_not_have_is_one_line(folder, given):
    from parts.tasks.lm_eval import LockstepModel

    with refused(next(iter(given))):
        LockstepModel(pretrained=str(folder), **given)
    assert LockstepModel(str(folder), dtype="float32", batch_size="4").model.batch_size == 4


def test_a_chat_is_written_by_the_folders_template(folder, tmp_path):
    from transformers import AutoTokenizer

    from parts.tasks.lm_eval import LockstepModel

    export, chat = tmp_path / "export", [{"role": "user", "content": "def f"}]
    shutil.copytree(folder, export)
    with pytest.raises(LockstepError, match="no chat template"):
        LockstepModel(str(export)).chat_template(True)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (export / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}>{% endif %}"
    )
    model = LockstepModel(str(export))
    theirs = AutoTokenizer.from_pretrained(export)
    assert model.chat_template(True) == theirs.chat_template
    assert model.apply_chat_template(chat) == "<user>def f>"
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "<user>def f"
    assert model.tokenizer_name


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"repetition_penalty": 1.7}, "repetition_penalty = 1.7"),
        ({"num_beams": 4}, "num_beams = 4"),
        ({"max_length": 9}, "max_length = 9"),
        ({"do_sample": True, "temperature": 1.0, "min_p": 0.2}, "min_p = 0.2"),
        ({"min_p": 0.2, "num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}, None),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.3, "max_new_tokens": 2}, None),
    ],
    ids=str,
)
def test_a_setting_of_a_text_is_done_or_named(folder, settings, refused):
    from lm_eval.api.instance import Instance

    from parts.tasks.lm_eval import LmEvalModel

    model = LmEvalModel(exported.model(folder))
    asked = [Instance("generate_until", {}, ("def", {"max_gen_toks": 2} | settings), 0)]
    if refused:
        with pytest.raises(LockstepError, match=f"generation_kwargs has {refused}"):
            model.generate_until(asked)
    else:
        assert len(model.generate_until(asked)) == 1


def test_a_drawn_text_is_drawn_as_task_folder_or_transformers_say(folder):
    from parts.tasks.lm_eval import LmEvalModel

    def drawn(generation, **given):
        model = exported.model(folder)
        texts = model.texts._replace(generation=generation)
        return tuple(LmEvalModel(model._replace(texts=texts))._settings(given)[1])

    assert drawn({}, do_sample=True) == (1.0, 50, 1.0)
    assert drawn({"top_k": 7, "top_p": 0.9}, do_sample=True, top_p=0.8) == (1.0, 7, 0.8)
    assert drawn({"temperature": 0.4}, temperature=0.2) == (0.2, 50, 1.0)
    assert drawn({"temperature": 0.4, "do_sample": True}, do_sample=False) == (0.0, None, 1.0)


@pytest.mark.soak
def test_lm_evals_own_command_knows_the_model_lockstep(folder, tasks, monkeypatch, capsys):
    import lm_eval

    from parts.tasks.lm_eval import main

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    command = f"lm_eval run --model lockstep --model_args pretrained={folder}"
    monkeypatch.setattr(sys, "argv", f"{command} --tasks {tasks['choices']}".split())
    main()
    assert re.search(r"\|choices\|.*\|acc  ", capsys.readouterr().out)
    found = lm_eval.simple_evaluate("lockstep", f"pretrained={folder}", tasks=[tasks["choices"]])
    assert found["results"]["choices"]["sample_len"] == len(QUESTIONS)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:5], "pretrained=nowhere", *sys.argv[6:]])
    with pytest.raises(SystemExit, match="error: .*no such folder"):
        main()
