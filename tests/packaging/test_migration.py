from __future__ import annotations

from tools import migration_tables
from tools.migration_tables import Outcome, Row, client_rows


def test_migration_tables_are_fresh():
    document = migration_tables.DOCUMENT.read_text()
    assert migration_tables.render(document) == document, (
        "run `make docs` and commit what it changes"
    )


def test_client_rows_tell_accepted_from_warned_and_refused():
    rows = {row.call: row.outcome for row in client_rows("TrainingClient")}
    assert rows["TrainingClient.forward_backward"] == Outcome("accepted")
    assert rows["TrainingClient.load_state(weights_access_token=...)"].kind == "warns"
    rows = {row.call: row.outcome for row in client_rows("RestClient")}
    assert rows["RestClient.get_audit_log"].kind == "refused"


def test_field_rows_find_every_field_in_effect():
    rows = [row for row in migration_tables.field_rows() if "Params." in row.call]
    assert [row for row in rows if row.outcome != Outcome("accepted")] == []
    assert Row("AdamParams.grad_clip_norm", Outcome("accepted")) in rows
