"""Pure decisions and their values: no I/O, no time, no torch."""
