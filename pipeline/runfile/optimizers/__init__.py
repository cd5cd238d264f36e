"""`model.LLM.optimizer`: the tables of every optimizer."""
