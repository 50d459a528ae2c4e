"""Webhooks; the alerts of a job, its checkpoints that are kept; ids of events used once."""

import sqlalchemy as sa
from alembic import op

revision = "0003_upkeep"
down_revision = "0002_access"
_LARGE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table and the columns. Jobs of before have neither alerts nor pins."""
    for name in ("alerts", "pinned"):
        op.add_column("job", sa.Column(name, sa.JSON, nullable=False, server_default="[]"))
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "event", recreate="always", table_kwargs={"sqlite_autoincrement": True}
        ):
            pass  # SQLite gives a deleted id again, unless the table is made for it
    op.create_table(
        "webhook",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("url", "secret")),
        sa.Column("project", sa.String),
        sa.Column("sent", _LARGE, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("not_before", sa.Float, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("delivered", "given_up")),
        sa.Column("last", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
