"""The first schema: the tables that the code declares, and an audit that nobody can change."""

from alembic import op

from deploy.service.database_tables import metadata

revision = "0001_tables"
down_revision = None
_REFUSAL = "the audit is append-only"


def upgrade() -> None:
    """Create the tables and the triggers."""
    # The declarations themselves, as long as no release has another schema. The first migration
    # after this one copies the tables of then into this file: what it adds is not created here.
    metadata.create_all(op.get_bind())
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
            " FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
            f" BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
        )
