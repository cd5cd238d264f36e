"""The answers to a stranger's [workload] and data of one, for tests/pipeline/runfile."""

DATA = "model.LLM.data_location"
ANSWERED = {
    **dict.fromkeys(("workload.factory", "workload.command"), "NEVER"),
    **{
        f"{DATA}.{key}": "SAID"
        for key in ("Arrays", "Arrays.path", "Files", "Files.path", "Workload")
    },
}
REFUSED = [
    (DATA, {"Arrays": {"path": "/data", "shuffle": "DontShuffle"}}),
    (DATA, {"Files": {"path": "/data", "shuffle": "DontShuffle"}}),
    (DATA, {"Workload": {"shuffle": "DontShuffle"}}),
]
