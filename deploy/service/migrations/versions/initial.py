"""The first schema: jobs, attempts, events, idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
_LARGE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "job",
        sa.Column("id", sa.String, primary_key=True),
        *(
            sa.Column(name, kind, nullable=False)
            for name, kind in (
                ("name", sa.String()),
                ("project", sa.String()),
                ("labels", sa.JSON()),
                ("priority", sa.Integer()),
                ("slots", sa.Integer()),
                ("settings", sa.JSON()),
                ("state", sa.String()),
                ("state_seq", sa.Integer()),
                ("attempt", sa.Integer()),
                ("nonce", sa.String()),
                ("code", sa.String()),
                ("reason", sa.String()),
                ("contact", sa.String()),
                ("cancelled", sa.Boolean()),
                ("fruitless", sa.Integer()),
                ("not_before", sa.Float()),
                ("events_read", sa.Integer()),
                ("created", sa.Float()),
                ("updated", sa.Float()),
                ("head", sa.JSON()),
            )
        ),
        sa.Column("snapshot", sa.String),
        sa.Column("request_key", sa.String, unique=True),
    )
    op.create_index("job_by_state", "job", ["state", "id"])
    op.create_index("job_by_project", "job", ["project", "id"])
    op.create_table(
        "attempt",
        sa.Column("job", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("started", sa.Float, nullable=False),
        sa.Column("ended", sa.Float),
        sa.Column("cause", sa.String, nullable=False),
        sa.Column("message", sa.String, nullable=False),
        sa.Column("exit_status", sa.Integer),
        sa.Column("snapshot", sa.String),
        sa.Column("log_tail", sa.Text, nullable=False),
    )
    op.create_table(
        "event",
        sa.Column("id", _LARGE, primary_key=True, autoincrement=True),
        sa.Column("job", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.UniqueConstraint("job", "source", "number"),
    )
    op.create_index("event_by_job", "event", ["job", "id"])
    op.create_table(
        "idempotency",
        sa.Column("request", sa.String, primary_key=True),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
