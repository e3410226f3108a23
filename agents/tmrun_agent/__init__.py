"""The per-node daemon: a thin shell around `tmrun.core.node` and `tmrun.core.coordinator`."""
