"""The sum of a model's values in the plain worker, by which tests see that it changed."""


def total(host, model_id):
    return host.ask("evaluate", model_id=model_id, split="sum")["metrics"]["sum"]
