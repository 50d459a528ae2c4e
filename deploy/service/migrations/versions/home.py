"""The home to which a database belongs, and the limits of a project's uploads."""

import sqlalchemy as sa
from alembic import op

revision = "0004_home"
down_revision = "0003_upkeep"
_LARGE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table and the columns. The next service that starts enters its home."""
    op.create_table("home", sa.Column("id", sa.String, primary_key=True))
    op.add_column("project", sa.Column("uploads", sa.Integer))
    op.add_column("project", sa.Column("upload_bytes", _LARGE))
