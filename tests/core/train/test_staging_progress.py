"""Who looks at a run that stages its data sees how far it is."""

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.jsonl import read_records
from tests.core.train.sessions import new_run, opened, write_texts


def test_the_heartbeats_of_staging_say_what_it_does_and_its_share(tmp_path):
    text = tmp_path / "text.jsonl"
    write_texts(text)
    run = new_run(tmp_path, text, data={"max_tokens": 2000, "document_batch": 8})
    with opened(run):
        beats = read_records(run.heartbeat(), Heartbeat).records
    said = {beat.staging.partition(":")[0]: beat for beat in beats if beat.staging}
    assert {"tokenise", "verify"} <= set(said)
    assert {beat.phase for beat in said.values()} == {"data"}
    assert 0 < said["tokenise"].staging_share <= 1
    assert said["verify"].staging_share is None
    assert beats[-1].staging is None
