"""Runs each migration for alembic; deploy/service/database_tables.py passes the connection."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
