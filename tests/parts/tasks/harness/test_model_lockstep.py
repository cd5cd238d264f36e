"""lm_eval's own command and registry know our model by its name, and its tokens are checked."""

import re
import shutil
import sys

import pytest

from lockstep.errors import LockstepError
from lockstep.files import write_json
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
    with pytest.raises(LockstepError, match="begins with token .*, expected .* vocab_size .272"):
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
