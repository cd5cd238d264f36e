"""Runs of small Llamas without a run file: what the benchmarks of audits train."""

from typing import Any


def llama(vocabulary: int, hidden: int, inner: int, heads: int, kv_heads: int, length: int) -> dict:
    """Return the config.json of a Llama of two layers."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def document(
    model: dict, optimizer: dict, *, peers: dict, rounds: int, batch: int, every: int, **config: Any
) -> dict:
    """Return a run file's document, for `runfile.parse`.

    Args:
      model: The model's config.json.
      optimizer: `[model.LLM.optimizer]`.
      peers: `[peers]`.
      rounds: Rounds of the run.
      batch: Sequences of a round.
      every: Rounds of a window.
      config: More keys of `[config]`.
    """
    return {
        "config": {
            "warmup_time": 5,
            "cooldown_time": 1,
            "epoch_time": 100_000,
            "max_round_train_time": 60,
            "round_witness_time": 1,
            "min_clients": 4,
            "init_min_clients": 4,
            "waiting_for_members_extra_time": 1,
            "verification_percent": 0,
            "witness_nodes": 2,
            "total_steps": rounds,
            "global_batch_size_start": batch,
            "global_batch_size_end": batch,
            "global_batch_size_warmup_tokens": 0,
        }
        | config,
        "model": {
            "LLM": {
                "architecture": "HfLlama",
                "data_type": "Pretraining",
                "max_seq_len": model["max_position_embeddings"],
                "cold_start_warmup_steps": 0,
                "checkpoint": {"Init": {"seed": 0, "config": model}},
                "data_location": {"Local": "."},
                "lr_schedule": {
                    "Constant": {"base_lr": 2e-3, "warmup_init_lr": 0.0, "warmup_steps": 0}
                },
                "optimizer": optimizer,
            }
        },
        "peers": peers,
        "links": {"tokens_per_second": 1000},
        "witness": {"snapshot_every": every},
    }
