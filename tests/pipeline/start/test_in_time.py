"""A run in which no message can be in time trains nothing: it is refused before it begins."""

import json
from types import SimpleNamespace

import pytest

from lockstep.errors import LockstepError
from lockstep.swarm import training_loop
from pipeline import runfile
from pipeline.audit.verdict import judge
from pipeline.language_model.language_model import programs_of
from pipeline.preflight import commands
from pipeline.preflight.plan import plan, plan_of
from pipeline.start import in_time
from pipeline.start.round_settings import round_settings
from pipeline.start.site import site_of
from tests import tiny
from tests.lockstep.swarm.simulated import MODEL, lab, run_of

EVERYWHERE = {"tokens_per_second": 1000.0, "latency_seconds": 0.0, "download_mbps": 100.0}


def run_with(upload_mbps: float | list[float], **links: object) -> runfile.Run:
    run = run_of("signs", max_round_train_time=5)
    table = run.links.model_copy(update=EVERYWHERE | {"upload_mbps": upload_mbps} | links)
    return run.model_copy(update={"links": table})


@pytest.fixture(scope="module")
def programs():
    return programs_of(run_of("signs"), MODEL, 0)


def test_a_run_of_which_no_message_can_be_in_time_is_refused(programs):
    slow = run_with(programs.form.bytes_about * 8 / 1e6 / 60)  # a minute
    expected = r"\[config\] max_round_train_time = 5: a message of .* seconds after the round began"
    with pytest.raises(LockstepError, match=expected):
        in_time.check(slow, programs)
    with pytest.raises(LockstepError, match=expected):
        plan_of(slow, MODEL)


def test_peers_whose_messages_cannot_be_in_time_are_named(programs):
    late = run_with([1.0, 1.0, 1e-6, 1.0, 1.0, 1.0])
    warning = in_time.check(late, programs)
    assert "of peers [2] reaches all peers" in warning
    assert f"warning: {warning}" in plan_of(late, MODEL).lines()


def test_a_run_whose_messages_are_in_time_or_whose_clock_is_real_has_no_warning(programs):
    assert in_time.check(run_with(1.0), programs) is None
    assert in_time.check(run_with(1e-6, clock="wall"), programs) is None


def test_what_is_computed_before_a_run_is_what_its_rounds_take(programs):
    run = run_with(0.01)
    (sequences, _), *_ = run.config.sizes(run.llm.max_seq_len)
    found = in_time.arrivals(round_settings(run), programs, sequences)
    of_message = programs.form.bytes_about * 8 / 1e4
    training = sequences / 6 * run.llm.max_seq_len / 1000
    assert min(found.values()) == pytest.approx(training + of_message, rel=0.01)


def entry(*applied: int) -> SimpleNamespace:
    evidence = SimpleNamespace(arrivals={0: 31.0, 1: 40.0}, broken=())
    decision = SimpleNamespace(applied=applied)
    return SimpleNamespace(round=SimpleNamespace(step=7), evidence=evidence, decision=decision)


def test_a_training_stops_after_a_few_rounds_in_which_nothing_was_applied():
    watch = training_loop.Watch(30)
    for _ in range(2):  # a round that applies something begins the count anew
        for _ in range(training_loop.MOST_EMPTY - 1):
            watch.took(entry())
        watch.took(entry(0))
    expected = "5 rounds in a row, up to round 7: the first arrived after 31.0 seconds, expected"
    with pytest.raises(LockstepError, match=expected):
        for _ in range(training_loop.MOST_EMPTY):
            watch.took(entry())


def test_witnesses_that_attest_to_nothing_do_not_end_a_training():
    watch, there = training_loop.Watch(30), entry()
    there.evidence.arrivals[0] = 29.0
    for _ in range(2 * training_loop.MOST_EMPTY):
        watch.took(there)
    there.evidence.broken = (0,)  # bytes that nobody accepts are no message
    with pytest.raises(LockstepError, match="5 rounds in a row"):
        for _ in range(training_loop.MOST_EMPTY):
            watch.took(there)


def test_a_training_of_peers_of_its_own_is_watched():
    """Over a store a few could make rounds empty while the others are away."""
    run = run_of("signs", max_round_train_time=7)
    (watch,) = site_of(lab("signs").setup(run)).observers
    assert (type(watch), watch.limit) == (training_loop.Watch, 7)


def test_ready_runs_are_in_time():
    """Those whose model is in the file."""
    for path in tiny.READY_RUNS:
        run = runfile.load(path)
        if isinstance(run.llm.checkpoint, runfile.CheckpointInit):
            config = dict(run.llm.checkpoint.config)
            assert plan_of(run, config).late is None, path


def test_the_command_check_does_not_judge_by_the_model_of_another_run(tmp_path):
    checkpoint = {"Hub": {"repo_id": "owner/name", "revision": "0" * 40}}
    changes = {"model__LLM__checkpoint": checkpoint, "links__upload_mbps": 0.001}
    run_file, _ = tiny.start(tmp_path, config__max_round_train_time=1, **changes)
    config = tmp_path / "data" / "init" / "hf" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(MODEL))
    commands.check(run_file, tmp_path)
    with pytest.raises(LockstepError, match="nothing is trained"):
        plan(runfile.load(run_file), tmp_path)


def test_a_verdict_does_not_accept_a_run_of_which_nothing_was_applied(tmp_path):
    for rounds, accepted in ((3, False), (2, True)):
        faults = [{"kind": "dropped", "peer": peer, "rounds": [1, rounds]} for peer in range(6)]
        run = run_of("signs", *faults, total_steps=3)
        transcript = lab("signs").train(run, tmp_path / f"{rounds}").transcript
        verdict = judge(run, transcript, [], None, run.snapshots(0).windows, [], kept=True)
        assert (verdict.empty_rounds, verdict.accepted) == (rounds, accepted)
