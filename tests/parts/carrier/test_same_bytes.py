"""Every carrier gives the same bytes, from the made file to the transcript."""

from tests import tiny


def test_peers_in_processes_give_the_bytes_of_peers_in_one_process(tmp_path):
    made = {}
    for carrier in ("in_process", "processes"):
        document = tiny.run_document(
            tiny.write_data(tmp_path / "tokens"),
            runtime__carrier=carrier,
            config__verification_percent=34,
            peers__count=3,
        )
        run_file = tmp_path / f"{carrier}.toml"
        tiny.write_run(run_file, document)
        root = tmp_path / carrier
        tiny.make(run_file, root, "download", "convert", "train")
        made[carrier] = tiny.contents(root / "data/trained")
    assert made["in_process"] == made["processes"]
