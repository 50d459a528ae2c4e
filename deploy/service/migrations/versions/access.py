"""Tokens, sessions, the limits of projects, the audit; and the owner of a job."""

import sqlalchemy as sa
from alembic import op

revision = "0002_access"
down_revision = "0001"
_LARGE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REFUSAL = "the audit is append-only"


def upgrade() -> None:
    """Create the tables. Existing jobs get the owner `local`, as without tokens."""
    op.add_column("job", sa.Column("owner", sa.String, nullable=False, server_default="local"))
    op.create_table(
        "token",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("projects", sa.JSON),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
        sa.Column("revoked", sa.Float),
    )
    op.create_table(
        "session",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("token", sa.String, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
    )
    op.create_table(
        "project",
        sa.Column("name", sa.String, primary_key=True),
        *(sa.Column(name, sa.Integer) for name in ("running", "queued", "workers")),
    )
    op.create_table(
        "audit",
        sa.Column("id", _LARGE, primary_key=True, autoincrement=True),
        sa.Column("time", sa.Float, nullable=False),
        *(
            sa.Column(name, sa.String, nullable=False)
            for name in ("actor", "token", "action", "job", "project", "address", "detail")
        ),
        sa.Column("status", sa.Integer, nullable=False),
    )
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
