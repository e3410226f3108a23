"""The `tmrun` command."""
