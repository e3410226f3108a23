"""``python -m tmrun`` is ``tmrun``, with this very interpreter."""

from tmrun.cli.main import entry

entry()
