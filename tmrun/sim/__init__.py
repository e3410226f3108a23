"""Job-scale simulation on the production decisions: virtual time, the real ``tmrun.core`` over the in-memory store, no processes."""
