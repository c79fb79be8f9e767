"""How long a test waits for what must come: only what hangs takes so long, however busy the machine."""

DEADLINE = 250.0  # seconds; below pytest's own timeout, so that a test that fails says where
