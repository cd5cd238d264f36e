"""Scores of tasks while a model trains: `[evaluate] every`. Stage train asks for this joint."""

import logging
from typing import Any

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from parts.tasks import task_model
from parts.tasks.run_file_tasks import RunFileTasks
from pipeline import runfile
from pipeline.monitor.training_scores import FILE, TrainingScores
from pipeline.scores import TaskResult
from pipeline.stage.artifacts import Paths
from pipeline.tokens.tokenizer_files import TOKENIZER, load_tokenizer
from pipeline.weights import exported, hf, model_folder, text_settings

log = logging.getLogger(__name__)


def training_scores(run: runfile.Run, hf_config: dict[str, Any], paths: Paths) -> TrainingScores:
    """Return the scores of a run's training, which has `[evaluate] every`.

    Tasks are as defined but for their number of documents, so the scores depend on `[evaluate]
    every`, `sample` and `sample_tasks` alone. They are computed on devices that no peer uses, if
    there are any. `hf_config` is the model's config.json, `paths` are those of the stage train.
    """
    evaluate = run.evaluate
    init, shards = paths.out("convert"), paths.out("download")
    groups = device_groups(jax.devices(), run.peers.fsdp)
    spare = groups[1 if run.peers.layout == "vmap" else run.peers.count :]
    aside = bool(spare) and run.runtime.in_one_process
    where = spare if aside else groups[:1]
    settings = runfile.Evaluate(
        tasks=evaluate.sample_tasks,
        trust_task_code=evaluate.trust_task_code,
        questions=evaluate.sample,
        limit=evaluate.sample,
    )
    hf_folder, download = init / "hf", shards / "tokenizer"
    folder = download if download.is_dir() else hf_folder  # the tokenizer's, as of the export
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    config = model_folder.with_context(hf_config, run.llm.max_seq_len)
    generation = model_folder.generation_config(hf_folder, config, folder)  # as of the export
    texts = text_settings.read(folder, config, tokenizer, generation)
    config_file = hf_folder / hf.CONFIG
    untrained = exported.computing(config, {}, tokenizer, texts, config_file, run.peers)
    model = task_model.from_folder(untrained, folder, (), settings.batch_size)  # without params
    notes: list[str] = []
    tasks = RunFileTasks(run, settings, model, shards, paths.store, notes)
    for note in notes:
        log.warning(f"train: {note}")

    def score(params: Tree) -> list[TaskResult]:
        trained = untrained._replace(params=params)
        current = task_model.from_folder(trained, folder, where, settings.batch_size)
        # the same program, which is compiled once
        return tasks.score(current._replace(score=model.score), quiet=True)

    return TrainingScores(paths.scratch / FILE, score, evaluate.every, aside=aside)
