"""What lm_eval asks of our model: tokens are checked, and settings of a text done or named."""

import shutil

import pytest

from lockstep.errors import LockstepError
from lockstep.files import write_json
from tests.parts.tasks import exported


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
